"""Switches quantization-aware training on and off at milestones.

Source: ``LinearQuantizer.step`` of coremltools/optimize/torch/quantization/quantizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.quantizer import EdgeOrNode

from coreml_delegate.errors import OptionError
from coreml_delegate.quantizer.annotate import mark_of
from coreml_delegate.quantizer.config import Milestones
from coreml_delegate.quantizer.patterns import BATCH_NORM, functional_name

_ATTRIBUTE = "coreml_milestones"
_TRAINING = 5  # position of the argument ``training`` of batch_norm


def attach_milestones(quantizers: Mapping[EdgeOrNode, Any]) -> None:
    """Store the milestones of each layer in its fake-quantize modules.

    Args:
        quantizers: torchao's modules for annotated edges and results.
    """
    for edge_or_node, module in quantizers.items():
        mark = mark_of(edge_or_node if isinstance(edge_or_node, Node) else edge_or_node[1])
        if module is None or mark is None or mark.settings.milestones is None:
            continue
        if not hasattr(module, _ATTRIBUTE):
            setattr(module, _ATTRIBUTE, mark.settings.milestones)


class MilestoneSchedule:
    """Switches observers and fake quantization of a prepared model at its milestones.

    Layers with milestones observe no ranges and simulate no quantization before their milestones.

    Args:
        model: From ``prepare_qat_pt2e`` (or a copy of it).

    Raises:
        OptionError: The model has no milestones.
    """

    def __init__(self, model: GraphModule) -> None:
        self._model = model
        self._modules = tuple(_modules(model))
        self._steps = 0
        if not self._modules:
            raise OptionError(
                "the model has no milestones",
                remedy="Give ModuleLinearQuantizerConfig milestones and prepare the model with it",
            )
        for module, _ in self._modules:
            module.enable_observer(False)
            module.enable_fake_quant(False)

    @property
    def steps(self) -> int:
        """Number of started steps."""
        return self._steps

    def step(self) -> None:
        """Start the next training step, and apply its milestones."""
        for module, due in self._modules:
            if due.observe == self._steps:
                module.enable_observer(True)
            if due.quantize == self._steps:
                module.enable_fake_quant(True)
            if due.stop_observing == self._steps:
                module.enable_observer(False)
        if any(due.freeze_norms == self._steps for _, due in self._modules):
            self._freeze_norms()
        self._steps += 1

    def _freeze_norms(self) -> None:
        # Searched late, because torchao replaces batch norms when it switches modes.
        for node in self._model.graph.nodes:
            if node.op != "call_function" or functional_name(node) != BATCH_NORM:
                continue
            due = _milestones_of(node)
            if due is not None and due.freeze_norms == self._steps:
                node.update_arg(_TRAINING, False)
        self._model.recompile()


def _modules(model: GraphModule) -> Iterator[tuple[FakeQuantizeBase, Milestones]]:
    for module in model.modules():
        milestones = getattr(module, _ATTRIBUTE, None)
        if isinstance(module, FakeQuantizeBase) and milestones is not None:
            yield module, milestones


def _milestones_of(norm: Node) -> Milestones | None:
    """Return the milestones of the nearest marked layer before a norm."""
    node: object = norm
    while isinstance(node, Node):
        mark = mark_of(node)
        if mark is not None:
            return mark.settings.milestones
        node = node.args[0] if node.args else None
    return None

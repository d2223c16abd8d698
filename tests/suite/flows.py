"""The flows of the suite: how a model is lowered and where the program runs.

ExecuTorch's own Core ML backend and ours share a name and must not meet in one process, so a
process serves one of the two, and only then imports it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from executorch.backends.test.harness import Tester
from executorch.backends.test.harness.stages import (
    Quantize,
    Serialize,
    StageType,
    ToEdgeTransformAndLower,
)
from executorch.backends.test.suite.flow import TestFlow
from torch.utils import _pytree as pytree

from coreml_delegate import runtime
from coreml_delegate.targets import Opset

Report = Mapping[str, tuple[str, ...]]
"""Why nodes stay on the CPU: reasons by op; empty where a partitioner gives none."""


class Source(enum.StrEnum):
    """Whose partitioner and backend lower."""

    OURS = "coreml_delegate"
    UPSTREAM = "executorch"


@dataclass(frozen=True)
class Lowering:
    """Options that a flow passes to the backend.

    Attributes:
        target: Deployment target, None for the smallest that a model needs.
        precision: Name of coremltools' compute precision.
        quantized: Whether the model is quantized first: weights and activations, 8 bits.
    """

    target: Opset | None
    precision: str
    quantized: bool = False


LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        # ExecuTorch's own flows of these names: the oldest target, and the default precision.
        "coreml": Lowering(Opset.iOS15, "FLOAT16"),
        "coreml_static_int8": Lowering(Opset.iOS17, "FLOAT16", quantized=True),
        # Whatever the model needs, in fp32: wrong translations do not hide behind rounding.
        "coreml_fp32": Lowering(None, "FLOAT32"),
    }
)


class RunHere(Serialize):
    """The stage that executes a program, with our runtime.

    Args:
        engine: Engine of the delegates.
    """

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = engine

    def run_artifact(self, inputs: Any) -> list[torch.Tensor]:
        program = runtime.load_program(self.artifact, host="python", engine=self._engine)
        return program.run("forward", pytree.tree_leaves(inputs))


class SuiteTester(Tester):
    """Takes one model through the stages.

    Args:
        module: The model.
        example_inputs: Inputs it is exported with.
        partitioner: Fresh, for this model alone.
        quantizer: Fresh too; unused where the flow does not quantize.
        engine: Engine of the delegates.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        example_inputs: Any,
        *,
        partitioner: Any,
        quantizer: Any,
        engine: str,
    ) -> None:
        stages = Tester.default_stage_classes() | {
            StageType.TO_EDGE_TRANSFORM_AND_LOWER: lambda: ToEdgeTransformAndLower(
                lambda: partitioner
            ),
            StageType.QUANTIZE: lambda: Quantize(quantizer),
            StageType.SERIALIZE: lambda: RunHere(engine),
        }
        super().__init__(module, example_inputs, stage_classes=stages)
        self._partitioner = partitioner

    def report(self) -> Report:
        """Why nodes stay on the CPU, as far as lowering came and the partitioner tells."""
        reports = getattr(self._partitioner, "reports", ())
        found: dict[str, list[str]] = {}
        for node in reports[-1].undelegated if reports else ():
            found.setdefault(node.op, []).append(str(node.reason))
        return {op: tuple(sorted(set(reasons))) for op, reasons in sorted(found.items())}


@dataclass(frozen=True)
class Makers:
    """Make what a test needs of one of the two backends.

    Attributes:
        partitioner: A partitioner.
        quantizer: A quantizer.
    """

    partitioner: Callable[[], Any]
    quantizer: Callable[[], Any]


def makers(source: Source, lowering: Lowering) -> Makers:
    """Makers of one of the two backends; imports that one."""
    if source is Source.OURS:
        from coreml_delegate import CoreMLBackend, CoreMLPartitioner, CoreMLQuantizer
    else:
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner
        from executorch.backends.apple.coreml.quantizer import CoreMLQuantizer
    import coremltools as ct
    from coremltools.optimize.torch import quantization

    target = lowering.target
    specs = {
        "minimum_deployment_target": None if target is None else ct.target(int(target)),
        "compute_precision": ct.precision[lowering.precision],
    }
    # The configuration of ExecuTorch's own flow.
    eight_bits = quantization.ModuleLinearQuantizerConfig(
        quantization_scheme="symmetric",
        activation_dtype=torch.quint8,
        weight_dtype=torch.qint8,
        weight_per_channel=True,
    )

    def partitioner() -> Any:
        return CoreMLPartitioner(compile_specs=CoreMLBackend.generate_compile_specs(**specs))

    def quantizer() -> Any:
        return CoreMLQuantizer(quantization.LinearQuantizerConfig(global_config=eight_bits))

    return Makers(partitioner, quantizer)


def make_flow(
    name: str, source: Source, engine: str, made: Callable[[SuiteTester], None]
) -> TestFlow:
    """A flow for the suite's runner.

    Args:
        name: Key of ``LOWERINGS``.
        source: Whose backend.
        engine: Engine of the delegates.
        made: Is told every tester that the suite makes.
    """
    lowering = LOWERINGS[name]
    new = makers(source, lowering)

    def new_tester(module: torch.nn.Module, inputs: Any) -> SuiteTester:
        tester = SuiteTester(
            module, inputs, partitioner=new.partitioner(), quantizer=new.quantizer(), engine=engine
        )
        made(tester)
        return tester

    # The suite runs no program without a delegate unless none is expected; here all are to run.
    return TestFlow(
        name,
        backend="coreml",
        tester_factory=new_tester,
        quantize=lowering.quantized,
        is_delegated=False,
    )

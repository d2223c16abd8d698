"""From a module to its quantized form, by the flow of PT2E."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from coreml_delegate.patches.third_party import coremltools, quiet_import
from coreml_delegate.quantization import QuantizationAssignment, mode_of

_CT = coremltools()
with quiet_import():
    from coremltools.optimize.torch.quantization import (
        LinearQuantizerConfig,
        ModuleLinearQuantizerConfig,
    )
    from torchao.quantization.pt2e.quantize_pt2e import (
        convert_pt2e,
        prepare_pt2e,
        prepare_qat_pt2e,
    )

    from coreml_delegate.quantizer import CoreMLQuantizer

__all__ = [
    "LinearQuantizerConfig",
    "ModuleLinearQuantizerConfig",
    "annotated",
    "config",
    "convert_pt2e",
    "exported",
    "few_bits",
    "layer",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "quantized",
]

Inputs = tuple[torch.Tensor, ...]


def layer(**options: Any) -> Any:
    """The settings of layers."""
    return ModuleLinearQuantizerConfig(**options)


def config(**options: Any) -> Any:
    """A global configuration; ``options`` go to ``layer``."""
    return LinearQuantizerConfig(global_config=layer(**options))


def exported(module: nn.Module, inputs: Inputs) -> GraphModule:
    """The graph that PT2E starts from."""
    return torch.export.export(module, inputs).module()


def annotated(
    module: nn.Module, inputs: Inputs, settings: Any = None
) -> tuple[CoreMLQuantizer, GraphModule]:
    """The quantizer, and the exported graph that it has annotated and validated."""
    quantizer = CoreMLQuantizer(config() if settings is None else settings)
    graph = exported(module.eval(), inputs)
    quantizer.annotate(graph)
    quantizer.validate(graph)
    return quantizer, graph


def quantized(
    module: nn.Module, inputs: Inputs, settings: Any, calibration: Sequence[Inputs] = ()
) -> tuple[CoreMLQuantizer, GraphModule]:
    """The quantizer, and the module calibrated and converted."""
    quantizer = CoreMLQuantizer(settings)
    prepared = prepare_pt2e(exported(module.eval(), inputs), quantizer)
    with torch.no_grad():
        for sample in calibration or (inputs,):
            prepared(*sample)
        return quantizer, convert_pt2e(prepared)


def few_bits(linear: str, embedding: str = "none", *, group: int = 16) -> dict[str, Any]:
    """Return keywords of ``quantize_weights``, from the short names of ``export-llm``."""
    names = {"int4": f"int4-group{group}", "int8": "int8-channel"}
    layers, table = (
        None if name == "none" else mode_of(names.get(name, name)) for name in (linear, embedding)
    )
    return {
        "linear": None if layers is None else QuantizationAssignment(layers),
        "embedding": table,
    }

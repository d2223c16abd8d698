"""Quantizing the model of a source, by each of the methods there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from coreml_delegate.errors import CoreMLDelegateError, OptionError, near_matches
from coreml_delegate.quantization_modes import Method, QuantizationAssignment, QuantizationMode
from coreml_delegate.quantization_modes.configs import (
    has_rows,
    is_weight_of_attention,
    quantizer_config_of,
    torchao_config,
)
from coreml_delegate.quantizer import CoreMLQuantizer, QuantizationReport
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs.dynamic_sizes import dynamic_shapes_of
from coreml_delegate.scripts.inputs.source import Source, blaming
from coreml_delegate.third_party import quiet_import
from coreml_delegate.transforms.half_precision import promote_half_to_fp32

logger = logging.getLogger(__name__)

Samples = Sequence[Sequence[Any]]
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Quantized:
    """A source after quantization.

    Attributes:
        source: The same model, quantized.
        in_float: Modules that stay in float though the assignment means them, each with the reason.
    """

    source: Source
    in_float: Mapping[str, str]


def quantize(source: Source, assignment: QuantizationAssignment, samples: Samples) -> Quantized:
    """Quantize a model.

    Args:
        source: Its module may be modified.
        assignment: How.
        samples: To calibrate with, flattened as ``source.leaves``; without any the example inputs
            are taken, whose values do not matter to weights.

    Raises:
        OptionError: It cannot be quantized so, or nothing of it can.
    """
    if assignment.mode.method is Method.PT2E:
        return Quantized(_by_pt2e(source, assignment, samples), {})
    if assignment.mode.method is Method.MODULES:
        module = modules_of(source, assignment.mode)
        in_float = quantize_modules(module, assignment)
        if source.exported is not None:
            source = replace(source, exported=_exported(module, source.exported, source))
        return Quantized(source, in_float)
    return Quantized(source, {})  # the compile options say it


def modules_of(source: Source, mode: QuantizationMode) -> nn.Module:
    """The module of a source that has modules.

    Raises:
        OptionError: It has none, being a program.
    """
    if isinstance(source.module, GraphModule) or not isinstance(source.module, nn.Module):
        raise OptionError(
            f"{mode.name} quantizes modules, and a .pt2 has none",
            remedy="Give the model itself, or use int8-weight or int4-weight",
        )
    return source.module


def quantize_modules(module: nn.Module, assignment: QuantizationAssignment) -> Mapping[str, str]:
    """Quantize linear layers and embeddings in place.

    Returns:
        Those that stay in float though they are meant, with the reason.

    Raises:
        OptionError: The assignment names a module that is not there, or nothing can be quantized.
    """
    paths = dict(module.named_modules())
    _check_paths(assignment, paths)
    chosen: dict[QuantizationMode, set[str]] = {}
    in_float: dict[str, str] = {}
    for path, layer in paths.items():
        mode = assignment.mode_for(path)
        if mode is None or not has_rows(layer):
            continue
        reason = obstacle(layer, mode)
        if reason is None:
            chosen.setdefault(mode, set()).add(path)
        else:
            in_float[path] = reason
    if not chosen:
        raise OptionError(
            f"nothing to quantize by {assignment.mode.name}",
            got="; ".join(f"{path}: {why}" for path, why in list(in_float.items())[:_SHOWN])
            or "no linear layer or embedding",
            remedy="int8-weight and int4-weight quantize every kind of layer",
        )
    with quiet_import():
        from torchao.quantization import quantize_

    for mode, names in chosen.items():
        with blaming(f"torchao cannot quantize by {mode.name}"):
            quantize_(module, torchao_config(mode), filter_fn=_is_among(names))
    return in_float


def _is_among(names: set[str]) -> Callable[[nn.Module, str], bool]:
    return lambda _, path: path in names


def _check_paths(assignment: QuantizationAssignment, paths: Mapping[str, nn.Module]) -> None:
    for path in assignment.modules:
        if path not in paths:
            raise OptionError(
                "the quantization config names a module that the model does not have",
                got=repr(path),
                expected=near_matches(path, paths, ""),
            )


def obstacle(layer: Any, mode: QuantizationMode) -> str | None:
    """Why a layer whose weight is [rows, columns] cannot be quantized so, or None."""
    weight: torch.Tensor = layer.weight
    columns = weight.shape[-1]
    if is_weight_of_attention(layer):
        return "nn.MultiheadAttention multiplies by its weight itself"
    if not weight.dtype.is_floating_point:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if mode.group_size is not None and columns % mode.group_size:
        return f"{columns} columns are no multiple of {mode.group_size}"
    return None


def _by_pt2e(source: Source, assignment: QuantizationAssignment, samples: Samples) -> Source:
    program = exported_in_float(source)
    graph: GraphModule = program.module()  # pyright: ignore[reportAssignmentType]
    calibration = [source.structured(leaves) for leaves in (samples or [source.leaves])]
    with console.progress(calibration, "Calibrating") as shown:
        quantized, report = quantize_graph(graph, quantizer_config_of(assignment), shown)
    if not report.quantized:
        reasons = dict.fromkeys(str(node.reason) for node in report.unquantized)
        raise OptionError(
            f"nothing to quantize by {assignment.mode.name}",
            got="; ".join(list(reasons)[:_SHOWN]) or "no operations on floats",
        )
    return replace(source, module=quantized, exported=_exported(quantized, program, source))


def exported_in_float(source: Source) -> ExportedProgram:
    """The program of a source, to be quantized by PT2E, which knows fp32 alone.

    A program in half precision gets an interior in fp32, as it gets when it is lowered.
    """
    return promote_half_to_fp32(source.export())


def quantize_graph(
    graph: GraphModule, config: Any, calibration: Any
) -> tuple[GraphModule, QuantizationReport]:
    """Prepare, calibrate and convert.

    Args:
        graph: ``torch.export.export(...).module()``; modified.
        config: coremltools' ``LinearQuantizerConfig``.
        calibration: Iterated over once: positional and keyword inputs.

    Returns:
        The quantized graph, and what of it is quantized.

    Raises:
        OptionError: The configuration does not go with the model, or the model fails on a sample.
        LoweringError: What results could not be lowered.
    """
    with quiet_import():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = CoreMLQuantizer(config)
    with blaming("PT2E cannot quantize the model"), torch.no_grad():
        prepared = prepare_pt2e(graph, quantizer)
        for args, kwargs in calibration:
            prepared(*args, **kwargs)
        return convert_pt2e(prepared), quantizer.report


def _exported(model: nn.Module, original: ExportedProgram, source: Source) -> ExportedProgram:
    args, kwargs = original.example_inputs or (source.args, source.kwargs)
    with torch.no_grad(), blaming("torch.export cannot capture the quantized model"):
        return torch.export.export(
            model,
            tuple(args),
            dict(kwargs),
            dynamic_shapes=dynamic_shapes_of(original, model, args, kwargs),
        )


def describe_in_float(in_float: Mapping[str, str]) -> None:
    """Warn of the modules that stay in float."""
    listed = [f"{path} ({why})" for path, why in in_float.items()]
    if listed:
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        console.warn(f"in float stay: {', '.join(listed[:_SHOWN])}{more}")


def weight_bytes(source: Source) -> int:
    """Size of the parameters and buffers of a model; shared ones count once."""
    if source.exported is not None:
        tensors = list(source.exported.state_dict.values())
    elif isinstance(source.module, nn.Module):
        tensors = [*source.module.parameters(), *source.module.buffers()]
    else:
        raise CoreMLDelegateError("the model has no weights to count")
    unique = {(t.data_ptr(), t.shape): t for t in tensors}
    return sum(tensor.nbytes for tensor in unique.values())

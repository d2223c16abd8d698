"""Quantize a model in PyTorch by an assignment of modes, with PT2E or torchao's ``quantize_``.

The modes that coremltools applies after conversion are compile options; see
``configs.compile_keywords``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.exported.source_model import SourceModel, dynamic_shapes_of
from coreml_delegate.patches.third_party import quiet_import, wrap_errors
from coreml_delegate.quantization.assignment import QuantizationAssignment, path_pattern
from coreml_delegate.quantization.configs import (
    has_rows,
    is_weight_of_attention,
    quantizer_config_of,
    torchao_config,
)
from coreml_delegate.quantization.modes import Method, QuantizationMode
from coreml_delegate.quantizer import CoreMLQuantizer, QuantizationReport
from coreml_delegate.transforms.half_precision import promote_half_to_fp32

Samples = Sequence[Sequence[Any]]
"""Inputs of several calls, each flattened as ``SourceModel.leaves``."""

_MOST_REASONS = 3  # in a message


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """A model after quantization.

    Attributes:
        in_float: Assigned modules that stay in float, with the reason.
    """

    source: SourceModel
    in_float: Mapping[str, str]


def quantize_model(
    source: SourceModel,
    assignment: QuantizationAssignment,
    samples: Iterable[Sequence[Any]] = (),
) -> QuantizedModel:
    """Quantize a model.

    Args:
        source: Its module may be modified.
        assignment: The mode of each module.
        samples: Inputs to calibrate with, each flattened as ``source.leaves``; empty for the
            example inputs, which suffice if only weights are quantized.

    Raises:
        OptionError: The model does not support these modes, or has nothing to quantize.
    """
    if assignment.mode.method is Method.PT2E:
        return QuantizedModel(_quantize_by_pt2e(source, assignment, samples), {})
    if assignment.mode.method is Method.MODULES:
        module = require_module(source, assignment.mode)
        in_float = quantize_modules(module, assignment)
        if source.exported is not None:
            source = replace(source, exported=_export_again(module, source.exported, source))
        return QuantizedModel(source, in_float)
    return QuantizedModel(source, {})  # by compile options


def require_module(source: SourceModel, mode: QuantizationMode) -> nn.Module:
    """Return the module whose submodules a mode quantizes.

    Raises:
        OptionError: The model is an exported program, without submodules.
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
        Paths of the assigned layers that stay in float, with the reason.

    Raises:
        OptionError: The assignment names a module that does not exist, or nothing can be quantized.
    """
    paths = dict(module.named_modules())
    check_paths(assignment, paths)
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
            got="; ".join(f"{path}: {why}" for path, why in list(in_float.items())[:_MOST_REASONS])
            or "no linear layer or embedding",
            remedy="int8-weight and int4-weight quantize every kind of layer",
        )
    with quiet_import():
        from torchao.quantization import quantize_

    for mode, names in chosen.items():
        with wrap_errors(f"torchao cannot quantize by {mode.name}"):
            quantize_(module, torchao_config(mode), filter_fn=_is_among(names))
    return in_float


def _is_among(names: set[str]) -> Callable[[nn.Module, str], bool]:
    return lambda _, path: path in names


def check_paths(assignment: QuantizationAssignment, paths: Collection[str]) -> None:
    """Check that the paths of an assignment are paths of modules.

    Raises:
        OptionError: No module has this path.
    """
    for path in assignment.modules:
        pattern = re.compile(path_pattern(path))
        if not any(map(pattern.fullmatch, paths)):
            raise OptionError(
                "the quantization config names a module that the model does not have",
                got=repr(path),
                expected=near_matches(path, paths, ""),
            )


def obstacle(layer: Any, mode: QuantizationMode) -> str | None:
    """Return why a mode cannot quantize a layer with a weight [rows, columns], or None."""
    weight: torch.Tensor = layer.weight
    rows, columns = weight.shape
    if is_weight_of_attention(layer):
        return "nn.MultiheadAttention multiplies by its weight itself"
    if not weight.dtype.is_floating_point:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if mode.group_size is not None and columns % mode.group_size:
        return f"{columns} columns are no multiple of {mode.group_size}"
    if mode.rows_per_table is not None and rows % mode.rows_per_table:
        return f"{rows} rows are no multiple of {mode.rows_per_table}"
    return None


def _quantize_by_pt2e(
    source: SourceModel, assignment: QuantizationAssignment, samples: Iterable[Sequence[Any]]
) -> SourceModel:
    program = export_in_float(source)
    graph: GraphModule = program.module()  # pyright: ignore[reportAssignmentType]
    calibration = (source.unflatten(leaves) for leaves in (samples or [source.leaves]))
    quantized, report = quantize_graph(graph, quantizer_config_of(assignment), calibration)
    if not report.quantized:
        reasons = dict.fromkeys(str(node.reason) for node in report.unquantized)
        raise OptionError(
            f"nothing to quantize by {assignment.mode.name}",
            got="; ".join(list(reasons)[:_MOST_REASONS]) or "no operations on floats",
        )
    return replace(source, module=quantized, exported=_export_again(quantized, program, source))


def export_in_float(source: SourceModel) -> ExportedProgram:
    """Export a model for PT2E, which supports only fp32.

    The interior of a program in half precision becomes fp32, as in lowering.
    """
    return promote_half_to_fp32(source.export())


def quantize_graph(
    graph: GraphModule, config: Any, calibration: Any
) -> tuple[GraphModule, QuantizationReport]:
    """Prepare, calibrate and convert a graph by PT2E.

    Args:
        graph: ``torch.export.export(...).module()``; modified.
        config: coremltools' ``LinearQuantizerConfig``.
        calibration: Iterable of positional and keyword inputs, iterated once.

    Returns:
        The quantized graph, and the quantizer's report.

    Raises:
        OptionError: The configuration does not fit the model, or the model fails on a sample.
        LoweringError: The quantized graph cannot be lowered.
    """
    with quiet_import():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = CoreMLQuantizer(config)
    with wrap_errors("PT2E cannot quantize the model"), torch.no_grad():
        prepared = prepare_pt2e(graph, quantizer)
        for args, kwargs in calibration:
            prepared(*args, **kwargs)
        return convert_pt2e(prepared), quantizer.report


def _export_again(
    model: nn.Module, original: ExportedProgram, source: SourceModel
) -> ExportedProgram:
    """Export the quantized model with the dynamic shapes of the original program."""
    args, kwargs = original.example_inputs or (source.args, source.kwargs)
    with torch.no_grad(), wrap_errors("torch.export cannot capture the quantized model"):
        return torch.export.export(
            model,
            tuple(args),
            dict(kwargs),
            dynamic_shapes=dynamic_shapes_of(original, model, args, kwargs),
        )

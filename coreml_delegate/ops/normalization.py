"""Normalizations, as inference computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.mil.compose.norms import rms_norm
from coreml_delegate.ops.call import OpCall
from coreml_delegate.ops.constants import is_stored
from coreml_delegate.ops.constraints import (
    IsConstant,
    argument_is,
    only_first_result_used,
    static_argument,
)
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    insert,
    only_result,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import per_result
from coreml_delegate.ops.merging import leading
from coreml_delegate.ops.quantization import Quantization, Tail
from coreml_delegate.ops.record import OpRecord


def _merges_spatial_dims(call: OpCall) -> bool:
    """The rewrite merges spatial dimensions."""
    tensor = call.tensor("input")
    if tensor is None:
        return False
    return tensor.dim() > _MAX_UNMERGED_RANK and not _has_only_dynamic_batch(tensor)


def _has_only_dynamic_batch(x: torch.Tensor) -> bool:
    batch, *sizes = x.shape
    return not isinstance(batch, int) and all(isinstance(size, int) for size in sizes)


def _rms_norm(
    x: Any, shape: Sequence[int], weight: Any = None, epsilon: float | None = None
) -> Any:
    """Coremltools scales ``x``, but not the epsilon: apple/coremltools#2821."""
    axes = range(x.rank - len(shape), x.rank)
    return rms_norm(x, axes, _EPSILON if epsilon is None else epsilon, weight)


def _layer_norm(node: Node) -> None:
    """Scale and shift by separate ops if they are computed, or if there is only a shift."""
    arguments = arguments_of(node)
    weight, bias = arguments["weight"], arguments["bias"]
    if is_stored(weight) and is_stored(bias) and (bias is None or weight is not None):
        return
    x, shape, eps = (arguments[n] for n in ("input", "normalized_shape", "eps"))
    result = only_result(node)
    plain = insert(result, ATEN.layer_norm.default, x, shape, None, None, eps)
    _scale_and_shift(result, plain, weight, bias)


def _scale_and_shift(node: Node, x: Node, weight: Node | None, bias: Node | None) -> None:
    if weight is not None and bias is not None:
        become(node, ATEN.add.Tensor, insert(node, ATEN.mul.Tensor, x, weight), bias)
    elif weight is not None:
        become(node, ATEN.mul.Tensor, x, weight)
    elif bias is not None:
        become(node, ATEN.add.Tensor, x, bias)
    else:
        become(node, ATEN.clone.default, x)


def _group_norm(node: Node) -> None:
    """Merge three spatial dimensions: split into groups, the input would have rank 6.

    With a dynamic batch, which coremltools cannot split, use a layer norm of the groups.
    """
    arguments = arguments_of(node)
    x = arguments["input"]
    result = only_result(node)
    groups: Any = arguments.get("num_groups", arguments.get("group"))
    if _has_only_dynamic_batch(value_of(x)):
        _group_norm_as_layer_norm(result, x, groups, arguments)
        return
    if value_of(x).dim() <= _MAX_UNMERGED_RANK:
        return
    shape = shape_of(x)
    flat = insert(result, ATEN.view_copy.default, x, [*shape[:2], math.prod(shape[2:])])
    options = (groups, arguments["weight"], arguments["bias"], arguments["eps"])
    normal = insert(result, ATEN.group_norm.default, flat, *options)
    become(result, ATEN.view_copy.default, normal, shape)


def _group_norm_as_layer_norm(
    node: Node, x: Node, groups: int, arguments: Mapping[str, Any]
) -> None:
    sizes = list(value_of(x).shape[1:])
    group_size = math.prod(sizes) // groups
    split = insert(node, ATEN.view_copy.default, x, [-1, groups, group_size])
    normal = insert(
        node, ATEN.layer_norm.default, split, [group_size], None, None, arguments["eps"]
    )
    joined = insert(node, ATEN.view_copy.default, normal, [-1, *sizes])
    aligned_shape = [-1, *(1 for _ in sizes[1:])]
    affine = (_reshape_parameter(node, arguments[n], aligned_shape) for n in ("weight", "bias"))
    _scale_and_shift(node, joined, *affine)


def _instance_norm(node: Node) -> None:
    """``(x - mean) / sqrt(var + eps) * weight + bias``, with mean and variance of the batch."""
    arguments = arguments_of(node)
    x, weight, bias = (arguments[n] for n in ("input", "weight", "bias"))
    result = only_result(node)
    dims = [d for d in range(value_of(x).dim()) if d != 1]
    mean = insert(result, ATEN.mean.dim, x, dims, True)
    centred = insert(result, ATEN.sub.Tensor, x, mean)
    square = insert(result, ATEN.mul.Tensor, centred, centred)
    variance = insert(result, ATEN.mean.dim, square, dims, True)
    shifted_variance = insert(result, ATEN.add.Scalar, variance, arguments["eps"])
    normal = insert(
        result, ATEN.mul.Tensor, centred, insert(result, ATEN.rsqrt.default, shifted_variance)
    )
    aligned_shape = [-1 if d == 1 else 1 for d in range(value_of(x).dim())]
    affine = (_reshape_parameter(result, parameter, aligned_shape) for parameter in (weight, bias))
    _scale_and_shift(result, normal, *affine)


def _reshape_parameter(node: Node, parameter: Node | None, shape: Sequence[int]) -> Node | None:
    if parameter is None:
        return None
    return insert(node, ATEN.view_copy.default, parameter, list(shape))


def _count_normalized_dims(call: OpCall) -> int:
    return len(call.arguments["normalized_shape"])


_EPSILON = torch.finfo(torch.float32).eps  # of a root mean square norm without one
_MAX_UNMERGED_RANK = 4
_LAYERS = leading("input", _count_normalized_dims)
_STATISTICS = tuple(IsConstant(n) for n in ("weight", "bias", "running_mean", "running_var"))

# Two passes for the moments, then scale and shift.
_op = partial(OpRecord, flops=per_result(7))
# Folded to one multiplication and one addition.
_batch_norm = partial(OpRecord, flops=per_result(2))

RECORDS = (
    _batch_norm(
        "aten.batch_norm.default",
        constraints=(argument_is("training", False), *_STATISTICS),
        quantization=Quantization(tail=Tail.NORM),
    ),
    _batch_norm("aten._native_batch_norm_legit_no_training.default", constraints=_STATISTICS),
    _op(
        "aten._native_batch_norm_legit.no_stats",
        constraints=(only_first_result_used,),
        rewrite=_instance_norm,
    ),
    _op("aten.layer_norm.default", merge=_LAYERS, rewrite=_layer_norm),
    _op(
        "aten.native_layer_norm.default",
        constraints=(only_first_result_used,),
        merge=_LAYERS,
        rewrite=_layer_norm,
    ),
    _op(
        "aten.group_norm.default",
        constraints=(static_argument("input", when=_merges_spatial_dims),),
        rewrite=_group_norm,
    ),
    # Its sizes are static arguments.
    _op(
        "aten.native_group_norm.default",
        constraints=(only_first_result_used,),
        rewrite=_group_norm,
    ),
    _op("aten.rms_norm.default", merge=_LAYERS, translation=_rms_norm),
)

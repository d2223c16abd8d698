"""Constants, and operations that move elements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from coreml_delegate.graph import Value
from coreml_delegate.stablehlo.attributes import resource_array, tensor_value
from coreml_delegate.stablehlo.source_op import (
    Operand,
    Rule,
    SourceOp,
    WideConstant,
    Words,
    calling,
)

# Larger tensors of equal elements become a broadcast scalar.
_LARGEST_SPLAT = 64
_RESOURCE = re.compile(r'dense_resource<("[^"]*"|[^>]*)>')


def _constant(source: SourceOp) -> Value | WideConstant:
    dtype = source.dtype()
    attribute = source.raw_attribute("value")
    resource = (
        _RESOURCE.match(str(attribute)[:300]) if type(attribute).__name__ == "Attribute" else None
    )
    if resource:
        key = resource.group(1).strip('"')
        content = source.context.resource(key)
        array = resource_array(key, content, dtype, source.shape())
    else:
        array = tensor_value(attribute)
    if array.size > _LARGEST_SPLAT and not any(array.strides):
        scalar = source.constant(np.array(array.flat[0]), dtype)
        if isinstance(scalar, WideConstant):
            return WideConstant(array)
        repeated = source.builder.broadcast_in_dim(scalar, array.shape, ())
        source.context.broadcasts[repeated] = scalar, ()
        return repeated
    return source.constant(array, dtype)


def _reshape(source: SourceOp) -> Operand:
    operand = source.operands[0]
    if isinstance(operand, WideConstant):
        return WideConstant(operand.array.reshape(source.shape()))
    if isinstance(operand, Words):
        return Words(source.builder.reshape(operand.pairs, (*source.shape(), 2)))
    return source.builder.reshape(source.value(0), source.shape())


def _broadcast_in_dim(source: SourceOp) -> Operand:
    dimensions, shape = source.integers("broadcast_dimensions"), source.shape()
    operand = source.operands[0]
    if isinstance(operand, WideConstant) and not operand.array.ndim:
        return WideConstant(np.broadcast_to(operand.array, shape))
    x = source.value(0)
    return _note_broadcast(
        source, x, source.builder.broadcast_in_dim(x, shape, dimensions), dimensions
    )


def _dynamic_broadcast_in_dim(source: SourceOp) -> Value:
    x, shape = source.values
    dimensions = source.integers("broadcast_dimensions")
    result = source.builder.dynamic_broadcast_in_dim(x, shape, dimensions)
    return _note_broadcast(source, x, result, dimensions)


def _broadcast(source: SourceOp) -> Value:
    x = source.value(0)
    sizes = source.integers("broadcast_sizes")
    dimensions = tuple(range(len(sizes), len(sizes) + x.rank))
    result = source.builder.broadcast_in_dim(x, (*sizes, *x.shape), dimensions)
    return _note_broadcast(source, x, result, dimensions)


def _note_broadcast(
    source: SourceOp, x: Value, result: Value, dimensions: tuple[int, ...]
) -> Value:
    source.context.broadcasts[result] = x, dimensions
    return result


def _concatenate(source: SourceOp) -> Value:
    return source.builder.concatenate(source.values, source.attribute("dimension"))


def _dynamic_slice(source: SourceOp) -> Value:
    x, *starts = source.values
    return source.builder.dynamic_slice(x, starts, source.integers("slice_sizes"))


def _dynamic_update_slice(source: SourceOp) -> Value:
    x, update, *starts = source.values
    return source.builder.dynamic_update_slice(x, update, starts)


def _iota(source: SourceOp) -> Value:
    return source.builder.iota(source.dtype(), source.shape(), source.attribute("iota_dimension"))


def _dynamic_iota(source: SourceOp) -> Value:
    dimension = source.attribute("iota_dimension")
    return source.builder.dynamic_iota(source.dtype(), source.value(0), dimension)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "chlo.dynamic_reshape": calling("dynamic_reshape"),
        "stablehlo.broadcast": _broadcast,
        "stablehlo.broadcast_in_dim": _broadcast_in_dim,
        "stablehlo.concatenate": _concatenate,
        "stablehlo.constant": _constant,
        "stablehlo.dynamic_broadcast_in_dim": _dynamic_broadcast_in_dim,
        "stablehlo.dynamic_iota": _dynamic_iota,
        "stablehlo.dynamic_pad": calling("dynamic_pad"),
        "stablehlo.dynamic_reshape": calling("dynamic_reshape"),
        "stablehlo.dynamic_slice": _dynamic_slice,
        "stablehlo.dynamic_update_slice": _dynamic_update_slice,
        "stablehlo.get_dimension_size": calling("get_dimension_size", "dimension"),
        "stablehlo.iota": _iota,
        "stablehlo.pad": calling(
            "pad", "edge_padding_low", "edge_padding_high", "interior_padding"
        ),
        "stablehlo.real_dynamic_slice": calling("real_dynamic_slice"),
        "stablehlo.reshape": _reshape,
        "stablehlo.reverse": calling("reverse", "dimensions"),
        "stablehlo.slice": calling("slice", "start_indices", "limit_indices", "strides"),
        "stablehlo.transpose": calling("transpose", "permutation"),
    }
)

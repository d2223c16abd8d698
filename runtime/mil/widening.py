"""Widen a program to fp32 and int64, to measure rounding and wrapping in its original dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Block,
    Constant,
    DictType,
    Feature,
    Function,
    ListType,
    NamedType,
    Op,
    Ref,
    StateType,
    TensorType,
    TupleType,
    ValueType,
)

_WIDER = {DType.FP16: DType.FP32, DType.BF16: DType.FP32, DType.INT32: DType.INT64}
# Ops take dtypes as strings (``cast``, ``make_list``); no op uses these strings otherwise.
_WIDER_LABELS = {narrow.label: wide.label for narrow, wide in _WIDER.items()}


def widen_function(function: Function) -> Function:
    """Return ``function`` with fp32 for every fp16 and int64 for every int32.

    Parameters, values, weights, states, and inputs and outputs of the model are widened. Constants
    that fp16 changed have their original values if the model stores them. Names and ops are
    unchanged, so that the values of both programs can be compared one by one.
    """
    originals = function.fp32_constants or {}
    return replace(
        function,
        params=tuple(_named(param) for param in function.params),
        block=_block(function.block, originals),
        inputs=tuple(_feature(feature) for feature in function.inputs),
        outputs=tuple(_feature(feature) for feature in function.outputs),
        states=tuple(_feature(feature) for feature in function.states),
    )


def has_rounded_constants(function: Function) -> bool:
    """Whether ``widen_function`` uses constants rounded to fp16."""
    constants = (op for op in function.block.walk() if op.type == "const")
    return function.fp32_constants is None and any(
        isinstance(op.outputs[0].type, TensorType) and op.outputs[0].type.dtype is DType.FP16
        for op in constants
    )


def _block(block: Block, originals: Constants) -> Block:
    return Block(
        inputs=tuple(_named(named) for named in block.inputs),
        ops=tuple(_op(op, originals) for op in block.ops),
        outputs=block.outputs,
    )


def _op(op: Op, originals: Constants) -> Op:
    original = originals.get(op.outputs[0].name) if op.type == "const" else None
    return Op(
        type=op.type,
        inputs={
            name: tuple(b if isinstance(b, Ref) else _constant(b) for b in bindings)
            for name, bindings in op.inputs.items()
        },
        outputs=tuple(_named(output) for output in op.outputs),
        blocks=tuple(_block(block, originals) for block in op.blocks),
        # The attribute ``name`` is a string but no dtype.
        attributes={
            name: value if name == "name" else _constant(value, original)
            for name, value in op.attributes.items()
        },
    )


def _constant(constant: Constant, original: NDArray[Any] | None = None) -> Constant:
    content = constant.content
    if isinstance(content, str) and content in _WIDER_LABELS:
        return replace(constant, content=_WIDER_LABELS[content])
    declared = _type(constant.type)
    if declared == constant.type or not isinstance(content, np.ndarray):
        return constant
    numpy = declared.dtype.numpy if isinstance(declared, TensorType) else content.dtype
    if original is not None and original.shape in ((), content.shape):
        content = np.broadcast_to(original, content.shape)
    return Constant(declared, content.astype(numpy))


def _named(named: NamedType) -> NamedType:
    return replace(named, type=_type(named.type))


def _feature(feature: Feature) -> Feature:
    return replace(feature, type=_tensor(feature.type))


def _tensor(declared: TensorType) -> TensorType:
    return replace(declared, dtype=_WIDER.get(declared.dtype, declared.dtype))


def widen_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an input of a function as an input of the widened function."""
    wide = {dtype.numpy: wide.numpy for dtype, wide in _WIDER.items() if dtype is not DType.BF16}
    return array.astype(wide.get(array.dtype, array.dtype), copy=False)


def _type(declared: ValueType) -> ValueType:
    match declared:
        case TensorType():
            return _tensor(declared)
        case StateType():
            return StateType(_tensor(declared.wrapped))
        case ListType():
            return ListType(_type(declared.element), declared.length)
        case TupleType():
            return TupleType(tuple(_type(element) for element in declared.elements))
        case DictType():
            return DictType(_type(declared.key), _type(declared.value))

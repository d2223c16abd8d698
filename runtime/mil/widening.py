"""The same program at a wider floating-point type: what its own rounding is measured against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Binding,
    Block,
    Constant,
    DictType,
    Feature,
    Function,
    ListType,
    NamedType,
    Op,
    StateType,
    TensorType,
    TupleType,
    ValueType,
)

_NARROW = (DType.FP16, DType.BF16)
_WIDE = DType.FP32
# Ops take dtypes as strings (``cast``, ``make_list``); no op takes one of these for anything else.
_NARROW_NAMES = {dtype.label for dtype in _NARROW}


def widened(function: Function) -> Function:
    """``function`` with fp32 for every fp16: parameters, values, weights and states.

    Names and structure stay, op by op, so that the values of both can be compared. Inputs and
    outputs of the model are fp32 as well.
    """
    return replace(
        function,
        params=tuple(_named(param) for param in function.params),
        block=_block(function.block),
        inputs=tuple(_feature(feature) for feature in function.inputs),
        outputs=tuple(_feature(feature) for feature in function.outputs),
        states=tuple(_feature(feature) for feature in function.states),
    )


def _block(block: Block) -> Block:
    return Block(
        inputs=tuple(_named(named) for named in block.inputs),
        ops=tuple(_op(op) for op in block.ops),
        outputs=block.outputs,
    )


def _op(op: Op) -> Op:
    return Op(
        type=op.type,
        inputs={
            name: tuple(_binding(binding) for binding in bindings)
            for name, bindings in op.inputs.items()
        },
        outputs=tuple(_named(output) for output in op.outputs),
        blocks=tuple(_block(block) for block in op.blocks),
        # The op's name is one of them, and no dtype.
        attributes={
            name: value if name == "name" else _constant(value)
            for name, value in op.attributes.items()
        },
    )


def _binding(binding: Binding) -> Binding:
    return _constant(binding) if isinstance(binding, Constant) else binding


def _constant(constant: Constant) -> Constant:
    if isinstance(constant.data, str) and constant.data in _NARROW_NAMES:
        return replace(constant, data=_WIDE.label)
    declared = _type(constant.type)
    if declared == constant.type or not isinstance(constant.data, np.ndarray):
        return constant
    return Constant(declared, constant.data.astype(_WIDE.numpy))


def _named(named: NamedType) -> NamedType:
    return replace(named, type=_type(named.type))


def _feature(feature: Feature) -> Feature:
    return replace(feature, type=_tensor(feature.type))


def _tensor(declared: TensorType) -> TensorType:
    return replace(declared, dtype=_WIDE) if declared.dtype in _NARROW else declared


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

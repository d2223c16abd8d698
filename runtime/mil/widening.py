"""Widen a program to fp32 and int64, to measure rounding and wrapping in its original dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.formats.fp32_constants import Constants
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


@dataclass(frozen=True)
class Widening:
    """Replaces dtypes of a program by wider dtypes.

    Args:
        wider: The wider dtype of each dtype to replace.
        originals: Values of constants before fp16 changed them, by name.
    """

    wider: Mapping[DType, DType]
    originals: Constants

    @cached_property
    def _labels(self) -> dict[str, str]:
        # Ops take dtypes as strings (``cast``, ``make_list``); no op uses these strings otherwise.
        return {narrow.label: wide.label for narrow, wide in self.wider.items()}

    def block(self, block: Block) -> Block:
        """Return a block with wide types."""
        return Block(
            inputs=tuple(self.named(named) for named in block.inputs),
            ops=tuple(self.op(op) for op in block.ops),
            outputs=block.outputs,
        )

    def op(self, op: Op) -> Op:
        """Return an op with wide outputs, constants and blocks; the names are unchanged."""
        original = self.originals.get(op.outputs[0].name) if op.type == "const" else None
        return Op(
            type=op.type,
            inputs={
                name: tuple(self.binding(binding) for binding in bindings)
                for name, bindings in op.inputs.items()
            },
            outputs=tuple(self.named(output) for output in op.outputs),
            blocks=tuple(self.block(block) for block in op.blocks),
            # The attribute ``name`` is a string but no dtype.
            attributes={
                name: value if name == "name" else self._constant(value, original)
                for name, value in op.attributes.items()
            },
        )

    def binding(self, binding: Binding) -> Binding:
        """Return a wide literal; names are unchanged."""
        return self._constant(binding) if isinstance(binding, Constant) else binding

    def named(self, named: NamedType) -> NamedType:
        """Return a name with its wide type."""
        return replace(named, type=self.type(named.type))

    def feature(self, feature: Feature) -> Feature:
        """Return a feature of the model with its wide type."""
        return replace(feature, type=self._tensor(feature.type))

    def type(self, declared: ValueType) -> ValueType:
        """Return a wide type."""
        match declared:
            case TensorType():
                return self._tensor(declared)
            case StateType():
                return StateType(self._tensor(declared.wrapped))
            case ListType():
                return ListType(self.type(declared.element), declared.length)
            case TupleType():
                return TupleType(tuple(self.type(element) for element in declared.elements))
            case DictType():
                return DictType(self.type(declared.key), self.type(declared.value))

    def _constant(self, constant: Constant, original: NDArray[Any] | None = None) -> Constant:
        content = constant.content
        if isinstance(content, str) and content in self._labels:
            return replace(constant, content=self._labels[content])
        declared = self.type(constant.type)
        if declared == constant.type or not isinstance(content, np.ndarray):
            return constant
        numpy = declared.dtype.numpy if isinstance(declared, TensorType) else content.dtype
        if original is not None and original.size in (1, content.size):
            shape = content.shape if original.size > 1 else ()
            content = np.broadcast_to(original.reshape(shape), content.shape)
        return Constant(declared, content.astype(numpy))

    def _tensor(self, declared: TensorType) -> TensorType:
        return replace(declared, dtype=self.wider.get(declared.dtype, declared.dtype))


_WIDER = {DType.FP16: DType.FP32, DType.BF16: DType.FP32, DType.INT32: DType.INT64}


def widen_function(function: Function) -> Function:
    """Return ``function`` with fp32 for every fp16 and int64 for every int32.

    Parameters, values, weights, states, and inputs and outputs of the model are widened. Constants
    that fp16 changed have their original values if the model stores them. Names and ops are
    unchanged, so that the values of both programs can be compared one by one.
    """
    widening = Widening(_WIDER, function.fp32_constants or {})
    return replace(
        function,
        params=tuple(map(widening.named, function.params)),
        block=widening.block(function.block),
        inputs=tuple(map(widening.feature, function.inputs)),
        outputs=tuple(map(widening.feature, function.outputs)),
        states=tuple(map(widening.feature, function.states)),
    )


def has_rounded_constants(function: Function) -> bool:
    """Whether ``widen_function`` uses constants rounded to fp16."""
    constants = (op for op in function.block.walk() if op.type == "const")
    return function.fp32_constants is None and any(
        isinstance(op.outputs[0].type, TensorType) and op.outputs[0].type.dtype is DType.FP16
        for op in constants
    )


def widen_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an input of a function as an input of the widened function."""
    wide = {dtype.numpy: wide.numpy for dtype, wide in _WIDER.items() if dtype is not DType.BF16}
    return array.astype(wide.get(array.dtype, array.dtype), copy=False)

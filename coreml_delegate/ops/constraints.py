"""Constraints that several records share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import OpCall, Reason, ReasonCode, flatten
from coreml_delegate.ops.constants import is_derived
from coreml_delegate.ops.record import Constraint


def argument_is(name: str, *accepted: Any) -> Constraint:
    """The argument, or its default, is among ``accepted``."""

    def check(call: OpCall) -> Reason | None:
        value = call.arguments.get(name)
        if any(value is a or value == a for a in accepted):
            return None
        expected = " or ".join(repr(a) for a in accepted)
        return Reason(ReasonCode.ARGUMENT, f"{name}={value!r}, Core ML takes {expected}")

    return check


def rank_between(name: str, low: int, high: int) -> Constraint:
    """The rank of a tensor argument lies in ``low .. high``."""

    def check(call: OpCall) -> Reason | None:
        tensor = call.tensor(name)
        if tensor is None or low <= tensor.dim() <= high:
            return None
        expected = str(low) if low == high else f"{low} to {high}"
        return Reason(
            ReasonCode.RANK, f"{name!r} has rank {tensor.dim()}, Core ML takes {expected} here"
        )

    return check


def only_first_result_used(call: OpCall) -> Reason | None:
    """Only the first result of the op is used; Core ML does not compute the others."""
    indices = [index for index in call.results_used() if index > 0]
    if not indices:
        return None
    return Reason(ReasonCode.USE, f"result {indices[0]} is used, Core ML has only result 0")


@dataclass(frozen=True, slots=True)
class IsConstant:
    """The argument, or every tensor in its list, is a derived constant; see ``ops.constants``.

    Attributes:
        name: Of the argument.
        may_be_dequantized: Whether a derived constant that is not stored is accepted.
    """

    name: str
    may_be_dequantized: bool = True

    def __call__(self, call: OpCall, /) -> Reason | None:
        """Return why the call is refused, or None."""
        nodes = (n for n in flatten(call.arguments.get(self.name)) if isinstance(n, Node))
        if all(self._is_constant(node, call) for node in nodes):
            return None
        return Reason(ReasonCode.ARGUMENT, f"{self.name!r} is computed, Core ML takes a constant")

    def _is_constant(self, node: Node, call: OpCall) -> bool:
        is_stored = node.op != "call_function"
        return is_derived(node, call.constants) and (is_stored or self.may_be_dequantized)


def floating_result(call: OpCall) -> Reason | None:
    """The results are floats."""
    return _result_kind(call, lambda dtype: dtype.is_floating_point, "floats")


def numeric_result(call: OpCall) -> Reason | None:
    """The results are numbers: Core ML does not compute with booleans."""
    return _result_kind(call, lambda dtype: dtype is not torch.bool, "numbers")


def _result_kind(call: OpCall, accepts: Callable[[torch.dtype], bool], kind: str) -> Reason | None:
    for tensor in call.outputs():
        if not accepts(tensor.dtype):
            got = str(tensor.dtype).removeprefix("torch.")
            return Reason(ReasonCode.DTYPE, f"the result is {got}, Core ML has {kind} here")
    return None


def holds(predicate: Callable[[OpCall], bool], code: ReasonCode, text: str) -> Constraint:
    """An ad hoc condition with a fixed reason."""

    def check(call: OpCall) -> Reason | None:
        return None if predicate(call) else Reason(code, text)

    return check


def contiguous_result(call: OpCall) -> Reason | None:
    """The result is row-major: Core ML has no other memory format."""
    order, memory_format = (call.arguments.get(n) for n in ("dim_order", "memory_format"))
    if order is not None and list(order) != sorted(order):
        return Reason(ReasonCode.LAYOUT, f"dim_order={list(order)}, Core ML is row-major")
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return Reason(ReasonCode.LAYOUT, f"{memory_format}, Core ML is row-major")
    return None


def static_result(call: OpCall) -> Reason | None:
    """The result's shape is static."""
    for tensor in call.outputs():
        if not all(isinstance(d, int) for d in tensor.shape):
            return Reason(
                ReasonCode.SYMBOLIC, f"the result has dynamic shape {tuple(tensor.shape)}"
            )
    return None


def static_argument(*names: str, when: Callable[[OpCall], bool] = lambda _: True) -> Constraint:
    """The shapes of tensor arguments are static, for calls for which ``when`` is true."""

    def check(call: OpCall) -> Reason | None:
        for name in names:
            tensor = call.tensor(name)
            if tensor is None or all(isinstance(d, int) for d in tensor.shape) or not when(call):
                continue
            shape = tuple(tensor.shape)
            return Reason(ReasonCode.SYMBOLIC, f"{name!r} has dynamic shape {shape}")
        return None

    return check

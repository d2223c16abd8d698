"""The record of one ATen op: support, rewrite, FLOPs, quantization; the verdict on one call.

The partitioner's verdicts, the rewrites before conversion, the estimated FLOPs, the quantizer's
patterns and the documentation's table derive from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node

from coreml_delegate.ops.call import (
    ANY,
    FLOAT,
    INT32,
    INTEGER,
    MAX_RANK,
    Dtypes,
    OpCall,
    Reason,
    ReasonCode,
    flatten,
    is_symbolic,
    overload_of,
)
from coreml_delegate.ops.flops import ONE_PER_RESULT, Estimator
from coreml_delegate.ops.merging import Merge, obstacle_to_merging
from coreml_delegate.ops.quantization import IN_FLOAT, Quantization
from coreml_delegate.patches.torch import schema_of
from coreml_delegate.targets import Opset


class Constraint(Protocol):
    """A condition on a call: returns None if it holds, else the reason why not."""

    def __call__(self, call: OpCall, /) -> Reason | None:
        """Return the reason to refuse a call, or None."""
        ...


Rewrite = Callable[[Node], None]
"""Changes one call in place before conversion; its result keeps its value, shape and dtype."""

Translation = Callable[..., Any]
"""Composes a call from MIL ops: takes its arguments, tensors as MIL variables, and returns the
variable of its result; see ``mil.compose``."""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """The record of one ATen op that Core ML can take.

    Attributes:
        target: ``namespace.name.overload`` as in ``aten.conv2d.default``; also stands for the
            copying variant (``aten.view.default`` for ``aten.view_copy.default``).
        dtypes: Accepted dtypes of the tensor arguments, by argument name; ``""`` for all others.
        results: Accepted dtypes of the results.
        constraints: Further conditions, tried in order.
        symbolic: Arguments, by name, that may be computed from shapes.
        max_rank: Highest rank of an argument or result.
        merge: Returns calls on tensors of at most ``MAX_RANK`` that compute a call on tensors of
            higher rank, see ``ops.merging``; None if there is no such merge.
        since: First opset that can express it.
        demand: Returns a newer opset that a call needs, and the feature that needs it; or None.
        preserve: Keep the op from ExecuTorch's decompositions, because Core ML has it as one.
        standalone: Whether a program may consist of one such call; False if its values cannot cross
            the boundary of a partition.
        rewrite: Turns a call into calls that coremltools translates rightly; None if it translates
            the call itself rightly.
        translation: Translates the call, rewritten if there is a rewrite, in place of coremltools;
            None if coremltools translates it.
        moves_data: The result has the unchanged elements of the first argument: coremltools may
            translate a call that keeps the shape to its argument.
        leaves_neural_engine: Returns why the neural engine does not run a call, by the rules of
            ``device_check``; None if it may.
        fails_on_neural_engine: Returns why a call fails on it; None if it does not.
        natural_indices: Whether PyTorch refuses negative indices, so that Core ML needs no check.
        flops: Estimates the operations of a call.
        quantization: How the quantizer treats the op.
    """

    target: str
    dtypes: Mapping[str, Dtypes] = field(default_factory=lambda: {"": FLOAT})
    results: Dtypes = ANY
    constraints: tuple[Constraint, ...] = ()
    symbolic: frozenset[str] = frozenset()
    max_rank: int = MAX_RANK
    merge: Merge | None = None
    since: Opset = Opset.iOS15
    demand: Callable[[OpCall], tuple[Opset, str] | None] = lambda _: None
    preserve: bool = True
    standalone: bool = True
    rewrite: Rewrite | None = None
    translation: Translation | None = None
    moves_data: bool = False
    leaves_neural_engine: Callable[[OpCall], str | None] = lambda _: None
    fails_on_neural_engine: Callable[[OpCall], str | None] = lambda _: None
    natural_indices: bool = False
    flops: Estimator = ONE_PER_RESULT
    quantization: Quantization = IN_FLOAT

    def oldest(self, call: OpCall) -> Opset:
        """The first opset that can express this call."""
        demanded = self.demand(call)
        return self.since if demanded is None else max(self.since, demanded[0])

    def obstacle(self, call: OpCall) -> Reason | None:
        """Why Core ML cannot take this call, or None if it can."""
        checks = (self._symbolic, self._dtypes, self._shapes, numbers_fit, *self.constraints)
        for check in checks:
            reason = check(call)
            if reason is not None:
                return reason
        return None

    def _symbolic(self, call: OpCall) -> Reason | None:
        for name, value in call.arguments.items():
            if name not in self.symbolic and any(is_symbolic(v) for v in flatten(value)):
                return Reason(ReasonCode.SYMBOLIC, f"argument {name!r} is computed from shapes")
        return None

    def _dtypes(self, call: OpCall) -> Reason | None:
        for name, tensor in call.tensors():
            accepted = self.dtypes.get(name, self.dtypes.get("", FLOAT))
            if tensor.dtype not in accepted:
                return Reason(
                    ReasonCode.DTYPE,
                    f"argument {name!r} is {_short(tensor.dtype)}, "
                    f"Core ML takes {', '.join(sorted(map(_short, accepted)))} here",
                    remedy="Cast it in the model",
                )
        for tensor in call.outputs():
            if tensor.dtype not in self.results:
                return Reason(
                    ReasonCode.DTYPE, f"the result is {_short(tensor.dtype)}", remedy="Cast before"
                )
        return None

    def _shapes(self, call: OpCall) -> Reason | None:
        named = [*call.tensors(), *(("result", t) for t in call.outputs())]
        for name, tensor in named:
            if tensor.dim() > self.max_rank and self.merge is None:
                return Reason(
                    ReasonCode.RANK,
                    f"{name!r} has rank {tensor.dim()}, Core ML takes at most {self.max_rank}",
                )
            if any(isinstance(d, int) and d == 0 for d in tensor.shape):
                return Reason(ReasonCode.SHAPE, f"{name!r} is empty: {tuple(tensor.shape)}")
        if self.merge is not None and any(tensor.dim() > self.max_rank for _, tensor in named):
            return obstacle_to_merging(call, self.merge)
        return None


def numbers_fit(call: OpCall) -> Reason | None:
    """Integers that an op computes with fit int32; positions, as the end of a slice, need not."""
    schema = schema_of(overload_of(call.node.target))
    results = call.outputs()
    are_integers = bool(results) and results[0].dtype in INTEGER
    kinds = (int, float) if are_integers else int
    for argument in () if schema is None else schema.arguments:
        value = call.arguments.get(argument.name)
        counts = str(argument.type) in ("number", "Optional[number]", "Tensor")
        if not counts or not isinstance(value, kinds) or not math.isfinite(value):
            continue
        if not INT32.min <= value <= INT32.max:
            return Reason(
                ReasonCode.ARGUMENT,
                f"{argument.name}={value} is beyond int32, the widest of Core ML",
            )
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

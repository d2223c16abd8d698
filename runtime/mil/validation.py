"""Check a function before any engine sees it.

Engines look up values by name, walk nested blocks and size buffers by declared types. This is safe
only if every name is defined once, before its uses, control flow has the right number of blocks,
and the features of the model are the parameters of the function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.runtime.mil.location import describe_op, located_ops
from coreml_delegate.runtime.mil.program import (
    STATE_OPERAND,
    Block,
    Feature,
    Function,
    Op,
    Ref,
    StateType,
    TensorType,
    ValueType,
)

MAX_ELEMENTS = 1 << 40
"""Elements of one tensor; a program with a larger shape is damaged."""

_MAX_RANK = 16  # Core ML's own limit is 5 for most ops


def check_tensor_type(declared: TensorType) -> None:
    """Refuse a type with too many dimensions or elements.

    Raises:
        BlobFormatError: Too many dimensions or elements.
    """
    shape = declared.shape or ()
    if len(shape) > _MAX_RANK:
        raise BlobFormatError(
            "tensor type has too many dimensions", got=str(len(shape)), expected=f"{_MAX_RANK}"
        )
    if math.prod(size for size in shape if size) > MAX_ELEMENTS:
        raise BlobFormatError(
            "tensor type is too large", got=str(declared), expected=f"{MAX_ELEMENTS} elements"
        )


def check_function(function: Function) -> None:
    """Check all properties that engines rely on.

    Raises:
        BlobFormatError: A check fails; the message names the op and its location.
    """
    _check_params(function)
    for _, op in located_ops(function):
        problem = _problem(op)
        if problem:
            raise BlobFormatError(f"{describe_op(function, op)} {problem}")
    _References(function).check()
    _check_features(function)


# --- ops ------------------------------------------------------------------------------------------


def _problem(op: Op) -> str | None:
    check = _CHECKS.get(op.type)
    if check is not None:
        return check(op)
    if op.type in STATE_OPERAND and STATE_OPERAND[op.type] not in op.inputs:
        return f"lacks its {STATE_OPERAND[op.type]!r}"
    if op.blocks:
        return f"has {len(op.blocks)} nested blocks and needs none"
    return None


def _const_problem(op: Op) -> str | None:
    value = op.attributes.get("val")
    if value is None:
        return "has no value"
    if len(op.outputs) != 1:
        return f"has {len(op.outputs)} outputs and needs one"
    if value.type != op.outputs[0].type:
        return f"holds {value.type} and declares {op.outputs[0].type}"
    return "has nested blocks and needs none" if op.blocks else None


def _cond_problem(op: Op) -> str | None:
    if len(op.blocks) != 2:
        return f"has {len(op.blocks)} nested blocks and needs two"
    if len(op.inputs.get("pred", ())) != 1:
        return "needs one predicate"
    for block in op.blocks:
        if block.inputs:
            return "has a branch with inputs"
        if len(block.outputs) != len(op.outputs):
            return f"has {len(op.outputs)} outputs and a branch with {len(block.outputs)}"
    return None


def _loop_problem(op: Op) -> str | None:
    if len(op.blocks) != 2:
        return f"has {len(op.blocks)} nested blocks and needs two"
    variables = len(op.inputs.get("loop_vars", ()))
    condition, body = op.blocks
    counts = {len(op.outputs), len(condition.inputs), len(body.inputs), len(body.outputs)}
    if counts != {variables}:
        return f"has {variables} variables and blocks or outputs of {sorted(counts)}"
    if len(condition.outputs) != 1:
        return f"has a condition of {len(condition.outputs)} values"
    return None


_CHECKS: Mapping[str, Callable[[Op], str | None]] = {
    "const": _const_problem,
    "cond": _cond_problem,
    "while_loop": _loop_problem,
}


# --- names ----------------------------------------------------------------------------------------


def _check_params(function: Function) -> None:
    uses = Counter(param.name for param in function.params)
    if repeated := sorted(name for name, count in uses.items() if count > 1):
        raise BlobFormatError(
            f"function {function.name!r} has parameters of one name", got=", ".join(repeated)
        )
    if function.block.inputs:
        raise BlobFormatError(
            f"function {function.name!r} has inputs of its outermost block",
            got=", ".join(named.name for named in function.block.inputs),
        )


class _References:
    """Checks that every value is defined before its uses, which also excludes cycles."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._states = {p.name for p in function.params if isinstance(p.type, StateType)}
        self._defined: set[str] = set()

    def check(self) -> None:
        self._defined.update(param.name for param in self._function.params)
        self._block(self._function.block)

    def _block(self, block: Block) -> None:
        local: list[str] = []
        self._define((named.name for named in block.inputs), local)
        for op in block.ops:
            self._uses(op)
            for inner in op.blocks:
                self._block(inner)
            self._define((output.name for output in op.outputs), local)
        self._check_defined("block output", block.outputs)
        self._check_values("block output", block.outputs)
        self._defined.difference_update(local)

    def _uses(self, op: Op) -> None:
        user = f"op {op.name!r} ({op.type})"
        for name, bindings in op.inputs.items():
            used = [b.name for b in bindings if isinstance(b, Ref)]
            self._check_defined(user, used)
            if name != STATE_OPERAND.get(op.type):
                self._check_values(user, used)
            elif len(bindings) != 1 or not set(used) & self._states:
                raise self._error(f"{user} needs a state as {name!r}", used)

    def _check_defined(self, user: str, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._defined]
        if missing:
            raise self._error(f"{user} uses a value that is not defined before it", missing)

    def _check_values(self, user: str, names: Iterable[str]) -> None:
        states = [name for name in names if name in self._states]
        if states:
            raise self._error(f"{user} uses a state as a value", states)

    def _define(self, names: Iterable[str], local: list[str]) -> None:
        for name in names:
            if name in self._defined:
                raise self._error("a value is defined twice", [name])
            self._defined.add(name)
            local.append(name)

    def _error(self, what: str, names: list[str]) -> BlobFormatError:
        got = ", ".join(repr(name) for name in names) or "no name"
        return BlobFormatError(f"function {self._function.name!r}: {what}", got=got)


# --- features -------------------------------------------------------------------------------------


def _check_features(function: Function) -> None:
    params: dict[str, ValueType] = {param.name: param.type for param in function.params}
    inputs = [name for name, declared in params.items() if not isinstance(declared, StateType)]
    states = [name for name, declared in params.items() if isinstance(declared, StateType)]
    for kind, features, expected in (
        ("inputs", function.inputs, inputs),
        ("states", function.states, states),
    ):
        described = [feature.name for feature in features]
        if sorted(described) != sorted(expected):
            raise BlobFormatError(
                f"function {function.name!r} is described with other {kind} than it has",
                got=", ".join(described) or "none",
                expected=", ".join(expected) or "none",
            )
    for feature in function.inputs:
        _check_shapes(feature)
    outputs = [feature.name for feature in function.outputs]
    missing = sorted(set(outputs) - set(function.block.outputs))
    if missing or len(set(outputs)) != len(outputs):
        raise BlobFormatError(
            f"function {function.name!r} does not produce the outputs of its description",
            got=", ".join(function.block.outputs) or "none",
            expected=", ".join(outputs),
        )


def _check_shapes(feature: Feature) -> None:
    """Check that the shapes and bounds of an input have the rank of the parameter."""
    shape = feature.type.shape
    if shape is None:
        return
    ranks = {len(shape_) for shape_ in feature.shapes} | ({len(feature.bounds)} - {0})
    if ranks - {len(shape)}:
        raise BlobFormatError(
            f"input {feature.name!r} is described with another rank than it has",
            got=", ".join(map(str, sorted(ranks))),
            expected=str(len(shape)),
        )

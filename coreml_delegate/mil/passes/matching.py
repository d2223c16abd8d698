"""Matching and replacing of ops in a MIL program in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.patches.third_party import coremltools

Selector = Callable[[Any], bool]
"""Returns whether coremltools may cast a MIL op to fp16."""

Rewrite = Callable[[Any], None]
"""Rewrites a MIL op in place, if it is of the kind that the rewrite is for."""

MOVES = frozenset(
    {
        *("reshape", "reshape_like", "transpose", "expand_dims", "squeeze", "reverse", "tile"),
        *("slice_by_index", "slice_by_size", "split", "concat", "stack", "identity", "gather"),
        *("gather_along_axis", "gather_nd", "band_part", "sliding_windows", "crop", "pad"),
    }
)
"""Ops whose results are elements of their operands."""


def rewrite(program: Any, rewrites: Sequence[Rewrite]) -> None:
    """Rewrite a MIL program in place; results that the rewrites leave unused stay in it."""
    for function in program.functions.values():
        _rewrite(function, rewrites)


def _rewrite(block: Any, rewrites: Sequence[Rewrite]) -> None:
    with block:
        for apply in rewrites:
            for op in list(block.operations):
                if op.enclosing_block is not None:  # otherwise a rewrite has removed it
                    apply(op)
        for op in list(block.operations):
            for inner in op.blocks:
                _rewrite(inner, rewrites)


def remove_dead_code(program: Any) -> None:
    """Remove the ops of a MIL program whose results nothing reads."""
    passes = coremltools().converters.mil.mil.passes.pass_registry.PASS_REGISTRY
    passes["common::dead_code_elimination"](program)


def replace(op: Any, new: Any) -> None:
    """Replace the result of an op by a variable of the same block, and remove the op."""
    block = op.enclosing_block
    block.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=new)
    block.remove_ops([op])


def replace_operand(op: Any, old: Any, new: Any) -> None:
    """Let ``op`` read ``new``, which is made before it, in place of ``old``."""
    anchor = new.op if new.op is not None and new.op.enclosing_block is op.enclosing_block else None
    op.enclosing_block.replace_uses_of_var_after_op(
        anchor_op=anchor, old_var=old, new_var=new, end_op=op
    )


def made_by(var: Any, *types: str) -> Any:
    """Return the op of one of ``types`` that computes a variable, or None."""
    op = getattr(var, "op", None)
    return op if op is not None and op.op_type in types else None


def number_in(var: Any) -> float | None:
    """Return the number that every element of a constant has; None for other variables."""
    value = None if var is None else var.val
    if value is None or isinstance(value, str | bool) or not np.size(value):
        return None
    array = np.asarray(value)
    first, last = array.flat[0], array.flat[-1]
    return float(first) if first == last and (array == first).all() else None


def is_fp32(var: Any) -> bool:
    """Return whether a variable is a tensor or scalar of fp32."""
    return bool(var.is_tensor_or_scalar_of(dtype="fp32"))


def variables(op: Any) -> list[Any]:
    """Return the variables that an op reads."""
    return [
        var
        for value in op.inputs.values()
        for var in (value if isinstance(value, list | tuple) else [value])
        if var is not None
    ]


def constants(op: Any) -> list[Any]:
    """Return the stored constants that an op reads, each once."""
    return [var for var in dict.fromkeys(variables(op)) if made_by(var, "const") is not None]


def operands(op: Any) -> list[Any]:
    """Return the variables of fp32 that an op reads."""
    return [var for var in variables(op) if is_fp32(var)]


def axes_of(reduction: Any, rank: int) -> tuple[int, ...] | None:
    """Return the axes of a reduction in ascending order, or None."""
    axes = range(rank) if reduction.axes is None else reduction.axes.val
    return None if axes is None else tuple(sorted({int(axis) % rank for axis in axes}))


def count_of(shape: Any) -> int | None:
    """Return the product of sizes; None if it is not known before the program runs."""
    sizes = list(shape)
    return (
        math.prod(int(s) for s in sizes)
        if all(isinstance(s, int | np.integer) for s in sizes)
        else None
    )


def only_reader(op: Any, *types: str) -> Any:
    """Return the reader of the result of ``op`` if it is the only one and of ``types``, or None."""
    result = op.outputs[0]
    readers = result.child_ops
    if len(readers) != 1 or readers[0].op_type not in types or is_output(result):
        return None
    return readers[0] if readers[0].enclosing_block is op.enclosing_block else None


def is_output(var: Any) -> bool:
    """Return whether a variable, computed by an op, leaves the op's block."""
    return var in var.op.enclosing_block.outputs


def squared(var: Any) -> Any:
    """Return x of a variable that is ``x ** 2``, or None."""
    op = made_by(var, "square", "mul", "pow")
    if op is None or (op.op_type == "mul" and op.x is not op.y):
        return None
    return op.x if op.op_type != "pow" or exponent(op) == 2 else None


def exponent(power: Any) -> float | None:
    """Return the constant exponent of a ``pow`` that does not broadcast its base, or None."""
    return number_in(power.y) if power.outputs[0].shape == power.x.shape else None


def is_tested_for_nan(op: Any) -> bool:
    """Return whether the result of an op is compared with itself, as only NaN differs from it."""
    return any(
        reader.op_type in ("equal", "not_equal") and reader.x is reader.y
        for reader in op.outputs[0].child_ops
    )


@dataclass(frozen=True, slots=True)
class ZeroedRows:
    """A selection of zeros for the rows of an attention that a mask hides.

    Attributes:
        largest: The op that reduces the mask, as numbers 0 and 1, to its largest element per row.
        mask: The summand of the scores that hides by minus infinity; None for a boolean mask.
    """

    largest: Any
    mask: Any


def zeroed_rows(op: Any) -> ZeroedRows | None:
    """Match ``select(max(float(visible)) <= 0, 0, attention)``.

    ``visible`` is a boolean mask, or ``mask > -inf``.
    """
    comparison: Any = made_by(op.cond, "less_equal") if op.op_type == "select" else None
    largest: Any = comparison and made_by(comparison.x, "reduce_max")
    truths: Any = largest and made_by(largest.x, "cast")
    if not truths or number_in(comparison.y) != 0 or number_in(op.a) != 0:
        return None
    if truths.x.dtype.__name__ != "bool":
        return None
    above = made_by(truths.x, "greater")
    if above is None:
        return ZeroedRows(largest, None)
    return ZeroedRows(largest, above.x) if number_in(above.y) == -math.inf else None

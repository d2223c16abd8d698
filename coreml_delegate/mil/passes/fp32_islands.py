"""Islands of fp32 in a program that is cast to fp16, found without data.

fp16 has 11 bits. Where it loses all digits of a result, and the program says so, the shortest chain
of cheap ops to this result stays in fp32; heavy ops, as convolutions, and their results are fp16.

A chain begins at values that fp32 holds and fp16 does not: an input of the model in fp32, integers,
and what a rule adds. An op *carries* such a value if it is cheap and reads the value, or the result
of another carrier. Ends of chains:

- **Angles.** The sine of 981 rad, which fp16 rounds to a multiple of 0.5.
- **Coordinates** of ``resample`` and ``crop_resize``, which MIL takes in fp32 beside pixels in
  fp16, and floats that become integers, as indices, with the fractions ``x - floor(x)`` between
  them. fp16 has no odd numbers from 2048 on.
- **Bounds.** fp16 rounds 1 - 1e-7 to 1, where ``log(1 - x)`` is infinite, and 1e-12 to 6e-8.
- **Deviations** of an input of the model from its mean, its first value or a constant: fp16 has
  multiples of 16 around 20,000. The cast of the input moves behind the difference.

Coremltools keeps an op with a constant beyond 65504 in fp32; ``overflows`` replaces its check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.passes.matching import (
    MOVES,
    Selector,
    count_of,
    is_fp32,
    is_output,
    made_by,
    number_in,
    operands,
    variables,
)
from coreml_delegate.patches.coremltools import INFINITE_FROM

_SATURATING = frozenset({"sigmoid", "softmax", "tanh", "exp", "exp2", "erf"})
"""Ops with results that fp16 does not hold, as 1 - 1e-5, for operands that it holds."""

_COMPARISONS = frozenset({"less", "less_equal", "greater", "greater_equal", "equal", "not_equal"})
_STEPS = frozenset({"floor", "ceil", "round"})
_EXTREMES = frozenset({"maximum", "minimum", "clip"})
_CHEAP = (
    MOVES
    | _SATURATING
    | _COMPARISONS
    | _STEPS
    | _EXTREMES
    | {
        *("add", "sub", "mul", "real_div", "floor_div", "mod", "abs", "sign", "select", "pow"),
        *("square", "sqrt", "rsqrt", "inverse", "log", "cumsum", "logical_and", "logical_or"),
        *("logical_not", "atan", "relu", "relu6", "clamped_relu"),
        *("reduce_max", "reduce_min", "reduce_sum", "reduce_mean"),
    }
)
_PRODUCTS = frozenset({"matmul", "linear"})
_LARGEST_CONTRACTION = 64  # terms of a sum that is cheap beside the ops that use it
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "int64")


def ops_in_fp32(program: Any, may_cast: Selector) -> frozenset[Any]:
    """Return the ops that have to stay in fp32.

    Args:
        program: A MIL program in fp32; its ops with coordinates are edited.
        may_cast: Returns whether an op will be cast to fp16 otherwise.
    """
    islands = set[Any]()
    for function in program.functions.values():
        search = _Search(frozenset(v for v in function.inputs.values() if is_fp32(v)), may_cast)
        search.visit(function)
        islands |= search.islands
    return frozenset(islands)


@dataclass(slots=True)
class _Search:
    """The search for islands in one function.

    Attributes:
        inputs: Inputs of the function in fp32.
        may_cast: Returns whether an op will be cast to fp16 otherwise.
        islands: The ops found so far.
    """

    inputs: frozenset[Any]
    may_cast: Selector
    islands: set[Any] = field(default_factory=set[Any])

    def visit(self, block: Any) -> None:
        """Find the islands in a block and in the blocks of its ops."""
        for rule in _RULES:
            with block:
                rule(self, block)
        for op in list(block.operations):
            for inner in op.blocks:
                self.visit(inner)

    def is_exact(self, var: Any) -> bool:
        """Return whether a variable has values that fp32 holds and fp16 may not."""
        if var in self.inputs:
            return True
        cast = made_by(var, "cast")
        return cast is not None and is_fp32(var) and cast.x.dtype.__name__ == "int"

    def carriers(self, block: Any, is_seed: Callable[[Any], bool]) -> set[Any]:
        """Return the cheap ops that compute from exact values, or from results of a seed.

        One product with a small matrix in a row is cheap, and a network of small layers is not.

        Args:
            block: A block; ops of other blocks carry nothing.
            is_seed: Returns whether a cheap op is the beginning of a chain.
        """
        carriers, from_products = set[Any](), set[Any]()
        for op in block.operations:
            read = variables(op)
            is_product, follows = _is_small_product(op), any(v.op in from_products for v in read)
            if not (op.op_type in _CHEAP or (is_product and not follows)):
                continue
            if is_seed(op) or any(self.is_exact(var) or var.op in carriers for var in read):
                carriers.add(op)
                from_products.update([op] if is_product or follows else [])
        return carriers

    def keep(self, ops: Iterable[Any]) -> None:
        """Add ops to the islands."""
        self.islands.update(op for op in ops if self.may_cast(op))


def _is_small_product(op: Any) -> bool:
    """Whether an op multiplies by a constant matrix with few rows, as frequencies."""
    if op.op_type not in _PRODUCTS or not any(map(_is_constant, operands(op))):
        return False
    contracted = op.x.shape[-2 if op.op_type == "matmul" and op.transpose_x.val else -1]
    count = count_of((contracted,))
    return count is not None and count <= _LARGEST_CONTRACTION


def _chain(end: Any, carriers: set[Any]) -> set[Any]:
    """Return the carriers from which a variable is computed."""
    chain = set[Any]()
    pending = [end.op]
    while pending:
        op = pending.pop()
        if op in carriers and op not in chain:
            chain.add(op)
            pending += [var.op for var in variables(op)]
    return chain


# Angles

_FUNCTIONS_OF_ANGLES = frozenset({"sin", "cos", "tan"})
_LARGEST_ANGLE = 8.0  # fp16 has steps of 2 ** -8 below it
_FEW_TERMS = 16  # of a running sum
_LARGEST_OF_FP16 = float(np.finfo(np.float16).max)
_MOST_ELEMENTS = 2**20  # of a constant that is read as a table; looking at more takes time
_LARGE = 2048.0  # fp16 has no odd integers beyond


def _keep_angles(search: _Search, block: Any) -> None:
    """Keep the arguments of sines from inputs, positions and running sums on."""
    ends = [op for op in block.operations if op.op_type in _FUNCTIONS_OF_ANGLES]
    if not ends:
        return
    magnitudes = _magnitudes(block)
    carriers = search.carriers(block, _begins_angle)
    for op in ends:
        chain = _chain(op.x, carriers)
        is_held = magnitudes.get(op.x, math.inf) <= _LARGEST_ANGLE
        if not is_held and (chain or search.is_exact(op.x)):
            search.keep({op, *chain})


def _begins_angle(op: Any) -> bool:
    if op.op_type == "cumsum":
        count = count_of((op.x.shape[op.axis.val],))
        return count is None or count > _FEW_TERMS
    return op.op_type in ("add", "sub", "mul") and any(
        _LARGE < _largest(var) < math.inf for var in operands(op)
    )


def _largest(var: Any) -> float:
    """Return the largest magnitude of a constant; NaN for other variables, and for weights."""
    if not _is_constant(var) or not 0 < np.size(var.val) <= _MOST_ELEMENTS:
        return math.nan
    return float(max(abs(np.min(var.val)), abs(np.max(var.val))))


def _is_constant(var: Any) -> bool:
    return made_by(var, "const") is not None and not isinstance(var.val, str | bool)


def _magnitudes(block: Any) -> dict[Any, float]:
    """Return bounds of the magnitudes of variables, by simple arithmetic of intervals."""
    bounds = dict[Any, float]()

    def bound(var: Any) -> float:
        largest = _largest(var) if _is_constant(var) else math.nan
        return bounds.get(var, math.inf) if math.isnan(largest) else largest

    for op in block.operations:
        if op.op_type in _MAGNITUDES or op.op_type in MOVES:
            rule = _MAGNITUDES.get(op.op_type, max)
            is_clip = op.op_type == "clip"
            values = [bound(var) for var in ((op.alpha, op.beta) if is_clip else operands(op))]
            for result in op.outputs:
                bounds[result] = rule(values) if values else math.inf
        elif made_by(op.outputs[0], "cast") and op.x.dtype.__name__ == "bool":
            bounds[op.outputs[0]] = 1.0
    return bounds


def _product(values: list[float]) -> float:
    return math.inf if math.inf in values else math.prod(values)


_MAGNITUDES: dict[str, Callable[[list[float]], float]] = {
    **dict.fromkeys(("sigmoid", "tanh", "softmax", "sin", "cos", "erf", "sign"), lambda _: 1.0),
    **dict.fromkeys(("add", "sub"), sum),
    **dict.fromkeys(("abs", "clip", "select"), max),
    "mul": _product,
}


# Coordinates

_COORDINATES = {"resample": ("coordinates",), "crop_resize": ("boxes", "roi")}
"""The operands of an op that say where it reads pixels."""


def _keep_coordinates(search: _Search, block: Any) -> None:
    """Keep coordinates of pixels, and floats that become integers."""
    ends = [op for op in block.operations if op.op_type in _COORDINATES or _becomes_integer(op)]
    if not ends:
        return
    tables = search.carriers(block, _reads_table)
    carriers = search.carriers(block, lambda _: False)
    for op in ends:
        if op.op_type == "cast":
            search.keep(_chain(op.x, carriers))
            continue
        name = next(name for name in _COORDINATES[op.op_type] if name in op.inputs)
        coordinates = op.inputs[name]
        chain = _chain(coordinates, tables)
        if is_fp32(coordinates) and (chain or search.is_exact(coordinates)):
            search.keep(chain)
            if search.may_cast(op):
                search.islands.add(_with_pixels_in_fp16(op, name))


def _becomes_integer(op: Any) -> bool:
    return op.op_type == "cast" and is_fp32(op.x) and op.dtype.val in _INTEGERS


def _reads_table(op: Any) -> bool:
    """Whether an op reads a constant of several numbers, as a grid of positions."""
    return any(_is_constant(var) and number_in(var) is None for var in operands(op))


def _with_pixels_in_fp16(op: Any, name: str) -> Any:
    """Return the op with other operands in fp16; the op itself if MIL demands one type."""
    domains = op.input_spec.input_types
    if domains[name].type_domain == domains["x"].type_domain:
        return op
    arguments = {key: var for key, var in op.inputs.items() if var is not None}
    for key, var in arguments.items():
        if key != name and is_fp32(var) and "fp16" in map(_name, domains[key].type_domain):
            is_constant = _is_constant(var)
            arguments[key] = (
                np.float16(var.val) if is_constant else mb.cast(x=var, dtype="fp16", before_op=op)
            )
    mixed = getattr(mb, op.op_type)(**arguments, before_op=op)
    result = op.outputs[0]
    block = op.enclosing_block
    widened = mb.cast(x=mixed, dtype="fp32", name=result.name, before_op=op)
    block.replace_uses_of_var_after_op(anchor_op=op, old_var=result, new_var=widened)
    block.remove_ops([op])
    return mixed.op


def _name(dtype: Any) -> str:
    return dtype.__name__


# Fractions


def _keep_fractions(search: _Search, block: Any) -> None:
    """Keep ``x - floor(x)``, with x of any size, and remainders."""
    rounded = _followers(block, _is_rounded, _keeps_integers)
    carriers = search.carriers(block, lambda _: False)
    for op in block.operations:
        is_fraction = op.op_type == "mod" or (
            op.op_type == "sub"
            and any(var.op in rounded for var in operands(op))
            and not (_is_constant(op.x) or _is_rounded(op.x.op))
        )
        chains = [_chain(var, carriers) for var in operands(op)] if is_fraction else []
        if chains and (chains[0] or search.is_exact(op.x)):
            search.keep({op}.union(*chains))


def _is_rounded(op: Any) -> bool:
    """Whether an op, or None, has whole numbers as a result."""
    if op is None or op.op_type not in _STEPS | {"cast"}:
        return False
    return op.op_type != "cast" or (is_fp32(op.outputs[0]) and op.x.dtype.__name__ == "int")


def _keeps_integers(op: Any) -> bool:
    return op.op_type in MOVES | _EXTREMES | {"select", "mul"}


# Bounds

_SMALLEST_BOUND = 2.0**-20  # fp16 has 4 bits or fewer below
_SMALLEST_SUMMAND = 2.0**-8  # beside a number of 0.5 or more
_LARGEST_SHIFT = 2.0**-10  # of values that are rounded to integers or compared
_NEAR = 2.0**-8
_LOST = 1 / 32  # relative error of the distance to an integer
_KEEPS_BOUND = (
    MOVES
    | _EXTREMES
    | {"mul", "real_div", "select", "pow", "square", "sqrt", "rsqrt", "inverse", "abs"}
)
_UNBOUNDED = frozenset({"log", "atanh"})  # with results that fp16 holds
_RECIPROCALS = {"real_div": "y", "inverse": "x", "rsqrt": "x", "pow": "x"}
_READERS_IN_RANGE = frozenset({"mul", "real_div", "log", "tanh", "sigmoid", "atan", "sqrt"})


def _keep_bounds(search: _Search, block: Any) -> None:
    """Keep logarithms, reciprocals and steps whose bound, epsilon or shift fp16 rounds away."""
    bounded = _followers(block, _has_lost_bound, _keeps_bound)
    shifted = _followers(block, lambda op: _is_shift(op) or op in bounded, _keeps_bound)
    saturated = _followers(block, _is_probability, _keeps_probability)
    exact = search.carriers(block, lambda _: False)
    carriers = search.carriers(block, lambda op: op in bounded or op.op_type in _SATURATING)
    for op in block.operations:
        if op.op_type in _UNBOUNDED:
            if op.x.op in bounded or op.x.op in saturated:
                search.keep({op, *_chain(op.x, carriers)})
        elif op.op_type in _RECIPROCALS:
            _keep_reciprocal(search, op, bounded, carriers, exact)
        elif op.op_type in _STEPS | _COMPARISONS:
            chain = set[Any]().union(*(_chain(var, exact) for var in operands(op)))
            is_exact = chain or any(search.is_exact(var) for var in operands(op))
            if is_exact and (op in bounded or any(var.op in shifted for var in operands(op))):
                search.keep({op, *chain})


def _keep_reciprocal(
    search: _Search, op: Any, bounded: set[Any], carriers: set[Any], exact: set[Any]
) -> None:
    """Keep a quotient whose divisor is computed from exact values, or is a distance from 1.

    The epsilon of other divisors only prevents 0 / 0, and fp16 has one that does.
    """
    divisor = op.inputs[_RECIPROCALS[op.op_type]]
    if divisor.op not in bounded or (op.op_type == "pow" and not (number_in(op.y) or 0) < 0):
        return
    chain = _chain(divisor, carriers)
    if any(link.op_type.startswith("reduce_") for link in chain):
        return
    is_exact = any(search.is_exact(var) for link in chain for var in operands(link))
    if is_exact or any(map(_is_distance, chain)):
        readers = {r for r in op.outputs[0].child_ops if r.op_type in _READERS_IN_RANGE}
        dividend = _chain(op.x, exact)
        search.keep({op, *chain, *dividend, *readers})


def _keeps_bound(op: Any) -> bool:
    """Whether a result is singular, or near 1, where an operand is."""
    return op.op_type in _KEEPS_BOUND or (
        op.op_type in ("add", "sub") and any(map(_is_constant, operands(op)))
    )


def _has_lost_bound(op: Any) -> bool:
    """Whether an op has a constant that fp16 rounds onto 0, onto an integer, or loses in a sum."""
    if op.op_type in ("add", "sub"):
        constants = [var for var in operands(op) if _is_constant(var)]
        is_distance = any(_is_distance(var.op) for var in operands(op))
        return any(
            _is_lost(var) or (is_distance and 0 < _largest(var) < _SMALLEST_SUMMAND)
            for var in constants
        )
    is_bound = op.op_type in _EXTREMES | _COMPARISONS or op.op_type == "select"
    return is_bound and any(_is_lost(var) for var in operands(op))


def _is_distance(op: Any) -> bool:
    """Whether an op adds a constant of 0.5 or more, as ``1 - x``."""
    return getattr(op, "op_type", None) in ("add", "sub") and any(
        _largest(var) >= 0.5 for var in operands(op)
    )


def _is_lost(var: Any) -> bool:
    """Whether fp16 has 4 bits or fewer of a constant, or of its distance to an integer."""
    if not _is_constant(var) or not np.size(var.val) or np.size(var.val) > _MOST_BOUNDS:
        return False
    values = np.asarray(var.val, np.float64)
    magnitudes = np.abs(values)
    if ((magnitudes > 0) & (magnitudes < _SMALLEST_BOUND)).any():
        return True
    integers = np.round(values)
    remainders = np.abs(values - integers)
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.abs(values.astype(np.float16).astype(np.float64) - values)
    is_near = (integers != 0) & (remainders > 0) & (remainders < _NEAR * magnitudes)
    return bool((is_near & (errors > _LOST * remainders)).any())


_MOST_BOUNDS = 64  # elements of a constant that is a bound; larger constants are weights


def _is_shift(op: Any) -> bool:
    """Whether an op adds a small number, by which values next to an integer pass it."""
    return op.op_type in ("add", "sub") and any(
        0 < _largest(var) < _LARGEST_SHIFT for var in operands(op)
    )


def _is_probability(op: Any) -> bool:
    return op.op_type in ("sigmoid", "softmax")


def _keeps_probability(op: Any) -> bool:
    return op.op_type in MOVES or _is_distance(op)


def _followers(
    block: Any, is_seed: Callable[[Any], bool], follows: Callable[[Any], bool]
) -> set[Any]:
    """Return the seeds and the ops that compute from them by ops that follow."""
    followers = set[Any]()
    for op in block.operations:
        if is_seed(op) or (follows(op) and any(var.op in followers for var in operands(op))):
            followers.add(op)
    return followers


# Comparisons with infinity


def _keep_comparisons_with_infinity(search: _Search, block: Any) -> None:
    """Keep comparisons with infinity of numbers beyond fp16, as in a mask."""
    comparisons = [
        op
        for op in block.operations
        if op.op_type in _COMPARISONS and any(_largest(var) == math.inf for var in operands(op))
    ]
    if not comparisons:
        return
    carriers = search.carriers(block, _exceeds_fp16)
    for op in comparisons:
        chain = set[Any]().union(*(_chain(var, carriers) for var in operands(op)))
        if chain or any(map(search.is_exact, operands(op))):
            search.keep({op, *chain})


def _exceeds_fp16(op: Any) -> bool:
    return any(_LARGEST_OF_FP16 < _largest(var) < math.inf for var in operands(op))


# Deviations

_LARGE_MEAN = 256.0  # fp16 has steps of 1/4 beyond
_STATISTICS = frozenset(
    {
        *("reduce_mean", "reduce_max", "reduce_min", "transpose", "reshape", "expand_dims"),
        *("squeeze", "slice_by_index", "slice_by_size", "tile"),
    }
)


def _keep_deviations(search: _Search, block: Any) -> None:
    """Keep differences of elements of an input, where its cast can follow instead."""
    for x in search.inputs:
        if x.child_ops and x not in block.outputs:
            search.keep(_deviations(x))


def _deviations(x: Any) -> set[Any]:
    """Return the ops from an input to its deviations, if no other op reads the input."""
    statistics, ends, pending = set[Any](), set[Any](), [x]
    while pending:
        for op in pending.pop().child_ops:
            is_statistic = op.op_type in _STATISTICS or (
                op.op_type == "mul" and any(number_in(var) is not None for var in operands(op))
            )
            if not is_statistic:
                ends.add(op)
            elif op not in statistics:
                statistics.add(op)
                pending += op.outputs
    values = {x, *(var for op in statistics for var in op.outputs)}
    if any(is_output(var) for var in values - {x}):
        return set()
    if not all(_is_deviation(op, values) for op in ends):
        return set()
    readers = {reader for op in ends for reader in op.outputs[0].child_ops}
    quotient = {op for op in readers if op.op_type == "real_div"}
    if len(ends) == 2 and len(readers) == 1 and quotient:  # (x - min(x)) / (max(x) - min(x))
        return statistics | ends | quotient
    return statistics | ends if len(ends) == 1 else set()


def _is_deviation(op: Any, values: set[Any]) -> bool:
    """Whether an op subtracts a mean, or other values of the same input."""
    if op.op_type == "layer_norm":
        return True
    if op.op_type == "batch_norm":
        return _largest(op.mean) >= _LARGE_MEAN
    if op.op_type not in ("add", "sub"):
        return False
    if any(_largest(var) >= _LARGE_MEAN for var in operands(op)):
        return True
    return op.op_type == "sub" and set(operands(op)) <= values


_RULES: tuple[Callable[[_Search, Any], None], ...] = (
    _keep_angles,
    _keep_coordinates,
    _keep_fractions,
    _keep_bounds,
    _keep_comparisons_with_infinity,
    _keep_deviations,
)

# Constants beyond fp16

_CHUNK = 2**20  # elements of a constant that are examined at once


def overflows(op: Any) -> bool:
    """Return whether a MIL op has a constant with finite values beyond fp16."""
    constants = (var for var in variables(op) if is_fp32(var) and made_by(var, "const"))
    return any(_has_large_number(np.asarray(var.op.val.val)) for var in constants)


def _has_large_number(values: np.ndarray[Any, Any]) -> bool:
    # Buffered, because a constant may be transposed, and flattening it would copy it.
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    for chunk in np.nditer(values, flags=flags, order="K", buffersize=_CHUNK):
        magnitudes = np.abs(chunk)
        if ((magnitudes > _LARGEST_OF_FP16) & (magnitudes < INFINITE_FROM)).any():
            return True
    return False

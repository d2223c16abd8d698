"""Rewrites of an fp32 program so that values finite in fp32 stay finite in fp16 (maximum 65504).

The pass runs directly before coremltools casts a program to fp16, for PyTorch, built graphs,
StableHLO and JAX. It leaves the ops alone that stay in fp32, and adds ops to them.

**Norms** square numbers, which overflows from 256 on: pytorch/executorch#19523,
facebookresearch/ConvNeXt#80. ``x / sqrt(mean(x ** 2) + epsilon)`` becomes MIL's ``layer_norm`` of
``[x, -x]``, whose mean is 0, and whose sums Core ML keeps in range. ``x - mean(x)`` in place of
``x`` is a layer norm itself. fp16 rounds a small epsilon to a multiple of ``2 ** -24``; a factor of
``x`` makes it a power of two.

**Other roots of squares** are scaled: ``sqrt(sum(x ** 2)) = s * sqrt(sum((x / s) ** 2))`` with the
largest magnitude ``s``.

**Scores** before a softmax: in ``matmul(q, k) * scale`` with a scale below 1, a factor is scaled
instead of the product, which may have overflowed: ultralytics/ultralytics#24990.

**Masks** add the smallest number of fp32 to scores, which is minus infinity in fp16: in a row that
is masked completely softmax divides zero by zero, and a product with a mask of ones and zeros turns
zeros into NaN. Such values are clamped to the range of fp16.

**Means** that are written as sums: see ``fp16_means``.

**Digits** that fp16 lacks: see ``fp32_islands``.

**Softplus** of numbers beyond about 10 is zero on the neural engine: apple/coremltools#2687. There
``log(1 + exp(x))`` is ``x`` in fp16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.norms import SMALLEST_EPSILON, Norm
from coreml_delegate.mil.passes.fp16_means import MEANS, centre_squares
from coreml_delegate.mil.passes.fp32_islands import ops_in_fp32
from coreml_delegate.mil.passes.matching import (
    MOVES,
    Selector,
    axes_of,
    count_of,
    exponent,
    is_fp32,
    is_tested_for_nan,
    made_by,
    number_in,
    only_reader,
    operands,
    remove_dead_code,
    replace,
    replace_operand,
    rewrite,
    squared,
    zeroed_rows,
)
from coreml_delegate.patches.coremltools import INFINITE_FROM

_MAX = float(np.finfo(np.float16).max)
_SMALLEST_NORMAL = float(np.finfo(np.float16).smallest_normal)
_LARGEST_GUARD = 1e-11  # epsilon of an rsqrt that only prevents division by zero; MIL's is 1e-12


def guard_fp16(program: Any, may_cast: Selector) -> Selector:
    """Rewrite what fp16 would lose, and find the ops that have to stay in fp32.

    Args:
        program: A MIL program in fp32; edited in place.
        may_cast: Returns whether an op may be cast to fp16; other ops keep their range.

    Returns:
        ``may_cast``, but false for the ops of ``fp32_islands``.
    """
    rewrite(program, [functools.partial(apply, may_cast=may_cast) for apply in _REWRITES])
    remove_dead_code(program)  # what the rewrites have replaced
    in_fp32 = ops_in_fp32(program, may_cast)
    return lambda op: op not in in_fp32 and may_cast(op)


# Norms and other roots of squares


_POWERS = {"sqrt": 0.5, "rsqrt": -0.5}


@dataclass(frozen=True, slots=True)
class _Root:
    """A root ``sqrt(reduce(x ** 2) * factor + epsilon)``, or its inverse.

    Attributes:
        op: The op that computes it.
        is_inverse: Whether it is one over the root.
        reduction: The op that sums or averages the squares.
        x: The squared tensor.
        axes: The reduced axes, in ascending order.
        is_kept: Whether these axes are kept, with size 1.
        factor: Factor of the reduction, a scalar variable; None for 1.
        is_divided: Whether the reduction is divided by the factor.
        epsilon: Summand to the squares, at least 0.
    """

    op: Any
    is_inverse: bool
    reduction: Any
    x: Any
    axes: tuple[int, ...]
    is_kept: bool
    factor: Any
    is_divided: bool
    epsilon: float

    @property
    def is_sum(self) -> bool:
        return self.reduction.op_type != "reduce_mean"

    @property
    def count(self) -> int | None:
        """Number of squares; None if it is not known before the program runs."""
        return count_of(self.x.shape[axis] for axis in self.axes)

    @property
    def per_mean(self) -> float | None:
        """The f of ``sqrt(f * mean(x ** 2) + epsilon)``; None if it is not known."""
        factor = 1.0 if self.factor is None else number_in(self.factor)
        if self.count is None or not factor or not factor > 0:
            return None
        factor = 1 / factor if self.is_divided else factor
        return factor * self.count if self.is_sum else factor

    @property
    def is_aligned(self) -> bool:
        """Whether the root broadcasts to the rows of ``x`` that it was computed from."""
        return self.is_kept or len(self.axes) == self.x.rank

    def quotients(self) -> list[Any]:
        """Return the ops of the same block that compute ``x / sqrt(...)``."""
        root = self.op.outputs[0]
        kind = "mul" if self.is_inverse else "real_div"
        users = [
            user
            for user in root.child_ops
            if user.op_type == kind and user.enclosing_block is self.op.enclosing_block
        ]
        pairs = [(self.x, root), (root, self.x)] if self.is_inverse else [(self.x, root)]
        return [user for user in users if self.is_aligned and (user.x, user.y) in pairs]


def _rewrite_root(op: Any, may_cast: Selector) -> None:
    root = _match_root(op)
    if root is None or not may_cast(root.reduction) or not may_cast(op):
        return
    quotients = root.quotients()
    match = _as_norm(root)
    if match is not None:
        for quotient in quotients:
            _replace_by_layer_norm(quotient, *match)
        quotients = []
    if op.outputs[0].child_ops or op.outputs[0] in op.enclosing_block.outputs:
        _scale_down(root, quotients)


def _match_root(op: Any) -> _Root | None:
    """Match a root of squares that ends in ``op``."""
    power = exponent(op) if op.op_type == "pow" else _POWERS.get(op.op_type)
    if power not in (0.5, -0.5) or not is_fp32(op.x):
        return None
    total, epsilon = _without_epsilon(op.x)
    if op.op_type == "rsqrt" and op.epsilon.val > _LARGEST_GUARD:
        epsilon += float(op.epsilon.val)
    factor, is_divided = None, False
    if (product := made_by(total, "mul", "real_div")) is not None:
        is_divided = product.op_type == "real_div"
        total, factor = product.x, product.y
        if not is_divided and number_in(total) is not None:
            total, factor = factor, total
        is_number = number_in(factor) is not None or math.prod(factor.shape) == 1
        if not is_number or product.outputs[0].shape != total.shape:
            return None
    view = made_by(total, "expand_dims", "reshape")
    reduced = total if view is None else view.x
    reduction = made_by(reduced, "reduce_mean", "reduce_sum", "reduce_sum_square")
    if reduction is None:
        return None
    x = reduction.x if reduction.op_type == "reduce_sum_square" else squared(reduction.x)
    axes = axes_of(reduction, x.rank) if x is not None and x.rank else None
    if x is None or axes is None:
        return None
    reduced_shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if view is not None and total.shape != reduced_shape:
        return None
    return _Root(
        op, power < 0, reduction, x, axes, total.shape == reduced_shape, factor, is_divided, epsilon
    )


def _without_epsilon(total: Any) -> tuple[Any, float]:
    """Match ``squares + epsilon``; return the squares and epsilon, 0 without."""
    addition = made_by(total, "add")
    for squares, summand in (
        ((addition.x, addition.y), (addition.y, addition.x)) if addition else ()
    ):
        number = number_in(summand)
        if number is not None and number > 0 and squares.shape == total.shape:
            return squares, number
    return total, 0.0


def _as_norm(root: _Root) -> tuple[Norm, float] | None:
    """Return the norm that divides by ``root``, and its scale; None if fp16 lacks the epsilon."""
    per_mean = root.per_mean
    if per_mean is None or root.epsilon / per_mean < SMALLEST_EPSILON:
        return None
    source = _source_of_deviations(root)
    is_centred = source is not None
    norm = Norm(source if is_centred else root.x, root.axes, is_centred, root.epsilon / per_mean)
    return norm, 1 / math.sqrt(per_mean)


def _source_of_deviations(root: _Root) -> Any:
    """Return x of a root of the squares of ``x - mean(x)``; None for other squares."""
    difference = made_by(root.x, "sub")
    mean = difference and made_by(difference.y, "reduce_mean")
    if mean is None or mean.x is not difference.x or difference.x.shape != root.x.shape:
        return None
    is_aligned = mean.keep_dims.val or len(root.axes) == mean.x.rank
    return mean.x if is_aligned and axes_of(mean, mean.x.rank) == root.axes else None


def _replace_by_layer_norm(quotient: Any, norm: Norm, scale: float) -> None:
    """Replace a quotient by a root, and constants that scale and shift it, by a layer norm."""
    last: Any = quotient
    parameters = dict[str, Any]()
    if not math.isclose(scale, 1, rel_tol=1e-7):
        parameters["gamma"] = np.full(norm.shape, scale, np.float32)
    for kind, name in (("mul", "gamma"), ("add", "beta")):
        reader = only_reader(last, kind)
        value = None if reader is None else _parameter(reader, last.outputs[0], norm)
        if reader is not None and value is not None:
            last, parameters[name] = reader, value * parameters.get(name, np.float32(1))
    if "beta" in parameters:
        parameters.setdefault("gamma", np.ones(norm.shape, np.float32))
    replace(last, norm.compose(parameters, name=last.outputs[0].name, before_op=last))


def _parameter(op: Any, x: Any, norm: Norm) -> Any:
    """Return the constant operand of ``op``, beside ``x``, as array of ``norm.shape``, or None."""
    other = op.y if op.x is x else op.x
    if other.val is None or made_by(other, "const") is None or op.outputs[0].shape != x.shape:
        return None
    value = np.asarray(other.val, np.float32)
    value = value.reshape((1,) * (x.rank - value.ndim) + value.shape)
    if any(size != 1 for axis, size in enumerate(value.shape) if axis not in norm.axes):
        return None
    value = value.reshape([value.shape[axis] for axis in norm.axes])
    return np.ascontiguousarray(np.broadcast_to(value, norm.shape))


def _scale_down(root: _Root, quotients: list[Any]) -> None:
    """Divide the squared tensor of a root by its largest magnitudes; multiply the root by them."""
    op, axes = root.op, list(root.axes)
    keywords: Any = {"before_op": op}
    largest = mb.reduce_max(x=mb.abs(x=root.x, **keywords), axes=axes, keep_dims=True, **keywords)
    # At least the root of epsilon, so that their ratio is at most 1, and not below fp16's normals.
    least = max(math.sqrt(root.epsilon), _SMALLEST_NORMAL)
    scale = mb.maximum(x=largest, y=np.float32(least), **keywords)
    scaled = mb.real_div(x=root.x, y=scale, **keywords)
    square = mb.mul(x=scaled, y=scaled, **keywords)
    reduce = mb.reduce_sum if root.is_sum else mb.reduce_mean
    total = reduce(x=square, axes=axes, keep_dims=True, **keywords)
    if root.factor is not None:
        apply = mb.real_div if root.is_divided else mb.mul
        number = number_in(root.factor)
        factor = root.factor if number is None else np.float32(number)
        total = apply(x=total, y=factor, **keywords)
    if root.epsilon:
        # (sqrt(eps) / scale) ** 2 is eps / scale ** 2 without its overflow.
        ratio = mb.real_div(x=np.float32(math.sqrt(root.epsilon)), y=scale, **keywords)
        total = mb.add(x=total, y=mb.mul(x=ratio, y=ratio, **keywords), **keywords)
    for quotient in quotients:  # (x / scale) / (root / scale)
        inverse = mb.rsqrt(x=total, **keywords)
        y = mb.mul(x=scaled, y=inverse, name=quotient.outputs[0].name, before_op=quotient)
        replace(quotient, y)
    result = op.outputs[0]
    if not result.child_ops and result not in op.enclosing_block.outputs:
        return
    combine = mb.real_div if root.is_inverse else mb.mul
    value = mb.rsqrt(x=total, **keywords) if root.is_inverse else mb.sqrt(x=total, **keywords)
    names = {"name": result.name}
    value = combine(x=value, y=scale, **keywords, **(names if root.is_kept else {}))
    replace(op, value if root.is_kept else mb.squeeze(x=value, axes=axes, **names, **keywords))


# Scores

# Ops whose results are values of their operands, or sums and products of them.
_SUMS = frozenset({"add", "sub"})
_PROPAGATES = (
    _SUMS
    | MOVES
    | {
        *("mul", "real_div", "select", "maximum", "minimum", "clip", "cast", "abs", "fill"),
        *("slice_update", "scatter", "scatter_along_axis", "scatter_nd"),
        "upsample_nearest_neighbor",
    }
)


def _origins(scores: Any) -> Iterator[tuple[Any, bool]]:
    """Yield variables whose values may propagate to ``scores``; whether as a term of a sum."""
    seen: set[Any] = set()
    pending = [(scores, False)]
    while pending:
        var, is_added = pending.pop()
        if var in seen:
            continue
        seen.add(var)
        yield var, is_added
        op = var.op
        if op is not None and op.op_type in _PROPAGATES:
            adds = is_added or op.op_type in _SUMS
            pending += [(operand, adds) for operand in operands(op)]


def _scale_before_product(softmax: Any, may_cast: Selector) -> None:
    """Scale a factor of the products that become scores of a softmax, instead of the products."""
    if softmax.op_type != "softmax":
        return
    for var, _ in list(_origins(softmax.x)):
        product, scale = _scaled_product(var) or (None, 1.0)
        if product is None or product.enclosing_block is not softmax.enclosing_block:
            continue
        if not may_cast(product):
            continue
        factors = operands(product)
        factor = min(factors, key=lambda factor: _elements(factor.shape))
        scaled = mb.mul(x=factor, y=np.float32(scale), before_op=product)
        if factors[0] is factors[1]:
            result = mb.matmul(**{**product.inputs, "x": scaled}, before_op=product)
            replace(product, result)
        else:
            replace_operand(product, factor, scaled)
            result = product.outputs[0]
        replace(var.op, result)


def _scaled_product(var: Any) -> tuple[Any, float] | None:
    """Match ``matmul(a, b) * scale`` with a scale below 1; return the product and the scale."""
    op = made_by(var, "mul", "real_div")
    if op is None or var in op.enclosing_block.outputs:
        return None
    result, number = op.x, number_in(op.y)
    if op.op_type == "mul" and number is None:
        result, number = op.y, number_in(op.x)
    product = made_by(result, "matmul", "einsum")
    if product is None or not number or result.child_ops != [op] or result.shape != var.shape:
        return None
    scale = number if op.op_type == "mul" else 1 / number
    factors = operands(product)
    is_matmul = product.op_type == "matmul"
    if not 0 < abs(scale) < 1 or len(factors) != 2 or not (is_matmul or len(set(factors)) == 2):
        return None
    if (
        result in product.enclosing_block.outputs
        or op.enclosing_block is not product.enclosing_block
    ):
        return None
    # A product of dequantized factors may be computed in integers.
    return None if any(made_by(f, "dequantize") for f in factors) else (product, scale)


def _elements(shape: Any) -> float:
    return math.prod(float(s) if isinstance(s, int | np.integer) else math.inf for s in shape)


# Masks


def _bound_factors(product: Any, may_cast: Selector) -> None:
    """Clamp the constant factors of a product that coremltools would take for infinity."""
    if product.op_type != "mul" or not may_cast(product):
        return
    for factor in (product.x, product.y):
        if _exceeds(factor, INFINITE_FROM):
            bounded = mb.const(val=np.clip(factor.val, -_MAX, _MAX), before_op=product)
            replace_operand(product, factor, bounded)


def _bound_scores(softmax: Any, may_cast: Selector) -> None:
    """Clamp the scores of a softmax, if their terms may include a mask.

    If NaN is replaced afterwards, rows that minus infinity hides as a whole have to become NaN.
    """
    if softmax.op_type != "softmax" or not may_cast(softmax) or is_tested_for_nan(softmax):
        return
    scores = softmax.x
    if not any(_may_overflow(*origin) for origin in _origins(scores)):
        return
    bounded = mb.clip(x=scores, alpha=np.float32(-_MAX), beta=np.float32(_MAX), before_op=softmax)
    replace_operand(softmax, scores, bounded)


def _bound_attention(op: Any, may_cast: Selector) -> None:
    """Clamp the mask of an attention; rows that it hides as a whole attend to all keys alike.

    Engines add the mask to the scores in fp32 or in fp16, so that a row of -65504 may keep the
    scores; with a query of 0 it has none. Zeros for rows that are hidden by minus infinity are left
    out if the mask has only finite numbers.
    """
    mask = op.inputs.get("attn_mask") if op.op_type == "scaled_dot_product_attention" else None
    if mask is None or not is_fp32(mask) or not may_cast(op):
        return
    if not any(_may_overflow(origin, True) for origin, _ in _origins(mask)):
        return
    keywords: Any = {"before_op": op}
    if mask.val is not None:
        bounded = mb.const(val=np.clip(mask.val, -_MAX, _MAX), **keywords)
        is_hidden = (bounded.val <= -_MAX).all(axis=-1, keepdims=True)
        hides_rows = bool(is_hidden.any())
    else:
        bounded = mb.clip(x=mask, alpha=np.float32(-_MAX), beta=np.float32(_MAX), **keywords)
        largest = mb.reduce_max(x=bounded, axes=[-1], keep_dims=True, **keywords)
        is_hidden, hides_rows = mb.less_equal(x=largest, y=np.float32(-_MAX), **keywords), True
    query = op.query
    if hides_rows:
        query = mb.select(cond=is_hidden, a=np.float32(0), b=query, **keywords)
    ops = [op]
    selection = only_reader(op, "select")
    rows = None if selection is None else zeroed_rows(selection)
    if selection is not None and rows is not None and rows.mask is mask and _is_finite(mask):
        ops.append(selection)
    arguments = {"query": query, "key": op.key, "value": op.value, "attn_mask": bounded}
    name = ops[-1].outputs[0].name
    result = mb.scaled_dot_product_attention(**arguments, name=name, **keywords)
    for replaced in ops:
        replace(replaced, result)


def _is_finite(mask: Any) -> bool:
    """Whether all elements of a mask are elements of finite constants."""
    pending = [mask]
    while pending:
        var = pending.pop()
        op = made_by(var, "const", "select", *MOVES)
        if op is None or (op.op_type == "const" and not np.isfinite(var.val).all()):
            return False
        pending += operands(op) if op.op_type != "const" else []
    return True


def _may_overflow(var: Any, is_added: bool) -> bool:
    """Whether a source of scores may have finite values beyond fp16.

    A source is a constant, or an input of the program or of a block that is added to the scores.
    """
    if var.op is None:
        return is_added and is_fp32(var)
    return _exceeds(var, _MAX)


def _exceeds(var: Any, limit: float) -> bool:
    """Whether a variable is a constant with finite values of magnitude ``limit`` or more."""
    if made_by(var, "const") is None or not is_fp32(var):
        return False
    extremes = np.abs([np.min(var.val), np.max(var.val)]) if np.size(var.val) else ()
    return any(limit <= extreme < math.inf for extreme in extremes)


# Softplus

_LINEAR_FROM = 10.0  # where softplus(x) - x is 5e-5, and fp16 has steps of 0.008


def _bound_softplus(op: Any, may_cast: Selector) -> None:
    """Compute ``max(x, softplus(min(x, 10)))`` in place of softplus."""
    if op.op_type != "softplus" or not may_cast(op):
        return
    keywords: Any = {"before_op": op}
    bounded = mb.minimum(x=op.x, y=np.float32(_LINEAR_FROM), **keywords)
    y = mb.maximum(
        x=op.x, y=mb.softplus(x=bounded, **keywords), name=op.outputs[0].name, **keywords
    )
    replace(op, y)


_REWRITES = (
    centre_squares,
    _scale_before_product,
    _bound_factors,
    _bound_scores,
    _bound_attention,
    _rewrite_root,
    _bound_softplus,
    *MEANS,
)

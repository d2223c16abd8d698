"""Inverse, determinant and solution of linear equations for matrices of up to four rows; distances.

They are computed by cofactors. Rows, and then columns, are divided by their largest magnitudes
first: the products of larger numbers may be beyond fp16, which has none from 65520 on.

PyTorch raises an error where a matrix cannot be inverted; here its inverse has infinities or NaNs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import Node

from coreml_delegate.ops.call import MAX_RANK, OpCall, ReasonCode
from coreml_delegate.ops.constraints import holds, only_result_used
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    insert,
    only_result,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import elements
from coreml_delegate.ops.merging import whole_sizes
from coreml_delegate.ops.mil_ops import integers
from coreml_delegate.ops.record import OpRecord

_MOST_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Matrices ``rows * x * columns``, with the inverse of ``x``.

    Attributes:
        adjugate: The inverse of ``x`` times its determinant, [*, n, n].
        determinant: Of ``x``, [*, 1, 1].
        rows: Factors of the rows, [*, n, 1].
        columns: Factors of the columns, [*, 1, n].
    """

    adjugate: Node
    determinant: Node
    rows: Node
    columns: Node

    @classmethod
    def of(cls, node: Node, matrix: Node) -> _Scaled:
        """Scale matrices [*, n, n]; the calls are inserted before ``node``."""
        rows = _magnitudes(node, matrix, -1)
        x = insert(node, ATEN.div.Tensor, matrix, rows)
        columns = _magnitudes(node, x, -2)
        x = insert(node, ATEN.div.Tensor, x, columns)
        sizes, count = whole_sizes(shape_of(x)), shape_of(x)[-1]
        flat = insert(node, ATEN.view_copy.default, x, [*sizes[:-2], count * count])
        adjugate = _adjugate(node, flat, count)
        adjugate = insert(node, ATEN.view_copy.default, adjugate, sizes)
        row = insert(node, ATEN.slice_copy.Tensor, x, -2, 0, 1, 1)
        column = insert(node, ATEN.slice_copy.Tensor, adjugate, -1, 0, 1, 1)
        products = insert(node, ATEN.mul.Tensor, row, _transposed(node, column))
        determinant = insert(node, ATEN.sum.dim_IntList, products, [-1], True)
        return cls(adjugate, determinant, rows, columns)


def _magnitudes(node: Node, x: Node, dim: int) -> Node:
    """Return the largest magnitudes along a dimension, 1 where all is zero."""
    largest = insert(node, ATEN.amax.default, insert(node, ATEN.abs.default, x), [dim], True)
    nothing = insert(node, ATEN.eq.Scalar, largest, 0.0)
    return insert(node, ATEN.add.Tensor, largest, cast(node, nothing, value_of(x).dtype))


def _transposed(node: Node, x: Node) -> Node:
    rank = value_of(x).dim()
    return insert(node, ATEN.permute_copy.default, x, [*range(rank - 2), rank - 1, rank - 2])


def _chosen(node: Node, flat: Node, places: Sequence[int]) -> Node:
    index = insert(node, integers(), list(places))
    return insert(node, ATEN.index_select.default, flat, -1, index)


_Term = tuple[Node, Sequence[int], Node, Sequence[int]]


def _products(node: Node, terms: Sequence[_Term]) -> Node:
    """Return the sum of products of chosen elements."""
    products = (
        insert(node, ATEN.mul.Tensor, _chosen(node, first, left), _chosen(node, second, right))
        for first, left, second, right in terms
    )
    return functools.reduce(lambda a, b: insert(node, ATEN.add.Tensor, a, b), products)


def _adjugate(node: Node, x: Node, count: int) -> Node:
    """Return the cofactors of matrices [*, n * n], transposed: [*, n * n].

    Elements with a changed sign are ``count * count`` behind: that of a cofactor is in its factors.
    """
    if count == 1:
        return insert(node, ATEN.full_like.default, x, 1.0)
    minus = insert(node, ATEN.mul.Scalar, x, -1.0)
    signed = insert(node, ATEN.cat.default, [x, minus], -1)
    if count == 2:
        return _chosen(node, signed, [3, 4 + 1, 4 + 2, 0])
    places = [(row, column) for column in range(count) for row in range(count)]
    if count == 3:
        # Of the rows and columns that follow in turn, the sign is plus.
        following = [[(row + k) % 3 * 3 for row, _ in places] for k in (1, 2)]
        beside = [[(column + k) % 3 for _, column in places] for k in (1, 2)]
        (low, high), (left, right) = following, beside
        a, d, b, c = (
            [r + k for r, k in zip(rows, columns, strict=True)]
            for rows, columns in ((low, left), (high, right), (low, right), (high, left))
        )
        return _products(node, [(x, a, x, d), (signed, [9 + n for n in b], x, c)])
    minors = _minors_of_pairs(node, x, signed)
    terms: list[_Term] = []
    for k in range(3):
        left_places: list[int] = []
        right_places: list[int] = []
        for row, column in places:
            columns = [c for c in range(4) if c != column]
            alone = columns.pop(k)
            is_negative = (row + column + k) % 2
            left_places.append((row ^ 1) * 4 + alone + 16 * is_negative)
            right_places.append((row < 2) * 6 + _PAIRS.index((columns[0], columns[1])))
        terms.append((signed, left_places, minors, right_places))
    return _products(node, terms)


def _minors_of_pairs(node: Node, x: Node, signed: Node) -> Node:
    """Return the minors of the first two rows of four, and of the last two: [*, 12]."""
    upper = [(first, first + 1) for first in (0, 2) for _ in _PAIRS]
    columns = _PAIRS * 2
    a = [p * 4 + c for (p, _), (c, _) in zip(upper, columns, strict=True)]
    b = [p * 4 + d for (p, _), (_, d) in zip(upper, columns, strict=True)]
    c = [q * 4 + c for (_, q), (c, _) in zip(upper, columns, strict=True)]
    d = [q * 4 + d for (_, q), (_, d) in zip(upper, columns, strict=True)]
    return _products(node, [(x, a, x, d), (signed, [16 + n for n in b], x, c)])


def _inverse(node: Node) -> None:
    result, matrix = only_result(node), arguments_of(node)["A"]
    become(result, *_solution(result, matrix, None, left=True))


def _solve(node: Node) -> None:
    arguments, result = arguments_of(node), only_result(node)
    matrix, right_hand = arguments["A"], arguments["B"]
    is_vector = _solves_for_vector(value_of(matrix).shape, value_of(right_hand).shape)
    if is_vector:
        right_hand = insert(result, ATEN.unsqueeze_copy.default, right_hand, -1)
    call = _solution(result, matrix, right_hand, left=arguments["left"] or is_vector)
    if is_vector:
        call = ATEN.squeeze_copy.dims, insert(result, *call), [-1]
    become(result, *call)


def _solution(node: Node, matrix: Node, right_hand: Node | None, left: bool) -> tuple[Any, ...]:
    """The call, with its arguments, that divides matrices, or 1, by a matrix."""
    scaled = _Scaled.of(node, matrix)
    rows, columns = (_transposed(node, factors) for factors in (scaled.rows, scaled.columns))
    last = columns if left else rows
    if right_hand is None:
        product = insert(node, ATEN.div.Tensor, scaled.adjugate, rows)
    elif left:
        part = insert(node, ATEN.div.Tensor, right_hand, scaled.rows)
        product = insert(node, ATEN.matmul.default, scaled.adjugate, part)
    else:
        part = insert(node, ATEN.div.Tensor, right_hand, scaled.columns)
        product = insert(node, ATEN.matmul.default, part, scaled.adjugate)
    quotient = insert(node, ATEN.div.Tensor, product, scaled.determinant)
    return ATEN.div.Tensor, quotient, last


def _determinant(node: Node) -> None:
    result = only_result(node)
    scaled = _Scaled.of(result, arguments_of(node)["A"])
    value = scaled.determinant
    # One factor after the other: zero stays zero, though a product of the factors is infinite.
    for factors, dim in ((scaled.rows, -2), (scaled.columns, -1)):
        for n in range(shape_of(factors)[dim]):
            factor = insert(result, ATEN.slice_copy.Tensor, factors, dim, n, n + 1, 1)
            value = insert(result, ATEN.mul.Tensor, value, factor)
    become(result, ATEN.squeeze_copy.dims, value, [-2, -1])


def _distances(node: Node) -> None:
    """Norms of all differences of rows."""
    arguments = arguments_of(node)
    left = insert(node, ATEN.unsqueeze_copy.default, arguments["x1"], -2)
    right = insert(node, ATEN.unsqueeze_copy.default, arguments["x2"], -3)
    difference = insert(node, ATEN.sub.Tensor, left, right)
    become(node, ATEN.linalg_vector_norm.default, difference, float(arguments["p"]), [-1], False)


def _distances_of_pairs(node: Node) -> None:
    """Norms of the differences of all rows but the last and those behind each."""
    arguments = arguments_of(node)
    x = arguments["self"]
    pairs = itertools.combinations(range(shape_of(x)[0]), 2)
    left, right = (
        insert(node, ATEN.index_select.default, x, 0, insert(node, integers(), places))
        for places in map(list, zip(*pairs, strict=True))
    )
    difference = insert(node, ATEN.sub.Tensor, left, right)
    become(node, ATEN.linalg_vector_norm.default, difference, float(arguments["p"]), [-1], False)


def _few_pairs(call: OpCall) -> bool:
    count = next(call.tensors("self"))[1].shape[0]
    return isinstance(count, int) and count <= _MOST_POINTS


def _solves_for_vector(matrix: Sequence[Any], right_hand: Sequence[Any]) -> bool:
    """Whether the right-hand side is a vector for each matrix, by PyTorch's rule."""
    # Symbols are compared as text: as numbers, they would become equal.
    return len(right_hand) == 1 or [*map(str, right_hand)] == [*map(str, matrix[:-1])]


def _few_rows(call: OpCall) -> bool:
    rows = next(call.tensors("A"))[1].shape[-1]
    return isinstance(rows, int) and rows <= _MOST_ROWS


def _flops_of_matrices(call: OpCall) -> int:
    """Three operations for each product in a cofactor."""
    tensor = next(call.tensors("A"))[1]
    return elements(tensor) * 3 * max(int(tensor.shape[-1]) - 1, 1)


def _flops_of_distances(call: OpCall) -> int:
    """A difference, a power and a sum for each element of the differences."""
    return 3 * elements(call.outputs()[0]) * int(next(call.tensors("x1"))[1].shape[-1])


def _flops_of_pairs(call: OpCall) -> int:
    return 3 * elements(call.outputs()[0]) * int(next(call.tensors("self"))[1].shape[-1])


_MOST_POINTS = 512  # whose indices take a megabyte
_PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
_CONSTRAINTS = (
    only_result_used(0),
    holds(_few_rows, ReasonCode.SHAPE, f"Core ML takes matrices of at most {_MOST_ROWS} rows"),
)

_op = partial(OpRecord, constraints=_CONSTRAINTS, flops=_flops_of_matrices)

RECORDS = (
    _op("aten._linalg_det.default", rewrite=_determinant),
    _op("aten.linalg_inv_ex.default", rewrite=_inverse),
    _op("aten._linalg_solve_ex.default", rewrite=_solve),
    OpRecord(
        "aten._cdist_forward.default",
        max_rank=MAX_RANK - 1,
        rewrite=_distances,
        flops=_flops_of_distances,
    ),
    OpRecord(
        "aten._pdist_forward.default",
        constraints=(
            holds(
                _few_pairs, ReasonCode.SHAPE, f"Core ML takes pairs of at most {_MOST_POINTS} rows"
            ),
        ),
        rewrite=_distances_of_pairs,
        flops=_flops_of_pairs,
    ),
)

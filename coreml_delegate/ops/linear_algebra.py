"""Inverse, determinant and linear solve of matrices of up to four rows, by cofactors; distances.

Rows, and then columns, are divided by their largest magnitudes first, so that no product overflows
fp16 (65520 and more is infinite).

PyTorch raises an error for a singular matrix; here its inverse has infinities or NaNs.
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
from coreml_delegate.ops.constraints import holds, only_first_result_used
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
from coreml_delegate.ops.merging import view_sizes
from coreml_delegate.ops.mil_ops import integers
from coreml_delegate.ops.record import OpRecord

_MAX_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Matrices factored as ``rows * x * columns``, with the inverse of ``x`` by cofactors.

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
        sizes, count = view_sizes(shape_of(x)), shape_of(x)[-1]
        flat = insert(node, ATEN.view_copy.default, x, [*sizes[:-2], count * count])
        adjugate = _adjugate(node, flat, count)
        adjugate = insert(node, ATEN.view_copy.default, adjugate, sizes)
        row = insert(node, ATEN.slice_copy.Tensor, x, -2, 0, 1, 1)
        column = insert(node, ATEN.slice_copy.Tensor, adjugate, -1, 0, 1, 1)
        products = insert(node, ATEN.mul.Tensor, row, _transpose(node, column))
        determinant = insert(node, ATEN.sum.dim_IntList, products, [-1], True)
        return cls(adjugate, determinant, rows, columns)


def _magnitudes(node: Node, x: Node, dim: int) -> Node:
    """Return the largest magnitudes along a dimension, 1 where all elements are zero."""
    maximum = insert(node, ATEN.amax.default, insert(node, ATEN.abs.default, x), [dim], True)
    is_zero = insert(node, ATEN.eq.Scalar, maximum, 0.0)
    return insert(node, ATEN.add.Tensor, maximum, cast(node, is_zero, value_of(x).dtype))


def _transpose(node: Node, x: Node) -> Node:
    rank = value_of(x).dim()
    return insert(node, ATEN.permute_copy.default, x, [*range(rank - 2), rank - 1, rank - 2])


def _select(node: Node, flat: Node, indices: Sequence[int]) -> Node:
    index = insert(node, integers(), list(indices))
    return insert(node, ATEN.index_select.default, flat, -1, index)


_Term = tuple[Node, Sequence[int], Node, Sequence[int]]


def _sum_of_products(node: Node, terms: Sequence[_Term]) -> Node:
    """Return the sum of ``a[indices_a] * b[indices_b]`` over all terms."""
    products = (
        insert(node, ATEN.mul.Tensor, _select(node, a, indices_a), _select(node, b, indices_b))
        for a, indices_a, b, indices_b in terms
    )
    return functools.reduce(lambda a, b: insert(node, ATEN.add.Tensor, a, b), products)


def _adjugate(node: Node, x: Node, count: int) -> Node:
    """Return the cofactors of matrices [*, n * n], transposed: [*, n * n].

    ``signed`` has the elements and their negatives, so that an index selects a cofactor's sign.
    """
    if count == 1:
        return insert(node, ATEN.full_like.default, x, 1.0)
    minus = insert(node, ATEN.mul.Scalar, x, -1.0)
    signed = insert(node, ATEN.cat.default, [x, minus], -1)
    if count == 2:
        return _select(node, signed, [3, 4 + 1, 4 + 2, 0])
    elements = [(row, column) for column in range(count) for row in range(count)]
    if count == 3:
        # With rows and columns in cyclic order, the sign is plus.
        rows_after = [[(row + k) % 3 * 3 for row, _ in elements] for k in (1, 2)]
        columns_after = [[(column + k) % 3 for _, column in elements] for k in (1, 2)]
        (low, high), (near, far) = rows_after, columns_after
        a, d, b, c = (
            [r + k for r, k in zip(rows, columns, strict=True)]
            for rows, columns in ((low, near), (high, far), (low, far), (high, near))
        )
        return _sum_of_products(node, [(x, a, x, d), (signed, [9 + n for n in b], x, c)])
    minors = _minors_of_pairs(node, x, signed)
    terms: list[_Term] = []
    for k in range(3):
        left_places: list[int] = []
        right_places: list[int] = []
        for row, column in elements:
            columns = [c for c in range(4) if c != column]
            single = columns.pop(k)
            is_negative = (row + column + k) % 2
            left_places.append((row ^ 1) * 4 + single + 16 * is_negative)
            right_places.append((row < 2) * 6 + _PAIRS.index((columns[0], columns[1])))
        terms.append((signed, left_places, minors, right_places))
    return _sum_of_products(node, terms)


def _minors_of_pairs(node: Node, x: Node, signed: Node) -> Node:
    """Return the minors of the first two rows of four, and of the last two: [*, 12]."""
    upper = [(first, first + 1) for first in (0, 2) for _ in _PAIRS]
    columns = _PAIRS * 2
    a = [p * 4 + c for (p, _), (c, _) in zip(upper, columns, strict=True)]
    b = [p * 4 + d for (p, _), (_, d) in zip(upper, columns, strict=True)]
    c = [q * 4 + c for (_, q), (c, _) in zip(upper, columns, strict=True)]
    d = [q * 4 + d for (_, q), (_, d) in zip(upper, columns, strict=True)]
    return _sum_of_products(node, [(x, a, x, d), (signed, [16 + n for n in b], x, c)])


def _inverse(node: Node) -> None:
    result, matrix = only_result(node), arguments_of(node)["A"]
    become(result, *_division_call(result, matrix, None, from_left=True))


def _solve(node: Node) -> None:
    arguments, result = arguments_of(node), only_result(node)
    matrix, right_hand = arguments["A"], arguments["B"]
    is_vector = _solves_for_vector(value_of(matrix).shape, value_of(right_hand).shape)
    if is_vector:
        right_hand = insert(result, ATEN.unsqueeze_copy.default, right_hand, -1)
    call = _division_call(result, matrix, right_hand, from_left=arguments["left"] or is_vector)
    if is_vector:
        call = ATEN.squeeze_copy.dims, insert(result, *call), [-1]
    become(result, *call)


def _division_call(
    node: Node, matrix: Node, right_hand: Node | None, from_left: bool
) -> tuple[Any, ...]:
    """Return target and arguments of the call that solves for, or inverts, ``matrix``."""
    scaled = _Scaled.of(node, matrix)
    rows, columns = (_transpose(node, factors) for factors in (scaled.rows, scaled.columns))
    factors_of_result = columns if from_left else rows
    if right_hand is None:
        product = insert(node, ATEN.div.Tensor, scaled.adjugate, rows)
    elif from_left:
        scaled_side = insert(node, ATEN.div.Tensor, right_hand, scaled.rows)
        product = insert(node, ATEN.matmul.default, scaled.adjugate, scaled_side)
    else:
        scaled_side = insert(node, ATEN.div.Tensor, right_hand, scaled.columns)
        product = insert(node, ATEN.matmul.default, scaled_side, scaled.adjugate)
    quotient = insert(node, ATEN.div.Tensor, product, scaled.determinant)
    return ATEN.div.Tensor, quotient, factors_of_result


def _determinant(node: Node) -> None:
    result = only_result(node)
    scaled = _Scaled.of(result, arguments_of(node)["A"])
    value = scaled.determinant
    # Multiply by one factor at a time: zero stays zero even if the product of factors is infinite.
    for factors, dim in ((scaled.rows, -2), (scaled.columns, -1)):
        for n in range(shape_of(factors)[dim]):
            factor = insert(result, ATEN.slice_copy.Tensor, factors, dim, n, n + 1, 1)
            value = insert(result, ATEN.mul.Tensor, value, factor)
    become(result, ATEN.squeeze_copy.dims, value, [-2, -1])


def _pairwise_norms(node: Node) -> None:
    """``norm(x1[i] - x2[j])`` of all pairs of rows."""
    arguments = arguments_of(node)
    rows_1 = insert(node, ATEN.unsqueeze_copy.default, arguments["x1"], -2)
    rows_2 = insert(node, ATEN.unsqueeze_copy.default, arguments["x2"], -3)
    difference = insert(node, ATEN.sub.Tensor, rows_1, rows_2)
    become(node, ATEN.linalg_vector_norm.default, difference, float(arguments["p"]), [-1], False)


def _norms_of_row_pairs(node: Node) -> None:
    """``norm(x[i] - x[j])`` of all rows i < j."""
    arguments = arguments_of(node)
    x = arguments["self"]
    pairs = itertools.combinations(range(shape_of(x)[0]), 2)
    rows_1, rows_2 = (
        insert(node, ATEN.index_select.default, x, 0, insert(node, integers(), indices))
        for indices in map(list, zip(*pairs, strict=True))
    )
    difference = insert(node, ATEN.sub.Tensor, rows_1, rows_2)
    become(node, ATEN.linalg_vector_norm.default, difference, float(arguments["p"]), [-1], False)


def _has_few_rows(call: OpCall) -> bool:
    count = next(call.tensors("self"))[1].shape[0]
    return isinstance(count, int) and count <= _MAX_POINTS


def _solves_for_vector(matrix: Sequence[Any], right_hand: Sequence[Any]) -> bool:
    """Whether the right-hand side is a vector for each matrix, by PyTorch's rule."""
    # Symbols are compared as text: as numbers, they would become equal.
    return len(right_hand) == 1 or [*map(str, right_hand)] == [*map(str, matrix[:-1])]


def _has_small_matrices(call: OpCall) -> bool:
    rows = next(call.tensors("A"))[1].shape[-1]
    return isinstance(rows, int) and rows <= _MAX_ROWS


def _flops_of_matrices(call: OpCall) -> int:
    """Three operations per product in a cofactor."""
    tensor = next(call.tensors("A"))[1]
    return elements(tensor) * 3 * max(int(tensor.shape[-1]) - 1, 1)


def _flops_of_pairwise_norms(call: OpCall) -> int:
    """A difference, a power and a sum per element of the differences."""
    return 3 * elements(call.outputs()[0]) * int(next(call.tensors("x1"))[1].shape[-1])


def _flops_of_row_pairs(call: OpCall) -> int:
    return 3 * elements(call.outputs()[0]) * int(next(call.tensors("self"))[1].shape[-1])


_MAX_POINTS = 512  # the indices of their pairs take a megabyte
_PAIRS = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
_CONSTRAINTS = (
    only_first_result_used,
    holds(
        _has_small_matrices, ReasonCode.SHAPE, f"Core ML takes matrices of at most {_MAX_ROWS} rows"
    ),
)

_op = partial(OpRecord, constraints=_CONSTRAINTS, flops=_flops_of_matrices)

RECORDS = (
    _op("aten._linalg_det.default", rewrite=_determinant),
    _op("aten.linalg_inv_ex.default", rewrite=_inverse),
    _op("aten._linalg_solve_ex.default", rewrite=_solve),
    OpRecord(
        "aten._cdist_forward.default",
        max_rank=MAX_RANK - 1,
        rewrite=_pairwise_norms,
        flops=_flops_of_pairwise_norms,
    ),
    OpRecord(
        "aten._pdist_forward.default",
        constraints=(
            holds(
                _has_few_rows,
                ReasonCode.SHAPE,
                f"Core ML takes pairs of at most {_MAX_POINTS} rows",
            ),
        ),
        rewrite=_norms_of_row_pairs,
        flops=_flops_of_row_pairs,
    ),
)

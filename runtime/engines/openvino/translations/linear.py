"""Matrix products and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    convert_to,
    dim_of,
    dims,
    element_type,
    f32,
    ints,
    is_float,
    rank,
    scalar,
    with_equal_sizes,
)
from coreml_delegate.runtime.engines.openvino.plugin import integers
from coreml_delegate.runtime.engines.openvino.plugin.decompression import (
    expand_unsupported_weight,
    expand_weight,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, Tensors


@translation("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Result:
    """``x @ weight.T + bias``: ``x`` [*, D_in], ``weight`` [D_out, D_in], ``bias`` [D_out]."""
    product = matmul(x, weight, transpose_y=True)
    return product if bias is None else ops.add(product, convert_to(bias, element_type(product)))


@translation("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Result:
    """Batched matrix product with numpy's broadcasting, in the element type of ``x``."""
    y = convert_to(expand_unsupported_weight(y, transposed=transpose_y), element_type(x))
    x_axis = -2 if transpose_x and rank(x) > 1 else -1
    x, y = with_equal_sizes(x, x_axis, y, -1 if transpose_y or rank(y) == 1 else -2)
    if is_float(x) and rank(x) == 1 and rank(y) > 1:
        # Between quantized values, OpenVINO 2026.4 returns a matrix for vector times matrix.
        product = ops.matmul(ops.unsqueeze(x, ints(0)), y, False, transpose_y)
        return ops.squeeze(product, ints(-2))
    if is_float(x):
        return ops.matmul(x, y, transpose_x, transpose_y)
    return _integer_product(x, y, transpose_x, transpose_y)


def _integer_product(x: Tensor, y: Tensor, transpose_x: bool, transpose_y: bool) -> Result:
    """Return an exact matrix product of integers, which OpenVINO 2026.4 multiplies as floats.

    Integer products occur in index arithmetic, so the matrices are small.
    """
    rows = ops.unsqueeze(x, ints(0)) if rank(x) == 1 else _swap_last_axes(x) if transpose_x else x
    columns = (
        ops.unsqueeze(y, ints(0)) if rank(y) == 1 else y if transpose_y else _swap_last_axes(y)
    )
    products = ops.multiply(ops.unsqueeze(rows, ints(-2)), ops.unsqueeze(columns, ints(-3)))
    result = integers.exact_sum(products, (-1,), False)
    dropped = [axis for axis, side in ((-2, x), (-1, y)) if rank(side) == 1]
    return ops.squeeze(result, ints(dropped)) if dropped else result


def _swap_last_axes(x: Tensor) -> Any:
    axes = list(range(rank(x)))
    return ops.transpose(x, ints([*axes[:-2], axes[-1], axes[-2]]))


@translation("einsum")
def einsum(values: Tensors, equation: str) -> Result:
    """Einstein summation.

    MIL defines ``nchw,nwhu->nchu``, with or without ``n``: axis -3 of the second operand is
    contracted with axis -1 of the first; the others are batch axes and broadcast.
    """
    values = tuple(map(expand_weight, values))
    if len(values) != 2 or _canonical_equation(equation) not in ("abcd,adce->abce", "abc,cbd->abd"):
        return ops.einsum([f32(value) for value in values], equation)
    x, y = values
    axes = rank(x)
    swap = list(range(axes))
    swap[-3], swap[-2] = swap[-2], swap[-3]
    product = ops.matmul(ops.transpose(x, ints(swap)), ops.transpose(y, ints(swap)), False, False)
    return ops.transpose(product, ints(swap))


def _canonical_equation(equation: str) -> str:
    """Return the equation with its letters renamed in order of appearance."""
    names: dict[str, str] = {}
    return "".join(
        names.setdefault(char, chr(ord("a") + len(names))) if char.isalpha() else char
        for char in equation.replace(" ", "")
    )


@translation("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Result:
    """``softmax(query @ key.T / sqrt(E) + attn_mask) @ value`` along the last two axes.

    ``query`` [*, L, E], ``key`` [*, S, E], ``value`` [*, S, EV]. A boolean mask is true for keys
    to attend to.

    Built of single ops, because for OpenVINO's own op the plugin transposes every key in memory:
    measured on 8 heads of 64, one query on 256 keys takes 0.75 of the time of that op, 128 queries
    take 0.9, and the results are bitwise equal.
    """
    query, key = with_equal_sizes(query, -1, key, -1)
    key, value = with_equal_sizes(key, -2, value, -2)
    scores = ops.matmul(_scale_query(query), key, False, True)
    if attn_mask is not None:
        scores = ops.add(scores, _mask_scores(attn_mask, scores))
    return ops.matmul(ops.softmax(scores, -1), value, False, False)


def _scale_query(query: Tensor) -> Result:
    """Return ``query / sqrt(E)`` for ``query`` [*, L, E]."""
    width = dims(query)[-1]
    if width is not None:
        return ops.multiply(query, scalar(width**-0.5, query))
    return ops.divide(query, ops.sqrt(convert_to(dim_of(query, -1), element_type(query))))


def _mask_scores(mask: Tensor, scores: Tensor) -> Result:
    """Return a mask to add to the scores: minus infinity where a boolean mask is false."""
    if element_type(mask) != ov.Type.boolean:
        return convert_to(mask, element_type(scores))
    return ops.select(mask, scalar(0.0, scores), scalar(-np.inf, scores))

"""Matrix products and attention."""

from __future__ import annotations

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    converted,
    element_type,
    ints,
    is_float,
    rank,
)
from coreml_delegate.runtime.engines.openvino.registry import (
    Result,
    Tensor,
    Tensors,
    refuse,
    translation,
)


@translation("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Result:
    """``x @ weight.T + bias``: ``x`` [*, D_in], ``weight`` [D_out, D_in], ``bias`` [D_out]."""
    product = matmul(x, weight, transpose_y=True)
    return product if bias is None else ops.add(product, converted(bias, element_type(product)))


@translation("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Result:
    """Batched matrix product with numpy's broadcasting, of the element type of ``x``."""
    if not is_float(x):
        raise refuse("matrix product of integers", element_type(x), "fp16 or fp32")
    return ops.matmul(x, converted(y, element_type(x)), transpose_x, transpose_y)


@translation("einsum")
def einsum(values: Tensors, equation: str) -> Result:
    """The one contraction MIL defines: ``nchw,nwhu->nchu``, or the same without ``n``.

    Axis -3 of the second operand is contracted with axis -1 of the first; the others are batch axes
    and broadcast.
    """
    x, y = values
    axes = rank(x)
    if _canonical(equation) not in ("abcd,adce->abce", "abc,cbd->abd"):
        raise refuse("einsum equation", equation, "nchw,nwhu->nchu or chw,whr->chr")
    swap = list(range(axes))
    swap[-3], swap[-2] = swap[-2], swap[-3]
    product = ops.matmul(ops.transpose(x, ints(swap)), ops.transpose(y, ints(swap)), False, False)
    return ops.transpose(product, ints(swap))


def _canonical(equation: str) -> str:
    """The equation with its letters renamed in order of appearance."""
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

    ``query`` [*, L, E], ``key`` [*, S, E], ``value`` [*, S, EV]. A boolean mask says what takes
    part.
    """
    if attn_mask is not None and rank(attn_mask) < rank(query):
        missing = list(range(rank(query) - rank(attn_mask)))
        attn_mask = ops.unsqueeze(attn_mask, ints(missing))
    return ops.scaled_dot_product_attention(query, key, value, attn_mask)

"""Matrix products and attention.

Source: coremltools' MIL op reference, ``linear`` and ``transformers``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel
from coreml_delegate.targets import Opset


@kernel("linear", widen=True)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; ``x``: [*, D_in], ``weight``: [D_out, D_in], ``bias``: [D_out].

    From iOS17 on, one of ``x`` and ``weight`` may have integers and the other floats.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@kernel("matmul", widen=True)
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Batched matrix product with numpy's broadcasting; transposing a vector has no effect."""
    first = x.mT if transpose_x and x.dim() > 1 else x
    second = y.mT if transpose_y and y.dim() > 1 else y
    dtype = torch.promote_types(x.dtype, y.dtype)
    return torch.matmul(first.to(dtype), second.to(dtype))


@kernel("einsum", widen=True)
def einsum(values: tuple[Tensor, ...], equation: str) -> Tensor:
    """Einstein summation; dimensions of length 1 broadcast."""
    return torch.einsum(equation, *values)


@kernel("scaled_dot_product_attention", since=Opset.iOS18, widen=True)
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """Attention; ``query``: [B, *, L, E], ``key``: [B, *, S, E], ``value``: [B, *, S, EV].

    ``softmax(query @ key.T / sqrt(E) + attn_mask) @ value``. A boolean mask is true for keys to
    attend to; a row without such keys is NaN, by the formula.
    """
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    return torch.softmax(scores, dim=-1) @ value

"""Rewrites of convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from coreml_delegate.preprocess.graph_edits import (
    ATEN,
    Rewrite,
    arguments_of,
    become,
    insert,
    set_arguments,
    value_of,
)


def _transposed(node: Node) -> None:
    """Crop the output here, where coremltools cannot: it takes output padding off the padding.

    Zeros after the input make the output longer by a stride each, with the bias where nothing else
    contributes; of that, PyTorch's output is a slice.
    """
    arguments = arguments_of(node)
    x: Node = arguments["input"]
    if not arguments.get("transposed", True):
        return
    dims = value_of(x).dim() - 2
    stride, padding, extra = (
        _spread(arguments[n], dims) for n in ("stride", "padding", "output_padding")
    )
    if all(e <= p for e, p in zip(extra, padding, strict=True)):
        return
    rows = list(zip(stride, padding, extra, strict=True))
    zeros = [max(0, -(-(e - p) // s)) for s, p, e in rows]
    sides = [side for count in reversed(zeros) for side in (0, count)]
    padded = insert(node, ATEN.constant_pad_nd.default, x, sides, 0.0)
    call = {"input": padded, "padding": [0] * dims, "output_padding": [0] * dims}
    set_arguments(node, **call)
    whole = insert(node, node.target, *node.args, **node.kwargs)
    for d, ((s, p, e), count) in enumerate(zip(rows, zeros, strict=True), start=2):
        cut = count * s + p - e
        end = -cut if cut else _END
        if p or cut:
            whole = insert(node, ATEN.slice_copy.Tensor, whole, d, p, end, 1)
    become(node, ATEN.clone.default, whole)


def _spread(values: Any, dims: int) -> list[int]:
    listed = [values] if isinstance(values, int) else list(values)
    return listed * dims if len(listed) == 1 else listed


_END = (1 << 63) - 1

REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.conv_transpose1d.default": _transposed,
        "aten.conv_transpose2d.input": _transposed,
        "aten.conv_transpose3d.input": _transposed,
        "aten.convolution.default": _transposed,
    }
)

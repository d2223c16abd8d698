"""Window arithmetic that convolutions and pooling share.

Source: ``aggregated_pad`` and ``spatial_dimensions_out_shape`` of coremltools.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

Padding = tuple[tuple[int, int], ...]
"""Elements before and after, per spatial dimension."""


def window_extent(kernel_sizes: Sequence[int], dilations: Sequence[int]) -> tuple[int, ...]:
    """Input elements that a dilated window spans, per spatial dimension."""
    return tuple((k - 1) * d + 1 for k, d in zip(kernel_sizes, dilations, strict=True))


def resolve_padding(
    pad_type: str,
    pad: Sequence[int] | None,
    sizes: Sequence[int],
    extents: Sequence[int],
    strides: Sequence[int],
) -> Padding:
    """The padding a ``pad_type`` stands for.

    Args:
        pad_type: ``valid``, ``custom``, ``same`` (the odd element goes after) or ``same_lower`` (it
            goes before).
        pad: [2 * spatial]: before and after, for ``custom``.
        sizes: Input size per spatial dimension.
        extents: Window extent per spatial dimension.
        strides: Stride per spatial dimension.

    Raises:
        ValueError: Unknown ``pad_type``, or ``custom`` without a pair per dimension.
    """
    mode = pad_type.lower()
    if mode == "valid":
        return ((0, 0),) * len(sizes)
    if mode == "custom":
        if pad is None or len(pad) != 2 * len(sizes):
            raise ValueError(f"pad_type 'custom' needs {2 * len(sizes)} values of pad, got {pad}")
        return tuple(zip(pad[::2], pad[1::2], strict=True))
    if mode not in ("same", "same_lower"):
        raise ValueError(f"pad_type is {pad_type!r}, not valid, custom, same or same_lower")
    totals = [
        max(0, (-(-size // stride) - 1) * stride + extent - size)
        for size, extent, stride in zip(sizes, extents, strides, strict=True)
    ]
    halves = [(total // 2, total - total // 2) for total in totals]
    return tuple(halves if mode == "same" else [(after, before) for before, after in halves])


def pad_spatial(x: Tensor, padding: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """``x`` with constant elements around its last dimensions; negative amounts crop."""
    if not any(before or after for before, after in padding):
        return x
    return F.pad(x, [amount for pair in reversed(padding) for amount in pair], value=value)

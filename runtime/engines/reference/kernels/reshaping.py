"""Ops that rearrange all elements of a tensor.

Source: coremltools' MIL op reference, ``tensor_transformation`` and ``tensor_operation``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import EachInt, IntPairs, Ints, kernel
from coreml_delegate.runtime.engines.reference.kernels.convolution import pad_spatial
from coreml_delegate.targets import Opset


@kernel("shape")
def shape(x: Tensor) -> Tensor:
    """The sizes of ``x``."""
    return torch.tensor(x.shape, dtype=torch.int32)


@kernel("reshape")
def reshape_ios15(x: Tensor, shape: Ints) -> Tensor:
    """``x`` with shape ``shape``; 0 keeps the size at the same index, -1 is inferred."""
    if 0 in shape and len(shape) != x.dim():
        raise ValueError(f"reshape to {shape}: a 0 needs as many sizes as x has ({x.dim()})")
    return x.reshape([size or x.shape[axis] for axis, size in enumerate(shape)])


@kernel("reshape", since=Opset.iOS17)
def reshape_ios17(x: Tensor, shape: Ints) -> Tensor:
    """``x`` with shape ``shape``; 0 keeps the size at this index from the end (or is 1)."""
    surplus = len(shape) - x.dim()
    old_sizes = [x.shape[axis - surplus] if axis >= surplus else 1 for axis in range(len(shape))]
    return x.reshape([size or old_sizes[axis] for axis, size in enumerate(shape)])


@kernel("reshape_like", since=Opset.iOS16)
def reshape_like(
    x: Tensor, ref_tensors: tuple[Tensor, ...], begins: EachInt, ends: EachInt, end_masks: EachInt
) -> Tensor:
    """``x`` with the concatenated slices of the shapes of ``ref_tensors`` as shape."""
    sizes: list[int] = []
    for ref, begin, end, masked in zip(ref_tensors, begins, ends, end_masks, strict=True):
        sizes += ref.shape[begin : None if masked else end]
    return x.reshape(sizes)


@kernel("flatten2d")
def flatten2d(x: Tensor, axis: int = 1) -> Tensor:
    """``x`` as a matrix: axes before ``axis`` are rows, later axes are columns."""
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@kernel("expand_dims")
def expand_dims(x: Tensor, axes: Ints) -> Tensor:
    """``x`` with new dimensions of size 1 at ``axes`` of the result."""
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


@kernel("squeeze")
def squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    """``x`` without dimensions of size 1 among ``axes`` (all by default)."""
    return x.squeeze() if axes is None else x.squeeze(axes)


@kernel("transpose")
def transpose(x: Tensor, perm: Ints) -> Tensor:
    """``x`` with permuted dimensions."""
    return x.permute(perm)


@kernel("depth_to_space")
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    """[N, C, H, W] to [N, C / b**2, H * b, W * b]; C is (b, b, C / b**2)."""
    n, c, h, w = x.shape
    b = block_size
    blocks = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(n, c // (b * b), h * b, w * b)


@kernel("space_to_depth")
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    """[N, C, H, W] to [N, C * b**2, H / b, W / b]; the new C is (b, b, C)."""
    n, c, h, w = x.shape
    b = block_size
    blocks = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * b * b, h // b, w // b)


@kernel("pixel_shuffle")
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """[N, C * f**2, H, W] to [N, C, H * f, W * f]; the old channels are (C, f, f)."""
    return F.pixel_shuffle(x, upscale_factor)


@kernel("pixel_unshuffle", since=Opset.iOS16)
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """[N, C, H * f, W * f] to [N, C * f**2, H, W]; the new channels are (C, f, f)."""
    return F.pixel_unshuffle(x, downscale_factor)


@kernel("space_to_batch")
def space_to_batch(x: Tensor, block_shape: Ints, paddings: IntPairs) -> Tensor:
    """Padded [N, C, H, W] to [r * s * N, C, H / r, W / s], for blocks of (r, s)."""
    n, c, h, w = (x := pad_spatial(x, paddings)).shape
    rows, columns = block_shape
    blocks = x.reshape(n, c, h // rows, rows, w // columns, columns).permute(3, 5, 0, 1, 2, 4)
    return blocks.reshape(rows * columns * n, c, h // rows, w // columns)


@kernel("batch_to_space")
def batch_to_space(x: Tensor, block_shape: Ints, crops: IntPairs) -> Tensor:
    """The inverse of ``space_to_batch``, with ``crops`` for its padding."""
    n, c, h, w = x.shape
    rows, columns = block_shape
    batch = n // (rows * columns)
    blocks = x.reshape(rows, columns, batch, c, h, w).permute(2, 3, 4, 0, 5, 1)
    full = blocks.reshape(batch, c, h * rows, w * columns)
    return pad_spatial(full, [(-before, -after) for before, after in crops])


@kernel("concat")
def concat(values: tuple[Tensor, ...], axis: int, interleave: bool = False) -> Tensor:
    """``values`` concatenated along ``axis``; ``interleave`` alternates elements; scalars stack."""
    if values[0].dim() == 0:
        return torch.stack(values)
    if not interleave:
        return torch.cat(values, dim=axis)
    axis %= values[0].dim()
    return torch.stack(values, dim=axis + 1).flatten(axis, axis + 1)


@kernel("stack")
def stack(values: tuple[Tensor, ...], axis: int) -> Tensor:
    """``values`` concatenated along a new axis."""
    return torch.stack(values, dim=axis)


@kernel("split")
def split(
    x: Tensor, axis: int, num_splits: int | None = None, split_sizes: Ints | None = None
) -> tuple[Tensor, ...]:
    """``x`` split along ``axis`` into equal parts or parts of ``split_sizes``."""
    if split_sizes is not None:
        return x.split(split_sizes, dim=axis)
    if not num_splits or x.shape[axis] % num_splits:
        raise ValueError(f"cannot split a size of {x.shape[axis]} into {num_splits} equal parts")
    return x.split(x.shape[axis] // num_splits, dim=axis)


@kernel("tile")
def tile(x: Tensor, reps: Ints) -> Tensor:
    """``x`` repeated ``reps[i]`` times along dimension i."""
    return x.repeat(reps)

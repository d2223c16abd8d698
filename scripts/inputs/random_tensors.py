"""Random inputs, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from coreml_delegate.runtime.engines.limits import require_memory

_MIN_BYTES = 4  # of an element while it is made


def generator(seed: int) -> torch.Generator:
    """Return a separate generator, so that inputs do not depend on other random numbers."""
    return torch.Generator().manual_seed(seed)


def random_tensor(
    dtype: torch.dtype,
    shape: Sequence[int],
    random: torch.Generator,
    *,
    low: int = 0,
    high: int = 1,
) -> torch.Tensor:
    """Return a random tensor.

    Args:
        dtype: Standard normal values for a floating-point type, ``low`` to ``high`` for integers,
            either truth value for bool.
        shape: Of the result.
        random: Source of randomness, advanced.
        low: Smallest integer.
        high: Largest integer.

    Raises:
        ExecutionError: The tensor does not fit into memory.
    """
    size = tuple(shape)
    # Elements are made in 4 or 8 bytes, and then cast.
    require_memory(
        math.prod(size) * _MIN_BYTES, f"a random {str(dtype).removeprefix('torch.')}{[*size]}"
    )
    if dtype.is_floating_point:
        return torch.randn(size, generator=random).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, size, generator=random).to(dtype)
    return torch.randint(low, high + 1, size, generator=random).to(dtype)


def resample(example: Any, random: torch.Generator) -> Any:
    """Return a random value like ``example``: integers from its smallest to its largest.

    A value that is no tensor is kept, because a program is specialised to it. Masks, offsets and
    positions (see ``_has_structure``) are kept too: with random ones a model computes nothing
    useful, or fails.
    """
    if not isinstance(example, torch.Tensor) or _has_structure(example):
        return example
    if example.dtype.is_floating_point or example.dtype is torch.bool or not example.numel():
        return random_tensor(example.dtype, example.shape, random)
    low, high = int(example.min()), int(example.max())
    return random_tensor(example.dtype, example.shape, random, low=low, high=high)


def _has_structure(example: torch.Tensor) -> bool:
    """Whether a tensor of several elements is a mask, offsets or positions by its values.

    A mask is of bool, has infinities, or has two values, one of them 0 (0 and 1, 0 and -1e9).
    Offsets and positions are integers that never fall along the last dimension, and rise.
    """
    if example.numel() < 2:
        return False
    if example.dtype is torch.bool or bool(example.isinf().any()):
        return True
    low, high = example.min(), example.max()
    if low == high:
        return False
    if (low == 0 or high == 0) and bool(((example == low) | (example == high)).all()):
        return True
    return (
        not example.dtype.is_floating_point
        and example.shape[-1] > 1
        and bool((example[..., 1:] >= example[..., :-1]).all())
    )


def resampled(leaves: Sequence[Any], count: int, seed: int) -> Iterator[list[Any]]:
    """Yield random inputs like ``leaves``, ``count`` times; see ``resample``."""
    random = generator(seed)
    for _ in range(count):
        yield [resample(leaf, random) for leaf in leaves]

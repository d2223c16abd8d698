"""Random inputs, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from coreml_delegate.runtime.engines.limits import require_memory

_MADE_OF = 4  # bytes of an element, at least


def generator(seed: int) -> torch.Generator:
    """Return a generator of its own, so that inputs do not depend on other random numbers."""
    return torch.Generator().manual_seed(seed)


def random_tensor(
    dtype: torch.dtype, shape: Sequence[int], random: torch.Generator, *, high: int = 1
) -> torch.Tensor:
    """Return a random tensor.

    Args:
        dtype: Standard normal values for a floating-point type, 0 to ``high`` for integers, either
            truth value for bool.
        shape: Of the result.
        random: Source of randomness, advanced.
        high: Largest integer.

    Raises:
        ExecutionError: The tensor does not fit into memory.
    """
    size = tuple(shape)
    # Made in 4 or 8 bytes, and then cast.
    require_memory(
        math.prod(size) * _MADE_OF, f"a random {str(dtype).removeprefix('torch.')}{[*size]}"
    )
    if dtype.is_floating_point:
        return torch.randn(size, generator=random).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, size, generator=random).to(dtype)
    return torch.randint(0, high + 1, size, generator=random).to(dtype)


def resample(example: Any, random: torch.Generator) -> Any:
    """Return a random value like ``example``, integers from 0 to its largest, for token indices.

    A value that is no tensor is kept, because a program is specialised to it.
    """
    if not isinstance(example, torch.Tensor):
        return example
    integral = not example.dtype.is_floating_point and example.numel()
    high = max(int(example.max()), 1) if integral and example.dtype is not torch.bool else 1
    return random_tensor(example.dtype, example.shape, random, high=high)


def resampled(leaves: Sequence[Any], count: int, seed: int) -> Iterator[list[Any]]:
    """Yield random inputs like ``leaves``, ``count`` times; see ``resample``."""
    random = generator(seed)
    for _ in range(count):
        yield [resample(leaf, random) for leaf in leaves]

"""The values behind the fake tensors of a program that ExecuTorch shows to partitioners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def real_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The real tensors that fake ones were made from, as far as they still exist.

    ``to_backend`` makes the fake state of a program from the real one, and torch's fake mode
    remembers for each real tensor the fake it made of it, weakly. Where it does not, nothing is
    found, and the caller does without values.

    Args:
        tensors: By name; those that are real are returned as they are.

    Returns:
        Real tensors by the same names, without those that were not found.
    """
    found: dict[str, torch.Tensor] = {}
    modes: dict[int, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, FakeTensor):
            found[name] = tensor
            continue
        mode = tensor.fake_mode
        if id(mode) not in modes:
            modes[id(mode)] = _by_fake(mode)
        real = modes[id(mode)].get(id(tensor))
        if real is not None and real.shape == tensor.shape and real.dtype == tensor.dtype:
            found[name] = real
    return found


def _by_fake(mode: Any) -> dict[int, torch.Tensor]:
    """Real tensors by the identity of their fakes."""
    # Private to torch, whose release this project pins.
    converter = getattr(mode.fake_tensor_converter, "meta_converter", None)
    described = getattr(getattr(converter, "describer", None), "lookup_tensor", None)
    fakes = getattr(converter, "tensor_memo", None)
    if described is None or fakes is None:
        return {}
    return {
        id(fake): real
        for real, number in described.items()
        if (fake := fakes.get(number)) is not None and isinstance(real, torch.Tensor)
    }

"""Rotary position embedding: tables of cosines and sines, and their use."""

from __future__ import annotations

import math

import torch

from coreml_delegate.scripts.llm.settings import LongContext, Rotary

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines, each [L, 1, R] for L positions and R rotated channels."""


def tables(rotary: Rotary, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all positions, to be looked up.

    Computed here, in fp32, because a position times a frequency does not fit fp16.

    Args:
        rotary: Settings.
        positions: Number of rows.

    Returns:
        Two tensors [positions, R], fp32. The sines of the first half of the channels are negated,
        so that the rotation is two products and a sum.
    """
    frequencies = _frequencies(rotary) / rotary.linear_factor
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn pairs of channels, half the rotated width apart, by the angles of their positions.

    Args:
        x: Queries or keys [B, L, H, head_dim].
        rotation: Of the L positions.
    """
    cos, sin = rotation
    channels = cos.shape[-1]
    first, second, rest = x.split((channels // 2, channels // 2, x.shape[-1] - channels), dim=-1)
    turned = torch.cat((first, second), dim=-1) * cos + torch.cat((second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _frequencies(rotary: Rotary) -> torch.Tensor:
    """Radians per position, [R / 2]."""
    exponents = torch.arange(0, rotary.channels, 2, dtype=torch.float32) / rotary.channels
    frequencies = 1.0 / (rotary.theta**exponents)
    if rotary.long_context is None:
        return frequencies
    return _stretched(frequencies, rotary.long_context)


def _stretched(frequencies: torch.Tensor, long: LongContext) -> torch.Tensor:
    """Frequencies for a longer context.

    Source: the ``llama3`` rope type of the configurations of Llama 3.1 and later.
    """
    rotations = long.original_context * frequencies / (2 * math.pi)
    kept = ((rotations - long.low) / (long.high - long.low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / long.factor)

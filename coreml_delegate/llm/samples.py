"""Encoders that take the samples of a recording, as Moonshine (arXiv:2410.15608) does.

Convolutions without padding make positions of the samples. A recording is shorter than the samples
that the program takes, so its padding has to change nothing: it makes positions that attention
masks, and the norm after the first convolution, whose mean and variance are those of all channels
and times, leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.attention import MASKED, current_call

_CONVOLUTIONS = ("conv1", "conv2", "conv3")  # in Moonshine's encoder
_NORM = "groupnorm"  # behind the first


@dataclass(frozen=True, slots=True)
class Reach:
    """How the results of convolutions depend on samples: i on ``kernel`` from ``stride * i`` on.

    Attributes:
        kernel: Number of samples of a result.
        stride: Samples from one result to the next.
    """

    kernel: int = 1
    stride: int = 1

    def of(self, convolution: Any) -> Reach:
        """Return the reach of a convolution behind these."""
        (size,), (step,) = convolution.kernel_size, convolution.stride
        return Reach(self.kernel + self.stride * (size - 1), self.stride * step)

    def count(self, length: torch.Tensor) -> torch.Tensor:
        """Return the number of results of ``length`` samples [1], at least 1."""
        return (length.clamp(min=self.kernel) - self.kernel) // self.stride + 1


def prepare_samples(encoder: Any) -> Reach:
    """Replace the norm of an encoder by one that leaves out padding.

    Args:
        encoder: Of a model of ``transformers``; changed.

    Returns:
        The reach of the encoder's positions.

    Raises:
        LoweringError: The encoder has another form.
    """
    norm: Any = getattr(encoder, _NORM, None)
    layers: list[Any] = [getattr(encoder, name, None) for name in _CONVOLUTIONS]
    if not all(isinstance(layer, nn.Conv1d) for layer in layers) or norm is None:
        raise LoweringError(
            "the encoder takes samples, and has a form that is not supported",
            got=type(encoder).__name__,
            expected="that of Moonshine",
        )
    reach = Reach()
    first = reach.of(layers[0])
    for layer in layers:
        reach = reach.of(layer)
    setattr(encoder, _NORM, NormWithoutPadding(norm, first))
    return reach


class NormWithoutPadding(nn.Module):
    """Group norm of the results of a call's samples, with a single group, without padding.

    (x - mean) / sqrt(variance + epsilon) * weight + bias

    Args:
        norm: The norm.
        reach: Of the results.
    """

    def __init__(self, norm: nn.GroupNorm, reach: Reach) -> None:
        super().__init__()
        self.weight, self.bias, self._epsilon = norm.weight, norm.bias, norm.eps
        self._reach = reach

    def forward(self, results: torch.Tensor) -> torch.Tensor:
        """Return the normalized ``results`` [1, C, T]."""
        total, length = results.shape[2], current_call().source_length
        if length is None:
            raise TypeError("the call has no samples")
        count = self._reach.count(length)
        # Weights whose mean is 1, so that sums of many results stay small.
        weights = torch.where(torch.arange(total) < count, total / count, 0.0)
        mean = (results * weights).mean((1, 2), keepdim=True)
        centered = results - mean
        variance = (centered * centered * weights).mean((1, 2), keepdim=True)
        normalized = centered * torch.rsqrt(variance + self._epsilon)
        return normalized * self.weight[:, None] + self.bias[:, None]


def over_samples(mask: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Return a mask of positions [1, 1, 1, P] as one of samples, from which an encoder takes it."""
    padding = (0, reach.kernel // reach.stride)
    padded = nn.functional.pad(mask, padding, value=MASKED)
    return padded.repeat_interleave(reach.stride, dim=-1)

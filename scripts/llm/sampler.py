"""The next token, chosen from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coreml_delegate.errors import OptionError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Only the so many likeliest tokens are drawn from, or None for all.
        top_p: Only the fewest likeliest tokens whose probabilities sum up to it are drawn from.
        seed: Of the draws.

    Raises:
        OptionError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "an integer of at least 1"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
        )
        for name, holds, expected in checks:
            if not holds:
                raise OptionError(
                    f"{name} is out of range", got=str(getattr(self, name)), expected=expected
                )


class Sampler:
    """Chooses tokens; equal settings and logits give equal tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """``logits`` [V], any floating-point type."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        scores, tokens = logits.double().sort(descending=True, stable=True)
        kept = scores[: self._sampling.top_k]
        shares = torch.softmax((kept - kept[0]) / self._sampling.temperature, dim=0)
        if self._sampling.top_p < 1:
            before = shares.cumsum(0) - shares
            shares = shares[before < self._sampling.top_p]
        return int(tokens[torch.multinomial(shares, 1, generator=self._random)])

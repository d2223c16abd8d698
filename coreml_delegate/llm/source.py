"""Constants of an encoder-decoder model: its source, and the start of its answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch


class SourceKind(enum.Enum):
    """Kind of the encoder's input: a text, or the spectrogram or the samples of a recording."""

    TOKENS = "tokens"
    AUDIO = "audio"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """Settings of the spectrogram of a recording.

    Attributes:
        sampling_rate: Samples per second.
        hop_length: Samples from one frame to the next.
        fft_size: Samples of a frame.
    """

    sampling_rate: int = 16000
    hop_length: int = 160
    fft_size: int = 400


@dataclass(frozen=True, slots=True)
class Source:
    """The constants that only an encoder-decoder model has.

    Attributes:
        length: Tokens of the longest source text, frames of a spectrogram, or samples of the
            longest recording.
        start: Tokens at the start of every answer.
        suppressed: Tokens that are never generated.
        first_suppressed: Tokens that are not generated as the first token.
        spectrogram: Settings of spectrograms.
    """

    kind: SourceKind
    length: int
    start: tuple[int, ...]
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    spectrogram: Spectrogram = Spectrogram()

    @property
    def is_recording(self) -> bool:
        """Whether the source is a recording."""
        return self.kind is not SourceKind.TOKENS

    def suppress(self, logits: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Return logits [V] with -inf for suppressed tokens.

        Args:
            logits: Logits [V] of the next token.
            first: Whether it is the first generated token.
        """
        tokens = [*self.suppressed, *(self.first_suppressed if first else ())]
        return logits.index_fill(0, torch.tensor(tokens), -torch.inf) if tokens else logits

    def constants(self) -> dict[str, Any]:
        """Return the values of constant methods by name, without defaults."""
        return {
            _KIND: self.kind.value,
            _LENGTH: self.length,
            _START: list(self.start),
            **{
                name: list(tokens)
                for name, field in _TOKENS.items()
                if (tokens := getattr(self, field))
            },
            **{
                f"get_{field.name}": size
                for field in fields(Spectrogram)
                if (size := getattr(self.spectrogram, field.name)) != field.default
            },
        }

    @classmethod
    def read(cls, values: Mapping[str, Sequence[Any]]) -> Source | None:
        """Read the source from constants; return None for a decoder-only model.

        Args:
            values: Results of the constant methods by name; ``NAMES`` are read.
        """
        if _KIND not in values:
            return None
        tokens = {
            field: tuple(int(token) for token in values.get(name, ()))
            for name, field in {_START: "start", **_TOKENS}.items()
        }
        sizes = {
            field.name: int(values[f"get_{field.name}"][0])
            for field in fields(Spectrogram)
            if f"get_{field.name}" in values
        }
        kind, length = SourceKind(values[_KIND][0]), int(values[_LENGTH][0])
        return cls(kind, length, **tokens, spectrogram=Spectrogram(**sizes))


_KIND, _LENGTH, _START = "get_source_kind", "get_max_source_len", "get_decoder_start_ids"
_TOKENS = {"get_suppressed_ids": "suppressed", "get_first_suppressed_ids": "first_suppressed"}
NAMES = (_KIND, _LENGTH, _START, *_TOKENS, *(f"get_{field.name}" for field in fields(Spectrogram)))
"""Names of the constant methods."""

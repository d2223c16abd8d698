"""Transcription with a ``.pte`` of a speech recognizer: the loop around its methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coreml_delegate import runtime
from coreml_delegate.errors import InputError, ProgramError
from coreml_delegate.llm.speech import (
    DECODER_STEP,
    ENCODER,
    JOINT,
    KIND,
    PREPROCESSOR,
    SAMPLES,
    SYMBOLS,
    Kind,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a transcript.

    Attributes:
        number: The token.
        start: Seconds from the start of the recording to the frame in which it was found.
    """

    number: int
    start: float


class Transcriber:
    """A ``.pte`` of ``export-speech``.

    Args:
        program: A program of ``runtime.load_program``.

    Attributes:
        sampling_rate: Samples per second of recordings.
        samples: Number of samples of the longest recording.
        vocabulary: Number of tokens, blank included.
        blank: Token that stands for no token.

    Raises:
        ProgramError: The program is of another kind.
    """

    def __init__(self, program: runtime.HostProgram) -> None:
        if KIND not in program.method_names:
            raise ProgramError(
                "the program does not recognize speech",
                got=f"the methods {', '.join(program.method_names)}",
                expected="a file of coreml-delegate export-speech",
            )
        self._program = program
        self._kind = Kind(self._constant(KIND))
        self.sampling_rate = int(self._constant("sample_rate"))
        self.samples = int(self._constant(SAMPLES))
        self.vocabulary = int(self._constant("vocab_size")) + 1
        self.blank = int(self._constant("blank_id"))
        stride = self._constant("window_stride")
        self._seconds = float(stride) * int(self._constant("encoder_subsampling_factor"))

    @classmethod
    def load(cls, path: Path | str, **options: Any) -> Transcriber:
        """Load a ``.pte``.

        Args:
            path: The file.
            options: ``host``, ``engine`` and ``options`` of ``runtime.load_program``.

        Raises:
            CoreMLDelegateError: See ``runtime.load_program``, and the class.
        """
        return cls(runtime.load_program(Path(path), **options))

    def __call__(self, samples: np.ndarray | torch.Tensor) -> list[Token]:
        """Return the most probable tokens of a recording, each the best after the one before.

        Args:
            samples: [n], fp32 from -1 to 1.

        Raises:
            InputError: There are too few or too many samples, or they have another shape.
        """
        frames = self.encode(*self.features(samples))
        tokens = self._collapse(frames) if self._kind is Kind.CTC else self._transduce(frames)
        return [Token(token, frame * self._seconds) for token, frame in tokens]

    def features(self, samples: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features [1, F, T] of a recording and the number of its frames [1].

        Raises:
            InputError: See ``__call__``.
        """
        audio = torch.as_tensor(samples, dtype=torch.float32)
        if audio.dim() != 1 or not 0 < len(audio) <= self.samples:
            seconds = len(audio) / self.sampling_rate if audio.dim() == 1 else None
            raise InputError(
                "the samples are not one recording that the program takes",
                got=f"shape {list(audio.shape)}" if seconds is None else f"{seconds:.2f} s",
                expected=f"one dimension, at most {self.samples / self.sampling_rate:.2f} s",
                remedy="Cut a longer recording into pieces",
            )
        features, length = self._run(PREPROCESSOR, audio, torch.tensor([len(audio)]))
        return features, length

    def encode(self, features: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Return the frames [1, T', J] of a recording, or logits [1, T', V] of CTC.

        Args:
            features: [1, F, T].
            length: Number of frames of the recording, [1], int64.
        """
        frames, count = self._run(ENCODER, features, length)
        return frames[:, : int(count)]

    def _collapse(self, logits: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield the tokens of CTC with their frames: equal neighbours are one, without blanks."""
        before = self.blank
        for frame, token in enumerate(logits[0].argmax(-1).tolist()):
            if token not in (before, self.blank):
                yield token, frame
            before = token

    def _transduce(self, frames: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield the tokens of a transducer with their frames, as ExecuTorch's runner finds them."""
        layers, width = (int(self._constant(name)) for name in ("num_rnn_layers", "pred_hidden"))
        most = int(self._constant(SYMBOLS))
        states: Sequence[torch.Tensor] = [torch.zeros(layers, 1, width) for _ in range(2)]
        vector, *states = self._run(DECODER_STEP, torch.tensor([[self.blank]]), *states)
        position = symbols = 0  # symbols: of this frame
        while position < frames.shape[1]:
            frame = frames[:, position : position + 1].contiguous()
            token, duration = (int(value) for value in self._run(JOINT, frame, vector))
            if token == self.blank:
                duration = max(duration, 1)
            else:
                yield token, position
                vector, *states = self._run(DECODER_STEP, torch.tensor([[token]]), *states)
            symbols = 0 if duration else symbols + 1
            if symbols == most:
                duration, symbols = 1, 0
            position += duration

    def _run(self, method: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.as_tensor(value) for value in self._program.run(method, list(inputs))]

    def _constant(self, name: str) -> Any:
        return self._program.run(name, [])[0]

"""Recordings, and the spectrograms of them that encoders take."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from coreml_delegate.errors import InputError
from coreml_delegate.llm.source import Spectrogram
from coreml_delegate.third_party import transformers

_BYTES = 2  # of a sample
_LARGEST = 2**15


def read_wav(path: Path | str, rate: int) -> np.ndarray:
    """Return the samples of a recording, fp32 from -1 to 1; several channels are averaged.

    Args:
        path: A WAV file with samples of 16 bits (PCM).
        rate: Samples a second that it has to have.

    Raises:
        InputError: The file does not exist, is not such a file, or has another rate.
    """
    if not Path(path).is_file():
        raise InputError("no such recording", got=str(path))
    try:
        with wave.open(str(path), "rb") as file:
            found, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise InputError(
            f"{path} is not a WAV file with uncompressed samples", got=str(error) or "no content"
        ) from error
    for what, got, expected in (
        ("bits a sample", 8 * width, 8 * _BYTES),
        ("samples a second", found, rate),
    ):
        if got != expected:
            raise InputError(
                f"{path} has another number of {what}",
                got=str(got),
                expected=str(expected),
                remedy="Convert the recording first",
            )
    usable = len(data) // (_BYTES * channels) * _BYTES * channels
    samples = np.frombuffer(data[:usable], "<i2").reshape(-1, channels)
    return samples.mean(axis=1, dtype=np.float32) / np.float32(_LARGEST)


def spectrogram(
    samples: np.ndarray, shape: Sequence[int], how: Spectrogram | None = None
) -> torch.Tensor:
    """Return the logarithmic mel spectrogram that Whisper takes, by ``transformers``.

    Args:
        samples: [n], from -1 to 1.
        shape: ``Generator.source_shape``: 1, bins and frames. Silence is put behind the samples.
        how: ``Layout.source.spectrogram``; None for that of all published models.

    Returns:
        [1, bins, frames], fp32.

    Raises:
        InputError: There are no samples, or more than the frames have.
    """
    _, bins, frames = shape
    how = how or Spectrogram()
    most = frames * how.hop_length
    if not 0 < len(samples) <= most:
        raise InputError(
            "the recording is too long" if len(samples) else "the recording is empty",
            got=f"{len(samples) / how.sampling_rate:.2f} s",
            expected=f"at most {most / how.sampling_rate:.2f} s",
            remedy="Cut it into pieces" if len(samples) else None,
        )
    extract = transformers().WhisperFeatureExtractor(
        feature_size=bins,
        sampling_rate=how.sampling_rate,
        hop_length=how.hop_length,
        n_fft=how.fft_size,
    )
    made = extract(samples, sampling_rate=how.sampling_rate, max_length=most)
    return torch.as_tensor(made["input_features"], dtype=torch.float32)

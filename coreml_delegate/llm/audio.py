"""Reading of recordings, and log-mel spectrograms for encoders."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from coreml_delegate.errors import InputError
from coreml_delegate.llm.source import Spectrogram
from coreml_delegate.patches.third_party import transformers

_BYTES = 2  # per sample
_LARGEST = 2**15  # magnitude of a sample


def read_wav(path: Path | str, rate: int) -> np.ndarray:
    """Return the samples [n] of a recording, fp32 from -1 to 1; channels are averaged.

    Args:
        path: A WAV file with samples of 16 bits (PCM).
        rate: Required number of samples per second.

    Raises:
        InputError: The file does not exist, is not 16-bit PCM, or has another rate.
    """
    if not Path(path).is_file():
        raise InputError("no such recording", got=str(path))
    try:
        with wave.open(str(path), "rb") as file:
            file_rate, width, channels = (
                file.getframerate(),
                file.getsampwidth(),
                file.getnchannels(),
            )
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise InputError(
            f"{path} is not a WAV file with uncompressed samples", got=str(error) or "no content"
        ) from error
    for quantity, got, expected in (
        ("bits a sample", 8 * width, 8 * _BYTES),
        ("samples a second", file_rate, rate),
    ):
        if got != expected:
            raise InputError(
                f"{path} has another number of {quantity}",
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
    """Return Whisper's log-mel spectrogram, computed by ``transformers``.

    Args:
        samples: [n], from -1 to 1.
        shape: ``Generator.source_shape``: 1, bins and frames. The samples are padded with silence.
        how: ``Layout.source.spectrogram``; None for the settings of all published models.

    Returns:
        [1, bins, frames], fp32.

    Raises:
        InputError: There are no samples, or more than the frames can take.
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
    features = extract(samples, sampling_rate=how.sampling_rate, max_length=most)
    return torch.as_tensor(features["input_features"], dtype=torch.float32)


def checked_spectrogram(source: Sequence[int] | torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the input of an encoder, fp32, after a check of its shape.

    Raises:
        InputError: It is no spectrogram, or has another shape.
    """
    got = tuple(source.shape) if isinstance(source, torch.Tensor) else f"{len(source)} tokens"
    if not isinstance(source, torch.Tensor) or got != tuple(shape):
        raise InputError(
            "the model takes a spectrogram",
            got=str(got),
            expected=f"a tensor of shape {tuple(shape)}",
            remedy="Make it with llm.audio.spectrogram",
        )
    return source.float()


def padded_samples(
    source: Sequence[int] | torch.Tensor, shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of an encoder of samples: [1, N], fp32, and the number of samples, [1].

    Args:
        source: Samples [n], from -1 to 1.
        shape: ``Generator.source_shape``: 1 and N.

    Raises:
        InputError: There are no samples, or more than N.
    """
    samples = torch.as_tensor(source)
    count = len(samples) if samples.dim() == 1 else 0
    if not 0 < count <= shape[1] or not samples.is_floating_point():
        raise InputError(
            "the model takes the samples of a recording",
            got=f"{samples.dtype} {list(samples.shape)}",
            expected=f"1 to {shape[1]} samples [n] in floating point",
            remedy="Cut it into pieces, or export with a larger --source-length",
        )
    return nn.functional.pad(samples.float(), (0, shape[1] - count))[None], torch.tensor([count])

"""Recordings: samples of WAV files, and the spectrograms that transformers makes of them."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from coreml_delegate.errors import InputError
from coreml_delegate.llm.audio import read_wav, spectrogram
from coreml_delegate.llm.source import Spectrogram
from coreml_delegate.patches.third_party import transformers

RATE = 16000


def write(path: Path, samples: np.ndarray, *, rate: int = RATE, width: int = 2) -> Path:
    """Write samples [n] or [n, channels]."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.astype({1: "u1", 2: "<i2", 4: "<i4"}[width]).tobytes())
    return path


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-(2**15), 2**15, count)


def test_samples_are_read_from_minus_1_to_1(tmp_path):
    samples = np.array([-(2**15), -1, 0, 1, 2**15 - 1])
    actual = read_wav(write(tmp_path / "a.wav", samples), RATE)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, (samples / 2**15).astype(np.float32))


def test_channels_are_averaged(tmp_path):
    samples = noise(20).reshape(10, 2)
    actual = read_wav(write(tmp_path / "a.wav", samples), RATE)
    np.testing.assert_allclose(actual, samples.mean(axis=1) / 2**15, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 8000}, "number of samples a second: got 8000, expected 16000. Convert"),
        ({"width": 1}, "number of bits a sample: got 8, expected 16. Convert"),
        ({"width": 4}, "number of bits a sample: got 32, expected 16. Convert"),
    ],
)
def test_other_recordings_are_refused(options, message, tmp_path):
    path = write(tmp_path / "a.wav", np.zeros(8), **options)
    with pytest.raises(InputError, match=message):
        read_wav(path, RATE)


@pytest.mark.parametrize("content", [b"", b"RIFF", b"fLaC and more that is no WAV file", None])
def test_what_is_no_recording_is_refused(content, tmp_path):
    path = tmp_path / "a.wav"
    if content is not None:
        path.write_bytes(content)
    message = "no such recording" if content is None else "is not a WAV file with uncompressed"
    with pytest.raises(InputError, match=message):
        read_wav(path, RATE)


def test_a_file_that_ends_early_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.wav", noise(100))
    path.write_bytes(path.read_bytes()[:-51])  # in the middle of a sample
    assert read_wav(path, RATE).shape == (74,)


def test_the_spectrogram_is_whispers(tmp_path):
    """For 30 s, as for published models; and for another length by the same formula."""
    samples = (noise(5 * RATE) / 2**15).astype(np.float32)
    extract = transformers().WhisperFeatureExtractor()
    expected = torch.as_tensor(extract(samples, sampling_rate=RATE)["input_features"])
    actual = spectrogram(samples, (1, 80, 3000))
    assert torch.equal(actual, expected)
    shorter = spectrogram(samples[:RATE], (1, 80, 100))
    assert (shorter.shape, shorter.dtype) == ((1, 80, 100), torch.float32)
    # But for the clamp, which is relative to the loudest frame, and the edge.
    torch.testing.assert_close(shorter[..., :98], actual[..., :98], atol=0.1, rtol=0)


def test_the_sizes_of_a_spectrogram_may_differ():
    made = spectrogram(np.ones(800, np.float32), (1, 20, 40), Spectrogram(16000, 80, 200))
    assert made.shape == (1, 20, 40)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "the recording is empty: got 0.00 s, expected at most 1.00 s"),
        (16001, "the recording is too long: got 1.00 s, expected at most 1.00 s. Cut it"),
        (32000, "the recording is too long: got 2.00 s, expected at most 1.00 s. Cut it"),
    ],
)
def test_recordings_must_fit(count, message):
    with pytest.raises(InputError, match=message):
        spectrogram(np.zeros(count, np.float32), (1, 80, 100))

"""Log-mel features of a recording, as a module that Core ML computes.

With samples x [n], pre-emphasis y_i = x_i - a x_(i-1), a Hann window w and the Fourier transform Y
of each windowed frame, the features of frame t are log(M |Y_t|^2 + 2^-24) with the mel filters M,
minus their mean over the frames of the recording, divided by their standard deviation.

The transform is a convolution with the windowed cosines and sines as its kernels: the steps of the
convolution are the frames. The window is shorter than the transform; where it begins only turns
the phase of Y, so the kernels have the window's length.

Source: ``ParakeetFeatureExtractor`` of transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.checkpoint import read_json
from coreml_delegate.llm.decoder_methods import CORE_ML
from coreml_delegate.patches.third_party import transformers, wrap_errors

FP32_MODULES = (f"fp32.{CORE_ML}",)
"""Paths of modules that compute in fp32, since fp16 does not hold the powers of a spectrum."""

_SETTINGS = "preprocessor_config.json"
_NAMES = {
    "bins": "feature_size",
    "sampling_rate": "sampling_rate",
    "hop_length": "hop_length",
    "window": "win_length",
    "fft_size": "n_fft",
    "preemphasis": "preemphasis",
}
_LEAST_POWER = 2.0**-24
_LEAST_DEVIATION = 1e-5


@dataclass(frozen=True, slots=True)
class FeatureSettings:
    """Settings of the features.

    Attributes:
        bins: F, the number of mel filters.
        sampling_rate: Samples per second.
        hop_length: Samples from one frame to the next.
        window: Samples of the window.
        fft_size: Samples of the Fourier transform.
        preemphasis: a.
    """

    bins: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    window: int = 400
    fft_size: int = 512
    preemphasis: float = 0.97

    @classmethod
    def read(cls, folder: Path | None, bins: int) -> FeatureSettings:
        """Read ``preprocessor_config.json``; without the file, return the defaults.

        Args:
            folder: Of the checkpoint, or None.
            bins: Number of mel filters if the file does not say it.

        Raises:
            OptionError: The file is malformed, or has impossible sizes.
        """
        path = None if folder is None else folder / _SETTINGS
        if path is None or not path.is_file():
            return cls(bins)
        values = read_json(path)
        options = {f.name: values.get(_NAMES[f.name], f.default) for f in fields(cls)}
        options["bins"] = values.get(_NAMES["bins"], bins)
        for name, value in options.items():
            kinds = (int, float) if name == "preemphasis" else (int,)
            if type(value) not in kinds or value < (0 if float in kinds else 1):
                raise OptionError(
                    f"{path} has a {_NAMES[name]} that is not supported", got=json.dumps(value)
                )
        if options["window"] > options["fft_size"]:
            raise OptionError(
                f"{path} has a window that is longer than the Fourier transform",
                got=f"{options['window']} samples",
                expected=f"at most {options['fft_size']}",
            )
        return cls(**options)


class Preprocessor(nn.Module):
    """Method ``preprocessor``: samples to features.

    ExecuTorch's kernels append silence up to the longest recording; Core ML computes the rest.

    Args:
        settings: Of the features.
        frames: T, the number of frames of the longest recording.
    """

    def __init__(self, settings: FeatureSettings, frames: int) -> None:
        super().__init__()
        self._samples = frames * settings.hop_length
        self.fp32 = nn.ModuleDict({CORE_ML: _Features(settings, frames)})

    def forward(
        self, audio: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features [1, F, T], zero after the recording, and its frames [1], int64.

        Args:
            audio: Samples [n] from -1 to 1, with n up to T times the hop.
            length: Number of samples of the recording, [1], int64; those after it are ignored.
        """
        padded = functional.pad(audio, (0, self._samples - audio.shape[0]))
        return self.fp32[CORE_ML](padded, length)


class _Features(nn.Module):
    def __init__(self, settings: FeatureSettings, frames: int) -> None:
        super().__init__()
        self._settings, self._frames = settings, frames
        # The window is in the middle of the transform, and that in the middle of its frame.
        before = settings.fft_size // 2 - (settings.fft_size - settings.window) // 2
        reach = (frames - 1) * settings.hop_length + settings.window
        samples = frames * settings.hop_length
        self._padding = (before, max(0, reach - before - samples))
        for name, tensor in (("kernels", _kernels(settings)), ("filters", _mel_filters(settings))):
            self.register_buffer(name, tensor, persistent=False)

    def forward(
        self, audio: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Preprocessor``; samples [n] of the longest recording."""
        settings = self._settings
        previous = functional.pad(audio[:-1], (1, 0))
        is_sample = torch.arange(len(audio)) < length
        audio = torch.where(is_sample, audio - settings.preemphasis * previous, 0.0)
        audio = functional.pad(audio, self._padding)[None, None]
        parts = functional.conv1d(audio, self.get_buffer("kernels"), stride=settings.hop_length)
        power = parts[..., : self._frames].square().unflatten(1, (2, -1)).sum(1)
        features = torch.log(self.get_buffer("filters") @ power + _LEAST_POWER)
        frames = length // settings.hop_length
        mask = (torch.arange(self._frames) < frames).to(features.dtype)
        mean = (features * mask).sum(-1, keepdim=True) / frames
        difference = (features - mean) * mask
        # A single frame has no deviation.
        variance = difference.square().sum(-1, keepdim=True) / (frames - 1).clamp(min=1)
        return difference / (variance.sqrt() + _LEAST_DEVIATION), frames


def _kernels(settings: FeatureSettings) -> torch.Tensor:
    """Return the windowed cosines and sines of all frequencies, [2 * (fft_size // 2 + 1), 1, w]."""
    count = settings.fft_size // 2 + 1
    window = torch.hann_window(settings.window, periodic=False, dtype=torch.float64)
    turns = torch.outer(torch.arange(count), torch.arange(settings.window)) % settings.fft_size
    angles = turns.double() * (2 * torch.pi / settings.fft_size)
    return (torch.cat((angles.cos(), angles.sin())) * window)[:, None].float()


def _mel_filters(settings: FeatureSettings) -> torch.Tensor:
    """Return the mel filters [F, fft_size // 2 + 1] of transformers."""
    with wrap_errors("transformers cannot make the mel filters"):
        extractor = transformers().ParakeetFeatureExtractor(
            feature_size=settings.bins,
            sampling_rate=settings.sampling_rate,
            n_fft=settings.fft_size,
        )
    return extractor.mel_filters

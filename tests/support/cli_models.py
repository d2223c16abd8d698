"""Models that command-line tests name as ``support.cli_models:FACTORY``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from coreml_delegate.third_party import coremltools


class Tiny(nn.Module):
    """Two outputs; without ``sin``, two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 10)

    def forward(self, x):
        features = torch.relu(self.conv(x))
        return self.linear(features.mean((2, 3))), torch.sin(features).sum()


def tiny():
    return Tiny(), torch.randn(1, 3, 16, 16)


def classifier():
    """The delegated half alone, to be given an input shape."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Noisy(nn.Module):
    def forward(self, x):
        print("noise")  # noqa: T201 - the very thing that must not reach the user's stdout
        return torch.relu(x)


def noisy():
    return Noisy(), torch.randn(4)


def failing():
    raise ValueError("no data\nfor you")


def number():
    return 3


class DataDependent(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def data_dependent():
    return DataDependent(), torch.randn(3)


class Distances(nn.Module):
    """Nothing for Core ML."""

    def forward(self, x):
        return torch.cdist(x, x)


def distances():
    return Distances(), torch.rand(5, 3)


class Gamma(nn.Module):
    """Nothing for ExecuTorch: not a core ATen op."""

    def forward(self, x):
        return torch.lgamma(x)


def gamma():
    return Gamma(), torch.rand(5)


def stalling():
    """A model whose conversion says that it has begun, by ``$STALLED``, and does not end."""

    def stall(*_args, **_keywords):
        Path(os.environ["STALLED"]).touch()
        time.sleep(600)

    coremltools().convert = stall
    return tiny()

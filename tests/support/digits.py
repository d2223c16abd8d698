"""A small network trained here on real data, scikit-learn's handwritten digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH = 100


class Digits(NamedTuple):
    """Images [N, 1, 8, 8] of 0 to 1, and their digits."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer for [N, 1, 8, 8] digits."""

    def __init__(self, *, norms: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if norms else nn.Identity
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            norm(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            norm(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


@functools.cache
def digits() -> Digits:
    """The data, always split the same way; four batches are for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    split = len(x) - 4 * BATCH
    return Digits(x[order[:split]], y[order[:split]], x[order[split:]], y[order[split:]])


def train(
    model: nn.Module,
    epochs: int,
    *,
    size: int = 64,
    rate: float = 3e-3,
    before_step: Callable[[], None] = lambda: None,
) -> None:
    """Train in place, always the same way, on whole batches of ``size``."""
    data = digits()
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for index in torch.randperm(len(data.train)).split(size):
            if len(index) < size:
                continue
            before_step()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.train[index]), data.train_labels[index])
            loss.backward()
            optimizer.step()


@functools.cache
def trained(*, norms: bool = True) -> DigitsNet:
    """The network after training, in eval mode; not to be modified."""
    torch.manual_seed(0)
    model = DigitsNet(norms=norms)
    train(model, epochs=15)
    return model.eval()


def predictions(
    predict: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor | None = None
) -> np.ndarray:
    """The digit with the largest score of ``predict``, for ``images`` or else the test images."""
    images = digits().test if images is None else images
    with torch.no_grad():
        logits = torch.cat([predict(batch) for batch in images.split(BATCH)])
    return logits.argmax(dim=1).numpy()


def all_images() -> torch.Tensor:
    """All images in whole batches, the test images first."""
    images = torch.cat([digits().test, digits().train])
    return images[: len(images) // BATCH * BATCH]


def accuracy(predicted: np.ndarray) -> float:
    """Share of recognized test images, 0 to 1; images after the test images do not count."""
    labels = digits().test_labels.numpy()
    return float((predicted[: len(labels)] == labels).mean())

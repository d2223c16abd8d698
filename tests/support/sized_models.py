"""Models for ranges of sizes, which commands name as ``support.sized_models:FACTORY``."""

from __future__ import annotations

import torch
from torch import nn


class Computing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


class OfTwo(Computing):
    def forward(self, x, y):
        return self._function(x, y)


class Counting(nn.Module):
    """Keeps the sum of all inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        self.total.add_(x.sum())
        return x * 2 + self.total


def one_row():
    return Computing(lambda x: x.relu() * x.sum(1, keepdim=True)), torch.randn(1, 4)


def many_rows():
    return one_row()[0], torch.randn(16, 4)


def shared():
    return OfTwo(lambda x, y: x.relu() + y), (torch.randn(1, 4), torch.randn(1, 4))


def twice():
    return OfTwo(lambda x, y: x.repeat(2, 1) + y), (torch.randn(1, 4), torch.randn(2, 4))


def counting():
    return Counting(), torch.randn(1, 4)


def otherwise_for_one():
    return Computing(lambda x: x * 3 if x.shape[0] == 1 else x + 1), torch.randn(1, 4)


def otherwise_for_odd():
    return Computing(lambda x: x * 3 if x.shape[0] % 2 else x + 1), torch.randn(4, 4)


def otherwise_beyond_five():
    return Computing(lambda x: x * 3 if x.shape[0] > 5 else x + 1), torch.randn(4, 4)


def pairs():
    """Takes an even number of rows."""
    return Computing(lambda x: x.view(-1, 2, 4).sum(1)), torch.randn(2, 4)


def four():
    """Takes four rows."""
    return Computing(lambda x: x + torch.ones(4, 4)), torch.randn(4, 4)


def of_another_rank_for_one():
    return Computing(lambda x: x.squeeze(0) + 1), torch.randn(4, 4)


def recurrent():
    """A layer whose number of rows ExecuTorch fixes if gradients are recorded."""
    return nn.GRU(4, 4, batch_first=True), torch.randn(1, 5, 4)


def convolving():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 6, 6)

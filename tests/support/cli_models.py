"""Models that command-line tests name as ``support.cli_models:FACTORY``."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from coreml_delegate.patches.third_party import coremltools


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
    """Only the delegated half; needs ``--input-shape``."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Masked(nn.Module):
    def forward(self, x, mask):
        return torch.exp(x), x.masked_fill(~mask, -torch.inf).softmax(-1)


def masked():
    return Masked(), (torch.full((8, 2), 12.0), torch.tensor([[True, False], [True, True]] * 4))


class Channels(nn.Module):
    def forward(self, image):
        return (image.mean((2, 3)) * 0.05).softmax(-1)


def channels():
    return Channels(), torch.zeros(1, 3, 4, 5)


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


class InDoubles(nn.Module):
    """A model that Core ML does not take."""

    def forward(self, x):
        return torch.sin(x)


def in_doubles():
    return InDoubles(), torch.rand(5, 3, dtype=torch.float64)


class Leaky(nn.Module):
    """A model that ExecuTorch cannot lower: the op has no out variant."""

    def forward(self, x):
        return nn.functional.rrelu(x, training=True)


def leaky():
    return Leaky(), torch.rand(5)


class LeastSquares(nn.Module):
    """A model that ``torch.export`` refuses."""

    def forward(self, x):
        return torch.linalg.lstsq(x, x)[0]


def least_squares():
    return LeastSquares(), torch.rand(3, 3)


class Named(NamedTuple):
    first: torch.Tensor
    others: tuple[torch.Tensor, ...]


@dataclass
class Result:
    """A dataclass that torch does not know."""

    named: Named
    middle: Any
    size: int
    absent: torch.Tensor | None = None


class Unusual(nn.Module):
    """Operators outside the core ATen opset, and a result in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.lgamma(self.before(x).exp())
        x = x + torch.view_as_real(torch.view_as_complex(x.reshape(-1, 3, 2))).reshape(-1, 6)
        x = self.after(x)
        return Result(Named(x, (x + 1,)), (torch.mode(x, 1), None), 7)


def unusual():
    return Unusual(), torch.rand(4, 6)


def stalling():
    """A model whose conversion signals its start by ``$STALLED`` and does not end."""

    convert = coremltools().convert

    def stall(*args, **keywords):
        if "package_dir" not in keywords:  # a trial of one call
            return convert(*args, **keywords)
        Path(os.environ["STALLED"]).touch()
        return time.sleep(600)

    coremltools().convert = stall
    return tiny()


class Assorted(nn.Module):
    """Arguments and results of every kind, and an input that is written."""

    def __init__(self, final=0.0):
        super().__init__()
        self._final = final

    def forward(self, x, form, scale, absent, options):
        x.add_(1)
        y = nn.functional.gelu(x, approximate=form) * scale * options["factor"]
        z = x - 1
        x.add_(self._final)
        return {"y": y, "none": absent, "rows": x.shape[0]}, [options["on"], 0.1, (z,)]


def assorted(final=0.0):
    options = {"on": True, "factor": 0.5}
    return Assorted(final), (torch.randn(2, 3), "tanh", 3, None, options)


def assorted_with_another_final():
    return assorted(1.0)


class Scaled(nn.Module):
    def forward(self, x, scale):
        return x * scale, scale


def scaled():
    return Scaled(), (torch.randn(2, 3), 2)


class Returning(nn.Module):
    def __init__(self, value):
        super().__init__()
        self._value = value

    def forward(self, x):
        return self._value, x + 1 if isinstance(self._value, str) else None


def returning_text():
    return Returning("text"), torch.randn(3)


def returning_a_number():
    return Returning(3), torch.randn(3)


class Overflowing(nn.Module):
    """A division by a mean of squares that overflow in fp16: zeros there."""

    def forward(self, x):
        x = x * 1000
        return x / (torch.mean(x * x) * 1e-3 + 1)


def overflowing():
    return Overflowing(), torch.randn(4, 8)


class Sensitive(nn.Module):
    """Three layers; the middle layer has a large weight in each row, for an input of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 8)
        with torch.no_grad():
            self.first.weight[0] = 0
            self.first.bias[0] = 0
            self.middle.weight[:, 0] = 3

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


class Squares(nn.Module):
    """Integers whose squares may be beyond int32, and the squares' remainders."""

    def forward(self, x):
        squares = x * x
        return squares.sum(), torch.remainder(squares, 7) > 3, x + 1


def squares():
    return Squares(), torch.tensor([2, 3])


def sensitive():
    return Sensitive(), torch.randn(2, 32)


def sensitive_samples():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 32, generator=generator) for _ in range(4)]


def no_samples():
    return []


def wide():
    """Weights of more than 2048 elements, one with rows of 96."""
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), torch.randn(2, 64)


class Attending(nn.Module):
    """PyTorch's own attention between linear layers."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 8)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        x = self.before(x)
        return self.after(self.attention(x, x, x, need_weights=False)[0])


def attending():
    return Attending(), (torch.rand(1, 6, 32),)


class Keyworded(nn.Module):
    """Inputs with different effects on the result."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, factor, *, rows, **unused):
        return self.after(self.before(x) * factor) + rows.mean()


def keyworded():
    """Keyword inputs beside a positional input, in another order than in ``forward``."""
    keywords = {"rows": torch.randn(5, 4), "factor": torch.rand(2, 8)}
    return Keyworded(), (torch.randn(2, 8),), keywords


def keyword_samples():
    generator = torch.Generator().manual_seed(1)
    shapes = {"factor": (2, 8), "rows": (5, 4), "x": (2, 8)}
    for _ in range(100):
        yield {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def unknown_keyword():
    return Keyworded(), {"y": torch.randn(2, 8)}


class Spectrum(nn.Module):
    """Returns complex numbers, which a program cannot return."""

    def forward(self, x):
        return torch.fft.rfft(x)


def spectrum():
    return Spectrum(), torch.rand(2, 8)


def two_positional():
    return Keyworded(), torch.randn(2, 8), torch.rand(2, 8)


@dataclass
class Step:
    """Inputs in a dataclass that torch does not know."""

    past: Named
    weights: dict[str, Any]


class Stepping(nn.Module):
    """Every kind of container, and a member that the model writes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, step, *rest, bias, scale):
        step.past.first.mul_(2)
        x = self.linear(step.past.first) * scale + step.past.others[0].sum()
        x = x + rest[0] * step.weights["a b"][0]
        return Step(Named(x, (rest[1] - x,)), {"file": torch.max(x, 1), "a b": bias + x})


def stepping():
    step = Step(Named(torch.randn(2, 4), (torch.randn(2),)), {"a b": [torch.randn(4)]})
    rest = (torch.randn(2, 4), torch.randn(2, 4))
    return Stepping(), (step, *rest), {"scale": 2, "bias": torch.randn(4)}


def decoder_with_cache():
    """A model of transformers that returns its cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    return GPT2LMHeadModel(config), {"input_ids": torch.arange(4)[None]}


def bert():
    """A transformers model, with inputs as its tokenizers return them."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    return BertModel(config), {"input_ids": torch.arange(8)[None], "attention_mask": mask}


def stalling_calibration():
    """A model whose calibration signals its start by ``$STALLED`` and does not end."""
    from torchao.quantization.pt2e import quantize_pt2e

    def stall(*_args, **_keywords):
        Path(os.environ["STALLED"]).touch()
        time.sleep(600)

    quantize_pt2e.prepare_pt2e = stall
    return sensitive()


def ending():
    """A model whose process is killed while it is loaded."""
    os.kill(os.getpid(), signal.SIGSEGV)


def endless():
    """A model whose loading signals its start by ``$STALLED`` and does not end."""
    Path(os.environ["STALLED"]).touch()
    time.sleep(600)


def insatiable():
    """A model that takes memory until it is stopped."""
    buffers = []
    while True:
        buffers.append(torch.ones(10_000_000))
        time.sleep(0.02)


def stalling_once():
    """A model whose first loading signals its start by ``$STALLED`` and does not end."""
    stalled = Path(os.environ["STALLED"])
    if not stalled.exists():
        stalled.write_text(str(os.getppid()))
        time.sleep(600)
    return tiny()


def ending_its_parent():
    """A model that ends the parent process."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


class Exponentials(nn.Module):
    """Sums that leave the range of fp16, and come back by a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x)
        return torch.log((y.exp() * 5000).sum(-1) * 900), y


def exponentials():
    return Exponentials(), torch.randn(2, 16)


class Choice(nn.Module):
    """Sums that leave the range of fp16 in a branch.

    Inside of a delegate, calls in branches cannot be kept in fp32.
    """

    def forward(self, x):
        def overflow(x):
            return torch.log((x.exp() * 5000).sum(-1) * 900)

        return torch.cond(x.sum() > 0, overflow, lambda x: x.sum(-1) * 1.0, (x,))


def unreachable():
    return Choice(), torch.rand(2, 16)


class Doubling(nn.Module):
    """Takes integers; the example is beyond int32, which no delegate accepts."""

    def forward(self, x):
        return x + x


def doubling():
    return Doubling(), torch.tensor([2**40, 3])

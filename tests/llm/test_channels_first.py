"""Functions of tensors with the channels first equal torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.channels_first import ChannelsFirst, Parts

LENGTH, HEADS, WIDTH = 5, 3, 4
CHANNELS = HEADS * WIDTH


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


WEIGHT, VECTOR, ROWS = random(7, CHANNELS), random(CHANNELS), random(1, LENGTH, WIDTH)
KERNEL = random(CHANNELS, 1, 3)


def rotated(x: Any) -> Any:
    first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.cat((-second, first), dim=-1)


def heads(x: Any) -> Any:
    return x.view(1, LENGTH, -1, WIDTH).transpose(1, 2)


def depthwise(x: Any) -> Any:
    x = x.transpose(-1, -2)
    return functional.conv1d(x, KERNEL, padding=2, groups=CHANNELS)[:, :, :LENGTH]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: functional.linear(x, WEIGHT, WEIGHT[:, 0]),
    "sum with a vector": lambda x: VECTOR + x * VECTOR - 1 / (3 - x * 0.1),
    "functions": lambda x: functional.silu(x) * functional.gelu(x) + torch.tanh(x.exp()),
    "root mean square": lambda x: VECTOR * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)),
    "layer norm": lambda x: functional.layer_norm(x, (CHANNELS,), VECTOR, VECTOR),
    "layer norm without weight": lambda x: functional.layer_norm(x, (CHANNELS,)),
    "halves": lambda x: torch.mul(*x.float().to(torch.float32).chunk(2, dim=-1)),
    "parts": lambda x: sum(x.split(WIDTH, dim=-1)),
    "tokens": lambda x: x[:, -3:-1].contiguous(),
    "heads": heads,
    "heads joined": lambda x: heads(x).transpose(1, 2).reshape(1, LENGTH, -1),
    "norm of a head": lambda x: heads(x).square().mean(-1, keepdim=True) * heads(x),
    "rotated": lambda x: heads(x) * ROWS.unsqueeze(1) + rotated(heads(x)),
    "tokens last": lambda x: x.transpose(1, 2).type_as(x),
    "convolution": depthwise,
    "orders mixed": lambda x: x.transpose(1, 2) + x.transpose(1, 2).transpose(1, 2).transpose(1, 2),
    "dropout": lambda x: functional.dropout(x, 0.5, training=False),
}


def channels_first(x: torch.Tensor) -> ChannelsFirst:
    return ChannelsFirst.of_channels(x.permute(0, 2, 1).unsqueeze(2))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    x = random(1, LENGTH, CHANNELS)
    expected, actual = FUNCTIONS[name](x), FUNCTIONS[name](channels_first(x))
    assert actual.shape == expected.shape
    assert actual.data.dim() == 4
    torch.testing.assert_close(actual.tensor(), expected)


def test_a_rotation_by_rows_with_the_channels_first_moves_nothing():
    query = heads(channels_first(random(1, LENGTH, CHANNELS)))
    rows = ChannelsFirst(ROWS[None].transpose(2, 3), (0, 3, 2))
    product = query * rows.unsqueeze(1)
    assert (product.order, product.data.shape) == (query.order, query.data.shape)
    expected = query.tensor() * ROWS.unsqueeze(1)
    torch.testing.assert_close(product.tensor(), expected)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: torch.cumsum(x, 1),
            r"no form for the neural engine: got cumsum of \[1, 5, 12\]",
        ),
        (lambda x: x[:, 0], "got __getitem__"),
        (lambda x: x[..., ::2], "got __getitem__"),
        (lambda x: x.reshape(1, CHANNELS, LENGTH), "got reshape"),
        (lambda x: x.mean(-1), "got mean"),
        (lambda x: functional.linear(heads(x), WEIGHT[:, :WIDTH]), "got linear"),
        (lambda x: functional.conv1d(x.transpose(1, 2), KERNEL, stride=2), "got conv1d"),
        (lambda x: functional.layer_norm(x, (LENGTH, CHANNELS)), "got layer_norm"),
        (lambda x: heads(x).unsqueeze(0), "got unsqueeze"),
        (lambda x: Parts([x.data]) * VECTOR, "got mul"),
        (lambda x: Parts([x.data]).mean(-1), "got mean"),
    ],
)
def test_other_functions_are_named(function, message):
    with pytest.raises(LoweringError, match=message):
        function(channels_first(random(1, LENGTH, CHANNELS)))


def test_parts_compute_as_one_tensor():
    x = random(1, 9)
    parts = torch.tanh(Parts(x.split(4, dim=1)) / 3.0) * 3.0
    torch.testing.assert_close(torch.cat(parts.parts, dim=1), torch.tanh(x / 3.0) * 3.0)

"""Recurrences over chunks, compared with the loops of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from support.tolerances import logits_bounds

from coreml_delegate.llm.recurrences import chunk_scan, gated_delta_rule, selective_scan
from coreml_delegate.llm.states import RECURRENCE, Span, StateLayer
from coreml_delegate.patches.third_party import torchvision_importable

NAME = (RECURRENCE, 0)
LENGTHS = [1, 2, 3, 5, 8, 13, 16, 17]


def theirs(family: str, name: str) -> Any:
    """A function of transformers."""
    with torchvision_importable():
        return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer(state: torch.Tensor, position: int, length: int, last: int | None = None) -> StateLayer:
    """States before a call of a length."""
    index = None if last is None else torch.tensor([last])
    return StateLayer({NAME: state}, Span(torch.tensor([position]), length, index), write=False)


def assert_close(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        atol, rtol = logits_bounds(other)
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def mamba_1(length: int) -> tuple[Any, ...]:
    channels, numbers = 6, 4
    inputs, steps = rand(1, channels, length), rand(1, channels, length) + 1
    into, out = rand(1, numbers, length), rand(1, numbers, length) - 1
    return inputs, steps, -rand(channels, numbers).exp(), into, out


MAMBA_1 = {"D": rand(6), "delta_bias": rand(6), "delta_softplus": True}
MAMBA_2 = {"D": rand(4), "dt_bias": rand(4), "dt_softplus": True, "chunk_size": 8}


def mamba_2(length: int) -> tuple[Any, ...]:
    heads, width, groups, numbers = 4, 3, 2, 5
    sizes = rand(1, length, heads, width), rand(1, length, heads), -rand(heads).exp()
    return (*sizes, rand(1, length, groups, numbers), rand(1, length, groups, numbers) + 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_mamba_1_equals_the_loop(length):
    """Theirs begins at zero, so what came before is a part of their text and not of ours."""
    whole = mamba_1(7 + length)
    before, given = (
        [each if each is whole[2] else each[:, :, part] for each in whole]
        for part in (slice(7), slice(7, None))
    )
    scan = theirs("mamba", "mamba_selective_scan")
    expected, state = scan(*whole, **MAMBA_1, return_last_state=True)
    _, past = scan(*before, **MAMBA_1, return_last_state=True)
    made = selective_scan(layer(past, 7, length), *given, **MAMBA_1)
    assert_close(made, (expected[:, :, 7:], state))


@pytest.mark.parametrize("length", LENGTHS)
def test_mamba_2_equals_its_own_form(length):
    past, given = rand(1, 4, 3, 5), mamba_2(length)
    options = {**MAMBA_2, "initial_states": past, "return_final_states": True}
    expected = theirs("mamba2", "mamba2_chunk_scan")(*given, **options)
    assert_close(chunk_scan(layer(past, 3, length), *given, **MAMBA_2), expected)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("length", [*LENGTHS, 64])
def test_the_gated_delta_rule_equals_the_loop(length, alike):
    """Equal keys that are taken whole make the system of the tokens as hard as it gets."""
    query, key, value = rand(1, length, 2, 6), rand(1, length, 2, 6), rand(1, length, 4, 5)
    key = key[:, :1].expand(key.shape) if alike else key
    decay = torch.zeros(1, length, 4) if alike else -rand(1, length, 4).abs()
    share = torch.ones(1, length, 4) if alike else rand(1, length, 4).sigmoid()
    past = rand(1, 4, 6, 5)
    given = {"g": decay, "beta": share, "use_qk_l2norm_in_kernel": True}
    expected = theirs("qwen3_5", "torch_recurrent_gated_delta_rule")(
        query, key, value, **given, initial_state=past, output_final_state=True
    )
    assert_close(gated_delta_rule(layer(past, 3, length), query, key, value, **given), expected)


@pytest.mark.parametrize(
    ("function", "given", "options", "state", "axis"),
    [
        (selective_scan, mamba_1(9), MAMBA_1, rand(1, 6, 4), 2),
        (chunk_scan, mamba_2(9), MAMBA_2, rand(1, 4, 3, 5), 1),
    ],
)
@pytest.mark.parametrize("count", range(1, 10))
def test_padding_leaves_the_state_as_it_is(function, given, options, state, axis, count):
    cut = [a.narrow(axis, 0, count) if a.dim() > 2 else a for a in given]
    expected = function(layer(state, 1, count), *cut, **options)
    made, after = function(layer(state, 1, 9, count - 1), *given, **options)
    assert_close((made.narrow(axis, 0, count), after), expected)

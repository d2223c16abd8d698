"""Layers that keep whole states: padding, beginnings of texts, and what the file declares."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from llm.test_families import CONTEXT, lowered, model
from support.llm_families import FAMILIES
from support.tolerances import SQNR_FP16, logits_bounds, sqnr_db

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.cached_decoder import write_cache
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.decoder_methods import Decode, Forward, Prefill
from coreml_delegate.llm.export import export_methods
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.options.compile_specs import Precision

STATEFUL = [name for name, family in FAMILIES.items() if family.states]
LENGTH = 36
TOKENS = torch.randint(3, 97, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@functools.cache
@torch.no_grad()
def expected(name: str) -> torch.Tensor:
    return model(name)(TOKENS, use_cache=False).logits[0]


@functools.cache
def decoder(name: str) -> Decoder:
    return Decoder(model(name), context=CONTEXT)


def empty_caches(made: Decoder) -> list[torch.Tensor]:
    """Rows of zeros, and states that must not be read at the beginning of a text."""
    caches = [each for layer in made.layers for each in layer.empty(CONTEXT, 0).values()]
    for number in made.replaced:
        caches[number].fill_(float("nan"))
    return caches


def padded(start: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chunk of tokens with others behind its last one, its position, and the last one's index."""
    chunk = torch.full((1, length), 11)
    chunk[:, :count] = TOKENS[:, start : start + count]
    return chunk, torch.tensor([start]), torch.tensor([count - 1])


@pytest.mark.share(4)
@pytest.mark.parametrize("chunk", [2, 5, 8])
@pytest.mark.parametrize("name", STATEFUL)
@torch.no_grad()
def test_chunks_of_every_length_continue_a_text(name, chunk):
    made = decoder(name)
    prefill, decode, forward = Prefill(made), Decode(made), Forward(made, chunk, CONTEXT)
    caches, start, turn = empty_caches(made), 0, 0
    atol, rtol = logits_bounds(expected(name))

    def check(logits: torch.Tensor) -> None:
        torch.testing.assert_close(logits[0], expected(name)[start - 1], atol=atol, rtol=rtol)

    while start + chunk <= LENGTH:
        count = turn % chunk + 1
        inputs = padded(start, count, chunk)
        if turn % (chunk + 1) == chunk:
            count, inputs = 1, padded(start, 1, chunk)
            logits, *new = decode(TOKENS[:, start : start + 1], inputs[1], caches)
        else:
            logits, *new = prefill(*inputs, caches)
        kept = forward(*inputs)
        for number, (cache, values) in enumerate(zip(caches, new, strict=True)):
            write_cache(cache, values, start, count, replace=number in made.replaced)
        start, turn = start + count, turn + 1
        check(logits)
        check(kept)


@torch.no_grad()
def test_buffers_of_an_earlier_text_count_for_nothing():
    made = decoder("lfm2")
    forward = Forward(made, 8, CONTEXT)
    first = forward(*padded(0, 8, 8))
    forward(*padded(8, 8, 8))
    assert torch.equal(forward(*padded(0, 8, 8)), first)


def again(generator: Generator) -> bool:
    """Whether a text has the same logits after another one."""
    tokens = TOKENS[0, :11].tolist()
    first = generator.feed(tokens)
    generator.feed(tokens)
    generator.reset()
    return torch.equal(first, generator.feed(tokens))


def test_the_file_says_which_caches_are_replaced():
    generator = lowered("lfm2")
    assert generator.layout.replaced == (0,)
    assert generator.layout.constants()["get_llm_layout_version"] == 3
    assert again(generator)
    logits = generator.feed(TOKENS[0, 11:].tolist())
    atol, rtol = logits_bounds(expected("lfm2"))
    generator.reset()
    logits = generator.feed(TOKENS[0].tolist())
    torch.testing.assert_close(logits, expected("lfm2")[-1], atol=atol, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [CacheKind.IO, CacheKind.STATE])
@pytest.mark.parametrize("name", STATEFUL)
def test_fp16_stays_close_and_begins_anew(name, cache):
    generator = lowered(name, Precision.FLOAT16, cache)
    assert bool(generator.layout.replaced) == (cache is CacheKind.IO)
    assert again(generator)
    generator.reset()
    made = [generator.feed([token]) for token in TOKENS[0].tolist()]
    assert sqnr_db(expected(name).numpy(), torch.stack(made).numpy()) > SQNR_FP16


def test_a_layout_without_the_replaced_caches_is_refused():
    layout = Layout(97, CONTEXT, 8, CacheKind.IO)
    with pytest.raises(OptionError, match=r"got replaced caches \(\), expected \(0,\)"):
        export_methods(decoder("lfm2"), layout)


def test_plain_decoders_keep_their_layout():
    plain: Any = decoder_of_rows()
    assert plain.replaced == ()
    layout = Layout(97, CONTEXT, 8, CacheKind.IO).constants()
    assert layout["get_llm_layout_version"] == 2
    assert "get_replaced_caches" not in layout


def decoder_of_rows() -> Decoder:
    return Decoder(model("llama"), context=CONTEXT)

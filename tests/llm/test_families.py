"""Architectures of transformers: the same logits and tokens as its own modules, or one error."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from llm import family_table
from support.checkpoints import CONFIG, tiny_model
from support.llm_families import FAMILIES, REFUSED, WINDOW
from support.lowering import fp32_specs
from support.tolerances import SQNR_FP16, logits_bounds, sqnr_db

from coreml_delegate import CoreMLPartitioner
from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.targets import Opset

CONTEXT, CHUNK, STEPS = 96, 8, 64
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
_SIZES = {"max_position_embeddings": CONTEXT}


def model(name: str) -> Any:
    return tiny_model(name, **{**_SIZES, **FAMILIES[name].changes})


@functools.cache
@torch.no_grad()
def expected(name: str) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers, computed on whole texts, and the logits behind each."""
    module, tokens = model(name), list(PROMPT)
    for _ in range(STEPS):
        tokens.append(int(module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :], module(torch.tensor([tokens]), use_cache=False).logits[0]


def lowered(
    name: str, precision: Precision = Precision.FLOAT32, cache: CacheKind = CacheKind.IO
) -> Generator:
    decoder = Decoder(model(name), context=CONTEXT)
    assert decoder.ordered == FAMILIES[name].copies
    windows = [layer.window for layer in decoder.layers]
    assert {"": {None}, "all": {WINDOW}, "some": {None, WINDOW}}[FAMILIES[name].window] == set(
        windows
    )
    replaced = decoder.replaced if cache is CacheKind.IO else ()
    layout = Layout(CONFIG["vocab_size"], CONTEXT, CHUNK, cache, replaced=replaced)
    specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower(export_methods(decoder, layout), layout, partitioner).buffer
    assert [len(report.partitions) for report in partitioner.reports] == [1] * len(layout.methods)
    assert not any(report.undelegated for report in partitioner.reports)
    return Generator.load(program, engine="openvino")


def logits_of(generator: Generator, tokens: list[int]) -> torch.Tensor:
    """Logits behind a prompt, and behind each token after it."""
    made = [generator.feed(PROMPT), *(generator.feed([token]) for token in tokens)]
    return torch.stack(made)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if family.quick else pytest.mark.slow)
        for name, family in FAMILIES.items()
    ],
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    tokens, logits = expected(name)
    actual = logits_of(lowered(name), tokens)
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(actual, logits[len(PROMPT) - 1 :], atol=atol, rtol=rtol)
    assert actual[:-1].argmax(-1).tolist() == tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", CacheKind.STATE),
        ("gemma3_text", CacheKind.STATE),
        ("mistral", CacheKind.STATE),
        ("bloom", CacheKind.STATE),
        ("gpt2", CacheKind.STATE),
        ("gemma2", CacheKind.IO),
        ("cohere", CacheKind.IO),
        ("olmo", CacheKind.IO),
        ("granite_swa", CacheKind.STATE),
        ("mixtral", CacheKind.STATE),
        ("deepseek_v3", CacheKind.IO),
        ("gpt_oss", CacheKind.IO),
    ],
)
def test_fp16_and_states_stay_close(name, cache):
    """A window in a state is a ring with room for the padding of a chunk."""
    tokens, logits = expected(name)
    actual = logits_of(lowered(name, Precision.FLOAT16, cache), tokens)
    assert sqnr_db(logits[len(PROMPT) - 1 :].numpy(), actual.numpy()) > SQNR_FP16


@pytest.mark.share(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name):
    changes, message, _ = REFUSED[name]
    with pytest.raises(CoreMLDelegateError, match=message):
        Decoder(tiny_model(name, **changes), context=64)


def test_the_page_lists_the_families():
    text = family_table.PAGE.read_text()
    assert family_table.page(text) == text, "run python -m tests.llm.family_table"

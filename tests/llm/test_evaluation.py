"""Perplexity in windows, beside the perplexity that transformers' own loss gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from llm.test_families import CONTEXT, lowered, model
from llm.test_standard_layout import SAMPLE, foreign, prompt
from llm.test_standard_layout import lowered as lowered_standard
from support.tolerances import PERPLEXITY_FP32

from coreml_delegate.errors import InputError, OptionError, ProgramError
from coreml_delegate.llm.evaluation import (
    Window,
    perplexity,
    perplexity_of,
    predict_with_module,
    predict_with_program,
    window_loss,
    windows,
)
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind

pytestmark = pytest.mark.xdist_group("standard")
TEXT = prompt(70)


@torch.no_grad()
def expected(name: str, tokens: Sequence[int], context: int, stride: int) -> float:
    """The perplexity by the loss of transformers, with labels of -100 for tokens to leave out."""
    module, losses, before = model(name), [], 0
    for start in range(0, len(tokens), stride):
        stop = min(start + context, len(tokens))
        inputs = torch.tensor([tokens[start:stop]])
        labels = inputs.clone()
        labels[:, : before - start if before > start else 0] = -100
        count = int((labels[0, 1:] != -100).sum())
        if count:
            losses += [float(module(inputs, labels=labels, use_cache=False).loss)] * count
        if stop == len(tokens):
            break
        before = stop
    return math.exp(sum(losses) / len(losses))


def measured(generator: Generator, context: int, stride: int | None) -> float:
    return perplexity(predict_with_program(generator), TEXT, context=context, stride=stride)


@pytest.mark.parametrize("cache", SAMPLE)
@pytest.mark.parametrize(("context", "stride"), [(32, None), (32, 10), (CONTEXT, None)])
def test_perplexity_of_standard_programs(cache, context, stride):
    name = SAMPLE[cache]
    generator = Generator.load(lowered_standard(name, cache), engine="openvino")
    assert measured(generator, context, stride) == pytest.approx(
        expected(name, TEXT, context, stride or context), rel=PERPLEXITY_FP32
    )


def test_perplexity_of_a_program_with_caches_as_inputs():
    generator = lowered("llama", cache=CacheKind.IO)
    assert measured(generator, 32, 20) == pytest.approx(
        expected("llama", TEXT, 32, 20), rel=PERPLEXITY_FP32
    )


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("dynamic", [False, True])
def test_logits_of_all_tokens_take_one_call(dynamic):
    generator = Generator.load(foreign(dynamic=dynamic))
    assert measured(generator, 40, 25) == pytest.approx(
        expected("llama", TEXT, 40, 25), rel=PERPLEXITY_FP32
    )
    generator.reset()
    assert [len(part) for part in generator.follow(TEXT[:6])] == ([6] if dynamic else [1] * 6)


def test_perplexity_of_the_model_in_torch():
    predict = predict_with_module(model("llama"))
    assert perplexity(predict, TEXT, context=32, stride=24) == pytest.approx(
        expected("llama", TEXT, 32, 24), rel=PERPLEXITY_FP32
    )


@pytest.mark.parametrize(
    ("length", "context", "stride", "parts"),
    [
        (10, 4, None, [(0, 4, 3), (4, 8, 3), (8, 10, 1)]),
        (9, 4, 4, [(0, 4, 3), (4, 8, 3)]),  # the last token would be a window without a prediction
        (10, 4, 2, [(0, 4, 3), (2, 6, 2), (4, 8, 2), (6, 10, 2)]),
        (5, 4, 1, [(0, 4, 3), (1, 5, 1)]),
        (3, 4, 2, [(0, 3, 2)]),
    ],
)
def test_windows(length, context, stride, parts):
    assert windows(length, context, stride) == [Window(*part) for part in parts]


@pytest.mark.parametrize("stride", range(1, 8))
def test_overlapping_windows_predict_every_token_but_the_first_once(stride):
    parts = windows(50, 8, stride)
    predicted = [token for part in parts for token in range(part.stop - part.count, part.stop)]
    assert predicted == list(range(1, 50))
    assert all(part.count <= stride for part in parts[1:])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((10, 1), OptionError, "the context is too short: got 1"),
        ((10, 4, 5), OptionError, "the stride is out of range: got 5, expected 1 to 4"),
        ((10, 4, 0), OptionError, "the stride is out of range: got 0"),
        ((1, 4), InputError, "the text is too short: got 1 tokens"),
    ],
)
def test_impossible_windows_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        windows(*arguments)


def test_logits_that_are_not_numbers_are_an_error_and_infinite_losses_are_not():
    (part,) = windows(4, 8)

    def predict(value: float):
        return lambda tokens, count: [torch.tensor([[value, 0.0]]).expand(count, 2)]

    with pytest.raises(ProgramError, match="NaN in the window of the tokens 0 to 3"):
        window_loss(predict(math.nan), [0, 1, 0, 1], part)
    loss = window_loss(predict(-math.inf), [0, 1, 0, 1], part)
    assert perplexity_of([loss], [part]) == math.inf


def test_a_window_has_to_fit_into_the_context():
    generator = Generator.load(lowered_standard("llama", CacheKind.STATE), engine="openvino")
    tokens = prompt(CONTEXT + 20)
    (part,) = windows(len(tokens), len(tokens))
    with pytest.raises(InputError, match=f"the context of {CONTEXT} tokens is too short"):
        window_loss(predict_with_program(generator), tokens, part)

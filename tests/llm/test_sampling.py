"""Sampling: distributions, filters, penalties and probabilities, beside those of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from llm.test_families import model
from llm.test_standard_layout import SAMPLE, lowered, prompt
from support.tolerances import logits_bounds
from transformers.generation import logits_process

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.candidates import Candidates, Selection
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind
from coreml_delegate.llm.sampling import Sampler, Sampling

pytestmark = pytest.mark.xdist_group("standard")


def test_draws_have_the_right_distribution():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    sampler = Sampler(Sampling(temperature=1.0))
    drawn = torch.bincount(torch.tensor([sampler(logits) for _ in range(4000)])) / 4000
    torch.testing.assert_close(drawn, logits.exp(), atol=0.04, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(), {1}),
        (Sampling(temperature=1.0, top_k=1), {1}),
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.35), {1}),
        (Sampling(temperature=1.0, top_p=0.75), {1, 2, 3}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.7), {1, 3}),
        (Sampling(temperature=1.0, min_p=0.6), {1, 3}),
        (Sampling(temperature=1.0, min_p=0.4, top_p=0.6), {1, 3}),
        (Sampling(temperature=1.0, min_p=1.0), {1}),
        (Sampling(temperature=0.01), {1}),
        (Sampling(temperature=100.0), {0, 1, 2, 3}),
    ],
)
def test_filters_limit_the_draw(sampling, drawn):
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    sampler = Sampler(sampling)
    assert {sampler(logits) for _ in range(200)} == drawn


def test_equal_seeds_draw_equal_tokens():
    logits = torch.zeros(1000)
    first, again, other = (Sampler(Sampling(1.0, seed=seed)) for seed in (5, 5, 6))
    tokens = [[sampler(logits) for _ in range(8)] for sampler in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
    ],
)
def test_sampling_settings_out_of_range_are_refused(setting):
    with pytest.raises(OptionError, match=f"{next(iter(setting))} is out of range"):
        Sampling(**setting)


@pytest.mark.parametrize("penalty", [0.7, 1.4])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    random = torch.Generator().manual_seed(0)
    text = list(range(0, 50, 3))
    processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    sampler = Sampler(Sampling(repetition_penalty=penalty))
    sampler.begin(text)
    for _ in range(20):
        logits = torch.randn(50, generator=random)
        expected = processor(torch.tensor([text]), logits[None].clone())[0].argmax()
        text.append(sampler(logits))
        assert text[-1] == expected


@pytest.mark.parametrize("min_p", [0.05, 0.3])
def test_min_p_keeps_the_tokens_of_transformers(min_p):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    kept = logits_process.MinPLogitsWarper(min_p)(torch.tensor([[0]]), logits[None].clone())[0]
    sampler = Sampler(Sampling(temperature=1.0, min_p=min_p))
    drawn = {sampler(logits) for _ in range(3000)}
    assert drawn == set(kept.isfinite().nonzero().flatten().tolist())


def test_the_presence_penalty_is_subtracted_once_for_a_generated_token():
    sampler = Sampler(Sampling(presence_penalty=1.0))
    sampler.begin([2])
    logits = torch.tensor([0.0, 0.5, 2.0, 1.9])
    assert [sampler(logits) for _ in range(5)] == [2, 3, 2, 2, 2]


def test_penalties_order_selected_candidates_again():
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    sampler.begin([7])
    assert sampler.choose(Candidates(torch.tensor([7, 5, 4]), torch.tensor([3.0, 2.0, 2.0]))) == 4
    assert sampler.choose(Candidates(torch.tensor([7, 5, 4]), torch.tensor([3.0, 2.0, 2.0]))) == 5


def test_generated_text_and_probabilities_are_those_of_transformers():
    """The tokens of the context before the prompt count, too."""
    name, text, count = SAMPLE[CacheKind.BUFFER], prompt(9), 16
    module = model(name)
    expected = module.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, len(text), dtype=torch.long),
        max_new_tokens=count,
        eos_token_id=None,
        do_sample=False,
        repetition_penalty=1.3,
    )[0, len(text) :].tolist()
    generator = Generator.load(lowered(name, CacheKind.BUFFER), engine="openvino")
    sampler = Sampler(Sampling(repetition_penalty=1.3), logprobs=3)
    generator.feed(text[:4])
    assert list(generator.generate(text[4:], sampler, limit=count)) == expected
    with torch.no_grad():
        logits = module(torch.tensor([text + expected]), use_cache=False).logits[0]
    shares = logits[len(text) - 1 : -1].double().log_softmax(-1)
    atol, rtol = logits_bounds(logits)
    assert [entry.token for entry in sampler.log_probabilities] == expected
    for entry, row in zip(sampler.log_probabilities, shares, strict=True):
        largest = row.topk(3)
        assert list(entry.most_probable) == largest.indices.tolist()
        actual = torch.tensor([entry.chosen, *entry.most_probable.values()], dtype=torch.float64)
        wanted = torch.cat((row[entry.token, None], largest.values))
        torch.testing.assert_close(actual, wanted, atol=2 * atol, rtol=rtol)


def test_probabilities_of_the_chosen_tokens_only():
    sampler = Sampler(Sampling(), logprobs=0)
    assert sampler(torch.zeros(4)) == 0
    (entry,) = sampler.log_probabilities
    assert (entry.chosen, entry.most_probable) == (pytest.approx(-math.log(4)), {})


def test_probabilities_need_the_logits_of_all_tokens():
    sampler = Sampler(Sampling(temperature=1.0), logprobs=1)
    sampler.check(None)
    with pytest.raises(OptionError, match=r"probabilities are unknown: got .*top-k:5"):
        sampler.check(Selection(5))
    with pytest.raises(OptionError, match="logprobs is out of range"):
        Sampler(Sampling(), logprobs=-1)

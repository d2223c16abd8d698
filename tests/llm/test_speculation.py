"""Proposed tokens, verified together: the tokens and the context are those without proposals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from llm.standard_programs import load, program
from llm.test_families import CHUNK, CONTEXT, model
from llm.test_standard_layout import VOCABULARY, Runner, check_texts, greedy, lowered, prompt
from support.llm_families import FAMILIES, WINDOW
from support.text_tokenizer import save_tokenizer

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.evaluation import perplexity, predict_with_program
from coreml_delegate.llm.export import export_methods
from coreml_delegate.llm.generator import Ending, Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.sampling import Sampler, Sampling
from coreml_delegate.llm.speculation import Draft, PromptLookup

pytestmark = pytest.mark.xdist_group("standard")

KINDS = [
    ("llama", CacheKind.STATE),
    *(
        pytest.param(*kind, marks=pytest.mark.slow)
        for kind in (
            ("llama", CacheKind.BUFFER),
            ("gemma3_text", CacheKind.STATE),
            ("gemma3_text", CacheKind.BUFFER),
            ("bloom", CacheKind.STATE),
        )
    ),
]
"""Families and caches: gemma3_text has windows, as rings."""


class Oracle:
    """Proposes the right tokens, except each ``wrong``-th."""

    def __init__(self, tokens: Sequence[int], wrong: int) -> None:
        self._tokens = list(tokens)
        self._count = itertools.count(1)
        self._wrong = wrong

    def __call__(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        assert list(tokens) == self._tokens[: len(tokens)]
        following = self._tokens[len(tokens) : len(tokens) + most]
        return [
            (token + 1) % VOCABULARY if next(self._count) % self._wrong == 0 else token
            for token in following
        ]


@pytest.mark.parametrize(("name", "cache"), KINDS)
def test_greedy_tokens_are_those_without_proposals(name, cache):
    """Wrong proposals at any place, in texts that are longer than the windows."""
    text, count = prompt(5), CONTEXT - 4
    expected = greedy(name, text, count)
    generator = load(name, cache)
    for wrong in (1, 2, 3, 5, 1000):
        generator.reset()
        generator.speculate(Oracle([*text, *expected], wrong))
        made = []
        for token in generator.generate(text, lambda logits: int(logits.argmax())):
            made.append(token)
            assert generator.position == len(text) + len(made) - 1
        assert made == expected
        assert generator.ending is Ending.CONTEXT
        statistics = generator.speculation
        assert statistics.calls + statistics.accepted == count - 1
        assert generator.decode.tokens > 0
        generator.decode.tokens = 0
        if wrong == 1:
            assert statistics.accepted == 0
    if not FAMILIES[name].window or cache is CacheKind.STATE:
        assert statistics.tokens_per_call > CHUNK / 2


def test_draws_and_probabilities_are_those_without_proposals():
    """The same seeds give the same tokens, with penalties that depend on all tokens before."""
    text, settings = prompt(7), Sampling(1.0, top_k=20, seed=3, repetition_penalty=1.2)
    generator = load("llama", CacheKind.STATE)
    plain = Sampler(settings, logprobs=2)
    expected = list(generator.generate(text, plain, limit=30))
    for wrong in (2, 3, 1000):
        generator.reset()
        generator.speculate(Oracle([*text, *expected], wrong))
        sampler = Sampler(settings, logprobs=2)
        assert list(generator.generate(text, sampler, limit=30)) == expected
        assert generator.ending is Ending.LIMIT
        assert generator.speculation.accepted > 5
        for ours, theirs in zip(sampler.log_probabilities, plain.log_probabilities, strict=True):
            assert ours.token == theirs.token
            # States are fp16, except for the tokens of a call itself.
            assert ours.chosen == pytest.approx(theirs.chosen, abs=0.01)


def test_the_context_goes_on_after_an_end():
    """An end token that was proposed, and tokens behind it, are not in the context."""
    text = prompt(6)
    expected = greedy("llama", text, 20)
    end = next(token for token in expected[4:] if token not in expected[:4])
    generator = load("llama", CacheKind.STATE)
    generator.speculate(Oracle([*text, *expected], 1000))
    before = expected[: expected.index(end)]
    made = list(generator.generate(text, lambda logits: int(logits.argmax()), stops=[end]))
    assert (made, generator.ending) == (before, Ending.STOP)
    assert generator.position == len(text) + len(before)
    generator.speculate(None)
    more = [11, 12, 13]
    following = list(generator.generate(more, lambda logits: int(logits.argmax()), limit=5))
    assert following == greedy("llama", [*text, *before, *more], 5)


@pytest.mark.slow
def test_drafts_of_another_model_are_verified():
    text = prompt(9)
    expected = greedy("llama", text, 24)
    generator = load("llama", CacheKind.STATE)
    drafts = {
        "the model itself": load("llama", CacheKind.STATE),
        "another": load("gemma3_text", CacheKind.BUFFER),
    }
    rates: dict[str, float] = {}
    for kind, draft in drafts.items():
        generator.reset()
        generator.speculate(Draft(draft, most=3))
        made = list(generator.generate(text, lambda logits: int(logits.argmax()), limit=24))
        assert made == expected
        rates[kind] = generator.speculation.tokens_per_call
    assert rates["the model itself"] > 3.5
    assert 1 <= rates["another"] < 3


def test_prompt_lookup_finds_the_latest_place_of_the_longest_ending():
    lookup = PromptLookup(2)
    assert lookup([1, 2, 3, 4, 1, 2, 5, 6, 7, 1, 2], 3) == [5, 6, 7]
    assert lookup([1, 2, 3, 9, 2, 5, 1, 2], 2) == [3, 9]  # two tokens before one
    assert lookup([4, 5, 5], 4) == [5]
    assert lookup([1, 2, 3], 4) == []
    assert lookup([1], 4) == []
    with pytest.raises(OptionError, match="longest is out of range: got 0"):
        PromptLookup(0)


def test_repeated_texts_take_fewer_calls():
    text = prompt(4)
    expected = greedy("llama", text, CONTEXT - 10)
    generator = load("llama", CacheKind.STATE)
    generator.speculate(PromptLookup())
    made = list(generator.generate(text, lambda logits: int(logits.argmax()), limit=len(expected)))
    assert made == expected
    repeats = len(set(expected)) < len(expected)
    assert generator.speculation.accepted > 0 or not repeats


def test_executorchs_runner_reads_the_logits_of_the_last_token(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json", VOCABULARY)
    runner = Runner(tmp_path, program("llama", CacheKind.STATE))
    check_texts(runner, "llama")


@pytest.mark.slow
@torch.no_grad()
def test_perplexity_takes_a_call_for_a_chunk(monkeypatch):
    tokens = prompt(2 * CHUNK + 3)
    generator = load("gemma3_text", CacheKind.BUFFER)
    calls: list[int] = []
    run = generator._program.run
    monkeypatch.setattr(generator._program, "run", lambda *args: calls.append(1) or run(*args))
    ours = perplexity(predict_with_program(generator), tokens, context=len(tokens))
    logits = model("gemma3_text")(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(tokens[1:]))
    assert ours == pytest.approx(float(loss.exp()), rel=1e-4)
    assert len(calls) == -(-(len(tokens) - 1) // CHUNK)


@pytest.mark.parametrize(
    ("name", "length"), [("llama", CONTEXT), ("gemma3_text", WINDOW), ("mamba2", 0), ("lfm2", 0)]
)
def test_windows_and_recurrences_limit_what_can_be_taken_back(name, length):
    assert Decoder(model(name), context=CONTEXT).rewindable == length


def test_programs_that_cannot_verify_are_refused():
    with pytest.raises(OptionError, match=r"one token only.*Export it with --logits all"):
        Generator.load(lowered("llama", CacheKind.STATE)).speculate(PromptLookup())
    recurrent = load("llama", CacheKind.STATE)
    recurrent.layout = replace(recurrent.layout, rewindable=0)
    with pytest.raises(OptionError, match="tokens cannot be taken back from the context"):
        recurrent.speculate(PromptLookup())
    with pytest.raises(OptionError, match="tokens cannot be taken back from the context"):
        Draft(recurrent)
    with pytest.raises(OptionError, match="most is out of range: got 0"):
        Draft(load("llama", CacheKind.STATE), most=0)
    decoder = Decoder(model("llama"), context=CONTEXT)
    with pytest.raises(OptionError, match="returns the logits of every token: got the layout meth"):
        export_methods(decoder, Layout(VOCABULARY, CONTEXT, CHUNK, CacheKind.IO), all_logits=True)

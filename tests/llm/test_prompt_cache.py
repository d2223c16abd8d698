"""Contexts in files: the same tokens with fewer calls, and files that cannot be used."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from llm.standard_programs import load, program
from llm.test_families import CHUNK, CONTEXT
from llm.test_families import lowered as lowered_methods
from llm.test_standard_layout import greedy, prompt
from safetensors.numpy import load_file, save_file
from support.llm_families import WINDOW

from coreml_delegate.errors import CoreMLDelegateError, InputError, ProgramError
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind
from coreml_delegate.llm.prompt_cache import PromptCache

pytestmark = pytest.mark.xdist_group("standard")

LENGTH = 4 * CHUNK + 3


def best(logits: torch.Tensor) -> int:
    return int(logits.argmax())


class Calls:
    """The number of calls of a generator's program."""

    def __init__(self, generator: Generator, monkeypatch) -> None:
        self.count = 0
        run = generator._program.run

        def counted(*args):
            self.count += 1
            return run(*args)

        monkeypatch.setattr(generator._program, "run", counted)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


def saved(generator: Generator, tokens, path) -> list[int]:
    """Generate after a prompt, and keep the context of the prompt."""
    return list(
        generator.generate(tokens, best, limit=8, before_last=lambda: generator.save_context(path))
    )


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("llama", CacheKind.STATE),
        pytest.param("gemma3_text", CacheKind.BUFFER, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_a_file_are_not_computed_again(name, cache, path, monkeypatch):
    text = prompt(LENGTH)
    expected = greedy(name, text, 8)
    assert saved(load(name, cache), text, path) == expected
    again = load(name, cache)
    calls = Calls(again, monkeypatch)
    assert again.load_context(path)
    assert again.position == LENGTH - 1
    assert again.resume(text) == LENGTH - 1
    assert list(again.generate(text[-1:], best, limit=8)) == expected
    assert calls.count == 8  # the last token of the prompt, and seven of the text


def test_a_text_that_begins_alike_takes_the_common_tokens(path):
    text = prompt(LENGTH)
    saved(load("llama", CacheKind.STATE), text, path)
    for common in (CHUNK - 1, LENGTH - 5, LENGTH + 2):
        other = [*text[:common], 5, 6, 7, 8]
        generator = load("llama", CacheKind.STATE)
        assert generator.load_context(path)
        kept = generator.resume(other)
        assert kept == min(common, LENGTH - 1)
        assert list(generator.generate(other[kept:], best, limit=6)) == greedy("llama", other, 6)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [CacheKind.STATE, CacheKind.BUFFER])
def test_a_text_shorter_than_a_window_takes_the_common_tokens(cache):
    text = prompt(WINDOW)
    generator = load("gemma3_text", cache)
    for common in (3, WINDOW - 1):
        generator.reset()
        generator.feed(text)
        other = [*text[:common], 8, 9, 10, 11]
        assert generator.resume(other) == common
        made = list(generator.generate(other[common:], best, limit=2 * WINDOW))
        assert made == greedy("gemma3_text", other, 2 * WINDOW)


@pytest.mark.slow
def test_a_text_longer_than_a_window_takes_all_tokens_or_none(path):
    text = prompt(LENGTH)
    saved(load("gemma3_text", CacheKind.BUFFER), text, path)
    for other, kept in (([*text, 9], LENGTH - 1), ([*text[:-4], 9, 9], 0)):
        generator = load("gemma3_text", CacheKind.BUFFER)
        assert generator.load_context(path)
        assert generator.resume(other) == kept
        made = list(generator.generate(other[kept:], best, limit=6))
        assert made == greedy("gemma3_text", other, 6)


@pytest.mark.slow
def test_a_recurrence_takes_the_whole_prompt_or_nothing(path):
    text = prompt(LENGTH)
    generator = lowered_methods("mamba2")
    generator.reset()
    expected = saved(generator, text, path)
    generator.reset()
    generator.feed(prompt(LENGTH + 1))
    assert generator.load_context(path)
    assert generator.resume(text) == LENGTH - 1
    assert list(generator.generate(text[-1:], best, limit=8)) == expected
    other = [*text[: LENGTH - 2], 4, 4]
    assert generator.load_context(path)
    assert generator.resume(other) == generator.position == 0
    assert list(generator.generate(other, best, limit=6)) == greedy("mamba2", other, 6)


@pytest.mark.slow
def test_caches_that_are_inputs_are_kept(path):
    text = prompt(LENGTH)
    generator = lowered_methods("llama")
    generator.reset()
    expected = saved(generator, text, path)
    generator.reset()
    generator.feed(prompt(LENGTH + 1))
    assert generator.load_context(path)
    assert list(generator.generate(text[generator.resume(text) :], best, limit=8)) == expected
    assert set(load_file(path)) >= {"tokens", "cache.0"}


@pytest.mark.slow
def test_another_programs_file_is_not_used(path):
    text = prompt(LENGTH)
    saved(load("llama", CacheKind.STATE), text, path)
    before = path.read_bytes()
    other = load("gemma3_text", CacheKind.BUFFER)
    other.feed([3, 4])
    assert not other.load_context(path)
    assert other.position == 2
    assert path.read_bytes() == before


def test_a_program_takes_files_of_itself_and_its_adapter_only(path):
    generator = load("llama", CacheKind.STATE)
    generator.feed([3, 4, 5])
    generator.save_context(path)
    stored = PromptCache.read(path)
    assert (stored.program, stored.adapter) == (
        hashlib.sha256(program("llama", CacheKind.STATE)).hexdigest(),
        "",
    )
    for change in ({"program": "0" * 64}, {"adapter": "french"}):
        replace(stored, **change).write(path)
        assert not generator.load_context(path)
    assert generator.position == 3


def test_damaged_files_are_errors_and_nothing_is_replaced(path):
    text = prompt(LENGTH)
    saved(load("llama", CacheKind.STATE), text, path)
    content = path.read_bytes()
    generator = load("llama", CacheKind.STATE)
    generator.feed([3, 4])
    flipped = bytearray(content)
    flipped[-100] ^= 1
    header = content.index(b'"adapter":""')
    damages = {
        "truncated": content[:-1],
        "empty": b"",
        "a flipped bit": bytes(flipped),
        "text": b"Once upon a time there was a text that is no prompt cache",
        "another adapter": content[:header] + b'"adapter":"x' + content[header + 12 :],
    }
    for damage, data in damages.items():
        path.write_bytes(data)
        with pytest.raises(InputError, match="is no prompt cache that can be read"):
            assert generator.load_context(path), damage
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(InputError, match="got a file of another kind"):
        generator.load_context(path)
    assert generator.position == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (3, 4, 4000)}, "the token is not in the model's vocabulary: got 4000"),
        ({"tokens": ()}, "there is no token"),
        ({"tokens": (3,) * (CONTEXT + 1)}, "does not fit into the context: got 97 tokens"),
        ({"caches": {}}, "the snapshot lacks states"),
    ],
)
def test_contents_that_do_not_fit_are_errors(changes, message, path):
    generator = load("llama", CacheKind.STATE)
    generator.feed([3, 4, 5])
    generator.save_context(path)
    replace(PromptCache.read(path), **changes).write(path)
    with pytest.raises(CoreMLDelegateError, match=message):
        generator.load_context(path)
    assert generator.position == 3


@pytest.mark.slow
def test_a_host_without_access_to_the_caches_says_so(path):
    generator = Generator.load(
        program("gemma3_text", CacheKind.BUFFER), engine="openvino", host="stock"
    )
    generator.feed([3, 4, 5])
    with pytest.raises(ProgramError, match=r"mutable buffer.*host=.python"):
        generator.save_context(path)
    assert not path.exists()


def test_the_file_says_what_it_is(path):
    generator = load("llama", CacheKind.STATE)
    generator.feed([3, 4, 5])
    generator.save_context(path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    assert header["format"] == "coreml-delegate prompt cache"
    assert len(header["program"]) == 64
    assert load_file(path)["tokens"].tolist() == [3, 4, 5]


def test_a_context_needs_no_file_to_be_resumed():
    text = prompt(LENGTH)
    generator = load("llama", CacheKind.STATE)
    list(generator.generate(text, best, limit=8))
    other = [*text[:20], 7, 8, 9]
    assert generator.resume(other) == 20
    assert list(generator.generate(other[20:], best, limit=6)) == greedy("llama", other, 6)

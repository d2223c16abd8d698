"""Texts of a grammar: allowed tokens beside a list of all valid texts, and texts that parse."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from llm.test_standard_layout import SAMPLE, lowered, prompt
from support.text_tokenizer import save_tokenizer, text_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.llm.candidates import Selection
from coreml_delegate.llm.generator import Ending, Generator
from coreml_delegate.llm.grammar import Grammar, json_rule, lark_rule, regex_rule
from coreml_delegate.llm.layout import CacheKind
from coreml_delegate.llm.sampling import Sampler, Sampling
from coreml_delegate.llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("standard")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Zoë", "a cat", "the world"]},
        "age": {"type": "integer", "minimum": 7, "maximum": 12},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def valid_texts() -> list[str]:
    """All texts of ``SCHEMA``, with the spaces of ``json.dumps``."""
    flags = [list(tags) for n in range(3) for tags in itertools.product((True, False), repeat=n)]
    values = [
        {"name": name, "age": age, **({} if tags is None else {"tags": tags})}
        for name in SCHEMA["properties"]["name"]["enum"]
        for age in range(7, 13)
        for tags in (None, *flags)
    ]
    return [json.dumps(value, ensure_ascii=False) for value in values]


TEXTS = [text.encode() for text in valid_texts()]
TRAINING = [text.decode() for text in TEXTS] * 3


def save_bytes_of_gpt2(path: Path) -> Path:
    """Byte-level BPE: a space is written Ġ."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.save(str(path))
    return path


def save_bytes_as_fallback(path: Path) -> Path:
    """BPE of characters as Llama 2 has it: a space is written as a low line, bytes as <0x00>."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(
        [text.replace("Zoë", "Zoe") for text in TRAINING],
        trainers.BpeTrainer(vocab_size=80, show_progress=False),
    )
    data = json.loads(trained.to_str())
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in data["model"]["vocab"] if piece not in pieces]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in data["model"]["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module", params=["bytes", "byte-level", "byte fallback"])
def tokens(request, tmp_path_factory):
    """Path of a tokenizer, number of tokens, the bytes of each token, and an end token."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    if request.param == "bytes":
        return None, 260, [bytes([byte]) for byte in range(256)] + [b""] * 4, 258
    if request.param == "byte-level":
        tokenizer = Tokenizer.from_file(str(save_bytes_of_gpt2(path)))
        plain = {
            character: byte for byte in range(256) for character in [_byte_level_character(byte)]
        }
        pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
        texts = [b"" if p in ("<s>", "</s>") else bytes(plain[c] for c in p) for p in pieces]
    else:
        tokenizer = Tokenizer.from_file(str(save_bytes_as_fallback(path)))
        pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
        texts = [_fallback_bytes(piece) for piece in pieces]
    # A model may have more tokens than its tokenizer.
    return path, len(texts) + 6, texts + [b""] * 6, tokenizer.token_to_id("</s>")


def _byte_level_character(byte: int) -> str:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((text, _),) = pre.pre_tokenize_str(bytes([byte]).decode("latin-1"))
    return text[-1] if byte < 128 else _printable(byte)


def _printable(byte: int) -> str:
    """GPT-2's character of a byte above 127: the byte's own, or one after 255."""
    moved = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(256 + moved.index(byte)) if byte in moved else chr(byte)


def _fallback_bytes(piece: str) -> bytes:
    if piece in ("<unk>", "<s>", "</s>"):
        return b""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


def expected_tokens(texts: list[bytes], before: bytes, end: int) -> set[int]:
    """The tokens after ``before`` that begin one of ``TEXTS``, and the end token after a text."""
    following = {text[len(before) :] for text in TEXTS if text.startswith(before)}
    allowed = {
        token
        for token, piece in enumerate(texts)
        if piece and any(rest.startswith(piece) for rest in following)
    }
    return allowed | ({end} if b"" in following else set())


def check_allowed(allowed: set[int], tokens, before: bytes) -> None:
    """Compare allowed tokens with those of all valid texts.

    Where all texts continue alike, the library takes the tokens that the tokenizer makes of it.
    """
    path, size, texts, end = tokens
    expected = expected_tokens(texts, before, end)
    if allowed != expected:
        assert path is not None
        following = [text[len(before) :] for text in TEXTS if text.startswith(before)]
        columns = itertools.takewhile(
            lambda column: len(set(column)) == 1, zip(*following, strict=False)
        )
        forced = bytes(column[0] for column in columns).decode()
        assert list(allowed) == load_tokenizer(path, vocabulary=size, bos=None).encode(forced)[:1]
        assert allowed < expected


def test_allowed_tokens_are_those_of_all_valid_texts(tokens):
    path, size, texts, end = tokens
    grammar = Grammar(json_rule(SCHEMA), path, vocabulary=size)
    random = torch.Generator().manual_seed(4)
    written: set[bytes] = set()
    for number in range(12):
        greedy = number % 2 == 0
        sampler = Sampler(Sampling(0.0 if greedy else 1.0), grammar=grammar, logprobs=0)
        sampler.begin([], {end})
        before = b""
        while not sampler.complete:
            logits = torch.randn(size, generator=random)
            allowed = set(grammar.allowed().nonzero()[:, 0].tolist())
            check_allowed(allowed, tokens, before)
            token = sampler(logits)
            assert sampler.log_probabilities[-1].chosen == logits.double().log_softmax(0)[token]
            if greedy:
                assert token == max(allowed, key=lambda token: float(logits[token]))
            assert token in allowed
            before += texts[token]
        written.add(before)
    assert written <= set(TEXTS)
    assert len(written) > 5


def test_the_texts_of_tokens_are_decoded_as_one(tokens):
    path, size, _, end = tokens
    tokenizer = load_tokenizer(path, vocabulary=size, bos=None)
    grammar = Grammar(json_rule(SCHEMA), path, vocabulary=size)
    sampler = Sampler(Sampling(temperature=1.0, seed=6), grammar=grammar)
    sampler.begin([], {end})
    chosen: list[int] = []
    while not sampler.complete:
        chosen.append(sampler(torch.zeros(size)))
    assert tokenizer.decode(chosen).encode() in TEXTS


def test_an_end_token_is_allowed_only_where_a_text_may_end():
    sampler = Sampler(Sampling(), grammar=Grammar(regex_rule("[0-9]{2,3}"), None, vocabulary=258))
    sampler.begin([], {257})
    logits = torch.zeros(258)
    logits[257], logits[ord("7")] = 9.0, 1.0
    assert [sampler(logits) for _ in range(3)] == [ord("7"), ord("7"), 257]
    sampler.begin([], set())  # a model without end tokens writes the longest text
    assert bytes(sampler(logits) for _ in range(3)) == b"777"
    assert sampler.complete


@pytest.mark.parametrize("seed", range(4))
def test_objects_of_any_schema_parse(seed):
    grammar = Grammar(json_rule(), None, vocabulary=256)
    sampler = Sampler(Sampling(temperature=1.0, seed=seed), grammar=grammar)
    sampler.begin([])
    logits, written = torch.zeros(256), b""
    logits[ord("}")] = logits[ord('"')] = 4.0
    while not sampler.complete:
        written += bytes([sampler(logits)])
    assert isinstance(json.loads(written), dict)


def test_a_grammar_in_larks_syntax():
    rule = lark_rule('start: "yes" | "no " WORD\nWORD: /[a-c]{2}/')
    sampler = Sampler(
        Sampling(temperature=1.0, seed=2), grammar=Grammar(rule, None, vocabulary=256)
    )
    texts: set[str] = set()
    for _ in range(20):
        sampler.begin([])
        text = b""
        while not sampler.complete:
            text += bytes([sampler(torch.zeros(256))])
        texts.add(text.decode())
    assert all(re.fullmatch("yes|no [abc]{2}", text) for text in texts)
    assert len(texts) > 3


@pytest.mark.parametrize(
    ("make", "value", "message"),
    [
        (json_rule, "{", "the schema is not JSON"),
        (json_rule, "[]", "the schema is no JSON object: got list"),
        (json_rule, {"type": "number of"}, "the schema cannot be followed: got Invalid type"),
        (json_rule, {"type": "array", "uniqueItems": True}, "cannot be followed: got Unimpl"),
        (regex_rule, "(a", "the regular expression cannot be followed: got .*regex parse error"),
        (lark_rule, "start: foo", 'the grammar cannot be followed: got .*unknown name: "foo"'),
    ],
)
def test_rules_that_the_library_does_not_know_are_refused(make, value, message):
    with pytest.raises(OptionError, match=message):
        make(value)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'coreml-delegate\[grammar\]'"):
        json_rule()


def test_models_and_tokenizers_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(OptionError, match=f"cannot read a tokenizer from {path}"):
        Grammar(json_rule(), path, vocabulary=256)
    sampler = Sampler(Sampling(), grammar=Grammar(json_rule(), None, vocabulary=256))
    with pytest.raises(OptionError, match="the grammar may allow none of its candidates"):
        sampler.check(Selection(8))
    save_tokenizer(path, 60)  # no letters behind Z, which "true" needs
    with pytest.raises(InputError, match="no token of the vocabulary continues"):
        Grammar(json_rule({"const": True}), path, vocabulary=60).allowed()


def test_a_program_generates_a_text_of_the_grammar(tmp_path):
    """A model of one token a character: text equal to the most probable valid one, greedily."""
    from llm.test_families import model

    name, text = SAMPLE[CacheKind.BUFFER], prompt(9)
    generator = Generator.load(lowered(name, CacheKind.BUFFER), engine="openvino")
    size = generator.layout.vocabulary
    path = save_tokenizer(tmp_path / "tokenizer.json", size)
    words = ["abba", "abc", "cab", "dad ", "dab? "]
    rule = regex_rule("|".join(map(re.escape, words)))
    sampler = Sampler(Sampling(), grammar=Grammar(rule, path, vocabulary=size))
    made = list(generator.generate(text, sampler))
    expected: list[int] = []
    while text_of(expected) not in words:
        logits = model(name)(torch.tensor([text + expected]), use_cache=False).logits[0, -1]
        begun = [word for word in words if word.startswith(text_of(expected))]
        allowed = {word[len(expected)] for word in begun}
        best = max(allowed, key=lambda c: float(logits[_token(c)].detach()))
        expected.append(_token(best))
    assert made == expected
    assert generator.ending is Ending.STOP


def _token(character: str) -> int:
    return next(token for token in range(97) if text_of([token]) == character)

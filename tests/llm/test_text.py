"""Tokenizers, text streams, and the layout that a .pte declares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.llm.cached_decoder import write_rows
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.llm.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TextStream,
    byte_tokenizer,
    load_tokenizer,
)

TEXT = "naïve 東京 🙂"
LAYOUT = Layout(300, 128, 16, CacheKind.IO, bos=256, eos=(257, 258))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A byte-level BPE tokenizer, trained on a few words."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the words of the world"] * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_streamed_pieces_join_to_the_text(kind, file):
    tokenizer = ByteTokenizer() if kind == "bytes" else FileTokenizer(file)
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.end() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5


@pytest.mark.parametrize(
    ("vocabulary", "bos", "image"), [(256, None, None), (260, 257, 258), (151_936, 1, 151_655)]
)
def test_a_file_of_bytes_has_the_tokens_of_the_byte_tokenizer(vocabulary, bos, image, tmp_path):
    from pytorch_tokenizers import CppHFTokenizer

    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer(vocabulary, bos, image))
    file, plain = FileTokenizer(path), ByteTokenizer(bos, image)
    runners = CppHFTokenizer()  # of ExecuTorch's runners
    runners.load(str(path))
    assert runners.vocab_size() == vocabulary
    for text in (TEXT, "a <image> b\n\t\0", "<300>"):
        tokens = plain.encode(text)
        assert file.encode(text) == tokens
        assert runners.encode(text, 1, 0) == tokens
        own = tokens[bos is not None :]
        assert file.decode(own) == plain.decode(own)
    assert file.decode([97, 0xE6]) == "a\ufffd"


def test_incomplete_bytes_are_held_back_until_the_end():
    stream = TextStream(ByteTokenizer())
    assert [stream.push(token) for token in (0x61, 0xE6)] == ["a", ""]
    assert stream.end() == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "shown", "stopped"),
    [
        (["END"], "one E two ", True),
        (["two", "one E"], "", True),
        (["more ENDS"], "one E two END more EN", False),
        ([" END", "END"], "one E two", True),
        ([""], "one E two END more EN", False),
    ],
)
def test_stop_texts_are_not_shown(stops, shown, stopped):
    stream = TextStream(ByteTokenizer(), stops)
    text = ""
    for token in b"one E two END more EN":
        text += stream.push(token)
        if stream.stopped:
            break
    assert (text + stream.end(), stream.stopped) == (shown, stopped)


def test_the_tokenizer_must_fit_the_model(file, tmp_path):
    assert load_tokenizer(None, vocabulary=258, bos=256).encode("a") == [256, 97]
    assert load_tokenizer(None, vocabulary=256, bos=None).decode([97, 300]) == "a"
    assert isinstance(load_tokenizer(file, vocabulary=300, bos=None), FileTokenizer)
    with pytest.raises(
        OptionError, match=r"has 32000 tokens, which are not bytes\. Pass --tokenizer"
    ):
        load_tokenizer(None, vocabulary=32000, bos=None)
    with pytest.raises(OptionError, match="no such tokenizer"):
        FileTokenizer(tmp_path / "none.json")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(OptionError, match="cannot read a tokenizer from"):
        FileTokenizer(tmp_path / "none.json")


def outputs(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, replace(LAYOUT, bos=None, eos=()), replace(LAYOUT, adapters=("french", "verse"))],
)
def test_a_layout_is_read_as_it_was_written(layout):
    constants = layout.constants()
    assert Layout.read(tuple(constants), lambda name: outputs(constants[name])) == layout


def test_adapters_have_methods_of_their_own():
    layout = replace(LAYOUT, adapters=("french", "verse"))
    assert layout.methods_of("verse") == ("decode_verse", "prefill_verse")
    assert layout.methods_of(None) == ("decode", "prefill") == LAYOUT.methods
    assert layout.methods == (
        *("decode", "prefill", "decode_french", "prefill_french"),
        *("decode_verse", "prefill_verse"),
    )
    assert replace(layout, cache=CacheKind.STATE).methods_of("french") == ("forward_french",)
    with pytest.raises(OptionError, match=r"no such adapter: got vers, expected perhaps verse$"):
        layout.methods_of("vers")
    with pytest.raises(OptionError, match=r"no such adapter: got vers\. Export it with --adapter"):
        LAYOUT.methods_of("vers")


def test_only_files_with_adapters_need_a_newer_package():
    adapted = replace(LAYOUT, adapters=("french",)).constants()
    assert LAYOUT.constants()["get_llm_layout_version"] == 2
    assert adapted["get_llm_layout_version"] == 3
    assert adapted.keys() - LAYOUT.constants().keys() == {"get_adapters"}


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("position", [0, 2, 3, 7])
def test_rows_are_written_by_position_modulo_their_number(position, count):
    values = torch.randn(1, 2, 9, 3)
    actual, expected = torch.zeros(2, 1, 2, 4, 3)
    for number in range(count):
        expected[:, :, (position + number) % 4] = values[:, :, number]
    write_rows(actual, values, position, count)
    assert torch.equal(actual, expected)


def test_programs_without_a_language_model_are_refused():
    with pytest.raises(ProgramError, match=r"got no method get_cache_kind\. Export it with"):
        Layout.read(("forward", "get_vocab_size"), lambda name: [0])
    constants = {**LAYOUT.constants(), "get_llm_layout_version": 1}
    with pytest.raises(ProgramError, match="got layout 1, expected layout 2 or 3"):
        Layout.read(tuple(constants), lambda name: outputs(constants[name]))

"""The documentation says what is so: its commands and its Python code run, its options exist."""

from __future__ import annotations

import itertools
import json
import re
import wave
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import numpy as np
import pytest
import tokenizers
from markdown_it import MarkdownIt
from PIL import Image
from support import checkpoints
from support.documents import (
    COMMAND,
    FIRST,
    NOT_RUN,
    REASONS,
    ROOT,
    RUN,
    Reader,
    blocks,
    commands,
    missing,
    pages,
    reading,
)

from coreml_delegate.patches.third_party import transformers
from coreml_delegate.scripts.cli import main_parser

README = ROOT / "README.md"
PAGES = [
    pytest.param(page, marks=() if page == FIRST else pytest.mark.slow, id=page.stem)
    for page in pages()
    if any(block.is_followed for block in blocks(page))
]
BLOCKS = [block for page in pages() for block in blocks(page)]


def _photo(path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)).save(path)


def _photos(folder: Path) -> None:
    folder.mkdir()
    _photo(folder / "one.png")


def _labels(path: Path) -> None:
    path.write_text("".join(f"class {number}\n" for number in range(1000)))


def _checkpoint(folder: Path) -> None:
    """A language model of bytes, of the kind that has the fewest operations."""
    checkpoints.save(
        folder,
        "phi",
        vocab_size=256,
        num_hidden_layers=1,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    _byte_tokenizer(folder)
    turns = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{turns}assistant: ")


def _text_encoder(folder: Path) -> None:
    """A model of sentence-transformers over bytes."""
    config = transformers().AutoConfig.for_model(
        "bert",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    transformers().AutoModel.from_config(config).save_pretrained(folder)
    _byte_tokenizer(folder)
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in parts.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def _recognizer(folder: Path) -> None:
    """A Parakeet model over bytes."""
    encoder = {
        "model_type": "parakeet_encoder",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
    }
    config = transformers().AutoConfig.for_model(
        "parakeet_tdt",
        vocab_size=257,
        blank_token_id=256,
        decoder_hidden_size=32,
        encoder_config=encoder,
    )
    transformers().AutoModelForTDT.from_config(config).save_pretrained(folder)
    _byte_tokenizer(folder)


def _recording(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(32000))


def _byte_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    bytes_alone = tokenizers.trainers.BpeTrainer(
        vocab_size=256,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], bytes_alone)
    tokenizer.save(str(folder / "tokenizer.json"))


def _book(path: Path) -> None:
    path.write_text("The quick brown fox jumps over the lazy dog.\n")


def _sweep(path: Path) -> None:
    path.write_text('repeat = 0\n[models.net]\nsource = "model:net"\n')


def _stablehlo(path: Path) -> None:
    row = jax.ShapeDtypeStruct((4,), np.float32)
    path.write_bytes(jax.export.export(jax.jit(jax.numpy.tanh))(row).serialize())


GIVEN: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        "photo.jpg": _photo,
        "photos": _photos,
        "labels.txt": _labels,
        "book.txt": _book,
        "checkpoint": _checkpoint,
        "minilm": _text_encoder,
        "parakeet-tdt": _recognizer,
        "hello.wav": _recording,
        "model.jax": _stablehlo,
        "sweep.toml": _sweep,
    }
)
"""A reader's own files, which pages name and do not make."""

SMALLER: Mapping[str, str] = MappingProxyType({"torchvision:resnet18": "model:net"})
"""Smaller models that stand for larger ones in ``make test``; else pages are followed exactly."""


# A reader sees warnings of other packages, and goes on.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        _follow(page, reader)


@pytest.mark.filterwarnings("ignore")
def test_the_readme_can_be_followed_with_a_smaller_model(tmp_path: Path) -> None:
    with reading(tmp_path, SMALLER) as reader:
        _follow(README, reader)


def _follow(page: Path, reader: Reader) -> None:
    followed = [block for block in blocks(page) if block.is_followed]
    for name, make in GIVEN.items():
        if any(re.search(rf"\b{name}\b", block.text) for block in followed):
            make(reader.folder / name)
    for block in followed:
        printed = reader.follow(block)
        shown = block.output
        if shown is not None:
            assert missing(printed, shown.text) == [], f"{shown.location}:\n{printed}"


def test_nothing_to_run_hides_in_a_block_that_is_shown() -> None:
    typed = re.compile(rf"^\s*(\$ |{COMMAND} |python3? |pip |make\b|cmake )", re.MULTILINE)
    for block in BLOCKS:
        assert block.language in (*RUN, *NOT_RUN), block.location
        assert block.language in RUN or not typed.search(block.text), block.location


def test_blocks_that_are_not_run_say_why() -> None:
    left = [block for block in BLOCKS if block.language in RUN and not block.is_followed]
    assert {block.remarks["not run"] for block in left} <= set(REASONS)


def _typed_commands() -> Iterator[tuple[str, list[str]]]:
    for block in BLOCKS:
        if block.language == "sh" and not block.is_followed:
            for words in commands(block):
                if words[0] == COMMAND:
                    yield block.location, words


def test_commands_that_are_not_run_have_valid_arguments() -> None:
    for place, (_, *arguments) in _typed_commands():
        try:
            main_parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{place}: {arguments}")


def _options_of_the_command() -> set[str]:
    (subparsers,) = (a for a in main_parser()._actions if hasattr(a.choices, "values"))
    parsers = [main_parser(), *subparsers.choices.values()]
    return {option for p in parsers for a in p._actions for option in a.option_strings}


# Options of other programs that pages name.
OTHERS = frozenset(
    {"--nthreads", "--markdown", "--results", "--rounds", "--only", "--no-footprints"}
)


def test_options_that_pages_name_exist() -> None:
    known = _options_of_the_command() | OTHERS
    for page in pages():
        inline = (
            child.content
            for token in MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))
            for child in token.children or ()
            if child.type == "code_inline"
        )
        named = {
            option
            for code in inline
            if not code.startswith(("python", "pip", "make"))
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)
        }
        assert named <= known, f"{page.name} names {sorted(named - known)}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_front_pages_lead_somewhere(name: str) -> None:
    """The site's own links are checked when it is built."""
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    assert links
    for path, anchor in links:
        target = ROOT / path if path else ROOT / name
        assert target.exists(), path
        if anchor:
            assert anchor in _anchors(target), f"{path}#{anchor}"


def _anchors(page: Path) -> set[str]:
    tokens = MarkdownIt("commonmark").parse(page.read_text("utf-8"))
    headings = (
        after.content
        for before, after in itertools.pairwise(tokens)
        if before.type == "heading_open"
    )
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}


def test_what_is_not_printed_is_found() -> None:
    printed = "coreml_0: 12 nodes, 3.4 kB\n  aten.add   2\nlatency: 0.1 ms\n"
    assert missing(printed, "coreml_0: 7 nodes, 1 kB\n...\n  aten.add  9\n") == []
    assert missing(printed, "latency: 7 ms (median of 10)") == ["latency: 7 ms (median of 10)"]
    assert missing(printed, "latency: 7 ms\n  aten.add 2\n") == ["  aten.add 2"]
    assert missing(printed, "coreml_0: ... 1 kB") == []

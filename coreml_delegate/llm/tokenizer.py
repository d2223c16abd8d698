"""Tokenizers, and incremental decoding of a stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from coreml_delegate.errors import OptionError
from coreml_delegate.patches.third_party import import_optional

TOKENIZER = "tokenizer.json"
BYTES = 256
"""Number of tokens that are bytes."""
_MOST_SPECIAL = 16  # tokens of a byte vocabulary that are not bytes
_REPLACEMENT = "\ufffd"  # for the bytes of an incomplete character
IMAGE = "<image>"
"""Text of an image token in the byte tokenizer."""


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, including tokens that begin a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes of an incomplete character become U+FFFD."""
        ...


class ByteTokenizer:
    """Tokenizer in which every byte of UTF-8 is a token; tokens above 255 have no text.

    Args:
        bos: Token before every text, or None.
        image: Token of the text ``IMAGE``; None to encode it as bytes.
    """

    def __init__(self, bos: int | None = None, image: int | None = None) -> None:
        self._before = [] if bos is None else [bos]
        self._image = image

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        if self._image is None:
            return [*self._before, *text.encode()]
        first, *parts = (part.encode() for part in text.split(IMAGE))
        following = (token for part in parts for token in (self._image, *part))
        return [*self._before, *first, *following]

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")


def tokenizer_file(path: Path) -> Path:
    """Return the ``tokenizer.json`` of a path to it or to its folder.

    Raises:
        OptionError: The file does not exist.
    """
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise OptionError("no such tokenizer", got=str(file))
    return file


class FileTokenizer:
    """Tokenizer of a Hugging Face ``tokenizer.json``.

    Raises:
        OptionError: The file cannot be read, or the ``tokenizers`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        path = tokenizer_file(path)
        tokenizers = import_optional("tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # its native module raises Exception itself
            raise OptionError(f"cannot read a tokenizer from {path}", got=str(error)) from error

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return self.encode_pair(text)[0]

    def encode_pair(self, text: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Return the tokens of one or two texts, and for each the number of its text, 0 or 1."""
        encoding = self._tokenizer.encode(text, second)
        return list(encoding.ids), list(encoding.type_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def text_of(self, token: int) -> str:
        """Return the text of a special token.

        Raises:
            OptionError: The tokenizer has no such token.
        """
        text = self._tokenizer.id_to_token(token)
        if text is None:
            raise OptionError("the tokenizer is of another model", got=f"no token {token}")
        return str(text)


def load_tokenizer(
    path: Path | None, *, vocabulary: int, bos: int | None, image: int | None = None
) -> Tokenizer:
    """Return the tokenizer of a file; without a file, the byte tokenizer.

    Args:
        path: ``tokenizer.json`` or its folder, or None.
        vocabulary: Number of tokens of the model.
        bos: Token that begins a text, or None.
        image: Token that stands for an image, or None.

    Raises:
        OptionError: The file cannot be read; or ``path`` is None, and the vocabulary is not bytes.
    """
    if path is not None:
        return FileTokenizer(path)
    if not BYTES <= vocabulary <= BYTES + _MOST_SPECIAL:
        raise OptionError(
            f"the model has {vocabulary} tokens, which are not bytes",
            remedy="Pass --tokenizer with the model's tokenizer.json",
        )
    return ByteTokenizer(bos, image)


def byte_tokenizer(vocabulary: int, bos: int | None = None, image: int | None = None) -> bytes:
    """Return the ``tokenizer.json`` of ``ByteTokenizer``, for runners that need a file.

    A token above 255 has its number as text, ``⟨300⟩``, so that a model with any vocabulary and
    random weights writes something.

    Args:
        vocabulary: Number of tokens of the model, at least 256.
        bos: Token before every text, or None.
        image: Token of the text ``IMAGE``, or None.

    Raises:
        OptionError: The ``tokenizers`` package is not installed.
    """
    tokenizers = import_optional("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    # Byte-level BPE writes a byte that is no printable character as a character above 255.
    alphabet = sorted(byte_level.alphabet())
    moved = (character for character in alphabet if ord(character) >= BYTES)
    names = {byte: chr(byte) if chr(byte) in alphabet else next(moved) for byte in range(BYTES)}
    names |= {token: f"⟨{token}⟩" for token in range(BYTES, vocabulary)}
    if image is not None:
        names[image] = IMAGE
    tokens = {name: token for token, name in names.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if image is not None:
        tokenizer.add_special_tokens([IMAGE])
    if bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{names[bos]} $A", special_tokens=[(names[bos], bos)]
        )
    return str(tokenizer.to_str()).encode()


class TextStream:
    """Decodes tokens one by one, and returns text as soon as later tokens cannot change it.

    Args:
        tokenizer: Decodes the tokens.
        stops: Texts that end the output; neither they nor later text is returned.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        # Decoding starts some tokens back, because a token's text depends on the tokens before it.
        self._start = 0
        self._decoded = 0  # number of tokens whose text is in _pending or returned
        self._pending = ""  # text that may be the start of a stop text
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._decoded])
        now = self._tokenizer.decode(self._tokens[self._start :])
        if now.endswith(_REPLACEMENT):
            return ""
        self._start, self._decoded = self._decoded, len(self._tokens)
        return self._release(now[len(before) :], ended=False)

    def end(self) -> str:
        """Return the pending text; no token follows."""
        if self.stopped:
            return ""
        before = self._tokenizer.decode(self._tokens[self._start : self._decoded])
        now = self._tokenizer.decode(self._tokens[self._start :])
        self._start = self._decoded = len(self._tokens)
        return self._release(now[len(before) :], ended=True)

    def _release(self, text: str, *, ended: bool) -> str:
        pending = self._pending + text
        starts = [start for stop in self._stops if (start := pending.find(stop)) >= 0]
        if starts:
            self.stopped, self._pending = True, ""
            return pending[: min(starts)]
        keep = 0 if ended else max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._pending = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)

"""Tokenizers, and the text of a stream of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from coreml_delegate.errors import OptionError
from coreml_delegate.third_party import import_optional

TOKENIZER = "tokenizer.json"
_BYTES = 256
_BEYOND = 16
_UNFINISHED = "\ufffd"
IMAGE = "<image>"
"""Text that stands for an image where tokens are bytes."""


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the tokens that begin one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no character yet become U+FFFD."""
        ...


class ByteTokenizer:
    """Tokenizer in which every byte of UTF-8 is a token; tokens above 255 have no text.

    Args:
        bos: Token put before a text, or None.
        image: Token of the text ``IMAGE``; None if that is a text as any other.
    """

    def __init__(self, bos: int | None = None, image: int | None = None) -> None:
        self._before = [] if bos is None else [bos]
        self._image = image

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        if self._image is None:
            return [*self._before, *text.encode()]
        first, *others = (part.encode() for part in text.split(IMAGE))
        behind = (token for part in others for token in (self._image, *part))
        return [*self._before, *first, *behind]

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")


def tokenizer_file(path: Path) -> Path:
    """Return the file of a tokenizer, given it or its folder.

    Raises:
        OptionError: There is none.
    """
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise OptionError("no such tokenizer", got=str(file))
    return file


class FileTokenizer:
    """Tokenizer of a Hugging Face ``tokenizer.json``.

    Args:
        path: The file, or its folder.

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
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


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
        OptionError: The file cannot be read; or none is given, and the vocabulary is not one of
            bytes.
    """
    if path is not None:
        return FileTokenizer(path)
    if not _BYTES <= vocabulary <= _BYTES + _BEYOND:
        raise OptionError(
            f"the model has {vocabulary} tokens, which are not bytes",
            remedy="Pass --tokenizer with the model's tokenizer.json",
        )
    return ByteTokenizer(bos, image)


class TextStream:
    """Returns the text of tokens that come one by one, as soon as it is certain.

    Args:
        tokenizer: Decodes the tokens.
        stops: Texts that end the output; neither they nor later text is returned.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        # Decoding starts some tokens back, because a token's text depends on those before it.
        self._start = 0
        self._shown = 0  # tokens whose text is in _held or returned
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; return the text that has become certain."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        if now.endswith(_UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return self._release(now[len(before) :], ended=False)

    def end(self) -> str:
        """Return the text held back so far; no token follows."""
        if self.stopped:
            return ""
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        self._start = self._shown = len(self._tokens)
        return self._release(now[len(before) :], ended=True)

    def _release(self, text: str, *, ended: bool) -> str:
        held = self._held + text
        found = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = 0 if ended else max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)

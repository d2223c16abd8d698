"""Text to tokens and back."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from coreml_delegate.errors import OptionError

_BYTES = 256
_BEYOND = 16
_UNFINISHED = "\ufffd"


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with what its kind puts before it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are no text yet become U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token; tokens above 255 have no text.

    Args:
        bos: Token put before a text, or None.
    """

    def __init__(self, bos: int | None = None) -> None:
        self._before = [] if bos is None else [bos]

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return [*self._before, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` of Hugging Face.

    Args:
        path: The file.

    Raises:
        OptionError: The file cannot be read, or the ``tokenizers`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise OptionError("no such tokenizer", got=str(path))
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            raise OptionError(
                f"reading {path} needs the tokenizers package",
                remedy="pip install 'coreml-delegate[llm]'",
            ) from None
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


def load_tokenizer(path: Path | None, *, vocabulary: int, bos: int | None) -> Tokenizer:
    """The tokenizer of a file or, without one, that of bytes.

    Args:
        path: ``tokenizer.json``, or None.
        vocabulary: Tokens of the model.
        bos: Token that begins its texts, or None.

    Raises:
        OptionError: The file cannot be read; or there is none, and the model's tokens are not
            bytes.
    """
    if path is not None:
        return FileTokenizer(path)
    if not _BYTES <= vocabulary <= _BYTES + _BEYOND:
        raise OptionError(
            f"the model has {vocabulary} tokens, which are not bytes",
            remedy="Pass --tokenizer with the model's tokenizer.json",
        )
    return ByteTokenizer(bos)


class TextStream:
    """Text of tokens that come one by one, given out as soon as it is certain.

    Args:
        tokenizer: Of the tokens.
        stops: Texts that end the output; neither they nor what follows is given out.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        # Decoding starts here: some way back, because a token's text depends on those before.
        self._start = 0
        self._shown = 0  # tokens whose text was given to _held
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain now."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._shown])
        now = self._tokenizer.decode(self._tokens[self._start :])
        if now.endswith(_UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return self._release(now[len(before) :], ended=False)

    def end(self) -> str:
        """The text that was held back, now that no token follows."""
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
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)

"""A ``tokenizer.json`` in which every token is one character, for ExecuTorch's runners."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_FIRST = 30  # byte of token 0: the runner's binding needs ASCII


def save_tokenizer(path: Path, size: int) -> Path:
    """Write a tokenizer of ``size`` tokens, at most 97; return its path."""
    vocabulary = {_stored(_FIRST + token): token for token in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return path


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    return "".join(chr(_FIRST + token) for token in tokens)


def _stored(byte: int) -> str:
    """Return the character that byte-level BPE writes for a byte: control characters move."""
    return chr(byte) if 33 <= byte <= 126 else chr(256 + (byte if byte <= 32 else byte - 94))

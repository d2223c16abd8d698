"""The facts about a language model that its ``.pte`` declares, so that it runs without other files.

Each is a method without inputs that returns a constant, under the name that ExecuTorch's own
language models use, where there is one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coreml_delegate.errors import ProgramError
from coreml_delegate.llm.source import NAMES as SOURCE_NAMES
from coreml_delegate.llm.source import Source

ENCODE = "encode"
DECODE = "decode"
PREFILL = "prefill"
FORWARD = "forward"

# Of the inputs and outputs of the methods; what a version adds is left out by older models.
_VERSION = 2
_ENCODER_VERSION = 3


class CacheKind(enum.Enum):
    """Where keys and values of earlier tokens are kept: inputs and outputs, or a state."""

    IO = "io"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Layout:
    """How to call an exported decoder.

    Attributes:
        vocabulary: Number of tokens.
        context: Number of tokens that the caches hold.
        chunk: Number of tokens that a call of ``prefill`` or ``forward`` takes.
        cache: Where the caches are kept.
        bos: Token that begins a text, or None.
        eos: Tokens that end one.
        source: Of an encoder-decoder model what it takes; None for a decoder alone.
    """

    vocabulary: int
    context: int
    chunk: int
    cache: CacheKind
    bos: int | None = None
    eos: tuple[int, ...] = ()
    source: Source | None = None

    @property
    def version(self) -> int:
        """The oldest version that has all of the layout."""
        return _VERSION if self.source is None else _ENCODER_VERSION

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that compute; the last takes a chunk."""
        if self.cache is CacheKind.STATE:
            return (FORWARD,)
        return (DECODE, PREFILL) if self.source is None else (ENCODE, DECODE, PREFILL)

    def constants(self) -> dict[str, Any]:
        """Return the constant methods by name, each with its value."""
        return {
            "get_llm_layout_version": self.version,
            "get_vocab_size": self.vocabulary,
            "get_max_context_len": self.context,
            "get_max_seq_len": self.chunk,
            "get_cache_kind": self.cache.value,
            "use_kv_cache": True,
            "get_eos_ids": list(self.eos),
            **({} if self.bos is None else {"get_bos_id": self.bos}),
            **({} if self.source is None else self.source.constants()),
        }

    @classmethod
    def read(cls, method_names: Sequence[str], call: Callable[[str], Sequence[Any]]) -> Layout:
        """Read the layout that a program declares.

        Args:
            method_names: Names of all methods.
            call: Runs a method without inputs; returns its outputs.

        Raises:
            ProgramError: The program is no language model exported by this package, or a newer one.
        """
        names = set(method_names)
        missing = sorted(cls(0, 0, 0, CacheKind.IO).constants().keys() - names)
        if missing:
            raise ProgramError(
                "the program is not a language model exported by this package",
                got=f"no method {missing[0]}",
                remedy="Export it with coreml-delegate export-llm",
            )
        known = (*cls(0, 0, 0, CacheKind.IO, 0).constants(), *SOURCE_NAMES)
        values: Mapping[str, Sequence[Any]] = {name: call(name) for name in known if name in names}
        (version,) = values["get_llm_layout_version"]
        if version not in (_VERSION, _ENCODER_VERSION):
            raise ProgramError(
                "the program was exported by another version of this package",
                got=f"layout {version}",
                expected=f"layout {_VERSION} or {_ENCODER_VERSION}",
                remedy="Export it again",
            )
        return cls(
            vocabulary=int(values["get_vocab_size"][0]),
            context=int(values["get_max_context_len"][0]),
            chunk=int(values["get_max_seq_len"][0]),
            cache=CacheKind(values["get_cache_kind"][0]),
            bos=int(values["get_bos_id"][0]) if "get_bos_id" in values else None,
            eos=tuple(int(token) for token in values["get_eos_ids"]),
            source=Source.read(values),
        )

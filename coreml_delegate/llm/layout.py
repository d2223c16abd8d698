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

DECODE = "decode"
PREFILL = "prefill"
FORWARD = "forward"

_VERSION = 2  # of the inputs and outputs of the methods
_NEWEST = 3  # of files with facts that a reader of version 2 would not heed


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
        replaced: Numbers of the caches that each call replaces as a whole; the others have a row
            for each token.
    """

    vocabulary: int
    context: int
    chunk: int
    cache: CacheKind
    bos: int | None = None
    eos: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that compute; the last takes a chunk."""
        return (FORWARD,) if self.cache is CacheKind.STATE else (DECODE, PREFILL)

    def constants(self) -> dict[str, Any]:
        """Return the constant methods by name, each with its value."""
        return {
            "get_llm_layout_version": _NEWEST if self.replaced else _VERSION,
            "get_vocab_size": self.vocabulary,
            "get_max_context_len": self.context,
            "get_max_seq_len": self.chunk,
            "get_cache_kind": self.cache.value,
            "use_kv_cache": True,
            "get_eos_ids": list(self.eos),
            **({} if self.bos is None else {"get_bos_id": self.bos}),
            **({"get_replaced_caches": list(self.replaced)} if self.replaced else {}),
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
        values: Mapping[str, Sequence[Any]] = {
            name: call(name)
            for name in cls(0, 0, 0, CacheKind.IO, 0, replaced=(0,)).constants()
            if name in names
        }
        (version,) = values["get_llm_layout_version"]
        if not _VERSION <= version <= _NEWEST:
            raise ProgramError(
                "the program was exported by another version of this package",
                got=f"layout {version}",
                expected=f"layout {_VERSION} or {_NEWEST}",
                remedy="Export it again",
            )
        return cls(
            vocabulary=int(values["get_vocab_size"][0]),
            context=int(values["get_max_context_len"][0]),
            chunk=int(values["get_max_seq_len"][0]),
            cache=CacheKind(values["get_cache_kind"][0]),
            bos=int(values["get_bos_id"][0]) if "get_bos_id" in values else None,
            eos=tuple(int(token) for token in values["get_eos_ids"]),
            replaced=tuple(int(number) for number in values.get("get_replaced_caches", ())),
        )

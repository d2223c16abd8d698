"""What a ``.pte`` says about the language model in it, so that nothing else is needed to run it.

Each fact is a method without inputs that returns a constant, as ExecuTorch's own language models
have them, and under its names where it has one for the fact.
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

_VERSION = 1  # of what the methods take and return


class CacheKind(enum.Enum):
    """Where keys and values of earlier tokens are."""

    IO = "io"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Layout:
    """How to call an exported decoder.

    Attributes:
        vocabulary: Number of tokens.
        context: Tokens that the caches hold.
        chunk: Tokens that one call of ``prefill`` or ``forward`` takes, at most.
        cache: Where the caches are.
        bos: Token that begins a text, or None.
        eos: Tokens that end one.
    """

    vocabulary: int
    context: int
    chunk: int
    cache: CacheKind
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that compute; the last takes a chunk."""
        return (FORWARD,) if self.cache is CacheKind.STATE else (DECODE, PREFILL)

    def constants(self) -> dict[str, Any]:
        """The methods, with what they return."""
        return {
            "get_llm_layout_version": _VERSION,
            "get_vocab_size": self.vocabulary,
            "get_max_context_len": self.context,
            "get_max_seq_len": self.chunk,
            "get_cache_kind": self.cache.value,
            "use_kv_cache": True,
            "get_eos_ids": list(self.eos),
            **({} if self.bos is None else {"get_bos_id": self.bos}),
        }

    @classmethod
    def read(cls, method_names: Sequence[str], call: Callable[[str], Sequence[Any]]) -> Layout:
        """Read it from a program.

        Args:
            method_names: All methods.
            call: Runs one that has no inputs; returns its outputs.

        Raises:
            ProgramError: It is no language model exported by this package, or a newer one.
        """
        names = set(method_names)
        missing = sorted(cls(0, 0, 0, CacheKind.IO).constants().keys() - names)
        if missing:
            raise ProgramError(
                "the program does not say how to generate text with it",
                got=f"no method {missing[0]}",
                remedy="Export it with coreml-delegate export-llm",
            )
        values: Mapping[str, Sequence[Any]] = {
            name: call(name) for name in cls(0, 0, 0, CacheKind.IO, 0).constants() if name in names
        }
        (version,) = values["get_llm_layout_version"]
        if version != _VERSION:
            raise ProgramError(
                "the program was exported by another version of this package",
                got=f"layout {version}",
                expected=f"layout {_VERSION}",
                remedy="Export it again",
            )
        return cls(
            vocabulary=int(values["get_vocab_size"][0]),
            context=int(values["get_max_context_len"][0]),
            chunk=int(values["get_max_seq_len"][0]),
            cache=CacheKind(values["get_cache_kind"][0]),
            bos=int(values["get_bos_id"][0]) if "get_bos_id" in values else None,
            eos=tuple(int(token) for token in values["get_eos_ids"]),
        )

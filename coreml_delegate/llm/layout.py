"""Methods and constants of a language model's ``.pte``, which let it run without other files.

Each constant is a method without inputs, with the name that ExecuTorch's own language models use,
if they have it.

The *standard* layout is what ExecuTorch's runners call (``extension/llm/runner``: the C++ class
``TextLLMRunner``, Swift's ``TextRunner``, and ``MultimodalRunner`` for images): one method with two
inputs, tokens and the position of the first, whose caches stay in the program. For recordings
(``extension/asr/runner``: the C++ class ``AsrRunner``) it has the methods ``encoder``, of a
spectrogram, and ``text_decoder``, of one token, the encoder's result and the position. The other
layout has methods with more inputs, for callers that hold the caches.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coreml_delegate.errors import OptionError, ProgramError, near_matches
from coreml_delegate.llm.candidates import Selection
from coreml_delegate.llm.images import ImageInput
from coreml_delegate.llm.source import NAMES, Source, SourceKind

ENCODE = "encode"
DECODE = "decode"
PREFILL = "prefill"
FORWARD = "forward"
VISION = "vision"
EMBED = "embed"
ENCODER = "encoder"
TEXT_DECODER = "text_decoder"
VISION_ENCODER = "vision_encoder"
TOKEN_EMBEDDING = "token_embedding"

_VERSION = 2  # of the inputs and outputs of the methods
_NEWEST = 3  # of files with constants that readers of version 2 do not know

_VERSION_CONSTANT = "get_llm_layout_version"
_REQUIRED = "get_max_seq_len"  # by ExecuTorch's runners

_REWINDABLE = "get_rewindable_len"  # readers that do not know it never take tokens back

STANDARD = "standard"
METHODS = "methods"

_OPTIONAL = (
    "get_bos_id",
    "get_selection",
    "get_adapters",
    "get_replaced_caches",
    *NAMES,
)


class CacheKind(enum.Enum):
    """Where the caches are."""

    IO = "io"
    """Inputs and outputs of the methods."""
    STATE = "state"
    """Core ML states."""
    BUFFER = "buffer"
    """Mutable buffers of ExecuTorch: inputs and outputs of the Core ML model."""


_STANDARD_CACHES = (CacheKind.STATE, CacheKind.BUFFER)
_METHODS_CACHES = (CacheKind.IO, CacheKind.STATE)


@dataclass(frozen=True, slots=True)
class Layout:
    """How to call an exported decoder.

    Attributes:
        vocabulary: Number of tokens; 0 if another exporter does not say it.
        context: Number of tokens that the caches hold.
        chunk: Number of tokens that a call of ``prefill`` or ``forward`` takes, at most this
            number in the standard layout.
        cache: Kind of the caches.
        bos: Token that begins a text, or None.
        eos: Tokens that end a text.
        selection: Which tokens the methods return in place of logits; None for logits.
        adapters: Names of the adapters, each with methods of its own.
        image: Image inputs; None for a text-only model.
        replaced: Indices of the caches that each call replaces as a whole; all other caches have a
            row per token.
        source: Source of an encoder-decoder model; None for a decoder-only model.
        standard: Whether ExecuTorch's runners can call the program.
        rewindable: Number of tokens of the longest text from which any tokens can be taken back:
            the caches then still have what the tokens before see. 0 for recurrent models.

    Raises:
        OptionError: A model that reads images or has an encoder has adapters; a model with an
            encoder selects tokens; or the layout cannot hold its caches or results.
    """

    vocabulary: int
    context: int
    chunk: int
    cache: CacheKind
    bos: int | None = None
    eos: tuple[int, ...] = ()
    selection: Selection | None = None
    adapters: tuple[str, ...] = ()
    image: ImageInput | None = None
    replaced: tuple[int, ...] = ()
    source: Source | None = None
    standard: bool = False
    rewindable: int = 0

    def __post_init__(self) -> None:
        kinds = _STANDARD_CACHES if self.standard else _METHODS_CACHES
        if self.cache not in kinds:
            raise OptionError(
                "the layout does not have such caches",
                got=f"{self.cache.value} in the layout {self.name}",
                expected=" or ".join(kind.value for kind in kinds),
                remedy="Choose another --cache or --layout",
            )
        if self.standard and self.source is not None and self.source.kind is not SourceKind.AUDIO:
            raise OptionError(
                "ExecuTorch's runner of models with an encoder takes spectrograms of recordings",
                got=f"a model that takes {self.source.kind.value} in the layout standard",
                remedy="Choose --layout methods",
            )
        if self.standard and self.selection is not None:
            raise OptionError(
                "ExecuTorch's runners take logits",
                got=str(self.selection),
                remedy="Export it with --layout methods",
            )
        if self.adapters and self.input_methods:
            raise OptionError(
                "adapters of a model that reads images or has an encoder are not supported",
                got=", ".join(self.adapters),
                remedy="Merge the adapter into a checkpoint with peft, and export that",
            )
        if self.selection is not None and self.source is not None:
            raise OptionError(
                "a model with an encoder cannot select tokens, because some may be suppressed",
                got=str(self.selection),
                remedy="Export it without --sample-in-model",
            )

    @property
    def name(self) -> str:
        """Name of the layout, as ``--layout`` has it."""
        return STANDARD if self.standard else METHODS

    @property
    def input_methods(self) -> tuple[str, ...]:
        """Names of the methods that compute inputs of the decoding methods."""
        if self.source is not None:
            return (ENCODER,) if self.standard else (ENCODE,)
        if self.image is None:
            return ()
        return (VISION_ENCODER, TOKEN_EMBEDDING) if self.standard else (VISION, EMBED)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods except constants: inputs, base model, and each adapter."""
        decoding = (name for adapter in (None, *self.adapters) for name in self.methods_of(adapter))
        return (*self.input_methods, *decoding)

    def methods_of(self, adapter: str | None) -> tuple[str, ...]:
        """Return the decoding methods of an adapter; the last takes a chunk.

        Args:
            adapter: Name of an adapter; None for the base model.

        Raises:
            OptionError: There is no such adapter.
        """
        if adapter is not None and adapter not in self.adapters:
            raise OptionError(
                "the program has no such adapter",
                got=adapter,
                expected=near_matches(adapter, self.adapters) if self.adapters else None,
                remedy=None if self.adapters else "Export it with --adapter",
            )
        names = (DECODE, PREFILL) if self.cache is CacheKind.IO else (FORWARD,)
        if self.standard and (self.image is not None or self.source is not None):
            names = (TEXT_DECODER,)
        return names if adapter is None else tuple(f"{name}_{adapter}" for name in names)

    @property
    def version(self) -> int:
        """Version of the inputs and outputs of the methods."""
        return _NEWEST if self._newer_constants() else _VERSION

    def constants(self) -> dict[str, Any]:
        """Return the constant methods by name, each with its value."""
        form = (
            {"enable_dynamic_shape": self.source is None}
            if self.standard
            else {_VERSION_CONSTANT: self.version}
        )
        return {
            **form,
            "get_vocab_size": self.vocabulary,
            "get_max_context_len": self.context,
            "get_max_seq_len": self.chunk,
            "get_cache_kind": self.cache.value,
            "use_kv_cache": True,
            "get_eos_ids": list(self.eos),
            **({} if self.bos is None else {"get_bos_id": self.bos}),
            **({_REWINDABLE: self.rewindable} if self.rewindable else {}),
            **self._newer_constants(),
        }

    def _newer_constants(self) -> dict[str, Any]:
        """Return the constants that readers of version 2 must not ignore."""
        return {
            **({} if self.selection is None else {"get_selection": str(self.selection)}),
            **({"get_adapters": list(self.adapters)} if self.adapters else {}),
            **({} if self.image is None else self.image.constants()),
            **({"get_replaced_caches": list(self.replaced)} if self.replaced else {}),
            **({} if self.source is None else self.source.constants()),
        }

    @classmethod
    def read(cls, method_names: Sequence[str], call: Callable[[str], Sequence[Any]]) -> Layout:
        """Read the layout from a program's constants.

        Args:
            method_names: Names of all methods.
            call: Runs a method without inputs; returns its outputs.

        Raises:
            ProgramError: The program is no language model of a known layout, or of a newer version.
        """
        names = set(method_names)
        if _REQUIRED in names and _VERSION_CONSTANT not in names:
            return cls._read_standard(names, call)
        required = cls(0, 0, 0, CacheKind.IO).constants()
        missing = sorted(required.keys() - names)
        if missing:
            raise ProgramError(
                "the program is not a language model for ExecuTorch's runners or of this package",
                got=f"no method {missing[0]}",
                remedy="Export it with coreml-delegate export-llm",
            )
        (version,) = call(_VERSION_CONSTANT)
        if not _VERSION <= version <= _NEWEST:
            raise ProgramError(
                "the program was exported by another version of this package",
                got=f"layout {version}",
                expected=f"layout {_VERSION} or {_NEWEST}",
                remedy="Export it again",
            )
        values: Mapping[str, Sequence[Any]] = {
            name: call(name) for name in (*required, *_OPTIONAL) if name in names
        }
        return cls(
            vocabulary=int(values["get_vocab_size"][0]),
            context=int(values["get_max_context_len"][0]),
            chunk=int(values["get_max_seq_len"][0]),
            cache=CacheKind(values["get_cache_kind"][0]),
            bos=int(values["get_bos_id"][0]) if "get_bos_id" in values else None,
            eos=tuple(map(int, values["get_eos_ids"])),
            selection=Selection.parse(values["get_selection"][0])
            if "get_selection" in values
            else None,
            adapters=tuple(map(str, values.get("get_adapters", ()))),
            image=ImageInput.read(names, call),
            replaced=tuple(map(int, values.get("get_replaced_caches", ()))),
            source=Source.read(values),
            rewindable=int(call(_REWINDABLE)[0]) if _REWINDABLE in names else 0,
        )

    @classmethod
    def _read_standard(cls, names: set[str], call: Callable[[str], Sequence[Any]]) -> Layout:
        """Read the standard layout, also of other exporters, which leave out some constants."""

        def value(name: str, default: Any) -> Any:
            return call(name)[0] if name in names else default

        length = int(call(_REQUIRED)[0])
        bos = value("get_bos_id", None)
        return cls(
            vocabulary=int(value("get_vocab_size", 0)),
            context=int(value("get_max_context_len", length)),
            chunk=length if value("enable_dynamic_shape", False) else 1,
            cache=CacheKind(value("get_cache_kind", CacheKind.BUFFER.value)),
            bos=None if bos is None else int(bos),
            eos=tuple(map(int, call("get_eos_ids"))) if "get_eos_ids" in names else (),
            adapters=tuple(map(str, call("get_adapters"))) if "get_adapters" in names else (),
            image=ImageInput.read(names, call),
            source=Source.read({name: call(name) for name in NAMES if name in names}),
            standard=True,
            rewindable=int(value(_REWINDABLE, 0)),
        )

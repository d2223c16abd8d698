"""The store of lowered subgraphs and verdicts, which are found by their content.

**Blobs in memory.** The partitioner converts each partition to prove that it converts. ExecuTorch
then cuts the same partition out of the program, copies it, and asks the backend for its blob. A
blob is reused only for the same subgraph: same graph, same options, equal constants.

**Conversions on disk.** An unchanged subgraph is not converted a second time. An entry has the
files of a blob, concatenated, with their names and sizes as metadata; with precision ``auto`` also
the constants that fp16 rounds. Its key is a digest of all
inputs of the conversion: the subgraph with its constants, the options, and the toolchain. So if one
layer of a model changes, the blobs of the other partitions are found.

**Verdicts on disk.** One entry has the verdicts of trials with one toolchain, by signature.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export import ExportedProgram

from coreml_delegate.dynamic_shapes.symbols import declared_ranges
from coreml_delegate.exported.module_scope import scopes_of
from coreml_delegate.formats.blob import Files, size_of
from coreml_delegate.formats.caches import cache_folder, software
from coreml_delegate.formats.entry_cache import CacheOptions, EntryCache
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.options.compile_specs import ModelType
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.coremltools import registered_translations
from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.patches.torch import FakeTensor

FOLDER: Final = "converted"
"""Name of the folder of conversions, in the folder of all caches."""

VERDICTS: Final = "trials"
"""Name of the folder of verdicts, in the folder of all caches."""

_PACKAGE: Final = "coreml_delegate"
# Distributions whose code takes part in a conversion.
_DISTRIBUTIONS: Final = ("coremltools", "executorch", "numpy", "torch", "torchao")


def digest(*lines: str) -> str:
    """Return a digest of lines of text: 64 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def toolchain() -> str:
    """Return a digest of the software that rewrites, translates and converts a subgraph."""
    return digest(
        *(f"{name} {value}" for name, value in software(_PACKAGE, *_DISTRIBUTIONS).items())
    )


# Blobs in memory


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether a partition shares its weights with other methods.

    Attributes:
        methods: The methods whose partitions are functions of one model; empty if the partition is
            a separate model.
        reason: Why it is separate; empty if it is not.
    """

    methods: tuple[str, ...] = ()
    reason: str = ""


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of a partition's lowering, for the report.

    Attributes:
        sharing: None until its blob is taken, and for a single method.
    """

    sharing: Sharing | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class CachedBlob:
    """A blob in the cache, which has only weak references to this record.

    Attributes:
        files: The files of the blob; None before it is made and after it is taken.
        fp32_constants: Constants that fp16 rounds, by name; None unless they are recorded.
        constants: The constants of the subgraph, each with its version.
        outcomes: One per partition with this blob, in lowering order: methods may have equal
            partitions.
    """

    files: Files | None
    constants: Mapping[str, tuple[torch.Tensor, int]]
    fp32_constants: Constants | None = None
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def expect(self) -> Outcome:
        """Add a partition with this blob, and return its outcome, filled in later."""
        self.outcomes.append(Outcome())
        return self.outcomes[-1]

    def latest(self, count: int) -> list[Outcome]:
        """Return the last ``count`` outcomes, of the current lowering, in order.

        Earlier outcomes belong to abandoned lowerings.
        """
        missing = [Outcome() for _ in range(count - len(self.outcomes))]
        return [*missing, *self.outcomes[max(0, len(self.outcomes) - count) :]]

    @contextmanager
    def lent(self) -> Generator[None]:
        """Keep the files when they are handed over within the block."""
        content = self.files, self.constants, self.fp32_constants
        try:
            yield
        finally:
            self.files, self.constants, self.fp32_constants = content

    def hand_over(self) -> Files | None:
        """Return the files and drop them from the record; None the second time."""
        files, self.files, self.constants = self.files, None, {}
        self.fp32_constants = None
        return files


# By fingerprint, which does not depend on the values of constants.
_RECORDS: dict[str, weakref.WeakSet[CachedBlob]] = {}


def fingerprint(program: ExportedProgram, options: CompileOptions) -> str:
    """Return a digest of a subgraph and its options, without the values of constants."""
    lines = [f"{spec.key}={bytes(spec.value)!r}" for spec in options.to_specs()]
    lines += [str(spec) for spec in program.graph_signature.input_specs]
    lines += [str(spec) for spec in program.graph_signature.output_specs]
    for node in program.graph.nodes:
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
        if node.op == "placeholder":  # the values of calls follow from these
            lines.append(_describe(node.meta.get("val")))
    return digest(*lines, *_outside_graph(program, options))


def keep(program: ExportedProgram, options: CompileOptions) -> CachedBlob:
    """Add a record for a blob that will be made.

    Args:
        program: The subgraph, before the conversion, which may change it.
        options: How it is lowered.

    Returns:
        A record for the files; the caller references it as long as they may be needed.
    """
    for key in [key for key, records in _RECORDS.items() if not records]:
        del _RECORDS[key]
    record = CachedBlob(None, _constants(program))
    _RECORDS.setdefault(fingerprint(program, options), weakref.WeakSet()).add(record)
    return record


def find(program: ExportedProgram, options: CompileOptions) -> CachedBlob | None:
    """Return the record of this subgraph with its blob, or None."""
    if not _RECORDS:
        return None
    constants = _tensors(program)
    for record in _RECORDS.get(fingerprint(program, options), ()):
        if record.files is not None and _same(record.constants, constants):
            return record
    return None


def take(program: ExportedProgram, options: CompileOptions) -> Files | None:
    """Return the files of this subgraph's blob and drop them from the cache; None if missing."""
    record = find(program, options)
    return None if record is None else record.hand_over()


def _constants(program: ExportedProgram) -> dict[str, tuple[torch.Tensor, int]]:
    """Return constants with versions; a tensor's version counts in-place changes."""
    return {name: (tensor, tensor._version) for name, tensor in _tensors(program).items()}


def _tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    values: dict[str, Any] = {**program.state_dict, **program.constants}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _same(old: Mapping[str, tuple[torch.Tensor, int]], new: Mapping[str, torch.Tensor]) -> bool:
    if old.keys() != new.keys():
        return False
    for name, (tensor, version) in old.items():
        other = new[name]
        is_equal = tensor is other or (tensor.dtype == other.dtype and torch.equal(tensor, other))
        if tensor._version != version or not is_equal:
            return False
    return True


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return repr(value)


# Conversions on disk


@dataclass(frozen=True, slots=True)
class ConversionCacheEntry:
    """The cache entry of one conversion, present or not."""

    cache: EntryCache
    key: bytes

    @classmethod
    def of(
        cls, program: ExportedProgram, options: CompileOptions, *, records_constants: bool = False
    ) -> ConversionCacheEntry | None:
        """Return the cache entry of a subgraph's conversion.

        Args:
            program: The subgraph, before the conversion, which may change it.
            options: How it is lowered.
            records_constants: Whether the entry has the constants that fp16 rounds.

        Returns:
            None if the cache is off, or if the result depends on inputs that the key lacks:
            functions that a user has registered with coremltools, or Core ML's compiler.

        Raises:
            OptionError: See ``CacheOptions.from_environment``.
        """
        cache_options = CacheOptions.from_environment(FOLDER)
        if cache_options is None or options.model_type is ModelType.COMPILED_MODEL:
            return None
        constants: dict[str, Any] = {**program.state_dict, **program.constants}
        if not all(_is_plain(value) for value in constants.values()):
            return None
        if any(node.op == "get_attr" for node in program.graph.nodes) or _is_extended():
            return None
        if sum(value.nbytes for value in constants.values()) > cache_options.limit_bytes:
            return None
        lines = [toolchain(), fingerprint(program, options)]
        if records_constants:
            lines.append("with constants in fp32")
        key = hashlib.sha256(digest(*lines).encode())
        for name, value in sorted(constants.items()):
            key.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            key.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return cls(EntryCache(cache_options), key.digest())

    def find(self) -> Files | None:
        """Return the files of the blob, mapped from disk, or None."""
        entry = self.cache.read(self.key)
        if entry is None:
            return None
        files: Files = {}
        start = 0
        for name, size in entry.metadata["files"]:
            files[name] = entry.payload[start : start + size]
            start += size
        return files

    def keep(self, files: Files) -> None:
        """Write the files of the blob; a cache that cannot be written is not an error."""
        metadata = {"files": [(name, size_of(content)) for name, content in files.items()]}
        self.cache.write(self.key, metadata, *files.values())


def _is_plain(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return is_tensor and type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _outside_graph(program: ExportedProgram, options: CompileOptions) -> Iterable[str]:
    """Yield a line for each input of a conversion that the text of the graph lacks."""
    yield from sorted(f"{symbol}: {bounds}" for symbol, bounds in program.range_constraints.items())
    yield from sorted(f"{size} is {bounds}" for size, bounds in declared_ranges(program).items())
    if options.keep_fp32.modules:
        for node in program.graph.nodes:
            yield f"{node.name} in {scopes_of(node)}"


def _is_extended() -> bool:
    """Whether other packages have registered translations or passes with coremltools."""
    with quiet_import():
        from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    registered: list[Any] = [
        *registered_translations(),
        *PASS_REGISTRY.passes.values(),
    ]
    builtin_packages = ("coremltools", _PACKAGE)
    return any(
        function.__module__.partition(".")[0] not in builtin_packages for function in registered
    )


# Verdicts on disk


def read_verdicts() -> dict[str, Any]:
    """Return the verdicts of trials with this toolchain, by signature; empty if none are kept."""
    cache = _verdict_cache()
    entry = None if cache is None else cache.read(_verdict_key())
    return {} if entry is None else entry.metadata


def keep_verdicts(verdicts: Mapping[str, Any]) -> None:
    """Add verdicts, as plain data; a cache that cannot be written is not an error.

    A process that writes at the same time may drop them: their calls are then tried again.
    """
    cache = _verdict_cache()
    if cache is not None:
        cache.write(_verdict_key(), {**read_verdicts(), **verdicts})


def _verdict_cache() -> EntryCache | None:
    """Return the cache of verdicts, also if the other caches are off; None without a folder."""
    caches = cache_folder()
    return None if caches is None else EntryCache(CacheOptions(caches / VERDICTS))


def _verdict_key() -> bytes:
    return bytes.fromhex(digest("verdicts", toolchain()))

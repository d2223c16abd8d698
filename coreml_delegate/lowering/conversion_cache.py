"""The cache of conversions on disk: an unchanged subgraph is not converted a second time.

An entry has the files of a blob, concatenated, with their names and sizes as metadata. Its key is a
digest of all inputs of the conversion: the subgraph with its constants, the options, the sources of
this package and the versions of its dependencies. So if one layer of a model changes, the blobs of
the other partitions are found.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.export import ExportedProgram

from coreml_delegate.caches import source_digest
from coreml_delegate.compile_options import CompileOptions, ModelType
from coreml_delegate.dynamic_shapes.symbols import declared_ranges
from coreml_delegate.formats.blob import Files, size_of
from coreml_delegate.formats.entry_cache import CacheOptions, EntryCache
from coreml_delegate.lowering.blob_cache import fingerprint
from coreml_delegate.module_scope import scopes_of
from coreml_delegate.patches.coremltools import registered_translations
from coreml_delegate.patches.torch import FakeTensor
from coreml_delegate.third_party import quiet_import

FOLDER: Final = "converted"
"""Name of this cache's folder, in the folder of all caches."""

# Distributions whose code takes part in a conversion.
_DISTRIBUTIONS: Final = ("coremltools", "executorch", "numpy", "torch", "torchao")
_PACKAGE: Final = "coreml_delegate"


@dataclass(frozen=True, slots=True)
class ConversionCacheEntry:
    """The cache entry of one conversion, present or not."""

    cache: EntryCache
    key: bytes

    @classmethod
    def of(cls, program: ExportedProgram, options: CompileOptions) -> ConversionCacheEntry | None:
        """Return the cache entry of a subgraph's conversion.

        Args:
            program: The subgraph, before the conversion, which may change it.
            options: How it is lowered.

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
        digest = hashlib.sha256(_toolchain_versions().encode())
        digest.update(fingerprint(program, options).encode())
        for line in _conversion_inputs_outside_graph(program, options):
            digest.update(line.encode() + b"\n")
        for name, value in sorted(constants.items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            digest.update(_bytes_of(value))
        return cls(EntryCache(cache_options), digest.digest())

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


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _conversion_inputs_outside_graph(
    program: ExportedProgram, options: CompileOptions
) -> Iterable[str]:
    """Yield a line for each input of a conversion that the text of the graph lacks."""
    yield from sorted(f"{symbol}: {bounds}" for symbol, bounds in program.range_constraints.items())
    yield from sorted(f"{size} is {bounds}" for size, bounds in declared_ranges(program).items())
    if options.keep_fp32.modules:
        for node in program.graph.nodes:
            yield f"{node.name} in {scopes_of(node)}"


@functools.cache
def _toolchain_versions() -> str:
    versions = [f"{name} {_version(name)}" for name in _DISTRIBUTIONS]
    machine = f"{platform.python_version()} {platform.machine()}"
    return "\n".join([source_digest(_PACKAGE), machine, *versions])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


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

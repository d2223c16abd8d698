"""The cache of compiled models on disk: the keys of entries, and which models are worth caching.

An entry is OpenVINO's own export of the compiled model, with the meaning of its ports as metadata.
Reading an entry replaces the translation of the program and the transformations of the graph;
kernels are generated for this machine's CPU either way.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import openvino as ov

from coreml_delegate.formats.caches import source_digest
from coreml_delegate.formats.entry_cache import EntryCache
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE
from coreml_delegate.runtime.engines.openvino.session.inference import OpenVinoFunction
from coreml_delegate.runtime.engines.openvino.session.state_tensors import Interface
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.op_errors import last_line

_logger = logging.getLogger(__name__)

# To be incremented when entries change in a way that no other part of a key shows.
_SCHEMA: Final = 1
_DISTRIBUTION: Final = "coreml-delegate"
# Packages that turn the bytes of a program into its graph; the key has a digest of their sources.
_TRANSLATION: Final = ("coreml_delegate.runtime.engines", "coreml_delegate.runtime.mil")

# Seconds of processor time. A model found in the cache saves about 0.9 ms for each op (measured on
# MobileNetV2, ResNet-50 and ViT-B/16 in fp16: 0.17, 0.26 and 0.85 s become 0.04, 0.11 and 0.38). It
# costs, for each byte of weights, the digest (0.7 GB/s a core) and the checksum of the entry (3.1
# GB/s). So loading a stack of 25 large layers, or a small program, saves no time.
_SAVED_PER_OP: Final = 0.9e-3
_COST_PER_BYTE: Final = 1.5e-9
_WORTHWHILE: Final = 20e-3


@dataclass(frozen=True, slots=True)
class CompiledCache:
    """The entries of one function of one program under one configuration.

    ``parts`` has all of a key except the input shapes.
    """

    entries: EntryCache
    parts: Mapping[str, object]

    @classmethod
    def of(
        cls,
        core: Any,
        function: Function,
        source: ProgramSource | None,
        options: EngineOptions,
        config: Mapping[str, object],
    ) -> CompiledCache | None:
        """Return the cache for ``function``; None without a cache, or if it would save no time.

        ``config`` has the properties that the function is compiled with.
        """
        if source is None or options.cache is None or not is_worth_caching(function):
            return None
        parts = key_parts(core, function, source, config, exact_nan=options.exact_nan)
        return cls(EntryCache(options.cache), parts)

    def find(self, core: Any, shapes: Mapping[str, tuple[int, ...]]) -> OpenVinoFunction | None:
        """Return the function compiled earlier for these input shapes, or None."""
        key = entry_key(self.parts, shapes)
        entry = self.entries.read(key)
        if entry is None:
            return None
        data = np.frombuffer(entry.payload, np.uint8)
        config: Any = self.parts["config"]
        try:
            compiled = core.import_model(ov.Tensor(data, shared_memory=True), DEVICE, config)
            # The model's constants may lie in the mapped entry, so ``content`` keeps that alive.
            interface = Interface.decode(entry.metadata)
            return OpenVinoFunction(interface, compiled, config, core=core, content=data)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            self.entries.reject(key, last_line(error))
            return None

    def keep(self, function: OpenVinoFunction, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Write a function compiled for these input shapes."""
        try:
            exported = function.compiled.export_model()
        except RuntimeError as error:
            _logger.debug("OpenVINO does not export this model: %s", error)
            return
        key = entry_key(self.parts, shapes)
        self.entries.write(key, function.interface.encode(), exported.getbuffer())


def is_worth_caching(function: Function) -> bool:
    """Whether loading ``function`` from the cache is faster than compiling it."""
    ops = [op for op in function.block.walk() if op.type != "const"]
    stored = [
        constant.nbytes
        for op in function.block.walk()
        for constant in (*op.attributes.values(), *op.literals())
        if constant.offset is not None
    ]
    return len(ops) * _SAVED_PER_OP - sum(stored) * _COST_PER_BYTE > _WORTHWHILE


def key_parts(
    core: Any,
    function: Function,
    source: ProgramSource,
    config: Mapping[str, object],
    *,
    exact_nan: bool,
) -> dict[str, object]:
    """Return everything that a compiled function depends on, except its input shapes."""
    return {
        "schema": _SCHEMA,
        "package": importlib.metadata.version(_DISTRIBUTION),
        "translation": source_digest(*_TRANSLATION),
        "openvino": ov.get_version(),
        "cpu": core.get_property(DEVICE, "FULL_DEVICE_NAME"),
        "capabilities": sorted(core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")),
        "machine": platform.machine(),
        "config": dict(config),
        "exact_nan": exact_nan,
        "program": source.digest.hex(),
        "function": function.name,
    }


def entry_key(parts: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return the key, 32 bytes, of a function compiled for ``shapes``."""
    text = json.dumps({**parts, "shapes": shapes}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()

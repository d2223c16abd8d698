"""Calls of a compiled model that enter no Python, for hosts that pass addresses.

A call of OpenVINO's Python package takes 10 to 20 us beyond the model itself, as long as a small
model. Its C library does without. A compiled model gets there by its export, which is imported
again: worth it for small models, where the call is what takes time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import openvino as ov

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.runtime.cpp_libraries import CppLibrary
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE
from coreml_delegate.runtime.native import NativeCall

_logger = logging.getLogger(__name__)

_PACKAGE: Final = "coreml_delegate.runtime.engines.openvino.session"
_SOURCE: Final = "native_calls.cpp"
_INTERFACE_VERSION: Final = 1
_ERROR_BYTES: Final = 1024

# Element types as OpenVINO's C library counts them (ov_common.h), of those that cross a boundary.
_TYPES: Final[Mapping[str, int]] = {
    "boolean": 1,
    "f16": 3,
    "f32": 4,
    "f64": 5,
    "i8": 7,
    "i16": 8,
    "i32": 9,
    "i64": 10,
    "u8": 16,
}


class _PortSpec(ctypes.Structure):
    _fields_ = (
        ("index", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
    )


def native_call(
    compiled: Any, config: Mapping[str, object], inputs: Sequence[int], outputs: Sequence[int]
) -> NativeCall | None:
    """Return how to call a compiled model without Python.

    Args:
        compiled: ``openvino.CompiledModel``.
        config: The properties that it was compiled with.
        inputs: Indices of its inputs, in the order in which calls pass them.
        outputs: Of its outputs, likewise.

    Returns:
        None if there is an obstacle, see ``native_obstacle``, or if the library refuses the model.
    """
    if native_obstacle(compiled) is not None:
        return None
    library, _ = _library()
    ports = [*(compiled.inputs[n] for n in inputs), *(compiled.outputs[n] for n in outputs)]
    types = [_TYPES[port.get_element_type().get_type_name()] for port in ports]
    content = compiled.export_model().getvalue()
    specs = (_PortSpec * len(ports))()
    for spec, index, port, kind in zip(specs, (*inputs, *outputs), ports, types, strict=True):
        sizes = tuple(port.get_shape())
        spec.index, spec.type, spec.rank = index, kind, len(sizes)
        spec.sizes = (ctypes.c_int64 * len(sizes))(*sizes)
    pairs = [str(text).encode() for pair in config.items() for text in pair]
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    model = library.coreml_native_load(
        content,
        len(content),
        DEVICE.encode(),
        (ctypes.c_char_p * len(pairs))(*pairs),
        len(config),
        specs,
        len(inputs),
        len(outputs),
        int(int(compiled.get_property("INFERENCE_NUM_THREADS")) == 1),
        error,
        len(error),
    )
    if not model:
        _logger.debug("no native calls: %s", error.value.decode(errors="replace"))
        return None
    run = ctypes.cast(library.coreml_native_run, ctypes.c_void_p).value or 0
    call = NativeCall(run, model)
    weakref.finalize(call, _free, library, model, content)
    return call


def native_obstacle(compiled: Any) -> str | None:
    """Return why a compiled model cannot be called without Python, or None.

    Args:
        compiled: ``openvino.CompiledModel``.
    """
    ports = [*compiled.inputs, *compiled.outputs]
    if not all(port.get_partial_shape().is_static for port in ports):
        return "its shapes are not fixed"
    types = {port.get_element_type().get_type_name() for port in ports}
    if not types <= _TYPES.keys():
        return f"tensors of {', '.join(sorted(types - _TYPES.keys()))} cross its boundary"
    return _library()[1]


def _free(library: Any, model: int, _: bytes) -> None:
    """Free a model, whose constants lie in the bytes that it was imported from."""
    library.coreml_native_free(model)


@functools.cache
def _library() -> tuple[Any, str | None]:
    """Return the library, and why it cannot be built or loaded."""
    try:
        return _load(), None
    except (EngineUnavailableError, OSError, AttributeError) as error:
        return None, str(error)


def _load() -> Any:
    root = Path(ov.__file__).parent
    found = sorted((root / "libs").glob("libopenvino_c.so*"))
    if sys.platform != "linux" or not found:
        raise EngineUnavailableError(f"the openvino package for {sys.platform} has no C library")
    source = CppLibrary(
        name="native_calls",
        folder="native-calls",
        source=importlib.resources.files(_PACKAGE).joinpath(_SOURCE).read_bytes(),
        flags=(f"-I{root / 'include'}",),
        libraries=(str(found[0]),),
        depends_on=(ov.get_version(), found[0].stat().st_size),
    )
    reason = source.unavailable_reason()
    if reason is not None:
        raise EngineUnavailableError("native calls cannot be built", got=reason)
    path = source.build()
    ctypes.CDLL(str(found[0]))  # by its name, the library finds the one that is loaded
    library = ctypes.CDLL(str(path))
    if library.coreml_native_version() != _INTERFACE_VERSION:
        raise EngineUnavailableError("native calls are of another version", got=str(path))
    library.coreml_native_load.restype = ctypes.c_void_p
    library.coreml_native_load.argtypes = (
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_uint64,
        ctypes.POINTER(_PortSpec),
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_uint64,
    )
    library.coreml_native_free.restype = None
    library.coreml_native_free.argtypes = (ctypes.c_void_p,)
    return library

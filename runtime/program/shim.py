"""The C++ shim that registers a backend with the stock ExecuTorch runtime, and its Python side.

The shim depends on the class layouts of the installed ``executorch`` wheel, so it is built on first
use.

A callback never raises into C++. It returns an error code, and keeps the exception for the wrapper
that may have made the call on the same thread; other callers see only the error code.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.metadata
import importlib.resources
import importlib.util
import logging
import struct
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from coreml_delegate.errors import EngineUnavailableError, ExecutionError, ProgramError
from coreml_delegate.runtime import native
from coreml_delegate.runtime.cpp_libraries import CppLibrary
from coreml_delegate.runtime.program.decoder import DTYPES, SCALAR_TYPES
from coreml_delegate.runtime.program.delegate_interface import (
    DelegateCallable,
    DelegateLoader,
    DelegatePayload,
    ObservableDelegate,
    OpEvent,
    check_output_count,
    fit_output,
)
from coreml_delegate.runtime.program.event_trace import ALIGNMENT, LOGGED_AS, debug_buffer_error
from coreml_delegate.runtime.threads import one_torch_thread

_logger = logging.getLogger(__name__)

_INTERFACE_VERSION: Final = 4
_OK: Final = 0
_FAILED: Final = 0x1  # Error::Internal
_NOT_FOUND: Final = 0x20  # Error::NotFound
# Record of a value: is tensor, dtype, rank, is dynamic, address, bytes, address of the value.
_FIELDS: Final = struct.Struct("=7q")


class _SpecView(ctypes.Structure):
    _fields_ = (("key", c_char_p), ("value", c_void_p), ("nbytes", c_uint64))


_INIT: Final = ctypes.CFUNCTYPE(
    *(c_int32, c_void_p, c_char_p, c_char_p, c_void_p, c_uint64),
    *(POINTER(_SpecView), c_uint64, c_int32),
)
_EXECUTE: Final = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_void_p)
_DESTROY: Final = ctypes.CFUNCTYPE(None, c_void_p)


class _Callbacks(ctypes.Structure):
    _fields_ = (("init", _INIT), ("execute", _EXECUTE), ("destroy", _DESTROY))


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a call: a tensor on the runtime's memory; ``value`` is its address there."""

    tensor: torch.Tensor
    value: int
    is_dynamic: bool


@dataclass(slots=True)
class _Delegate:
    """A loaded delegate, with the arguments of its last call.

    The runtime usually passes the same memory in every call, so the tensors are reused.
    """

    callable: DelegateCallable
    records: bytes = b""
    arguments: list[_Argument] = field(default_factory=list[_Argument])


class ThreadState(threading.local):
    """Exceptions and delegates that callbacks store for the caller on the same thread.

    Delegates of the thread may log values of ``remaining_bytes``, None if unknown: the runtime ends
    the process when its debug buffer is full.
    """

    error: BaseException | None = None
    is_kept: bool = False
    loaded: list[DelegateCallable] | None = None
    remaining_bytes: int | None = None


class KeptErrors:
    """A context in which exceptions of callbacks on this thread are kept rather than logged.

    Not a generator, which would take microseconds in every call.
    """

    __slots__ = ("_before", "_state")

    def __init__(self, state: ThreadState) -> None:
        self._state = state

    def __enter__(self) -> Self:
        state = self._state
        self._before = state.is_kept, state.error
        state.is_kept, state.error = True, None
        return self

    def __exit__(self, *_: object) -> None:
        self._state.is_kept, self._state.error = self._before

    @property
    def error(self) -> BaseException | None:
        """The last exception that was kept, or None."""
        return self._state.error


_SIZES: Final = (POINTER(c_int32), c_uint64)
_TEXT: Final = (c_char_p, c_uint64)
# Function of the library -> argument types; all but the last return an error code.
_PROTOTYPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "coreml_shim_has_backend": (c_char_p,),
    "coreml_shim_register": (c_char_p, POINTER(_Callbacks)),
    "coreml_shim_named_data": (c_void_p, *_TEXT, POINTER(c_void_p), POINTER(c_uint64)),
    "coreml_shim_set_native": (c_void_p, c_void_p, c_void_p),
    "coreml_shim_resize": (c_void_p, *_SIZES, POINTER(c_int64)),
    "coreml_shim_wants_values": (c_void_p,),
    "coreml_shim_log_op": (c_void_p, c_char_p, c_uint64, c_uint64, *_TEXT),
    "coreml_shim_log_value": (c_void_p, c_char_p, c_int32, c_void_p, *_SIZES),
    "coreml_shim_close": (),
}


class Shim:
    """The loaded library, one per process, because registrations are permanent.

    Attributes:
        state: The state of the calling thread.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, argument_types in _PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes = argument_types
            function.restype = c_int32
        library.coreml_shim_close.restype = None
        self._loaders: dict[str, DelegateLoader] = {}
        self._delegates: dict[int, _Delegate] = {}
        self.state = ThreadState()
        # The runtime keeps pointers to these, so they must stay alive.
        self._callbacks = _Callbacks(
            _INIT(self._init), _EXECUTE(self._execute), _DESTROY(self._destroy)
        )

    def register(self, backend_id: str, loader: DelegateLoader) -> None:
        """Let ``loader`` load all later delegates of ``backend_id``.

        Raises:
            EngineUnavailableError: The runtime has another backend of that name, or too many.
        """
        if backend_id not in self._loaders:
            name = backend_id.encode()
            if self._library.coreml_shim_has_backend(name):
                raise EngineUnavailableError(
                    "the runtime has another backend of this name already", got=backend_id
                )
            code = self._library.coreml_shim_register(name, ctypes.byref(self._callbacks))
            if code != _OK:
                raise EngineUnavailableError(
                    f"the runtime refused to register {backend_id}", got=f"error {code:#x}"
                )
        self._loaders[backend_id] = loader

    @contextmanager
    def collecting(self) -> Generator[list[DelegateCallable]]:
        """Collect the delegates that this thread loads within the context.

        Yields:
            The delegates in loading order, which is the order of the ``.pte``.
        """
        before, delegates = self.state.loaded, list[DelegateCallable]()
        self.state.loaded = delegates
        try:
            yield delegates
        finally:
            self.state.loaded = before

    # --- callbacks

    def _report(self, error: BaseException, doing: str) -> int:
        self.state.error = error
        if not self.state.is_kept:
            self.state.error = None  # has no reader: do not keep its frames alive
            _logger.error("%s failed", doing, exc_info=error)
        return _FAILED

    def _init(
        self,
        handle: int,
        backend: bytes,
        method: bytes,
        processed: int | None,
        nbytes: int,
        specs: Any,
        spec_count: int,
        is_observed: int,
    ) -> int:
        try:
            payload = DelegatePayload(
                backend_id=backend.decode(),
                processed=_bytes_at(processed, nbytes),
                compile_specs=tuple(
                    (spec.key.decode(), bytes(_bytes_at(spec.value, spec.nbytes)))
                    for spec in (specs[:spec_count] if spec_count else ())
                ),
                method_name=method.decode(),
                named_data=functools.partial(self._named_data, handle),
                is_observed=bool(is_observed),
            )
            delegate = self._loaders[payload.backend_id](payload)
            self._delegates[handle] = _Delegate(delegate)
            native = delegate.native
            if native is not None:
                self._library.coreml_shim_set_native(handle, native.run, native.model)
            if self.state.loaded is not None:
                self.state.loaded.append(delegate)
        except BaseException as error:  # noqa: BLE001 - nothing may be raised into C++
            return self._report(error, "loading a delegate")
        return _OK

    def _execute(self, handle: int, records: int, length: int, tracer: int | None) -> int:
        try:
            delegate = self._delegates[handle]
            key = ctypes.string_at(records, length * 8)
            if key != delegate.records:
                delegate.arguments = _arguments(key)
                delegate.records = key
            with torch.no_grad():
                self._call(delegate, tracer)
        except BaseException as error:  # noqa: BLE001 - nothing may be raised into C++
            return self._report(error, "executing a delegate")
        return _OK

    def _destroy(self, handle: int) -> None:
        self._delegates.pop(handle, None)

    @one_torch_thread()
    def _call(self, delegate: _Delegate, tracer: int | None) -> None:
        function, arguments = delegate.callable, delegate.arguments
        count = function.input_count
        outputs = arguments[count:]
        inputs = [argument.tensor for argument in arguments[:count]]
        if tracer is not None and isinstance(function, ObservableDelegate):
            wants_values = bool(self._library.coreml_shim_wants_values(tracer))
            results, events = function.observe(inputs, with_values=wants_values)
            self._log(tracer, events)
        else:
            results = function(inputs)
        check_output_count(len(results), len(outputs))
        for position, (argument, result) in enumerate(zip(outputs, results, strict=True)):
            target = argument.tensor
            source = fit_output(
                result, target.shape, dynamic=argument.is_dynamic, position=position
            )
            if source.shape != target.shape:
                target = self._resize(argument, tuple(source.shape))
            target.copy_(source)

    def _log(self, tracer: int, events: Sequence[OpEvent]) -> None:
        for event in events:
            symbol, metadata = event.symbol.encode(), event.metadata
            end = event.start + event.nanoseconds
            self._library.coreml_shim_log_op(
                tracer, symbol, event.start, end, metadata, len(metadata)
            )
            for value in event.values:
                tensor = torch.from_numpy(np.ascontiguousarray(value))
                self._log_value(tracer, symbol, tensor)

    def _log_value(self, tracer: int, symbol: bytes, value: torch.Tensor) -> None:
        tensor = value.to(LOGGED_AS.get(value.dtype, value.dtype))
        remaining = self.state.remaining_bytes
        if remaining is not None:
            remaining -= tensor.nbytes + ALIGNMENT
            if remaining < 0:
                raise debug_buffer_error(symbol.decode(), tensor.nbytes)
            self.state.remaining_bytes = remaining
        sizes = (c_int32 * tensor.dim())(*tensor.shape)
        code = self._library.coreml_shim_log_value(
            tracer, symbol, SCALAR_TYPES[tensor.dtype], tensor.data_ptr(), sizes, tensor.dim()
        )
        if code != _OK:
            raise debug_buffer_error(symbol.decode(), tensor.nbytes)

    def _resize(self, argument: _Argument, shape: tuple[int, ...]) -> torch.Tensor:
        rank = len(shape)
        record = (c_int64 * (_FIELDS.size // 8 + 2 * rank))()
        sizes = (c_int32 * rank)(*shape)
        code = self._library.coreml_shim_resize(argument.value, sizes, rank, record)
        if code != _OK:
            raise ExecutionError(
                "the runtime cannot resize a delegate's output",
                got=f"shape {list(shape)} (error {code:#x})",
                expected="a shape within the bounds of the exported program",
            )
        return _arguments(bytes(record))[0].tensor

    def _named_data(self, handle: int, key: str) -> memoryview | None:
        if handle in self._delegates:
            raise ProgramError("named data can be read only while a delegate is loaded", got=key)
        data, nbytes, name = c_void_p(), c_uint64(), key.encode()
        code = self._library.coreml_shim_named_data(
            handle, name, len(name), ctypes.byref(data), ctypes.byref(nbytes)
        )
        if code == _NOT_FOUND:
            return None
        if code != _OK:
            raise ProgramError(
                f"the runtime cannot read named data {key!r}", got=f"error {code:#x}"
            )
        return _bytes_at(data.value, nbytes.value)


def _bytes_at(address: int | None, nbytes: int) -> memoryview:
    if not address or not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B").toreadonly()


def _arguments(records: bytes) -> list[_Argument]:
    """Decode the records of a call into tensors on the runtime's memory."""
    arguments: list[_Argument] = []
    position = 0
    while position < len(records):
        is_tensor, dtype, rank, is_dynamic, data, nbytes, value = _FIELDS.unpack_from(
            records, position
        )
        position += _FIELDS.size
        if not is_tensor:
            raise ProgramError(
                f"argument {len(arguments)} of a delegate is no tensor",
                expected="tensors only, as on a device",
            )
        layout = struct.unpack_from(f"={2 * rank}q", records, position)
        position += 8 * len(layout)
        tensor = _tensor(DTYPES.get(dtype), layout[:rank], layout[rank:], data, nbytes)
        arguments.append(_Argument(tensor, value, bool(is_dynamic)))
    return arguments


def _tensor(
    dtype: torch.dtype | None,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    data: int,
    nbytes: int,
) -> torch.Tensor:
    if dtype is None:
        raise ProgramError("argument of a delegate has a dtype that torch does not have")
    if nbytes == 0:
        return torch.empty(sizes, dtype=dtype)
    if not data:
        raise ExecutionError("the runtime passed a tensor without memory", got=f"{nbytes} bytes")
    memory = (ctypes.c_ubyte * nbytes).from_address(data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


_lock: Final = threading.Lock()
_shim: Shim | None = None


def loaded_shim() -> Shim | None:
    """Return the shim if it is loaded, else None."""
    return _shim


def load_shim() -> Shim:
    """Build the shim if needed, and load it.

    Returns:
        The same shim in every call.

    Raises:
        EngineUnavailableError: The shim cannot be built or loaded; the message has the reason.
    """
    global _shim
    with _lock:
        if _shim is None:
            _shim = _load()
        return _shim


def _load() -> Shim:
    path = build()
    root = executorch_root()
    try:
        if root is not None:
            # The shim refers to the runtime library without a path, so load that first.
            ctypes.CDLL(str(library_path(root)))
        library = ctypes.CDLL(str(path))
        version: int = library.coreml_shim_version()
        shim = Shim(library)
    except (OSError, AttributeError) as error:
        raise EngineUnavailableError(
            "cannot load the runtime shim",
            got=str(error),
            remedy=f"Delete {path} to have it built again.",
        ) from error
    if version != _INTERFACE_VERSION:
        raise EngineUnavailableError("the runtime shim is of another version", got=str(version))
    atexit.register(library.coreml_shim_close)
    return shim


# --- building the library -------------------------------------------------------------------------

_PACKAGE: Final = "coreml_delegate.runtime.program"
_SOURCE: Final = "coreml_shim.cpp"
_HEADER: Final = "delegate_calls.h"
_FLAGS: Final = (
    # Makes the wheel's headers use their generated macros.
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    # The wheel is built with it, and the layout of contexts in the headers depends on it.
    "-DET_EVENT_TRACER_ENABLED",
)


def executorch_root() -> Path | None:
    """Return the folder of the installed ``executorch``, without importing it; None if absent."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def library_path(root: Path) -> Path:
    """Return the wheel's shared runtime library, with which backends are registered."""
    return root / "lib" / "libexecutorch.so"


def unavailable_reason() -> str | None:
    """Return the reason why the shim cannot be built on this machine, or None if it can."""
    root = executorch_root()
    if root is None:
        return "the executorch package is not installed"
    if sys.platform != "linux" or not library_path(root).is_file():
        return f"the executorch package for {sys.platform} has no shared runtime library"
    return _shim_for(root).unavailable_reason()


def build() -> Path:
    """Return the shim; build it on the first use with this ``executorch``.

    Returns:
        Path of the shared library.

    Raises:
        EngineUnavailableError: There is no compiler, or it fails (with its last lines of output).
    """
    reason = unavailable_reason()
    root = executorch_root()
    if reason is not None or root is None:
        raise EngineUnavailableError(
            "the stock runtime cannot run Core ML delegates here",
            got=reason,
            remedy="Install a C++ compiler or set CXX, or use the Python host.",
        )
    return _shim_for(root).build()


def _shim_for(root: Path) -> CppLibrary:
    headers = root / "include"
    library = library_path(root).stat()
    sources = importlib.resources.files(_PACKAGE)
    return CppLibrary(
        name="coreml_shim",
        folder="stock-shim",
        source=sources.joinpath(_SOURCE).read_bytes(),
        headers={_HEADER: sources.joinpath(_HEADER).read_bytes(), native.HEADER: native.header()},
        flags=(
            *_FLAGS,
            f"-I{headers}",
            f"-I{headers / 'executorch/runtime/core/portable_type/c10'}",
        ),
        libraries=(f"-L{root / 'lib'}", "-lexecutorch"),
        depends_on=(importlib.metadata.version("executorch"), library.st_size, library.st_mtime_ns),
    )

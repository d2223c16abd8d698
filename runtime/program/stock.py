"""The ``stock`` host: ExecuTorch's runtime, with our delegate registered under Core ML's name."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from coreml_delegate.errors import (
    CoreMLDelegateError,
    EngineUnavailableError,
    ExecutionError,
    OptionError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.op_errors import first_line
from coreml_delegate.runtime.program import shim
from coreml_delegate.runtime.program.bundle import is_bundle, program_of
from coreml_delegate.runtime.program.delegate_interface import (
    COREML_BACKEND_ID,
    NO_REJECTED_HOSTS,
    DelegateCallable,
    DelegateLoader,
    RejectedHosts,
)
from coreml_delegate.runtime.program.event_trace import (
    ALIGNMENT,
    LOGGED_AS,
    debug_buffer_error,
    used_bytes,
)
from coreml_delegate.runtime.program.host_program import HostProgram, states_of
from coreml_delegate.runtime.program.inputs import Value, check_inputs, in_dim_order
from coreml_delegate.runtime.program.plan import (
    DelegateCall,
    IndexList,
    KernelCall,
    MethodInfo,
    TensorSpec,
)
from coreml_delegate.runtime.program.ptd import Sources, list_sources, open_program
from coreml_delegate.runtime.program.pte import Source, map_source
from coreml_delegate.runtime.program.signature import mutable_buffers
from coreml_delegate.runtime.snapshots import State

_logger = logging.getLogger(__name__)

# The bindings redirect the process's C++ streams during every call, which is not thread-safe; nor
# are the runtime's methods.
_RUNTIME_LOCK: Final = threading.RLock()
_REGISTER_LOCK: Final = threading.Lock()


def unavailable_reason() -> str | None:
    """Return the reason why the stock runtime cannot run Core ML delegates here, or None."""
    return None if machine.has_core_ml() else shim.unavailable_reason()


def register(loader: DelegateLoader, *, backend_id: str = COREML_BACKEND_ID) -> None:
    """Let ``executorch.runtime`` run programs with delegates of ``backend_id``.

    Builds a small C++ library on first use. A second call replaces the loader for programs loaded
    afterwards. There is no way to unregister. On macOS, where the runtime has Core ML's own
    backend, this does nothing.

    Raises:
        EngineUnavailableError: See ``unavailable_reason``; or another backend has that name.
    """
    if machine.has_core_ml() and backend_id == COREML_BACKEND_ID:
        _logger.debug("the runtime has Core ML's own backend; nothing to register")
        return
    with _REGISTER_LOCK:
        shim.load_shim().register(backend_id, loader)


def check_support(method: MethodInfo, backend_id: str | None = None) -> None:
    """Check that the runtime has all backends and operators of a method.

    The runtime itself reports only an error number. A backend ``backend_id`` will be registered
    before the method is loaded.

    Raises:
        ProgramError: The method has a delegate of a backend that the runtime does not have.
        UnsupportedOpError: The runtime lacks an operator.
        EngineUnavailableError: The runtime cannot be imported.
    """
    runtime = _runtime()
    with _RUNTIME_LOCK:
        backends = runtime.backend_registry
        required = {delegate.backend_id for delegate in method.delegates} - {backend_id}
        absent = [name for name in sorted(required) if not backends.is_available(name)]
        registered = backends.registered_backend_names
        operators = runtime.operator_registry.operator_names
    if absent:
        raise ProgramError(
            f"method {method.name!r} has a delegate whose backend the runtime does not have",
            got=absent[0],
            expected=", ".join(registered),
            remedy="Register the backend first." if absent[0] == COREML_BACKEND_ID else None,
        )
    if missing := sorted(method.operators.keys() - operators):
        raise UnsupportedOpError(
            "the stock runtime has no kernel for operators of the program",
            got=", ".join(missing),
            remedy="Import the library that registers them"
            + ("." if required else ", or use the Python host."),
        )


class StockProgram(HostProgram):
    """A ``.pte`` loaded in the stock runtime. Calls from several threads run one at a time.

    The loader passed to ``register`` prepares delegates.

    Args:
        pte: Path of a ``.pte``, or its bytes.
        data: External data of the program: path of a ``.ptd``, or its bytes.
        rejected_hosts: Value of the attribute.
        enable_etdump: See ``runtime.load_program``.
        debug_buffer_size: See ``runtime.load_program``.

    Raises:
        BlobFormatError: Not a ``.pte``, or a truncated or corrupt one.
        ProgramError: A file cannot be read, the runtime refuses it, it takes more memory than is
            available, or tensors are missing in ``data``.
        OptionError: ``data`` has several files; the runtime accepts only one.
        EngineUnavailableError: The runtime cannot be imported.
    """

    host_name = "stock"

    def __init__(
        self,
        pte: Source,
        *,
        data: Sources | None = None,
        rejected_hosts: RejectedHosts = NO_REJECTED_HOSTS,
        enable_etdump: bool = False,
        debug_buffer_size: int = 0,
    ) -> None:
        # Parsed first for the metadata, and because the runtime's errors on bad bytes say little.
        program = open_program(pte, data)
        super().__init__(program, rejected_hosts, _RUNTIME_LOCK)
        planned = max((sum(method.arena_sizes) for method in program.methods), default=0)
        limits.require_available_memory(planned, "the memory that the program plans")
        # Bytes left for values; None if events are not logged.
        self._remaining_bytes = debug_buffer_size if enable_etdump else None
        self._logs_values = bool(self._remaining_bytes)
        self._written: tuple[bytes, bytes] | None = None
        self._methods: dict[str, Any] = {}
        self._delegates: dict[str, list[DelegateCallable]] = {}
        runtime = _runtime()
        content = _content(pte)
        with _RUNTIME_LOCK, _as_path(data) as data_path:
            try:
                self._loaded = runtime.load_program(
                    content,
                    data_path=data_path,
                    enable_etdump=enable_etdump,
                    debug_buffer_size=debug_buffer_size,
                )
            except (RuntimeError, MemoryError) as error:
                raise ProgramError(
                    "the stock runtime refuses the program", got=first_line(error)
                ) from error

    def delegates(self, method: str) -> tuple[DelegateCallable, ...]:
        """Return a method's loaded delegates of our backend; see ``HostProgram``."""
        with _RUNTIME_LOCK:
            self._method(self.program.method(method))
        return tuple(self._delegates[method])

    def run(self, method: str, inputs: Sequence[Value]) -> list[Value]:
        """Run a method once; see ``HostProgram``."""
        info = self.program.method(method)
        check_inputs(info, inputs)
        # The runtime ignores the strides of inputs, so bring them into its memory layout.
        arguments = [
            in_dim_order(value.detach() if value.requires_grad else value, spec)
            if isinstance(spec, TensorSpec) and isinstance(value, torch.Tensor)
            else spec  # equals ``value``, or is None for a string
            for spec, value in zip(info.input_specs, inputs, strict=True)
        ]
        with _RUNTIME_LOCK:
            loaded = self._method(info)
            with self._logging(info):
                return list(_call(lambda: loaded.execute(arguments), info, "failed to run"))

    @contextmanager
    def _logging(self, info: MethodInfo) -> Generator[None]:
        """Keep the values of a run within the debug buffer; beyond it, the runtime would abort."""
        if self._written is not None:
            raise OptionError(
                "the events have been written, after which the stock runtime logs no more",
                remedy="Load the program again, or use host='python'",
            )
        library = shim.loaded_shim()
        if not self._logs_values or self._remaining_bytes is None or library is None:
            yield
            return
        own = _logged_bytes(info)
        if own > self._remaining_bytes:
            raise debug_buffer_error(f"method {info.name!r}", own)
        library.state.remaining_bytes = self._remaining_bytes - own
        try:
            yield
        finally:
            self._remaining_bytes = library.state.remaining_bytes or 0
            library.state.remaining_bytes = None

    def _logged_events(self) -> tuple[bytes, bytes] | None:
        if self._written is None and self._remaining_bytes is not None:
            self._written = self._read_events()
        return self._written

    def _read_events(self) -> tuple[bytes, bytes]:
        with _RUNTIME_LOCK, tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
            # In a temporary folder, because the runtime does not report failed writes.
            dump, values = Path(folder) / "etdump", Path(folder) / "values"
            self._loaded.write_etdump_result_to_file(str(dump), str(values))
            etdump = dump.read_bytes()
            content = b""
            if values.exists():
                # The runtime writes the complete buffer, including its unused end.
                with values.open("rb") as file:
                    content = file.read(used_bytes(etdump))
            return etdump, content

    def _states(self, *, loaded: bool = False) -> dict[str, State]:
        for info in self.program.methods:
            self._check_reachable(info)
        for info in () if loaded else self.program.methods:
            self._method(info)
        return dict(
            state
            for name, delegates in self._delegates.items()
            for state in states_of(name, delegates).items()
        )

    def _check_reachable(self, info: MethodInfo) -> None:
        buffers = mutable_buffers(info)
        if buffers or (machine.has_core_ml() and info.delegates):
            raise ProgramError(
                "the stock runtime does not give access to what the program keeps",
                got=f"{len(buffers)} mutable buffer(s) outside of delegates in {info.name!r}"
                if buffers
                else "Core ML's own backend",
                remedy="Use host='python', or load the program anew to begin from the start",
            )

    def _method(self, info: MethodInfo) -> Any:
        loaded = self._methods.get(info.name)
        if loaded is None:
            check_support(info)
            library = shim.loaded_shim()
            with nullcontext([]) if library is None else library.collecting() as delegates:
                loaded = _call(lambda: self._loaded.load_method(info.name), info, "failed to load")
            self._methods[info.name] = loaded
            self._delegates[info.name] = list(delegates)
        return loaded


def _logged_bytes(info: MethodInfo) -> int:
    """Return an upper bound of the bytes that the runtime logs in a run, without delegates' values.

    The bound is the size of all arguments of calls and of the outputs.

    Raises:
        OptionError: The bound is unknown, or the runtime would write a damaged file.
    """
    instructions = [instruction for chain in info.chains for instruction in chain]
    calls = [c for c in instructions if isinstance(c, KernelCall | DelegateCall)]
    logged = [*info.outputs, *(index for call in calls for index in call.args)]
    specs = [info.values[index] for index in logged]
    tensors = [spec for spec in specs if isinstance(spec, TensorSpec)]
    obstacles = {
        "loops": info.has_jumps,
        "lists of tensors": any(isinstance(spec, IndexList) for spec in specs),
    }
    dtypes = {spec.dtype for spec in tensors if LOGGED_AS.get(spec.dtype, spec.dtype) != spec.dtype}
    obstacles |= {f"tensors of {dtype}": True for dtype in dtypes}
    if reasons := [what for what, is_there in obstacles.items() if is_there]:
        raise OptionError(
            "the stock runtime does not log the values of this method safely",
            got=", ".join(reasons),
            remedy="Use host='python', or log only times",
        )
    return sum(ALIGNMENT + math.prod(spec.shape) * spec.dtype.itemsize for spec in tensors)


def _content(pte: Source) -> bytes | str:
    """Return a program as path or bytes for the runtime, which does not read bundles here."""
    view, _ = map_source(pte, "the program", "a .pte file")
    if is_bundle(view):
        return bytes(program_of(view))
    return bytes(pte) if isinstance(pte, bytes | bytearray | memoryview) else str(pte)


@contextmanager
def _as_path(data: Sources | None) -> Generator[Path | None]:
    """Provide external data as one file, which the runtime maps while it loads a program."""
    if data is None:
        yield None
        return
    sources = list_sources(data)
    if len(sources) != 1:
        raise OptionError(
            "the stock runtime takes one file of external data",
            got=str(len(sources)),
            remedy="Use host='python', or write one file",
        )
    (source,) = sources
    if not isinstance(source, bytes | bytearray | memoryview):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
        path = Path(folder) / "external.ptd"
        path.write_bytes(source)
        yield path


def _runtime() -> Any:
    try:
        with quiet_import():
            from executorch.runtime import Runtime  # takes seconds to import: not at module level
    except ImportError as error:
        raise EngineUnavailableError(
            "the stock runtime cannot be imported", got=first_line(error)
        ) from error
    _start_threads()
    return Runtime.get()


@functools.cache
def _start_threads() -> None:
    """Let the runtime count cores for its threads, with its messages in our log.

    On Linux it first looks for files of Android, and writes a line to stderr for each missing file.
    """
    from executorch.extension.pybindings import portable_lib

    count_threads = getattr(portable_lib, "_threadpool_get_thread_count", None)
    if count_threads is None or sys.stderr is None:
        return
    with _RUNTIME_LOCK, tempfile.TemporaryFile() as messages:
        stderr = os.dup(2)
        try:
            os.dup2(messages.fileno(), 2)
            count_threads()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        messages.seek(0)
        _logger.debug("messages of the runtime's thread pool: %s", messages.read().decode())


def _call(action: Callable[[], Any], info: MethodInfo, what: str) -> Any:
    """Run ``action``; raise a delegate's exception instead of the runtime's error number."""
    library = shim.loaded_shim()
    with nullcontext() if library is None else shim.KeptErrors(library.state) as kept_errors:
        try:
            return action()
        except (RuntimeError, MemoryError) as error:
            cause = error if kept_errors is None else kept_errors.error or error
            if isinstance(cause, Exception) and not isinstance(cause, CoreMLDelegateError):
                raise _failure(info, what, cause) from cause
            cause.add_note(f"in a delegate of method {info.name!r} on the stock runtime")
            raise cause from None


def _failure(info: MethodInfo, what: str, error: Exception) -> ExecutionError:
    return ExecutionError(f"the stock runtime {what} method {info.name!r}", got=first_line(error))

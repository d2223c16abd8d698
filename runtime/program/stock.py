"""Host B: the stock ExecuTorch runtime, with our delegate registered under Core ML's name."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from coreml_delegate.errors import (
    CoreMLDelegateError,
    EngineUnavailableError,
    ExecutionError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.runtime.program import shim_build
from coreml_delegate.runtime.program.delegate import COREML_BACKEND_ID, DelegateLoader
from coreml_delegate.runtime.program.inputs import Value, check_inputs, in_dim_order
from coreml_delegate.runtime.program.plan import KernelCall, MethodInfo, TensorSpec
from coreml_delegate.runtime.program.pte import PteProgram, Source
from coreml_delegate.runtime.program.shim import load_shim, loaded_shim
from coreml_delegate.third_party import quiet_import

_logger = logging.getLogger(__name__)

# The bindings redirect the process's C++ streams around every call, which two threads must not do
# at once; the runtime's methods are not thread-safe either.
_RUNTIME_LOCK: Final = threading.RLock()
_REGISTER_LOCK: Final = threading.Lock()


def unavailable_reason() -> str | None:
    """Why the stock runtime cannot run Core ML delegates on this machine; None if it can."""
    return None if _has_core_ml() else shim_build.unavailable_reason()


def register(loader: DelegateLoader, *, backend_id: str = COREML_BACKEND_ID) -> None:
    """Let ``executorch.runtime`` run programs with Core ML delegates.

    Builds a small C++ library on first use. Calling again replaces the loader: programs loaded
    afterwards use the new one. There is no way to unregister. On macOS, where the runtime has
    Core ML's own backend, this does nothing.

    Args:
        loader: Prepares delegates for execution.
        backend_id: Name of the backend whose delegates it takes.

    Raises:
        EngineUnavailableError: See ``unavailable_reason``; or another backend has that name.
    """
    if _has_core_ml() and backend_id == COREML_BACKEND_ID:
        _logger.debug("the runtime has Core ML's own backend; nothing to register")
        return
    with _REGISTER_LOCK:
        load_shim().register(backend_id, loader)


class StockProgram:
    """A ``.pte`` loaded in the stock runtime. Calls from several threads take turns.

    Has the interface of ``PythonProgram``. Delegates run through what ``register`` was given.
    """

    def __init__(self, program: PteProgram, runtime: Any, loaded: Any) -> None:
        self._program = program
        self._runtime = runtime
        self._loaded = loaded
        self._methods: dict[str, Any] = {}

    @classmethod
    def load(cls, pte: Source) -> StockProgram:
        """Load a program; its methods are prepared when first run, or by ``load_method``.

        Args:
            pte: Path of a ``.pte``, or its bytes.

        Raises:
            BlobFormatError: Not a ``.pte``, or a truncated or corrupt one.
            ProgramError: The file cannot be read, or the runtime refuses it.
            EngineUnavailableError: The runtime cannot be imported.
        """
        # Parsed here first: for the metadata, and because the runtime says little about bad bytes.
        program = PteProgram.open(pte)
        runtime = _runtime()
        data = bytes(pte) if isinstance(pte, bytes | bytearray | memoryview) else str(pte)
        with _RUNTIME_LOCK:
            try:
                loaded = runtime.load_program(data)
            except RuntimeError as error:
                raise ProgramError(
                    "the stock runtime refuses the program", got=_first_line(error)
                ) from error
        return cls(program, runtime, loaded)

    @property
    def method_names(self) -> tuple[str, ...]:
        """Names of the methods, in file order."""
        return self._program.method_names

    @property
    def program(self) -> PteProgram:
        """The program as it was read: metadata, delegates, named data."""
        return self._program

    def load_method(self, name: str = "forward") -> None:
        """Prepare a method: load its delegates and allocate its memory.

        Raises:
            ProgramError: No such method; a backend the runtime does not have; a refusal.
            UnsupportedOpError: The runtime lacks an operator.
        """
        with _RUNTIME_LOCK:
            self._method(self._program.method(name))

    def run(self, method: str, inputs: Sequence[Value]) -> list[Value]:
        """Run a method once.

        Args:
            method: Method name.
            inputs: Inputs in order; tensors of any strides.

        Returns:
            Outputs in order: copies, safe to keep.

        Raises:
            InputError: Wrong count, dtype or shape of an input.
            ExecutionError: A kernel or a delegate failed.
            ProgramError: See ``load_method``, as are the other errors of the first run.
        """
        info = self._program.method(method)
        check_inputs(info, inputs)
        # The runtime reads an input's memory in its own order, whatever the strides say.
        arranged = [
            in_dim_order(value.detach(), spec)
            if isinstance(spec, TensorSpec) and isinstance(value, torch.Tensor)
            else value
            for spec, value in zip(info.input_specs, inputs, strict=True)
        ]
        with _RUNTIME_LOCK:
            loaded = self._method(info)
            return list(_call(lambda: loaded.execute(arranged), info, "failed to run"))

    def _method(self, info: MethodInfo) -> Any:
        loaded = self._methods.get(info.name)
        if loaded is None:
            self._check_support(info)
            loaded = _call(lambda: self._loaded.load_method(info.name), info, "failed to load")
            self._methods[info.name] = loaded
        return loaded

    def _check_support(self, info: MethodInfo) -> None:
        """Say what the runtime lacks, which it would put into one number."""
        backends = self._runtime.backend_registry
        for backend_id in sorted({delegate.backend_id for delegate in info.delegates}):
            if not backends.is_available(backend_id):
                raise ProgramError(
                    f"method {info.name!r} has a delegate whose backend the runtime does not have",
                    got=backend_id,
                    expected=", ".join(backends.registered_backend_names),
                    remedy="Register the backend first."
                    if backend_id == COREML_BACKEND_ID
                    else None,
                )
        known = self._runtime.operator_registry.operator_names
        used = {
            call.operator for chain in info.chains for call in chain if isinstance(call, KernelCall)
        }
        if missing := sorted(used - known):
            raise UnsupportedOpError(
                "the stock runtime has no kernel for operators of the program",
                got=", ".join(missing),
                remedy="Import the library that registers them, or use the Python host.",
            )


def _has_core_ml() -> bool:
    return sys.platform == "darwin"


def _runtime() -> Any:
    try:
        with quiet_import():
            from executorch.runtime import Runtime  # takes seconds to import: not at module level
    except ImportError as error:
        raise EngineUnavailableError(
            "the stock runtime cannot be imported", got=_first_line(error)
        ) from error
    return Runtime.get()


def _call(action: Callable[[], Any], info: MethodInfo, what: str) -> Any:
    """Run ``action``; a delegate's own exception takes the place of the runtime's error number."""
    shim = loaded_shim()
    if shim is None:
        return _call_plainly(action, info, what)
    with shim.keeping_errors() as kept:
        try:
            return action()
        except RuntimeError as error:
            cause = kept()
            if cause is None:
                raise _failure(info, what, error) from error
            if isinstance(cause, Exception) and not isinstance(cause, CoreMLDelegateError):
                raise _failure(info, what, cause) from cause
            cause.add_note(f"in a delegate of method {info.name!r} on the stock runtime")
            raise cause from None


def _call_plainly(action: Callable[[], Any], info: MethodInfo, what: str) -> Any:
    try:
        return action()
    except RuntimeError as error:
        raise _failure(info, what, error) from error


def _failure(info: MethodInfo, what: str, error: Exception) -> ExecutionError:
    return ExecutionError(f"the stock runtime {what} method {info.name!r}", got=_first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

"""Choose the host that executes a ``.pte``, and load the program on that host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from coreml_delegate.errors import (
    EngineUnavailableError,
    OptionError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.delegate import read_blob, resolve
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.coreml import COREML
from coreml_delegate.runtime.engines.selection import AUTO
from coreml_delegate.runtime.program import host as python
from coreml_delegate.runtime.program import stock
from coreml_delegate.runtime.program.delegate_interface import (
    COREML_BACKEND_ID,
    NO_REJECTED_HOSTS,
    DelegateLoader,
    DelegatePayload,
    RejectedHosts,
)
from coreml_delegate.runtime.program.event_trace import EventTrace
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.plan import DelegateInfo, MethodInfo
from coreml_delegate.runtime.program.ptd import ExternalData, Sources, list_sources
from coreml_delegate.runtime.program.pte import PteProgram, Source
from coreml_delegate.runtime.program.stock import StockProgram

_logger = logging.getLogger(__name__)

HostProgram: TypeAlias = PythonProgram | StockProgram
"""A loaded program; both kinds have the same interface."""

# Between registering a loader and loading with it, no other thread may register another.
_STOCK_LOCK: Final = threading.Lock()


def _python_obstacles(
    program: PteProgram, data: Sources | None, option: str | None
) -> tuple[str, ...]:
    del data, option  # supports all
    return _refusals(program, python.check_support)


def _stock_obstacles(
    program: PteProgram, data: Sources | None, option: str | None
) -> tuple[str, ...]:
    if (reason := stock.unavailable_reason()) is not None:
        return (reason,)
    if data is not None and len(list_sources(data)) != 1:
        return ("it takes one file of external data",)
    if machine.has_core_ml():
        if option is not None:
            return (f"Core ML's own backend does not take {option}",)
        if methods := _stateful_methods(program, data):
            return (f"{_KEEPS_NO_STATE}, which {', '.join(methods)} has",)
    return _refusals(program, lambda method: stock.check_support(method, COREML_BACKEND_ID))


def _refusals(program: PteProgram, check: Callable[[MethodInfo], None]) -> tuple[str, ...]:
    """Return the reasons why ``check`` refuses methods, each once."""
    reasons: list[str] = []
    for method in program.methods:
        try:
            check(method)
        except (ProgramError, UnsupportedOpError, EngineUnavailableError) as error:
            reasons.append(f"{error.what}: {error.got}")
    return tuple(dict.fromkeys(reasons))


_KEEPS_NO_STATE: Final = "ExecuTorch's Core ML backend for macOS keeps no state"


def _stateful_methods(program: PteProgram, data: Sources | None) -> list[str]:
    """Return the names of the methods with a stateful Core ML delegate."""
    if data is not None:
        program = program.with_external(ExternalData.open(data).get)
    return [
        method.name
        for method in program.methods
        if any(
            _has_state(program, method, info)
            for info in method.delegates
            if info.backend_id == COREML_BACKEND_ID
        )
    ]


def _has_state(program: PteProgram, method: MethodInfo, info: DelegateInfo) -> bool:
    payload = DelegatePayload(
        info.backend_id, info.processed, info.compile_specs, method.name, program.named_data
    )
    blob, function = resolve(payload)
    try:
        model, _ = read_blob(blob)
    except ProgramError:  # compiled ahead of time, which only Apple's runtime reads
        return False
    return bool(model.function(function).states)


def _package_only_option(engine: str, options: EngineOptions | None) -> str | None:
    """Return the option that only engines of this package support, as text; None by default."""
    options = options or EngineOptions()
    if engine not in (AUTO, COREML.name):
        return f"engine={engine!r}"
    if options.numerics_option is not None:
        return options.numerics_option
    if options.exact_nan:
        return "exact_nan=True"
    return None if options.compute_unit is None else "a compute unit beside the program's own"


def check_stock_options(engine: str, options: EngineOptions | None) -> None:
    """Refuse options that Core ML's own backend lacks, where it runs the delegates.

    Args:
        engine: ``auto``, or an engine's name.
        options: How to execute.

    Raises:
        OptionError: This is macOS, and the backend does not support an option.
    """
    option = _package_only_option(engine, options)
    if machine.has_core_ml() and option is not None:
        raise OptionError(
            "on macOS the stock host runs delegates by Core ML's own backend",
            got=option,
            remedy="Use host='python', or leave it out",
        )


_DEFAULT: Final = PythonProgram.host_name

# Host -> function that returns reasons why it cannot run all methods; the default host first.
_OBSTACLES: Final[
    Mapping[str, Callable[[PteProgram, Sources | None, str | None], tuple[str, ...]]]
] = {
    _DEFAULT: _python_obstacles,
    StockProgram.host_name: _stock_obstacles,
}

HOSTS: Final = (AUTO, *_OBSTACLES)
"""Names of hosts of ``.pte`` programs: ``auto``, the Python executor, ExecuTorch's runtime."""


def load(
    pte: Source,
    loader: DelegateLoader,
    *,
    engine: str = AUTO,
    options: EngineOptions | None = None,
    data: Sources | None = None,
    host: str = AUTO,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
) -> HostProgram:
    """Load a program on a host.

    Args:
        pte: Path of a ``.pte``, or its bytes.
        loader: Prepares the Core ML delegates.
        engine: The engine that ``loader`` uses, or ``auto``.
        options: The engine's options.
        data: External data of the program.
        host: One of ``HOSTS``. ``auto`` is ``python``, or ``stock`` if only that host runs all
            methods, which is logged with the reason.
        enable_etdump: See ``runtime.load_program``.
        debug_buffer_size: See ``runtime.load_program``.

    Raises:
        CoreMLDelegateError: See ``runtime.load_program``.
    """
    program: Source | PteProgram = pte
    rejected_hosts = NO_REJECTED_HOSTS
    if host == AUTO:
        program = PteProgram.open(pte)
        host, rejected_hosts = _choose(program, data, _package_only_option(engine, options))
    if host == _DEFAULT:
        external = None if data is None else ExternalData.open(data)
        return PythonProgram.load(
            program,
            loader,
            external_data=external,
            rejected_hosts=rejected_hosts,
            trace=EventTrace(debug_buffer_size) if enable_etdump else None,
        )
    check_stock_options(engine, options)
    if machine.has_core_ml() and (methods := _stateful_methods(PteProgram.open(pte), data)):
        _logger.warning("%s, which %s has", _KEEPS_NO_STATE, ", ".join(methods))
    with _STOCK_LOCK:
        stock.register(loader)
        loaded = StockProgram.load(
            pte,
            data=data,
            rejected_hosts=rejected_hosts,
            enable_etdump=enable_etdump,
            debug_buffer_size=debug_buffer_size,
        )
        # Loading a method loads its delegates: do so before another loader is registered.
        for name in loaded.method_names:
            loaded.load_method(name)
    return loaded


def _choose(
    program: PteProgram, data: Sources | None, option: str | None
) -> tuple[str, RejectedHosts]:
    """Return the first host that runs all methods, else the default host, which may run some."""
    rejected_hosts: dict[str, tuple[str, ...]] = {}
    for name, obstacles in _OBSTACLES.items():
        reasons = obstacles(program, data, option)
        if not reasons:
            if rejected_hosts:
                _log_rejected(f"{program.origin} runs on the {name} host", rejected_hosts)
            return name, rejected_hosts
        rejected_hosts[name] = reasons
    _log_rejected(f"no host runs all of {program.origin}", rejected_hosts)
    return _DEFAULT, rejected_hosts


def _log_rejected(what: str, rejected_hosts: RejectedHosts) -> None:
    why = (f"the {name} host cannot ({', '.join(r)})" for name, r in rejected_hosts.items())
    _logger.warning("%s: %s", what, "; ".join(why))

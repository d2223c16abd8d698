"""Choose the host that executes a ``.pte``, and load the program on that host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from coreml_delegate.errors import (
    EngineUnavailableError,
    OptionError,
    ProgramError,
    UnsupportedOpError,
)
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.delegate import delegate_loader, read_blob, resolve
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.coreml import COREML
from coreml_delegate.runtime.engines.selection import AUTO, ENGINES, require_choice
from coreml_delegate.runtime.program import host as python
from coreml_delegate.runtime.program import stock
from coreml_delegate.runtime.program.delegate_interface import (
    COREML_BACKEND_ID,
    NO_REJECTED_HOSTS,
    RejectedHosts,
)
from coreml_delegate.runtime.program.event_trace import EventTrace
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.host_program import HostProgram
from coreml_delegate.runtime.program.plan import DelegateInfo, MethodInfo
from coreml_delegate.runtime.program.ptd import Sources, list_sources, open_program
from coreml_delegate.runtime.program.pte import PteProgram, Source
from coreml_delegate.runtime.program.stock import StockProgram

_logger = logging.getLogger(__name__)

# Between registering a loader and loading with it, no other thread may register another.
_STOCK_LOCK: Final = threading.Lock()


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
        if methods := _stateful_methods(program):
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


def _stateful_methods(program: PteProgram) -> list[str]:
    """Return the names of the methods with a stateful Core ML delegate."""
    return [
        method.name
        for method in program.methods
        if any(
            info.backend_id == COREML_BACKEND_ID and _has_state(program, info)
            for info in method.delegates
        )
    ]


def _has_state(program: PteProgram, info: DelegateInfo) -> bool:
    blob, function = resolve(info.processed, program.named_data)
    try:
        model, _ = read_blob(blob)
    except ProgramError:  # compiled ahead of time, which only Apple's runtime reads
        return False
    return bool(model.function(function).states)


def _package_only_option(engine: str | None, options: EngineOptions | None) -> str | None:
    """Return the option that only engines of this package support, as text; None by default."""
    options = options or EngineOptions()
    if engine not in (None, AUTO, COREML.name):
        return f"engine={engine!r}"
    if options.numerics_option is not None:
        return options.numerics_option
    if options.exact_nan:
        return "exact_nan=True"
    return None if options.compute_unit is None else "a compute unit beside the program's own"


def check_stock_options(engine: str | None, options: EngineOptions | None) -> None:
    """Refuse options that Core ML's own backend lacks, where it runs the delegates.

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


# Host -> function that returns reasons why it cannot run all methods; the default host first.
_OBSTACLES: Final[
    Mapping[str, Callable[[PteProgram, Sources | None, str | None], tuple[str, ...]]]
] = {
    PythonProgram.host_name: lambda program, *_: _refusals(program, python.check_support),
    StockProgram.host_name: _stock_obstacles,
}

HOSTS: Final = (AUTO, *_OBSTACLES)
"""Names of hosts of ``.pte`` programs: ``auto``, the Python executor, ExecuTorch's runtime."""


def load_program(
    program: Source,
    *,
    data: Sources | None = None,
    host: str = AUTO,
    engine: str | None = AUTO,
    options: EngineOptions | None = None,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
) -> HostProgram:
    """Load a ``.pte``: Core ML delegates run on an engine, all other ops on the CPU.

    Args:
        program: Path, or the bytes.
        data: External data of the program: path or bytes of one or several ``.ptd`` files; the
            stock host accepts one file.
        host: ``python`` (executes the ``.pte`` with torch's kernels), ``stock`` (ExecuTorch's
            runtime) or ``auto``. ``auto`` is ``python``, which needs no compiler, and whose kernels
            are faster than the stock host's portable kernels. If only the stock host can run the
            program (delegates of other backends, ops that torch lacks), ``auto`` is ``stock``, and
            logs the reason. On macOS the stock host runs delegates by ExecuTorch's own Core ML
            backend, which keeps no states.
        engine: ``auto``, an engine's name, or None for the fastest engine that computes in the
            program's own types, which shows how fp16 rounds and overflows.
        options: How to execute.
        enable_etdump: Whether calls log events, the time of each op, also in delegates, which makes
            calls slower. ``write_etdump_result_to_file`` writes the events for ExecuTorch's
            Inspector.
        debug_buffer_size: Bytes for the values that ops compute, for which each delegate computes
            twice; 0 to log no values. Inspector reads the values of one run.

    Returns:
        A program with ``method_names``, ``run(method, inputs)``, and ``reset_state``,
        ``snapshot_state`` and ``restore_state``; see ``HostProgram``.

    Raises:
        OptionError: Unknown host or engine, or several ``data`` for the stock host; or, on macOS,
            an engine or engine options for the stock host, which does not use engines there.
        BlobFormatError: Not a ``.pte`` or ``.ptd``, or a corrupt file.
        ProgramError: A file cannot be read, or ``data`` lacks external data of the program.
        EngineUnavailableError: The stock host cannot be used here; the message has the reason.
    """
    require_choice("host", host, _OBSTACLES)
    require_choice("engine", engine, ENGINES)
    if debug_buffer_size < 0 or (debug_buffer_size and not enable_etdump):
        raise OptionError(
            "values are logged with the events of a program",
            got=f"debug_buffer_size={debug_buffer_size} and enable_etdump={enable_etdump}",
            remedy="Pass enable_etdump=True, and 0 or more bytes",
        )
    opened: Source | PteProgram = program
    rejected_hosts = NO_REJECTED_HOSTS
    if host == AUTO:
        opened = open_program(program, data)
        host, rejected_hosts = _choose(opened, data, _package_only_option(engine, options))
    loader = delegate_loader(engine, options)
    if host == PythonProgram.host_name:
        trace = EventTrace(debug_buffer_size) if enable_etdump else None
        return PythonProgram(opened, loader, data=data, rejected_hosts=rejected_hosts, trace=trace)
    check_stock_options(engine, options)
    if machine.has_core_ml() and (methods := _stateful_methods(open_program(program, data))):
        _logger.warning("%s, which %s has", _KEEPS_NO_STATE, ", ".join(methods))
    with _STOCK_LOCK:
        stock.register(loader)
        loaded = StockProgram(
            program,
            data=data,
            rejected_hosts=rejected_hosts,
            enable_etdump=enable_etdump,
            debug_buffer_size=debug_buffer_size,
        )
        # Loading a method loads its delegates: do so before another loader is registered.
        for name in loaded.method_names:
            loaded.load_method(name)
    return loaded


def register(*, engine: str = AUTO, options: EngineOptions | None = None) -> None:
    """Let ``executorch.runtime.Runtime`` run programs with Core ML delegates.

    Programs loaded afterwards use this engine; a later call replaces it. On macOS, where the
    runtime has its own Core ML backend, nothing is registered.

    Args:
        engine: ``auto``, or an engine's name.
        options: How to execute.

    Raises:
        OptionError: Unknown engine; or, on macOS, an engine other than Core ML.
        EngineUnavailableError: For example, there is no C++ compiler for the required library.
    """
    require_choice("engine", engine, ENGINES)
    check_stock_options(engine, options)
    stock.register(delegate_loader(engine, options))


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
    return PythonProgram.host_name, rejected_hosts


def _log_rejected(what: str, rejected_hosts: RejectedHosts) -> None:
    why = (f"the {name} host cannot ({', '.join(r)})" for name, r in rejected_hosts.items())
    _logger.warning("%s: %s", what, "; ".join(why))

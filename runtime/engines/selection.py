"""Choose the engine of a function, and compile the function once for all callers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coreml_delegate.errors import EngineUnavailableError, OptionError, UnsupportedOpError
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.engines.base import CompiledFunction, Engine, EngineOptions
from coreml_delegate.runtime.engines.coreml import COREML
from coreml_delegate.runtime.engines.live_values import LiveValues
from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.engines.reference.engine import REFERENCE
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Function

logger = logging.getLogger(__name__)

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (COREML, OPENVINO, REFERENCE)}
"""Every engine by name, fastest first."""

AUTO = "auto"


def require_choice(option: str, name: str | None, names: Iterable[str]) -> None:
    """Refuse a name that is neither None nor ``auto`` nor among ``names``.

    Raises:
        OptionError: The option has another value.
    """
    choices = (AUTO, *names)
    if name is not None and name not in choices:
        raise OptionError(f"unknown {option}", got=repr(name), expected=" | ".join(choices))


def engines_here() -> dict[str, Engine]:
    """Return the engines that ``auto`` tries on this machine, by name, fastest first.

    Core ML is part of macOS only: on other systems it is not tried, nor listed as rejected.
    """
    excluded = set[str]() if machine.has_core_ml() else {COREML.name}
    return {name: engine for name, engine in ENGINES.items() if name not in excluded}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Selection:
    """A function compiled by an engine, and why faster engines were rejected.

    Attributes:
        rejected_engines: Reasons by engine name; empty if the fastest engine was chosen.
        source: The bytes that the function was read from; kept alive, because the key has their
            address.
    """

    engine_name: str
    compiled: CompiledFunction
    rejected_engines: Mapping[str, tuple[str, ...]]
    source: ProgramSource | None = None


_COMPILED: LiveValues[Selection] = LiveValues()


def compile_function(
    name: str | None,
    function: Function,
    options: EngineOptions,
    source: ProgramSource | None = None,
) -> Selection:
    """Compile a function with the named engine, or with the fastest engine that can run it.

    A second call for the same function of the same bytes in memory, for another method or from
    another thread, returns the same compiled function. Each caller makes its own states.

    Args:
        name: ``auto`` for the fastest engine that can run the function, or an engine's name; None
            for the fastest engine that computes in the function's own types.
        function: The function to run.
        options: How to execute.
        source: The bytes that ``function`` was read from; without them nothing is shared or cached.

    Raises:
        OptionError: No such engine, or it lacks the precision of ``options``.
        EngineUnavailableError: The named engine cannot be used on this machine.
        UnsupportedOpError: The named engine, or every engine, lacks an op; lists the missing ops.
    """
    if name is None:
        # An engine that computes in fp32 shows neither rounding nor overflow of fp16. An option
        # that changes the types names the engine that has it.
        is_narrow = any(dtype.bits < DType.FP32.bits for dtype in function.computed_in())
        name = REFERENCE.name if is_narrow and options.numerics_option is None else AUTO
    require_choice("engine", name, ENGINES)
    if source is None:
        return _compile_with(name, function, options, None)
    key = (source.address, function.name, name, options)
    return _COMPILED.get(key, lambda: _compile_with(name, function, options, source))


def _compile_with(
    name: str, function: Function, options: EngineOptions, source: ProgramSource | None
) -> Selection:
    if name == AUTO:
        return _compile_with_fastest(function, options, source)
    engine = ENGINES[name]
    try:
        return Selection(name, engine.compile(function, options, source), {}, source)
    except UnsupportedOpError as error:
        raise UnsupportedOpError(
            f"the {name} engine cannot run function {function.name!r}",
            got="; ".join(_reasons(engine, function, error)),
            remedy=error.remedy or "Use engine='auto'",
        ) from error


def _compile_with_fastest(
    function: Function, options: EngineOptions, source: ProgramSource | None
) -> Selection:
    rejected_engines: dict[str, tuple[str, ...]] = {}
    for name, engine in engines_here().items():
        try:
            # Without a check of ``unsupported`` first, which would translate programs twice.
            return Selection(
                name, engine.compile(function, options, source), rejected_engines, source
            )
        except EngineUnavailableError as error:
            rejected_engines[name] = (error.got or error.what,)
        except OptionError as error:
            rejected_engines[name] = (str(error),)
        except UnsupportedOpError as error:
            rejected_engines[name] = _reasons(engine, function, error)
        _log_rejected(function.name, name, rejected_engines[name][0], source)
    raise UnsupportedOpError(
        f"no engine can run function {function.name!r}",
        got="; ".join(f"{name}: {', '.join(why)}" for name, why in rejected_engines.items()),
    )


def _reasons(engine: Engine, function: Function, error: UnsupportedOpError) -> tuple[str, ...]:
    """Return the engine's ``unsupported`` reasons; without any, the reason in ``error``.

    Some reasons appear only when the engine compiles.
    """
    return tuple(engine.unsupported(function)) or (error.got or error.what,)


# Warnings already logged: a program may be loaded many times with the same reason.
_LOGGED: set[tuple[str, str, str, bytes]] = set()


def _log_rejected(function: str, engine: str, reason: str, source: ProgramSource | None) -> None:
    """Log once for each program why an engine was rejected."""
    warning = (function, engine, reason, source.spec_digest if source is not None else b"")
    if warning not in _LOGGED:
        _LOGGED.add(warning)
        logger.warning("function %r does not run on the %s engine: %s", function, engine, reason)

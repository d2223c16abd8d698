"""Choose the engine of a function, and compile the function once for all who ask for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from coreml_delegate.errors import EngineUnavailableError, OptionError, UnsupportedOpError
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.engines.base import CompiledFunction, Engine, EngineOptions
from coreml_delegate.runtime.engines.coreml import COREML
from coreml_delegate.runtime.engines.live_values import LiveValues
from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.engines.reference.engine import REFERENCE
from coreml_delegate.runtime.engines.source import ProgramSource
from coreml_delegate.runtime.mil.program import Function

logger = logging.getLogger(__name__)

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (COREML, OPENVINO, REFERENCE)}
"""Every engine by name, fastest first."""

AUTO = "auto"


def engines_here() -> dict[str, Engine]:
    """Return the engines that ``auto`` asks on this machine, by name, fastest first.

    Core ML is no part of other systems than macOS: it is not asked there, and no reason is given.
    """
    left_out = set[str]() if machine.has_core_ml() else {COREML.name}
    return {name: engine for name, engine in ENGINES.items() if name not in left_out}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Selection:
    """A function compiled by an engine, and why faster engines were rejected.

    Attributes:
        engine_name: The engine that runs it.
        compiled: The function, ready to run.
        rejected_engines: Reasons by engine name; empty if the fastest was taken.
        source: The bytes the function was read from; held, because the key has their address.
    """

    engine_name: str
    compiled: CompiledFunction
    rejected_engines: Mapping[str, tuple[str, ...]]
    source: ProgramSource | None = None


_COMPILED: LiveValues[Selection] = LiveValues()


def compile_function(
    name: str, function: Function, options: EngineOptions, source: ProgramSource | None = None
) -> Selection:
    """Compile a function with the engine asked for, or with the fastest that takes it.

    A second call for the same function of the same bytes in memory, for another method or from
    another thread, returns the same compiled function. Each caller makes its own states.

    Args:
        name: ``auto`` for the fastest that can run it, or an engine's name.
        function: The function to run.
        options: How to execute.
        source: The bytes ``function`` was read from; without them nothing is shared or cached.

    Raises:
        OptionError: No such engine, or it lacks the precision asked for.
        EngineUnavailableError: The engine asked for cannot be used on this machine.
        UnsupportedOpError: The engine asked for, or every engine, lacks an op; lists each.
    """
    if name != AUTO and name not in ENGINES:
        raise OptionError("unknown engine", got=repr(name), expected=" | ".join((AUTO, *ENGINES)))
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
            # Compiled at once: asking first would translate every program twice.
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
    """Return what the engine says it cannot take, or else the reason in ``error``.

    Some reasons come up only when the engine compiles.
    """
    return tuple(engine.unsupported(function)) or (error.got or error.what,)


# Warnings already logged: a program is loaded many times, and the reason stays the same.
_LOGGED: set[tuple[str, str, str, bytes]] = set()


def _log_rejected(function: str, engine: str, reason: str, source: ProgramSource | None) -> None:
    """Log, once for each program, why an engine was rejected."""
    warning = (function, engine, reason, source.spec_digest if source is not None else b"")
    if warning not in _LOGGED:
        _LOGGED.add(warning)
        logger.warning("function %r does not run on the %s engine: %s", function, engine, reason)

"""Which engine runs a function."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from coreml_delegate.errors import EngineUnavailableError, OptionError, UnsupportedOpError
from coreml_delegate.runtime.engines.base import CompiledFunction, Engine, EngineOptions
from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.engines.reference.engine import REFERENCE
from coreml_delegate.runtime.engines.sharing import Sharing
from coreml_delegate.runtime.engines.source import ProgramSource
from coreml_delegate.runtime.mil.program import Function

logger = logging.getLogger(__name__)

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (OPENVINO, REFERENCE)}
"""Every engine by name, fastest first."""

AUTO = "auto"


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Selection:
    """A function compiled by an engine, and why faster engines were passed over.

    Attributes:
        engine_name: The engine that runs it.
        compiled: The function, ready to run.
        passed_over: Reasons by engine name; empty if the fastest was taken.
        source: What the function was read from: held, so that its place in memory stays its own.
    """

    engine_name: str
    compiled: CompiledFunction
    passed_over: Mapping[str, tuple[str, ...]]
    source: ProgramSource | None = None


_SHARING: Sharing[Selection] = Sharing()


def compile_function(
    name: str, function: Function, options: EngineOptions, source: ProgramSource | None = None
) -> Selection:
    """Compile a function with the engine asked for, or with the fastest that takes it.

    Whoever asks again for the same function of the same bytes in memory, for another method or from
    another thread, is given the same compiled function. States are made apart.

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
        return _selected(name, function, options, None)
    key = (source.place, function.name, name, options)
    return _SHARING.get(key, lambda: _selected(name, function, options, source))


def _selected(
    name: str, function: Function, options: EngineOptions, source: ProgramSource | None
) -> Selection:
    if name == AUTO:
        return _fastest(function, options, source)
    engine = ENGINES[name]
    try:
        return Selection(name, engine.compile(function, options, source), {}, source)
    except UnsupportedOpError as error:
        raise UnsupportedOpError(
            f"the {name} engine cannot run function {function.name!r}",
            got="; ".join(_reasons(engine, function, error)),
            remedy="Use engine='auto'",
        ) from error


def _fastest(function: Function, options: EngineOptions, source: ProgramSource | None) -> Selection:
    passed_over: dict[str, tuple[str, ...]] = {}
    for name, engine in ENGINES.items():
        try:
            # Compiled at once: asking first would translate every program twice.
            return Selection(name, engine.compile(function, options, source), passed_over, source)
        except EngineUnavailableError as error:
            passed_over[name] = (error.got or error.what,)
        except OptionError as error:
            passed_over[name] = (str(error),)
        except UnsupportedOpError as error:
            passed_over[name] = _reasons(engine, function, error)
        _say_passed_over(function.name, name, passed_over[name][0], source)
    raise UnsupportedOpError(
        f"no engine can run function {function.name!r}",
        got="; ".join(f"{name}: {', '.join(why)}" for name, why in passed_over.items()),
    )


def _reasons(engine: Engine, function: Function, error: UnsupportedOpError) -> tuple[str, ...]:
    """All reasons; the one that came up where an engine sees none before it compiles."""
    return tuple(engine.unsupported(function)) or (error.got or error.what,)


# What has been said: a program is loaded many times, and the reason stays the same.
_SAID: set[tuple[str, str, str, bytes]] = set()


def _say_passed_over(function: str, engine: str, reason: str, source: ProgramSource | None) -> None:
    """Say, once for each program, why an engine was passed over."""
    said = (function, engine, reason, source.spec_digest if source is not None else b"")
    if said not in _SAID:
        _SAID.add(said)
        logger.warning("function %r does not run on the %s engine: %s", function, engine, reason)

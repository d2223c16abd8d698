"""Which engine runs a function."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from coreml_delegate.errors import EngineUnavailableError, OptionError, UnsupportedOpError
from coreml_delegate.runtime.engines.base import CompiledFunction, Engine, EngineOptions
from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.engines.reference.engine import REFERENCE
from coreml_delegate.runtime.mil.program import Function

logger = logging.getLogger(__name__)

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (OPENVINO, REFERENCE)}
"""Every engine by name, fastest first."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Selection:
    """A function compiled by an engine, and why faster engines were passed over.

    Attributes:
        engine_name: The engine that runs it.
        compiled: The function, ready to run.
        passed_over: Reasons by engine name; empty if the fastest was taken.
    """

    engine_name: str
    compiled: CompiledFunction
    passed_over: Mapping[str, tuple[str, ...]]


def compile_function(name: str, function: Function, options: EngineOptions) -> Selection:
    """Compile a function with the engine asked for, or with the fastest that takes it.

    Args:
        name: ``auto`` for the fastest that can run it, or an engine's name.
        function: The function to run.
        options: How to execute.

    Raises:
        OptionError: No such engine.
        EngineUnavailableError: The engine asked for cannot be used on this machine.
        UnsupportedOpError: The engine asked for, or every engine, lacks an op; lists each.
    """
    if name == AUTO:
        return _fastest(function, options)
    if name not in ENGINES:
        raise OptionError("unknown engine", got=repr(name), expected=" | ".join((AUTO, *ENGINES)))
    engine = ENGINES[name]
    try:
        return Selection(name, engine.compile(function, options), {})
    except UnsupportedOpError as error:
        raise UnsupportedOpError(
            f"the {name} engine cannot run function {function.name!r}",
            got="; ".join(engine.unsupported(function)),
            remedy="Use engine='auto'",
        ) from error


def _fastest(function: Function, options: EngineOptions) -> Selection:
    passed_over: dict[str, tuple[str, ...]] = {}
    for name, engine in ENGINES.items():
        try:
            # Compiled at once: asking first would translate every program twice.
            return Selection(name, engine.compile(function, options), passed_over)
        except EngineUnavailableError as error:
            passed_over[name] = (error.got or error.what,)
        except UnsupportedOpError:
            passed_over[name] = tuple(engine.unsupported(function))
        logger.warning(
            "function %r does not run on the %s engine: %s",
            function.name,
            name,
            passed_over[name][0],
        )
    raise UnsupportedOpError(
        f"no engine can run function {function.name!r}",
        got="; ".join(f"{name}: {', '.join(why)}" for name, why in passed_over.items()),
    )

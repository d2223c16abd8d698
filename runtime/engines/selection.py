"""Which engine runs a function."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from coreml_delegate.errors import EngineUnavailableError, OptionError, UnsupportedOpError
from coreml_delegate.runtime.engines.base import Engine
from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.engines.reference.engine import REFERENCE
from coreml_delegate.runtime.mil.program import Function

logger = logging.getLogger(__name__)

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (OPENVINO, REFERENCE)}
"""Every engine by name, fastest first."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Selection:
    """An engine, and why faster ones were passed over.

    Attributes:
        engine: The engine that can run the function.
        passed_over: Reasons by engine name; empty if the fastest was taken.
    """

    engine: Engine
    passed_over: Mapping[str, tuple[str, ...]]


def select(name: str, function: Function) -> Selection:
    """The engine for a function.

    Args:
        name: ``auto`` for the fastest that can run it, or an engine's name.
        function: The function to run.

    Raises:
        OptionError: No such engine.
        EngineUnavailableError: The engine asked for cannot be used on this machine.
        UnsupportedOpError: The engine asked for, or every engine, lacks an op; lists each.
    """
    if name == AUTO:
        return _fastest(function)
    if name not in ENGINES:
        raise OptionError(
            "unknown engine", got=repr(name), expected=" | ".join((AUTO, *ENGINES))
        )
    engine = ENGINES[name]
    unavailable = engine.unavailable_reason()
    if unavailable is not None:
        raise EngineUnavailableError(
            f"the {name} engine cannot be used here", got=unavailable, remedy="Use engine='auto'"
        )
    obstacles = engine.unsupported(function)
    if obstacles:
        raise UnsupportedOpError(
            f"the {name} engine cannot run function {function.name!r}", got="; ".join(obstacles)
        )
    return Selection(engine, {})


def _fastest(function: Function) -> Selection:
    passed_over: dict[str, tuple[str, ...]] = {}
    for name, engine in ENGINES.items():
        unavailable = engine.unavailable_reason()
        obstacles = engine.unsupported(function) if unavailable is None else [unavailable]
        if not obstacles:
            return Selection(engine, passed_over)
        passed_over[name] = tuple(obstacles)
        logger.warning(
            "function %r does not run on the %s engine: %s", function.name, name, obstacles[0]
        )
    raise UnsupportedOpError(
        f"no engine can run function {function.name!r}",
        got="; ".join(f"{name}: {', '.join(why)}" for name, why in passed_over.items()),
    )

"""Chooses the settings of a call: by module name first, then by type, then the global ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node

from coreml_delegate.errors import OptionError
from coreml_delegate.module_scope import ModulePattern, Scope, scopes_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.quantizer.config import LayerSettings, ModuleType, QuantizerSettings


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings of one call.

    Attributes:
        settings: The settings; None leaves the call in float.
        origin: The entry of the configuration that they come from.
        explicit: Whether the entry names the call's module or function, rather than all.
    """

    settings: LayerSettings | None
    origin: str
    explicit: bool

    def admits(self, other: Choice) -> bool:
        """Whether a call with the choice ``other`` may be fused behind a call with this one."""
        return not other.explicit or other.settings == self.settings


class SettingsSelector:
    """Chooses settings, and records which entries of the configuration covered a call.

    The path of a module, or the name of a class, stands for everything inside that module. Of
    several, the entry for the innermost module counts.

    Args:
        settings: The whole configuration.
    """

    def __init__(self, settings: QuantizerSettings) -> None:
        self._settings = settings
        self._names = {name: re.compile(name) for name in settings.by_name}
        self._types = {kind: _TypeMatcher(kind) for kind in settings.by_type}
        self._met: set[Any] = set()

    def choose(self, node: Node) -> Choice:
        """Return the settings of a call."""
        scopes = scopes_of(node)
        name = self._innermost(self._depths_by_name(scopes))
        kind = self._innermost(self._depths_by_type(node, scopes))
        if name is not None:
            settings = self._settings.by_name[name]
            return Choice(settings, f"module_name_configs[{name!r}]", explicit=True)
        if kind is not None:
            settings = self._settings.by_type[kind]
            return Choice(settings, f"module_type_configs[{_label(kind)!r}]", explicit=True)
        return Choice(self._settings.everywhere, "global_config", explicit=False)

    def check_entries(self, nodes: Iterable[Node]) -> None:
        """Check that every entry covers a call.

        Raises:
            OptionError: An entry names a module or function that is not in the graph.
        """
        calls = [node for node in nodes if node.op == "call_function"]
        for node in calls:
            self.choose(node)
        for option, keys in (
            ("module_name_configs", self._settings.by_name),
            ("module_type_configs", self._settings.by_type),
        ):
            missing = [_label(key) for key in keys if key not in self._met]
            if missing:
                paths = sorted({s.path for n in calls for s in scopes_of(n) if s.path})
                raise OptionError(
                    f"{option} names nothing in this program",
                    got=", ".join(map(repr, missing)),
                    expected=f"modules such as {', '.join(map(repr, paths[:5]))}"
                    if paths
                    else None,
                )

    def _innermost(self, found: dict[Any, int]) -> Any:
        self._met.update(found)
        return max(found, key=lambda key: found[key], default=None)

    def _depths_by_name(self, scopes: tuple[Scope, ...]) -> dict[str, int]:
        found: dict[str, int] = {}
        for scope in scopes:
            for path in _upwards(scope.path):
                depth = path.count(".") + 1
                for name, expression in self._names.items():
                    if expression.fullmatch(path) and depth > found.get(name, 0):
                        found[name] = depth
        return found

    def _depths_by_type(self, node: Node, scopes: tuple[Scope, ...]) -> dict[ModuleType, int]:
        found: dict[ModuleType, int] = {}
        for kind, matcher in self._types.items():
            depth = matcher.depth(node, scopes)
            if depth:
                found[kind] = depth
        return found


class _TypeMatcher:
    """Finds the calls that a key of ``module_type_configs`` covers."""

    def __init__(self, kind: ModuleType) -> None:
        is_module = isinstance(kind, str) or (
            isinstance(kind, type) and issubclass(kind, nn.Module)
        )
        self._module = ModulePattern.of(kind, "module_type_configs") if is_module else None  # pyright: ignore[reportArgumentType]
        self._function = None if is_module else _function_name(kind)

    def depth(self, node: Node, scopes: tuple[Scope, ...]) -> int:
        """Return the depth of the covered scope around a call, 1 at the root; 0 for none."""
        if self._function is not None:
            return len(scopes) + 1 if self._function == _op_name(node) else 0
        pattern = self._module
        depths = (n for n, scope in enumerate(scopes, 1) if pattern and pattern.covers((scope,)))
        return max(depths, default=0)


def _upwards(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _op_name(node: Node) -> str:
    return target_name(node.target).split(".")[1].strip("_")


def _function_name(function: Any) -> str:
    """Return the name of the ATen op that a function calls, in-place forms of ``operator`` too."""
    name = str(getattr(function, "__name__", "")).strip("_")
    if getattr(function, "__module__", "") == "_operator" and name in ("iadd", "imul", "imatmul"):
        return name[1:]
    return name


def _label(key: Any) -> str:
    return key if isinstance(key, str) else str(getattr(key, "__name__", key))

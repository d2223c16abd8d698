"""Selects the settings of a call: by module name first, then by type, then the global settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Node

from coreml_delegate.errors import OptionError
from coreml_delegate.exported.module_scope import ModulePattern, Scope, ancestor_paths, scopes_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.quantizer.config import LayerSettings, ModuleType, QuantizerSettings


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings of one call.

    Attributes:
        settings: The settings; None leaves the call in float.
        origin: Name of the configuration's entry.
        explicit: Whether the entry names the call's module or function, unlike the global entry.
    """

    settings: LayerSettings | None
    origin: str
    explicit: bool

    def admits(self, other: Choice) -> bool:
        """Whether a call with the choice ``other`` may be fused into a call with this choice."""
        return not other.explicit or other.settings == self.settings


class SettingsSelector:
    """Selects settings, and records which entries of the configuration matched a call.

    An entry for a module or class includes submodules. The entry for the innermost module decides.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: QuantizerSettings) -> None:
        self._settings = settings
        self._names = {name: re.compile(name) for name in settings.by_name}
        self._types = {kind: _TypeMatcher(kind) for kind in settings.by_type}
        self._matched: set[Any] = set()

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
        """Check that every entry matches a call.

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
            missing = [_label(key) for key in keys if key not in self._matched]
            if missing:
                paths = sorted({s.path for n in calls for s in scopes_of(n) if s.path})
                raise OptionError(
                    f"{option} names nothing in this program",
                    got=", ".join(map(repr, missing)),
                    expected=f"modules such as {', '.join(map(repr, paths[:5]))}"
                    if paths
                    else None,
                )

    def _innermost(self, depths: dict[Any, int]) -> Any:
        self._matched.update(depths)
        return max(depths, key=lambda key: depths[key], default=None)

    def _depths_by_name(self, scopes: tuple[Scope, ...]) -> dict[str, int]:
        depths: dict[str, int] = {}
        for scope in scopes:
            for path in ancestor_paths(scope.path):
                depth = path.count(".") + 1
                for name, expression in self._names.items():
                    if expression.fullmatch(path) and depth > depths.get(name, 0):
                        depths[name] = depth
        return depths

    def _depths_by_type(self, node: Node, scopes: tuple[Scope, ...]) -> dict[ModuleType, int]:
        depths: dict[ModuleType, int] = {}
        for kind, matcher in self._types.items():
            depth = matcher.depth(node, scopes)
            if depth:
                depths[kind] = depth
        return depths


class _TypeMatcher:
    """Matches calls by a key of ``module_type_configs``."""

    def __init__(self, kind: ModuleType) -> None:
        is_module = isinstance(kind, str) or (
            isinstance(kind, type) and issubclass(kind, nn.Module)
        )
        self._module = ModulePattern.of(kind, "module_type_configs") if is_module else None  # pyright: ignore[reportArgumentType]
        self._function = None if is_module else _function_name(kind)

    def depth(self, node: Node, scopes: tuple[Scope, ...]) -> int:
        """Return the depth of the innermost matching scope of a call, 1 at the root; 0 without."""
        if self._function is not None:
            return len(scopes) + 1 if self._function == _op_name(node) else 0
        pattern = self._module
        depths = (n for n, scope in enumerate(scopes, 1) if pattern and pattern.covers((scope,)))
        return max(depths, default=0)


def _op_name(node: Node) -> str:
    return target_name(node.target).split(".")[1].strip("_")


def _function_name(function: Any) -> str:
    """Return the name of a function's ATen op, also for in-place functions of ``operator``."""
    name = str(getattr(function, "__name__", "")).strip("_")
    if getattr(function, "__module__", "") == "_operator" and name in ("iadd", "imul", "imatmul"):
        return name[1:]
    return name


def _label(key: Any) -> str:
    return key if isinstance(key, str) else str(getattr(key, "__name__", key))

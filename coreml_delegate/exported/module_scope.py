"""The ``nn.Module`` of a node, and patterns of modules."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from coreml_delegate.errors import OptionError

_GLOB = re.compile(r"[*?\[]")
_CALL = re.compile(r"@\d+$")


@dataclass(frozen=True, slots=True)
class Scope:
    """A module whose ``forward`` a node was traced in.

    Attributes:
        path: Path as in ``named_modules``; empty for the root.
        class_name: Module and name of its class, ``torch.nn.modules.linear.Linear``.
    """

    path: str
    class_name: str


def scopes_of(node: Node) -> tuple[Scope, ...]:
    """Return the modules around a node, outermost first; empty without recorded modules.

    Source: ``nn_module_stack`` of ``torch.export``, which has path and class, or class name, by
    call. The path of a module's second call ends in ``@1``.
    """
    entries = (node.meta.get("nn_module_stack") or {}).values()
    return tuple(Scope(_CALL.sub("", str(path)), _class_name(kind)) for path, kind in entries)


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A user's pattern of modules, including their submodules.

    Attributes:
        text: A path (``layers.0``), a path with wildcards (``layers.*.norm``), or a class: its
            dotted name, its public name (``torch.nn.LayerNorm``), or its bare name.
        is_class: Whether ``text`` is only the dotted name of a class.
    """

    text: str
    is_class: bool = False

    @classmethod
    def of(cls, pattern: str | type[nn.Module], option: str) -> ModulePattern:
        """Return the pattern for a string or class.

        Raises:
            OptionError: ``pattern`` is neither a string nor a class of modules, or it is empty.
        """
        if isinstance(pattern, str) and pattern.strip():
            return cls(pattern.strip())
        if isinstance(pattern, type) and issubclass(pattern, nn.Module):
            return cls(_class_name(pattern), is_class=True)
        raise OptionError(
            f"{option} takes paths and classes of modules", got=repr(pattern), expected=_EXAMPLES
        )

    def covers(self, scopes: Iterable[Scope]) -> bool:
        """Whether the pattern matches one of the modules around a node."""
        return any(_matches(self, scope) for scope in scopes)


_EXAMPLES = "'layers.0', 'layers.*.norm' or torch.nn.LayerNorm"


@functools.lru_cache(maxsize=65536)
def _matches(pattern: ModulePattern, scope: Scope) -> bool:
    text = pattern.text
    if pattern.is_class:
        return scope.class_name == text
    if _GLOB.search(text):
        return any(fnmatch.fnmatchcase(path, text) for path in ancestor_paths(scope.path))
    return f"{scope.path}.".startswith(f"{text}.") or _names_class(text, scope.class_name)


def ancestor_paths(path: str) -> Iterator[str]:
    """Yield a path and all of its parents, uncalled containers like ``ModuleList`` included."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _names_class(text: str, class_name: str) -> bool:
    """Whether ``text`` is the class's bare name, or its name after a parent package."""
    package, _, name = text.rpartition(".")
    if class_name.rpartition(".")[2] != name:
        return False
    return not package or f"{class_name}.".startswith(f"{package}.")


def _class_name(kind: object) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)

"""A griffe extension: what takes declared options shows them, as at run time.

griffe reads sources, in which options stand as fields, and not in signatures and docstrings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import griffe

from coreml_delegate.options.declaration import PLACEHOLDER
from coreml_delegate.patches.third_party import quiet_import


class DeclaredOptions(griffe.Extension):
    """Replaces docstrings in which options are to be written, and the signatures beside them."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Document a class."""
        if (actual := _documented(cls)) is not None:
            name = "__init__"
            if name not in cls.members:
                self_ = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
                cls.set_member(name, griffe.Function(name, parameters=griffe.Parameters(self_)))
            owner, *_rest = cls.members[name].parameters
            cls.members[name].parameters = _parameters(actual, cls.module, owner)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Document a method."""
        if (actual := _documented(func)) is not None:
            owner, *_rest = func.parameters
            func.parameters = _parameters(actual, func.module, owner)


def _documented(target: griffe.Class | griffe.Function) -> Any:
    """Replace a docstring in which options are to be written; return the object, or None."""
    if target.docstring is None or not PLACEHOLDER.search(target.docstring.value):
        return None
    with quiet_import():
        actual: Any = importlib.import_module(target.module.path)
        for name in target.path.removeprefix(f"{target.module.path}.").split("."):
            actual = getattr(actual, name)
    target.docstring.value = inspect.getdoc(actual)
    return actual


def _parameters(actual: Any, module: griffe.Module, owner: griffe.Parameter) -> griffe.Parameters:
    parameters = (p for p in inspect.signature(actual).parameters.values() if p.name != owner.name)
    return griffe.Parameters(owner, *(_parameter(p, module) for p in parameters))


def _parameter(actual: inspect.Parameter, module: griffe.Module) -> griffe.Parameter:
    annotation = ast.parse(actual.annotation, mode="eval").body
    default = str(getattr(actual.default, "name", actual.default)).replace("<factory>", "...")
    return griffe.Parameter(
        actual.name,
        annotation=griffe.get_annotation(annotation, module),
        kind=griffe.ParameterKind[actual.kind.name.lower()],
        default=None if actual.default is actual.empty else default,
    )

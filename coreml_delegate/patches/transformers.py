"""Patches of transformers, and its private interfaces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from coreml_delegate.patches import Patch

_LIBRARY = "transformers"
_VERSIONS = ("5.24",)


class _OrderedSet(set[Any]):
    """A set that iterates its elements in the order of their ``repr``."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


def _ordered_set(original: type[set[Any]]) -> type[set[Any]]:
    del original
    return _OrderedSet


def ordered_sets(parts: Iterable[object]) -> tuple[Patch, ...]:
    """Return a patch of ``set`` for each module of transformers that defines parts of a model.

    Args:
        parts: The modules of the model.
    """
    names = {type(part).__module__ for part in parts}
    return tuple(
        Patch(
            owner=lambda name=name: sys.modules[name],
            name="set",
            replacement=_ordered_set,
            reason=(
                "models compute a mask and a rotation for each element of a set of layer types; "
                "the order of strings in a set differs between processes, and so would programs"
            ),
            issue=None,
            library=_LIBRARY,
            versions=_VERSIONS,
        )
        for name in sorted(names)
        if name.startswith(f"{_LIBRARY}.")
    )


def recurrence(code: FunctionType, name: str, function: Callable[..., Any]) -> Patch:
    """Return a patch of the function that computes a recurrence.

    Args:
        code: The ``forward`` that calls the function.
        name: The function, a global of the module of ``code``.
        function: Replaces it.
    """
    return Patch(
        owner=lambda: sys.modules[code.__module__],
        name=name,
        replacement=lambda original: function,  # noqa: ARG005 - a replacement takes the original
        reason=(
            "the recurrences loop over tokens, begin at zero, or treat padding as tokens, and "
            "have no registry like the functions of attention"
        ),
        issue=None,
        library=_LIBRARY,
        versions=_VERSIONS,
    )


def set_attention(config: Any, name: str) -> None:
    """Set the function that computes attention, by its name in ``AttentionInterface``.

    ``set_attn_implementation``, which is public, skips models that do not declare support.
    """
    config._attn_implementation = name


def set_experts(config: Any, name: str) -> None:
    """Set the function that computes experts, by its name in ``ExpertsInterface``.

    ``set_experts_implementation``, which is public, is a method of the model, not of a part.
    """
    config._experts_implementation = name

"""Names of inputs and outputs: their paths in the model's nested inputs and results.

A path starts with a parameter's name or a key of the result, followed by keys, ``.key``, and
indices, ``[1]``: ``past.key``, ``hidden_states[1]``. An element of a tuple result is ``output_1``,
and a value in it ``output_1.key``.

ExecuTorch writes the nesting of a method's inputs and outputs into a ``.pte`` as JSON
``[1, spec]``, where a spec is ``{"type": name of a class, "context": JSON of its keys,
"children_spec": [spec, ...]}``, and ``{"type": null, ...}`` for a single value.

Source: ``treespec_dumps`` in torch's ``utils/_pytree.py``; ``table ContainerMetadata`` in
``program.fbs`` of ExecuTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias, cast

Path: TypeAlias = tuple["str | int", ...]
"""Keys and indices of a value, outermost first."""

OUTPUT: Final = "output"
"""Prefix of the names of outputs without a key."""

_PROTOCOL = 1
_KEYWORDS = 1  # index of the keyword inputs; the positional inputs have index 0


def input_name(path: Path) -> str:
    """Return the name of an input; its path starts with the parameter's name."""
    return _key(path[0]) + _suffix(path[1:])


def output_name(path: Path) -> str:
    """Return the name of an output; a single result is ``output_0``."""
    first, *inner = path or (0,)
    start = f"{OUTPUT}_{first}" if isinstance(first, int) else _key(first)
    return start + _suffix(inner)


def _suffix(path: Sequence[str | int]) -> str:
    return "".join(f".{key}" if _is_word(key) else f"[{key!r}]" for key in path)


def _key(key: str | int) -> str:
    return str(key) if _is_word(key) else f"[{key!r}]"


def _is_word(key: str | int) -> bool:
    return isinstance(key, str) and key.isidentifier()


def read_inputs(nesting: str, count: int) -> list[str] | None:
    """Return the names of a method's inputs; positional inputs are named by their position.

    Args:
        nesting: ExecuTorch's JSON of the nesting, possibly damaged or empty.
        count: Number of inputs.

    Returns:
        ``count`` different names, or None if the text does not determine them.
    """
    paths = _read_paths(nesting)
    if paths is None:
        return None
    names = [
        input_name(path[1:]) if path[:1] == (_KEYWORDS,) and len(path) > 1 else str(position)
        for position, path in enumerate(paths)
    ]
    return _if_unique(names, count)


def read_outputs(nesting: str, count: int) -> list[str] | None:
    """Return the names of a method's outputs; see ``read_inputs``."""
    paths = _read_paths(nesting)
    return None if paths is None else _if_unique([*map(output_name, paths)], count)


def _if_unique(names: list[str], count: int) -> list[str] | None:
    return names if len(names) == count == len(set(names)) else None


def _read_paths(nesting: str) -> list[Path] | None:
    try:
        protocol, spec = json.loads(nesting)
        return [*_paths(spec, ())] if protocol == _PROTOCOL else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # files of other exporters, and damaged files, run without names


def _paths(spec: Any, path: Path) -> Iterator[Path]:
    if spec["type"] is None:
        yield path
        return
    children: list[Any] = spec["children_spec"]
    keys = _keys(spec["context"], len(children))
    for index, child in enumerate(children):
        yield from _paths(child, (*path, index if keys is None else keys[index]))


def _keys(context: str | None, count: int) -> list[str | int] | None:
    """Return the keys of a container, or None if it has indices."""
    keys: Any = json.loads(context or "null")
    if isinstance(keys, dict):  # a defaultdict's, with its factory
        keys = cast("dict[str, Any]", keys).get("dict_context")
    return usual_keys(keys, count)


def usual_keys(keys: Any, count: int) -> list[str | int] | None:
    """Return ``keys`` if they are a list of ``count`` strings and integers, or None."""
    if not isinstance(keys, list):
        return None
    listed = cast("list[Any]", keys)
    is_usual = all(isinstance(key, str | int) and not isinstance(key, bool) for key in listed)
    return listed if is_usual and len(listed) == count else None

"""Enumerated shapes of a program's inputs, checked and bound to the program's symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.export import ExportedProgram

from coreml_delegate.dynamic_shapes.enumerated import (
    MAX_SHAPES,
    EnumeratedInput,
    EnumeratedShapes,
    Shape,
    Size,
    SymbolicSize,
)
from coreml_delegate.dynamic_shapes.symbols import expression_of, input_tensors
from coreml_delegate.errors import OptionError, near_matches


def enumerate_inputs(
    program: ExportedProgram, shapes: Mapping[str, Sequence[Sequence[int]]]
) -> EnumeratedShapes:
    """Check the shapes of a program's inputs and bind them to its symbols.

    Args:
        program: A program exported with these dimensions dynamic.
        shapes: Shapes by input name; the n-th shapes of all inputs form a combination.

    Raises:
        OptionError: An input is unknown or missing, a shape violates the exported constraints, or
            there are too few, too many or repeated combinations.
    """
    tensors = input_tensors(program)
    _check_names(shapes, tensors)
    listed = {name: _read_shapes(name, value) for name, value in shapes.items()}
    _check_count(listed)
    entries: dict[tuple[Size, ...], EnumeratedInput] = {}
    for name, tensor in tensors.items():
        sizes = _sizes_of(tensor, program)
        is_fixed = all(isinstance(size, int) for size in sizes)
        if name not in listed:
            if is_fixed:
                continue
            raise OptionError(
                f"input {name!r} has dynamic dimensions and no enumerated shapes",
                got=_sizes_text(sizes),
                remedy="List a shape of it for each combination, or export it with fixed sizes",
            )
        for shape in listed[name]:
            _check_shape(name, shape, sizes)
        existing = entries.get(sizes)
        if is_fixed:
            continue
        if existing is None:
            entries[sizes] = EnumeratedInput((name,), sizes, listed[name])
        elif existing.shapes == listed[name]:
            entries[sizes] = replace(existing, names=(*existing.names, name))
        else:
            raise OptionError(
                f"inputs {existing.names[0]!r} and {name!r} have the same symbolic shape "
                "and different enumerated shapes",
                got=f"{_shapes_text(existing.shapes)} and {_shapes_text(listed[name])}",
                expected=_sizes_text(sizes),
                remedy="Export them with dimensions that are independent of each other",
            )
    if not entries:
        raise OptionError(
            "no input has dynamic dimensions",
            got=", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()),
            remedy="Export with dynamic_shapes: enumerated shapes select from the allowed sizes",
        )
    enumerated = EnumeratedShapes(tuple(entries.values()))
    combinations = list(zip(*(entry.shapes for entry in enumerated.inputs), strict=True))
    repeated = [c for i, c in enumerate(combinations) if c in combinations[:i]]
    if repeated:
        raise OptionError(
            "a combination of enumerated shapes is listed twice",
            got=", ".join(str(list(shape)) for shape in repeated[0]),
        )
    return enumerated


def _check_names(shapes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    for name in shapes:
        if name not in tensors:
            raise OptionError(
                "enumerated shapes name an input that the program does not have",
                got=repr(name),
                expected=near_matches(name, tensors),
            )


def _check_count(listed: Mapping[str, tuple[Shape, ...]]) -> None:
    counts = {name: len(shapes) for name, shapes in listed.items()}
    if len(set(counts.values())) > 1:
        raise OptionError(
            "inputs have different numbers of enumerated shapes",
            got=", ".join(f"{name!r} {count}" for name, count in counts.items()),
            remedy="List as many shapes for each: the n-th shapes of all inputs are a combination",
        )
    count = max(counts.values(), default=0)
    if not 2 <= count <= MAX_SHAPES:
        raise OptionError(
            "wrong number of enumerated shapes",
            got=str(count),
            expected=f"2 to {MAX_SHAPES}",
            remedy="Export with fixed sizes for one shape, and with only dynamic_shapes for more "
            "shapes than can be listed",
        )


def _read_shapes(name: str, shapes: Any) -> tuple[Shape, ...]:
    if not isinstance(shapes, list | tuple):
        raise OptionError(
            f"enumerated shapes of input {name!r} are not a list",
            got=repr(shapes),
            expected="[[1, 8]]",
        )
    return tuple(_read_shape(name, shape) for shape in cast("Sequence[Any]", shapes))


def _read_shape(name: str, shape: Any) -> Shape:
    sizes = tuple(cast("Sequence[Any]", shape)) if isinstance(shape, list | tuple) else ()
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise OptionError(
            f"enumerated shape of input {name!r} is not a list of positive integers",
            got=repr(shape),
            expected="for example [1, 8]",
        )
    return sizes


def _check_shape(name: str, shape: Shape, sizes: Sequence[Size]) -> None:
    if len(shape) != len(sizes):
        raise OptionError(
            f"enumerated shape of input {name!r} has a different rank than the input",
            got=f"{len(shape)} ({list(shape)})",
            expected=f"{len(sizes)} ({_sizes_text(sizes)})",
        )
    for dim, (value, size) in enumerate(zip(shape, sizes, strict=True)):
        if isinstance(size, int) and value != size:
            raise OptionError(
                f"enumerated shape of input {name!r} changes dimension {dim}, which is fixed",
                got=f"{value} ({list(shape)})",
                expected=str(size),
                remedy="Export the program with this dimension dynamic",
            )
        if isinstance(size, SymbolicSize) and not size.admits(value):
            raise OptionError(
                f"enumerated shape of input {name!r} is out of bounds in dimension {dim}",
                got=f"{value} ({list(shape)})",
                expected=str(size),
                remedy="Export the program with wider bounds for this dimension",
            )


def _sizes_of(tensor: torch.Tensor, program: ExportedProgram) -> tuple[Size, ...]:
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    return tuple(
        _symbolic_size(str(expression_of(size)), ranges)
        if isinstance(size, torch.SymInt)
        else int(size)
        for size in tensor.shape
    )


def _symbolic_size(expression: str, ranges: Mapping[str, Any]) -> SymbolicSize:
    bounds = ranges.get(expression)
    if bounds is None:
        return SymbolicSize(expression)
    return SymbolicSize(expression, _finite_bound(bounds.lower), _finite_bound(bounds.upper))


def _finite_bound(bound: Any) -> int | None:
    return int(bound) if getattr(bound, "is_finite", True) and bound.is_Integer else None


def _sizes_text(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _shapes_text(shapes: Sequence[Shape]) -> str:
    return " | ".join(str(list(shape)) for shape in shapes)

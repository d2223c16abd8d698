"""Enumerated input shapes: checks against a program, and the shapes of partitions' inputs.

The input sizes of a partition are expressions of the program's symbols. Every combination of the
program's input shapes binds the symbols to values, from which the partition's shapes follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from torch.export import ExportedProgram

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.dynamic_shapes.enumerated import (
    MAX_SHAPES,
    EnumeratedInput,
    EnumeratedShapes,
    Shape,
    Size,
    SymbolicSize,
)
from coreml_delegate.dynamic_shapes.symbols import expression_of, input_tensors
from coreml_delegate.errors import ContractError, OptionError, near_matches
from coreml_delegate.targets import Opset

SEVERAL_INPUTS_OPSET = Opset.iOS18
"""First opset with enumerated shapes for several inputs; the n-th shapes form a combination."""


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


def boundary_shapes(
    program: ExportedProgram, options: CompileOptions
) -> dict[str, tuple[Shape, ...]]:
    """Return the shapes of every input of a partition, one shape per combination.

    Args:
        program: The partition, or the whole program.
        options: The compile options, with the enumerated shapes of the whole program.

    Returns:
        Shapes by input name; empty without enumerated shapes.

    Raises:
        ContractError: An input size depends on more than the program's input sizes; or the target
            is older than iOS18, and several inputs have enumerated shapes.
    """
    if options.enumerated_shapes is None:
        return {}
    bindings = options.enumerated_shapes.bindings()
    shapes = {
        name: tensor_shapes(name, tensor, bindings)
        for name, tensor in input_tensors(program).items()
    }
    target, varying = options.deployment_target, enumerated_inputs(shapes)
    if len(varying) > 1 and target is not None and target < SEVERAL_INPUTS_OPSET:
        raise ContractError(
            f"enumerated shapes of several inputs ({', '.join(varying)}) need "
            f"{SEVERAL_INPUTS_OPSET.name} ({SEVERAL_INPUTS_OPSET.platforms})",
            got=f"minimum_deployment_target {target.name}",
            remedy="Raise it, or export all inputs but one with fixed sizes",
        )
    return shapes


def tensor_shapes(
    name: str, tensor: torch.Tensor, bindings: Sequence[Mapping[str, int]]
) -> tuple[Shape, ...]:
    """Return the shape of a tensor for each binding of the symbols to values.

    Args:
        name: Name of the tensor, for messages.
        tensor: A tensor with symbolic sizes.
        bindings: See ``EnumeratedShapes.bindings``.

    Raises:
        ContractError: A size depends on more than these symbols.
    """
    return tuple(tuple(_evaluate(name, size, b) for size in tensor.shape) for b in bindings)


def undetermined(tensor: torch.Tensor, enumerated: EnumeratedShapes) -> str | None:
    """Return the first size of a tensor that the enumerated shapes do not determine, or None."""
    symbols = enumerated.bindings()[0].keys()
    for size in tensor.shape:
        if isinstance(size, torch.SymInt):
            free = {str(symbol) for symbol in expression_of(size).free_symbols}
            if not free <= symbols:
                return str(size)
    return None


def fix_sizes(program: ExportedProgram, shapes: Mapping[str, tuple[Shape, ...]]) -> None:
    """Replace a symbolic input size by a number if it is equal in every combination.

    Args:
        program: The partition; changed in place.
        shapes: Shapes of its inputs; see ``boundary_shapes``.
    """
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name not in shapes:
            continue
        tensor: torch.Tensor = node.meta["val"]
        pairs = zip(tensor.shape, zip(*shapes[node.name], strict=True), strict=True)
        sizes = [values[0] if len(set(values)) == 1 else size for size, values in pairs]
        if sizes != list(tensor.shape):
            node.meta["val"] = tensor.new_empty(sizes)


def enumerated_inputs(shapes: Mapping[str, tuple[Shape, ...]]) -> dict[str, tuple[Shape, ...]]:
    """Return the inputs whose shape differs between combinations, with their shapes.

    If only one input differs, its shapes are without duplicates.
    """
    varying = {name: listed for name, listed in shapes.items() if len(set(listed)) > 1}
    if len(varying) == 1:
        return {name: tuple(dict.fromkeys(listed)) for name, listed in varying.items()}
    return varying


def declare(spec: Any, inputs: Mapping[str, tuple[Shape, ...]]) -> None:
    """Replace the shape ranges in a model's description by enumerated shapes.

    Args:
        spec: The ``Model`` message.
        inputs: Shapes by feature name.
    """
    for feature in spec.description.input:
        shapes = inputs.get(feature.name)
        if shapes is None:
            continue
        array = feature.type.multiArrayType
        array.ClearField("shapeRange")
        del array.shape[:]
        array.shape.extend(shapes[0])
        for shape in shapes:
            array.enumeratedShapes.shapes.add().shape.extend(shape)


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


def _evaluate(name: str, size: int | torch.SymInt, binding: Mapping[str, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = expression_of(size)
    value = expression.xreplace(
        {s: sympy.Integer(binding[str(s)]) for s in expression.free_symbols if str(s) in binding}
    )
    if not value.is_Integer:
        raise ContractError(
            f"size {size} of {name!r} does not follow from the enumerated shapes",
            got=f"{value}",
            remedy="It depends on data, or on dimensions that are not enumerated: leave the ops "
            "that need it to the CPU (skip_ops_for_coreml_delegation)",
        )
    return int(value)


def _sizes_text(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _shapes_text(shapes: Sequence[Shape]) -> str:
    return " | ".join(str(list(shape)) for shape in shapes)

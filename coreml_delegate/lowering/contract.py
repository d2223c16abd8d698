"""The boundary of a subgraph: names, shapes, and checks of the device runtime's contract.

The input sizes of a partition are expressions of the program's symbols. Every combination of the
program's enumerated input shapes binds the symbols to values, from which the partition's shapes
follow.

On the device every violation is the same ``InvalidProgram``; here each has its own message.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: ``ETCoreMLModel``, ``backend_delegate``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from coreml_delegate.dynamic_shapes import input_sizes
from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes, Shape
from coreml_delegate.dynamic_shapes.symbols import expression_of, input_tensors
from coreml_delegate.errors import ContractError
from coreml_delegate.formats.blob_layout import MethodMetadata
from coreml_delegate.formats.mlpackage import MAIN
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.targets import STATE_OPSET, Opset

SEVERAL_INPUTS_OPSET = Opset.iOS18
"""First opset with enumerated shapes for several inputs; the n-th shapes form a combination."""

BOUNDARY_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)
"""Dtypes that the device runtime converts at a delegate's boundary."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The inputs, outputs and states of a subgraph, as ExecuTorch will pass them.

    Attributes:
        inputs: Name and fake tensor of each input.
        outputs: Name and fake tensor of each output.
        states: Names of the mutable buffers.
        shapes: The shapes of every input, one per combination of enumerated shapes; empty without.
    """

    inputs: tuple[tuple[str, torch.Tensor], ...]
    outputs: tuple[tuple[str, torch.Tensor], ...]
    states: tuple[str, ...]
    shapes: Mapping[str, tuple[Shape, ...]]

    @property
    def enumerated(self) -> dict[str, tuple[Shape, ...]]:
        """The inputs whose shape differs between combinations, with their shapes."""
        return enumerated_inputs(self.shapes)

    @property
    def opset(self) -> Opset:
        """The oldest opset that can express the boundary."""
        if self.states or not self.inputs:
            return STATE_OPSET
        return SEVERAL_INPUTS_OPSET if len(self.enumerated) > 1 else Opset.iOS15


def boundary_of(program: ExportedProgram, options: CompileOptions) -> Boundary:
    """Read the boundary from the signature of a subgraph.

    Raises:
        ContractError: An input or output is not a tensor; or see ``boundary_shapes``.
    """
    shapes = boundary_shapes(program, options)
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = [(str(name), _tensor(name, nodes)) for name in signature.user_inputs]
    outputs = [(str(name), _tensor(name, nodes)) for name in signature.user_outputs]
    states = tuple(sorted(signature.buffers_to_mutate.values()))
    return Boundary(tuple(inputs), tuple(outputs), states, shapes)


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


def check_program(boundary: Boundary, target: Opset | None) -> None:
    """Check a subgraph before it is converted.

    Args:
        boundary: The boundary of the subgraph.
        target: Opset of the deployment target, or None if any opset is allowed.

    Raises:
        ContractError: The device would refuse the program; the message names the rule.
    """
    if not boundary.outputs:
        raise ContractError("subgraph has no output", expected="at least one")
    for name, tensor in (*boundary.inputs, *boundary.outputs):
        if tensor.dtype not in BOUNDARY_DTYPES:
            raise ContractError(
                f"tensor {name!r} cannot cross into Core ML",
                got=str(tensor.dtype),
                expected=", ".join(sorted(str(d) for d in BOUNDARY_DTYPES)),
                remedy="Cast it in the model",
            )
        if any(isinstance(d, int) and d == 0 for d in tensor.shape):
            raise ContractError(f"tensor {name!r} is empty", got=str(tuple(tensor.shape)))
    requirements = [
        (bool(boundary.states), f"mutable buffers as states ({', '.join(boundary.states)})"),
        (not boundary.inputs, "a model without inputs"),
    ]
    for applies, feature in requirements:
        if applies and target is not None and target < STATE_OPSET:
            raise ContractError(
                f"{feature} need {STATE_OPSET.name} ({STATE_OPSET.platforms})",
                got=f"minimum_deployment_target {target.name}",
                remedy="Raise it, or set take_over_mutable_buffer=False",
            )


def name_boundary(
    boundary: Boundary,
    spec: Any,
    relations: Mapping[str, Sequence[Any]],
) -> MethodMetadata:
    """Check a converted model against its subgraph, and declare the shapes of its inputs.

    Args:
        boundary: The boundary of the subgraph.
        spec: The ``Model`` message of the converted model; its description is completed.
        relations: Sizes of inputs in symbols, by input name; see ``dynamic_shapes.input_sizes``.

    Returns:
        The names for the blob's metadata, in the order of the delegate's arguments.

    Raises:
        ContractError: Counts, shapes or names do not agree.
    """
    description = spec.description
    inputs = [feature.name for feature in description.input]
    outputs = [feature.name for feature in description.output]
    _check_side("input", boundary.inputs, description.input)
    _check_side("output", boundary.outputs, description.output)
    _check_unique([*inputs, *outputs, *(feature.name for feature in description.state)])
    # Features may have other names than inputs, but are in the same order.
    feature_of = {name: inputs[i] for i, (name, _) in enumerate(boundary.inputs)}
    _declare(spec, {feature_of[name]: listed for name, listed in boundary.enumerated.items()})
    sizes = {feature_of[name]: listed for name, listed in relations.items()}
    input_sizes.write(description.metadata.userDefined, {MAIN: sizes})
    return MethodMetadata(tuple(inputs), tuple(outputs))


def _check_side(
    side: str, expected: Sequence[tuple[str, torch.Tensor]], features: Sequence[Any]
) -> None:
    if len(expected) != len(features):
        raise ContractError(
            f"converted model has a different number of {side}s than the subgraph",
            got=_names_text(feature.name for feature in features),
            expected=_names_text(name for name, _ in expected),
        )
    for (name, tensor), feature in zip(expected, features, strict=True):
        shape = tuple(feature.type.multiArrayType.shape)
        # Outputs often have no shape in the description; a scalar is passed as one element.
        if shape and len(shape) != max(tensor.dim(), 1):
            raise ContractError(
                f"{side} {name!r} has a different rank in the converted model",
                got=f"{feature.name}: {shape}",
                expected=str(tuple(tensor.shape)),
            )


def _check_unique(names: Sequence[str]) -> None:
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise ContractError(
            "feature names of the converted model are not unique", got=_names_text(duplicates)
        )


def _tensor(name: Any, nodes: dict[str, Any]) -> torch.Tensor:
    node = nodes.get(name)
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ContractError(
            "only tensors can cross into Core ML", got=f"{name!r} is {type(value).__name__}"
        )
    return value


def _names_text(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _declare(spec: Any, inputs: Mapping[str, tuple[Shape, ...]]) -> None:
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

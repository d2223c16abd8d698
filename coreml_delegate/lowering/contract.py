"""The boundary of a subgraph: its names, and checks of the device runtime's contract.

On the device every violation is the same ``InvalidProgram``; here each has its own message.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: ``ETCoreMLModel``, ``backend_delegate``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.dynamic_shapes import input_sizes
from coreml_delegate.dynamic_shapes.enumerated import Shape
from coreml_delegate.errors import ContractError
from coreml_delegate.formats.blob_layout import MethodMetadata
from coreml_delegate.formats.mlpackage import MAIN
from coreml_delegate.lowering.enumerated_shapes import declare
from coreml_delegate.targets import STATE_OPSET, Opset

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
    """The inputs, outputs and states of a subgraph, as ExecuTorch will pass them."""

    inputs: tuple[tuple[str, torch.Tensor], ...]
    outputs: tuple[tuple[str, torch.Tensor], ...]
    states: tuple[str, ...]


def boundary_of(program: ExportedProgram) -> Boundary:
    """Read the boundary from the signature of a subgraph.

    Raises:
        ContractError: An input or output is not a tensor.
    """
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = [(str(name), _tensor(name, nodes)) for name in signature.user_inputs]
    outputs = [(str(name), _tensor(name, nodes)) for name in signature.user_outputs]
    states = tuple(sorted(signature.buffers_to_mutate.values()))
    return Boundary(tuple(inputs), tuple(outputs), states)


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
    enumerated: Mapping[str, tuple[Shape, ...]],
    relations: Mapping[str, Sequence[Any]],
) -> MethodMetadata:
    """Check a converted model against its subgraph, and declare the shapes of its inputs.

    Args:
        boundary: The boundary of the subgraph.
        spec: The ``Model`` message of the converted model; its description is completed.
        enumerated: Enumerated shapes by input name.
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
    declare(spec, {feature_of[name]: shapes for name, shapes in enumerated.items()})
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

"""Checks that torchao can prepare an annotated graph and that Core ML can run it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    EdgeOrNode,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from coreml_delegate.errors import LoweringError, UnsupportedOperatorError
from coreml_delegate.ops.call import GETITEM, target_name
from coreml_delegate.ops.constants import attribute_constants
from coreml_delegate.quantizer.patterns import BY_OP, functional_name
from coreml_delegate.quantizer.qspec import Concrete, annotation_of, integer_range, resolve, spec_at

_LISTED_PROBLEMS = 5  # in a message

Annotated = tuple[EdgeOrNode, QuantizationSpecBase]


def validate(model: GraphModule) -> None:
    """Check every annotation of a graph, including the annotations of other quantizers.

    Args:
        model: Annotated graph in ATen dialect.

    Raises:
        UnsupportedOperatorError: An op is annotated that Core ML does not run quantized.
        LoweringError: Annotations cannot be prepared, converted or lowered; it lists them.
    """
    annotated = [n for n in model.graph.nodes if annotation_of(n) is not None]
    foreign = [n for n in annotated if any(_annotated_specs(n)) and not _is_quantizable(n)]
    if foreign:
        raise UnsupportedOperatorError(
            "annotated operators that Core ML does not run quantized",
            got=_problems_text([f"{n.name} ({target_name(n.target)})" for n in foreign]),
            expected="operators whose records in coreml_delegate.ops have a quantization",
        )
    constants = attribute_constants(model.graph)
    problems = [
        p
        for n in annotated
        for entry in _annotated_specs(n)
        for p in _problems(n, *entry, constants)
    ]
    if problems:
        raise LoweringError(
            f"{len(problems)} annotations cannot be used", got=_problems_text(problems)
        )


def _annotated_specs(node: Node) -> Iterator[Annotated]:
    annotation = annotation_of(node)
    if annotation is None:
        return
    for source, spec in annotation.input_qspec_map.items():
        if spec is not None:
            yield (source, node), spec
    if annotation.output_qspec is not None:
        yield node, annotation.output_qspec


def _is_quantizable(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = functional_name(node)
    return name in BY_OP or target_name(node.target) == GETITEM


def _problems(
    node: Node, edge_or_node: EdgeOrNode, spec: QuantizationSpecBase, constants: Collection[Node]
) -> Iterator[str]:
    source = edge_or_node if isinstance(edge_or_node, Node) else edge_or_node[0]
    where = f"the result of {node.name}" if source is node else f"{source.name} into {node.name}"
    if source is not node and source not in node.all_input_nodes:
        yield f"{where}: {node.name} does not take it"
        return
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        got = str(getattr(value, "dtype", "no tensor")).removeprefix("torch.")
        yield f"{where}: it is {got}, not float32"
    yield from (f"{where}: {problem}" for problem in _reference_problems(edge_or_node, spec))
    concrete = resolve(spec)
    if concrete is not None:
        for check in _CHECKS:
            problem = check(source, concrete, source in constants)
            if problem is not None:
                yield f"{where}: {problem}"


def _reference_problems(edge_or_node: EdgeOrNode, spec: QuantizationSpecBase) -> Iterator[str]:
    """Yield a problem if the reference of a shared spec is dangling or circular."""
    path, current = [edge_or_node], spec
    while True:
        reference = _reference(current)
        if reference is None:
            return
        if reference in path:
            yield f"its quantization is shared in a circle: {' -> '.join(map(_name, path))}"
            return
        following = spec_at(reference)
        if following is None:
            yield f"it shares the quantization of {_name(reference)}, which has none"
            return
        path.append(reference)
        current = following


def _reference(spec: QuantizationSpecBase) -> EdgeOrNode | None:
    if isinstance(spec, SharedQuantizationSpec):
        return spec.edge_or_node
    return spec.derived_from[0] if isinstance(spec, DerivedQuantizationSpec) else None


def _has_dtype(_: Node, spec: Concrete, _is_constant: bool) -> str | None:
    if spec.dtype in (torch.int8, torch.uint8):
        return None
    return f"Core ML quantizes to int8 and uint8, not {str(spec.dtype).removeprefix('torch.')}"


def _is_static(_: Node, spec: Concrete, _is_constant: bool) -> str | None:
    return "Core ML has no dynamic quantization" if spec.is_dynamic else None


def _fits_dtype(_: Node, spec: Concrete, _is_constant: bool) -> str | None:
    if spec.dtype not in (torch.int8, torch.uint8):
        return None
    low, high = integer_range(spec.dtype)
    limits = (spec.quant_min, spec.quant_max)
    fits = all(limit is None or low <= limit <= high for limit in limits)
    return None if fits else f"{limits} is beyond {str(spec.dtype).removeprefix('torch.')}"


def _fills_dtype(_: Node, spec: Concrete, is_constant: bool) -> str | None:
    """Core ML quantizes activations to the full range of the dtype; it cannot clip to less."""
    if is_constant or spec.dtype not in (torch.int8, torch.uint8):
        return None
    limits, full = (spec.quant_min, spec.quant_max), integer_range(spec.dtype)
    if all(limit is None or limit == end for limit, end in zip(limits, full, strict=True)):
        return None
    return f"an activation has the range {full[0]} to {full[1]}, not {limits[0]} to {limits[1]}"


def _has_axis(source: Node, spec: Concrete, is_constant: bool) -> str | None:
    axis = getattr(spec, "ch_axis", None)
    if axis is None:
        return None
    if not is_constant:
        return "an activation is quantized per channel, Core ML has that for weights"
    rank = source.meta["val"].dim() if isinstance(source.meta.get("val"), torch.Tensor) else 0
    return None if axis < rank else f"axis {axis} of a tensor of rank {rank}"


# Arguments of a check: the tensor, its spec, and whether the tensor is a constant.
_CHECKS: tuple[Callable[[Node, Concrete, bool], str | None], ...] = (
    _has_dtype,
    _is_static,
    _fits_dtype,
    _fills_dtype,
    _has_axis,
)


def _name(edge_or_node: EdgeOrNode) -> str:
    return (
        edge_or_node.name
        if isinstance(edge_or_node, Node)
        else f"({edge_or_node[0].name}, {edge_or_node[1].name})"
    )


def _problems_text(items: list[str]) -> str:
    more = len(items) - _LISTED_PROBLEMS
    return "; ".join(items[:_LISTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")

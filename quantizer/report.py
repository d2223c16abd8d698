"""``QuantizationReport``: the quantization of each call, or the reason why it stays in float.

As JSON one object::

    schema_version  1; raised when a field is removed or changes its meaning, not when one is added
    summary         nodes, quantized, patterns (number of matches by pattern)
    nodes           list of NodeQuantization in graph order, with the field quantized added
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

from coreml_delegate.errors import ProgramError
from coreml_delegate.exported.module_scope import scopes_of
from coreml_delegate.ops.call import GETITEM, target_name
from coreml_delegate.quantizer.annotate import mark_of
from coreml_delegate.quantizer.matcher import is_annotated
from coreml_delegate.quantizer.qspec import annotation_of, output_spec

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class NodeQuantization:
    """The quantization of one call.

    Attributes:
        name: Node name in the annotated graph.
        op: Op target, for example ``aten.conv2d.default``.
        module: Path of the module of the call, empty for the root or if unknown.
        pattern: Name of the matching pattern, ``conv-bn-act``, or None.
        fused_into: Name of the first node of the pattern, if it is another node.
        config: The entry of the configuration that applied, or None.
        inputs: Quantization of each activation that it takes, by node name.
        weight: Quantization of its weight, or None.
        output: Quantization of its result; None if it stays in float or is fused.
        reason: Why the call is not quantized; None if it is.
    """

    name: str
    op: str
    module: str
    pattern: str | None
    fused_into: str | None
    config: str | None
    inputs: Mapping[str, str]
    weight: str | None
    output: str | None
    reason: str | None

    @property
    def quantized(self) -> bool:
        """Whether the call is part of a quantized pattern."""
        return self.pattern is not None

    def __str__(self) -> str:
        # Without inputs that keep their quantization, which is in their own record.
        specs = [f"{name} {spec}" for name, spec in self.inputs.items() if spec != f"as {name}"]
        specs += [f"weight {self.weight}"] if self.weight else []
        specs += [f"result {self.output}"] if self.output else []
        if not specs and self.fused_into is not None:
            specs = [f"fused into {self.fused_into}"]
        return "; ".join(specs) or self.reason or "takes quantized tensors"


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The quantization of every call of a graph.

    Attributes:
        nodes: Records in graph order, only of calls that compute floating-point tensors.
    """

    nodes: tuple[NodeQuantization, ...]

    @property
    def quantized(self) -> tuple[NodeQuantization, ...]:
        """The calls in quantized patterns."""
        return tuple(n for n in self.nodes if n.quantized)

    @property
    def unquantized(self) -> tuple[NodeQuantization, ...]:
        """The calls that stay in float."""
        return tuple(n for n in self.nodes if not n.quantized)

    @property
    def patterns(self) -> Mapping[str, int]:
        """Number of matches by pattern, most frequent first."""
        counts = Counter(n.pattern for n in self.nodes if n.pattern and n.fused_into is None)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def node(self, name: str) -> NodeQuantization:
        """Return the record of a node.

        Raises:
            ProgramError: There is no such node.
        """
        for record in self.nodes:
            if record.name == name:
                return record
        raise ProgramError("no such node in the report", got=repr(name))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; the module docstring has the schema."""
        return {
            "schema_version": SCHEMA_VERSION,
            "summary": {
                "nodes": len(self.nodes),
                "quantized": len(self.quantized),
                "patterns": dict(self.patterns),
            },
            "nodes": [asdict(n) | {"quantized": n.quantized} for n in self.nodes],
        }

    def to_json(self) -> str:
        """Return the report as JSON; the module docstring has the schema."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def to_table(self) -> str:
        """Return the report for a terminal."""
        return "\n".join(_lines(self))

    def __str__(self) -> str:
        return self.to_table()


def describe(graph: Graph, reasons: Mapping[Node, str]) -> QuantizationReport:
    """Report on an annotated graph.

    Args:
        graph: The annotated graph.
        reasons: Why calls with a pattern are not quantized.
    """
    calls = (n for n in graph.nodes if n.op == "call_function")
    recorded = (n for n in calls if _computes_float(n) and not _is_tuple_element(n))
    return QuantizationReport(tuple(_record(n, reasons) for n in recorded))


def _record(node: Node, reasons: Mapping[Node, str]) -> NodeQuantization:
    mark, annotation = mark_of(node), annotation_of(node)
    edges = {} if annotation is None else annotation.input_qspec_map
    quantized = {n: spec for n, spec in edges.items() if spec is not None}
    is_anchor = mark is not None and mark.anchor == node.name
    weight = mark.weight if mark is not None and is_anchor else None
    weights = [n for n in quantized if n.name == weight]
    scopes = scopes_of(node)
    return NodeQuantization(
        name=node.name,
        op=target_name(node.target),
        module=scopes[-1].path if scopes else "",
        pattern=None if mark is None else mark.pattern,
        fused_into=None if mark is None or is_anchor else mark.anchor,
        config=None if mark is None else mark.origin,
        inputs={n.name: _spec_text(s) for n, s in quantized.items() if n not in weights},
        weight=next((_spec_text(quantized[n]) for n in weights), None),
        output=None if annotation is None else _result_text(node),
        reason=None if mark is not None else _reason(node, reasons),
    )


def _reason(node: Node, reasons: Mapping[Node, str]) -> str:
    if node in reasons:
        return reasons[node]
    if is_annotated(node):
        return "another quantizer annotated it"
    return f"no pattern for {target_name(node.target)}"


def _result_text(node: Node) -> str | None:
    specs = [output_spec(n) for n in (node, *_tuple_elements(node))]
    return next((_spec_text(spec) for spec in specs if spec is not None), None)


def _tuple_elements(node: Node) -> list[Node]:
    return [u for u in node.users if target_name(u.target) == GETITEM]


def _is_tuple_element(node: Node) -> bool:
    """Whether a node is an element of a tuple result, which the record of its op covers."""
    return target_name(node.target) == GETITEM


def _computes_float(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(v, torch.Tensor) and v.dtype.is_floating_point for v in values)


def _spec_text(spec: QuantizationSpecBase) -> str:
    if isinstance(spec, SharedQuantizationSpec):
        shared = spec.edge_or_node
        return f"as {shared.name if isinstance(shared, Node) else shared[0].name}"
    if isinstance(spec, DerivedQuantizationSpec):
        source = spec.derived_from[0]
        return f"as {source.name if isinstance(source, Node) else source[0].name}"
    if isinstance(spec, FixedQParamsQuantizationSpec):
        return f"{_dtype(spec)} fixed, scale {spec.scale:g}, zero point {spec.zero_point}"
    if isinstance(spec, QuantizationSpec):
        axis = "per tensor" if spec.ch_axis is None else f"per channel of axis {spec.ch_axis}"
        scheme = str(spec.qscheme).rpartition("_")[2]
        return f"{_dtype(spec)} {scheme} {axis}"
    return type(spec).__name__


def _dtype(spec: QuantizationSpec | FixedQParamsQuantizationSpec) -> str:
    name = str(spec.dtype).removeprefix("torch.")
    if spec.quant_min is None or spec.quant_max is None:
        return name
    bits = (spec.quant_max - spec.quant_min).bit_length()
    return name if f"{bits}" in name else f"{bits}-bit {name}"


def _lines(report: QuantizationReport) -> Iterator[str]:
    yield f"{len(report.quantized)} of {len(report.nodes)} operations quantized"
    if report.patterns:
        yield "  " + ", ".join(f"{count} {name}" for name, count in report.patterns.items())
    rows = [(n.name, n.pattern or "-", n.module or "-", str(n)) for n in report.nodes]
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()

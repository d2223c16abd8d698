"""Annotates matches for torchao.

A tensor has one quantization spec: the pattern that computes it determines the spec, and its users
share it. Only for a tensor computed in float does the user determine the spec.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from coreml_delegate.ops.quantization import Output
from coreml_delegate.quantizer.config import LayerSettings
from coreml_delegate.quantizer.matcher import Match
from coreml_delegate.quantizer.qspec import SpecFactory, derived_spec, output_spec

MARK_KEY = "coreml_quantization"
"""Key of the ``Mark`` in a node's ``meta``."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The match that annotated a node.

    Attributes:
        pattern: Name of the pattern with its fused ops, ``conv-bn-act``.
        anchor: Name of the first node of the pattern.
        weight: Name of the weight's node, or None.
        origin: The entry of the configuration that applied.
        settings: Settings of that entry.
    """

    pattern: str
    anchor: str
    weight: str | None
    origin: str
    settings: LayerSettings


def mark_of(node: Node) -> Mark | None:
    """Return the mark of an annotated node, or None."""
    return node.meta.get(MARK_KEY)


class Annotator:
    """Annotates the matches of one graph, in graph order."""

    def __init__(self) -> None:
        self._not_negative: set[Node] = set()

    def annotate(self, match: Match, settings: LayerSettings) -> None:
        """Annotate a match that the checker accepted."""
        specs = SpecFactory(settings)
        # torchao's batch norm folding relies on this order: data, weight, bias.
        inputs: dict[Node, QuantizationSpecBase | None] = {
            node: self._input(node, specs, match) for node in match.data
        }
        if match.weight is not None:
            inputs[match.weight] = specs.weight(match.pattern.channel_axis)
            bias = match.call.arguments.get("bias")
            if isinstance(bias, Node):
                inputs[bias] = None
        weight = None if match.weight is None else match.weight.name
        mark = Mark(match.name, match.anchor.name, weight, match.choice.origin, settings)
        for node in match.nodes:
            _write(node, QuantizationAnnotation(_annotated=True), mark)
        _write(match.anchor, QuantizationAnnotation(input_qspec_map=inputs, _annotated=True), mark)
        if match.is_not_negative(self._not_negative):
            self._not_negative.update(match.results)
        for node in match.results:
            self._annotate_result(node, self._output(match, specs), mark)

    def _annotate_result(self, node: Node, spec: QuantizationSpecBase | None, mark: Mark) -> None:
        annotation: QuantizationAnnotation = node.meta.get(
            Q_ANNOTATION_KEY, QuantizationAnnotation(_annotated=True)
        )
        annotation.output_qspec = spec
        _write(node, annotation, mark)

    def _input(self, node: Node, specs: SpecFactory, match: Match) -> QuantizationSpecBase | None:
        if specs.settings.activation is None or _is_scalar(node):
            return None
        if output_spec(node) is not None:
            return SharedQuantizationSpec(node)
        # The input of softmax and sigmoid may stay in float: the range of the result is fixed.
        if match.pattern.weight is None and match.fixed_range is not None and not match.tail:
            return None
        return specs.activation(not_negative=node in self._not_negative)

    def _output(self, match: Match, specs: SpecFactory) -> QuantizationSpecBase | None:
        if match.pattern.output is Output.FLOAT:
            return None
        if match.pattern.output is Output.OF_INPUT:
            source = match.data[0]
            spec = output_spec(source)
            return None if spec is None else derived_spec(source, spec)
        if match.fixed_range is not None:
            return specs.fixed(*match.fixed_range)
        return specs.activation(not_negative=match.last in self._not_negative)


def _write(node: Node, annotation: QuantizationAnnotation, mark: Mark) -> None:
    node.meta[Q_ANNOTATION_KEY] = annotation
    node.meta[MARK_KEY] = mark


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0

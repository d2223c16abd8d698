"""Finds the calls with a quantization pattern, and the calls fused into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from coreml_delegate.ops.call import GETITEM, OpCall, target_name
from coreml_delegate.ops.constants import attribute_constants
from coreml_delegate.ops.quantization import Output, Pattern, Tail
from coreml_delegate.quantizer.patterns import (
    is_not_negative,
    pattern_of,
    quantization_of,
    tail_of,
)
from coreml_delegate.quantizer.qspec import annotation_of
from coreml_delegate.quantizer.selection import Choice, SettingsSelector


@dataclass(frozen=True, slots=True)
class Match:
    """A call with a pattern, and the following calls, which are fused into it.

    Attributes:
        pattern: The pattern of the op's record.
        name: Name of the pattern with its fused ops: ``conv-bn-act``.
        call: The call.
        choice: The call's settings.
        data: The activations that it takes, in the order of the schema.
        weight: Its weight, or None.
        has_constant_weight: Whether the weight is a constant.
        tail: The fused calls, in order.
    """

    pattern: Pattern
    name: str
    call: OpCall
    choice: Choice
    data: tuple[Node, ...]
    weight: Node | None
    has_constant_weight: bool
    tail: tuple[Node, ...]

    @property
    def anchor(self) -> Node:
        """The first call of the pattern."""
        return self.call.node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every call of the match, in graph order."""
        return (self.anchor, *self.tail)

    @property
    def last(self) -> Node:
        """The last call, which computes the match's result."""
        return self.nodes[-1]

    @property
    def results(self) -> tuple[Node, ...]:
        """Nodes of the result's tensors: calls of ``getitem`` if there are several tensors."""
        if isinstance(self.last.meta.get("val"), list | tuple):
            return tuple(u for u in self.last.users if target_name(u.target) == GETITEM)
        return (self.last,)

    @property
    def fixed_range(self) -> tuple[float, float] | None:
        """Range of the result if the op fixes it, or None."""
        return quantization_of(self.last).fixed_range

    @property
    def follows(self) -> bool:
        """Whether the match is quantized only if its input is quantized."""
        if self.pattern.output is Output.OF_INPUT:
            return True
        return self.pattern.follows and self.fixed_range is None

    def is_not_negative(self, not_negative: set[Node]) -> bool:
        """Whether the result has no negative values, given the set of such tensors."""
        if self.tail or self.pattern.follows:
            return is_not_negative(self.last)
        keeps = self.pattern.keeps_sign or self.pattern.output is Output.OF_INPUT
        data = [v for k, v in self.call.arguments.items() if k in self.pattern.data]
        scalars = [v for v in data if isinstance(v, int | float)]
        return keeps and all(n in not_negative for n in self.data) and all(s >= 0 for s in scalars)


def find_matches(graph: Graph, selector: SettingsSelector) -> Iterator[Match]:
    """Yield the matches of a graph in graph order; a call is in at most one match.

    Calls with an annotation are skipped.

    Args:
        graph: In ATen dialect, from ``torch.export``, with ``meta["val"]``.
        selector: Selects the settings.
    """
    constants = attribute_constants(graph)
    fused: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in fused or is_annotated(node):
            continue
        call = OpCall.of(node)
        pattern = pattern_of(call, constants)
        if pattern is not None:
            match = _match(call, pattern, selector, constants)
            fused.update(match.tail)
            yield match


def is_annotated(node: Node) -> bool:
    """Whether this quantizer, or an earlier quantizer, has annotated a node."""
    return annotation_of(node) is not None


def _match(
    call: OpCall, pattern: Pattern, selector: SettingsSelector, constants: Collection[Node]
) -> Match:
    node = call.node
    choice = selector.choose(node)
    data = tuple(n for name in call.arguments for n in _nodes(call, name) if name in pattern.data)
    weight = call.arguments.get(pattern.weight or "")
    tail: list[Node] = []
    kinds: list[Tail] = []
    for kind in pattern.tail:
        following = _sole_user(tail[-1] if tail else node)
        if following is None or tail_of(following) is not kind:
            continue
        if choice.admits(selector.choose(following)) and not is_annotated(following):
            tail.append(following)
            kinds.append(kind)
    return Match(
        pattern=pattern,
        name="-".join((pattern.name, *kinds)),
        call=call,
        choice=choice,
        data=tuple(dict.fromkeys(data)),
        weight=weight if isinstance(weight, Node) else None,
        has_constant_weight=weight in constants,
        tail=tuple(tail),
    )


def _nodes(call: OpCall, name: str) -> list[Node]:
    value = call.arguments[name]
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, Node) and _is_tensor(item)]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _sole_user(node: Node) -> Node | None:
    """Return the only user of a node if its first argument is the node, or None."""
    users = list(node.users)
    if len(users) != 1 or not users[0].args or users[0].args[0] is not node:
        return None
    return users[0]

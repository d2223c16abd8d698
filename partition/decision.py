"""Verdicts to partitions: group, select, tag, confirm, and again until nothing more is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops import Reason
from coreml_delegate.partition.buffers import tag_states
from coreml_delegate.partition.grouping import Group, group_calls
from coreml_delegate.partition.isolation import own_tables
from coreml_delegate.partition.selection import Selection
from coreml_delegate.partition.symbolic_sizes import stranded_sizes
from coreml_delegate.partition.tagging import DataOwnership, tag_constants, tag_groups


class Confirm(Protocol):
    """A last look at the partitions of a tagged program, such as their conversion."""

    def __call__(self, program: ExportedProgram, tags: Sequence[str], /) -> Mapping[Node, Reason]:
        """Calls in these partitions that cannot be delegated after all; empty if all can."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the calls of one program.

    Attributes:
        partitions: The calls of each partition by its tag, in the order in which they run.
        refused: Why each of the other calls stays on the CPU.
    """

    partitions: Mapping[str, Group]
    refused: Mapping[Node, Reason]


def decide(
    program: ExportedProgram,
    refused: Mapping[Node, Reason],
    *,
    constants: Collection[Node],
    selection: Selection,
    ownership: DataOwnership,
    confirm: Confirm,
) -> Decision:
    """Partition a program and tag it.

    Args:
        program: In edge dialect; it is tagged.
        refused: The calls known not to be delegated, each with the reason.
        constants: Placeholders that are inside every partition that uses them.
        selection: Which partitions are worth one.
        ownership: Which data goes to partitions.
        confirm: Asked about the partitions until it has nothing to add.
    """
    own_tables(program)
    known = dict(refused)
    while True:
        possible = group_calls(program.graph, known.keys(), constants=constants)
        stranded = stranded_sizes(program.graph, possible)
        if stranded:
            known.update(stranded)
            continue
        groups, dropped = selection.apply(possible)
        tags = tag_groups(program, groups)
        if ownership.constants:
            tag_constants(program)
        if ownership.mutable_buffers:
            tag_states(program)
        more = confirm(program, tags)
        if not more:
            return Decision(dict(zip(tags, groups, strict=True)), known | dropped)
        known.update(more)

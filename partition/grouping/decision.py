"""The decision on a program: group calls, select, tag, confirm; again if a call is refused."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.conversion.delegation_tags import remove_tags, set_tag, tag_constants, tag_of
from coreml_delegate.ops import Reason
from coreml_delegate.ops.boundary import shared_across_partitions
from coreml_delegate.partition.grouping.mutable_buffers import tag_states
from coreml_delegate.partition.grouping.selection import Selection
from coreml_delegate.partition.grouping.stages import Group, group_calls
from coreml_delegate.partition.grouping.symbolic_sizes import stranded_sizes


@dataclass(frozen=True, slots=True)
class DataOwnership:
    """The data that Core ML has inside; all other data is passed to it.

    Attributes:
        constants: Whether it has parameters, buffers that nothing mutates, and lifted constants.
        mutable_buffers: Whether it has mutable buffers; see ``grouping.mutable_buffers``.
    """

    constants: bool = True
    mutable_buffers: bool = True


class Confirm(Protocol):
    """A last look at the partitions of a tagged program, such as their conversion."""

    def __call__(self, program: ExportedProgram, tags: Sequence[str], /) -> Mapping[Node, Reason]:
        """Return the calls in these partitions that cannot be delegated after all."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """The partitions of one program.

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
    prefix: str = "",
) -> Decision:
    """Partition a program and tag it.

    Args:
        program: In edge dialect; it is tagged.
        refused: The calls known not to be delegated, each with the reason.
        constants: Placeholders that are inside every partition that uses them.
        selection: The user's limits on partitions.
        ownership: The data that partitions have inside.
        confirm: Called with the tags of the partitions until it refuses no more calls.
        prefix: Of the tags.
    """
    _own_tables(program)
    known = dict(refused)
    while True:
        possible = group_calls(program.graph, known.keys(), constants=constants)
        apart = stranded_sizes(program.graph, possible) | shared_across_partitions(
            program.graph, possible
        )
        if apart:
            known.update(apart)
            continue
        groups, dropped = selection.apply(possible)
        tags = _tag_groups(program, groups, prefix)
        if ownership.constants:
            tag_constants(program)
        if ownership.mutable_buffers:
            tag_states(program)
        more = confirm(program, tags)
        if not more:
            return Decision(dict(zip(tags, groups, strict=True)), known | dropped)
        known.update(more)


def _own_tables(program: ExportedProgram) -> None:
    """Give ``program`` tables of constants and parameters of its own.

    ExecuTorch takes the data of delegates out of them, and shares one of them with the program that
    it was given, which is to stay as it is.
    """
    tables: Any = program
    tables._constants = copy.copy(program.constants)
    tables._state_dict = copy.copy(program.state_dict)


def _tag_groups(program: ExportedProgram, groups: Sequence[Group], prefix: str) -> list[str]:
    """Tag the calls of each group, numbered in the order of the groups.

    Attributes that only calls of one group use (submodules, literals) go with them. Tags of an
    earlier grouping are removed.

    Returns:
        The tags.
    """
    remove_tags(program)
    tags: list[str] = []
    for group in groups:
        tag = f"{prefix}coreml_{len(tags)}"
        tags.append(tag)
        for node in group:
            set_tag(node, tag)
    for node in program.graph.find_nodes(op="get_attr"):
        used_in = {tag_of(user) for user in node.users}
        only = used_in.pop() if len(used_in) == 1 else None
        if only is not None:
            set_tag(node, only)
    return tags

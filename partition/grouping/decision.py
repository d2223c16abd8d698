"""The decision on a program: group calls, select, tag, confirm; repeat if a call is refused."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.lowering.delegation_tags import remove_tags, set_tag, tag_constants, tag_of
from coreml_delegate.ops import Reason
from coreml_delegate.ops.boundary import shared_across_partitions
from coreml_delegate.partition.grouping.mutable_buffers import tag_states
from coreml_delegate.partition.grouping.selection import Selection
from coreml_delegate.partition.grouping.stages import Group, group_calls
from coreml_delegate.partition.grouping.symbolic_sizes import stranded_sizes
from coreml_delegate.patches.torch import set_parts


@dataclass(frozen=True, slots=True)
class DataOwnership:
    """The data inside Core ML models; all other data is passed to them.

    Attributes:
        constants: Whether parameters, unmutated buffers, and lifted constants are inside.
        mutable_buffers: Whether mutable buffers are inside; see ``grouping.mutable_buffers``.
    """

    constants: bool = True
    mutable_buffers: bool = True


class Confirm(Protocol):
    """A final check of the partitions of a tagged program, by their conversion."""

    def __call__(self, program: ExportedProgram, tags: Sequence[str], /) -> Mapping[Node, Reason]:
        """Return the calls in these partitions that cannot be delegated, with the reasons."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """The partitions of one program.

    Attributes:
        partitions: The calls of each partition by its tag, in execution order.
        refused: The other calls, with the reasons.
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
        refused: The calls refused so far, each with the reason.
        constants: Placeholders that are inside every partition that uses them.
        selection: The user's limits on partitions.
        ownership: The data inside partitions.
        confirm: Called with the tags of the partitions until it refuses no more calls.
        prefix: Of the tags.
    """
    _copy_tables(program)
    refusals = dict(refused)
    while True:
        possible = group_calls(program.graph, refusals.keys(), constants=constants)
        stranded = stranded_sizes(program.graph, possible) | shared_across_partitions(
            program.graph, possible
        )
        if stranded:
            refusals.update(stranded)
            continue
        groups, dropped = selection.apply(possible)
        tags = _tag_groups(program, groups, prefix)
        if ownership.constants:
            tag_constants(program)
        if ownership.mutable_buffers:
            tag_states(program)
        failed = confirm(program, tags)
        if not failed:
            return Decision(dict(zip(tags, groups, strict=True)), refusals | dropped)
        refusals.update(failed)


def _copy_tables(program: ExportedProgram) -> None:
    """Copy the tables of constants and parameters of ``program``.

    ExecuTorch removes the data of delegates from them, and shares a table with the original
    program, which must not change.
    """
    tables = {"constants": program.constants, "state_dict": program.state_dict}
    set_parts(program, {name: copy.copy(table) for name, table in tables.items()})


def _tag_groups(program: ExportedProgram, groups: Sequence[Group], prefix: str) -> list[str]:
    """Tag the calls of each group, numbered in the order of the groups.

    Attributes (submodules, literals) that only one group uses get its tag. Tags of an earlier
    grouping are removed.

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

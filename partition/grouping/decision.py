"""The decision on a program: group calls, select, tag, confirm; repeat if a call is refused."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.lowering.delegation_tags import remove_tags, set_tag, tag_constants, tag_of
from coreml_delegate.opaque_ops.recorded_compression import unread_weights
from coreml_delegate.ops import Reason, ReasonCode, flops_of
from coreml_delegate.ops.boundary import shared_across_partitions
from coreml_delegate.ops.call import DECOMPRESS, target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.partition.grouping.moved_calls import trifles
from coreml_delegate.partition.grouping.mutable_buffers import obstacle_to_all_states, tag_states
from coreml_delegate.partition.grouping.stages import Group, cut, group_calls
from coreml_delegate.partition.grouping.symbolic_sizes import stranded_sizes
from coreml_delegate.partition.verdicts.parts import is_part
from coreml_delegate.patches.torch import set_parts
from coreml_delegate.targets import LARGEST_WEIGHTS


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
    options: PartitionerKeywords,
    *,
    confirm: Confirm,
    prefix: str = "",
) -> Decision:
    """Partition a program and tag it.

    Args:
        program: In edge dialect; it is tagged.
        refused: The calls refused so far, each with the reason.
        options: The partitioner's: limits on partitions, and the data inside them.
        confirm: Called with the tags of the partitions until it refuses no more calls.
        prefix: Of the tags.
    """
    _copy_tables(program)
    refusals = dict(refused)
    # These are inside every partition that uses them.
    constants = stored_nodes(program) if options.take_over_constant_data else ()
    while True:
        refusals.update(unread_weights(program.graph, refusals))
        possible = group_calls(program.graph, refusals.keys(), constants=constants)
        if (limit := _largest_weights(options.compiling)) is not None:
            possible = [part for group in possible for part in cut(group, constants, limit)]
        if options.moves_calls and (moved := _moved_trifles(possible, constants)):
            refusals.update(moved)
            continue
        stranded = stranded_sizes(program.graph, possible) | shared_across_partitions(
            program.graph, possible
        )
        if stranded:
            refusals.update(stranded)
            continue
        groups, dropped = _select(possible, options)
        tags = _tag_groups(program, groups, prefix)
        if options.take_over_constant_data:
            tag_constants(program)
        if obstacle_to_all_states(program, options) is None:
            tag_states(program)
        failed = confirm(program, tags)
        if not failed:
            return Decision(dict(zip(tags, groups, strict=True)), refusals | dropped)
        refusals.update(failed)


def _largest_weights(options: CompileOptions) -> int | None:
    """Return the most bytes of a partition's weights in the program; None for any number.

    Core ML has fp32 as fp16, if it computes in fp16. Compressed weights are smaller than here.
    """
    if options.device is None or options.compression_demand is not None:
        return None
    return LARGEST_WEIGHTS if options.precision is Precision.FLOAT32 else 2 * LARGEST_WEIGHTS


def _moved_trifles(groups: Sequence[Group], constants: Collection[Node]) -> dict[Node, Reason]:
    """Return the calls of groups with too little work for a partition on the neural engine."""
    total = sum(_value(group)[0] for group in groups)
    reasons: dict[Node, Reason] = {}
    for group in trifles(groups, constants):
        flops, count = _value(group)
        share = f"{count} operation(s) with {flops / max(total, 1):.2%} of the work"
        text = f"its partition would have {share}"
        reason = Reason(ReasonCode.DEVICE, text, "Lower for no device to delegate it")
        reasons.update(dict.fromkeys(group, reason))
    return reasons


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


# Selection of groups by size and estimated FLOPs


def _select(
    groups: Sequence[Group], options: PartitionerKeywords
) -> tuple[list[Group], dict[Node, Reason]]:
    """Select groups within the user's limits on partitions.

    Most estimated FLOPs win, then more operations, then the earlier group. A group that dequantizes
    compressed weights is exempt from the limits, but counts: the CPU cannot run it.

    Returns:
        The selected groups, in order, and the calls of the other groups with the reasons.
    """
    exempt = {n for n, group in enumerate(groups) if any(map(_decompresses, group))}
    smallest, most = options.min_partition_nodes, options.max_partitions
    large = {n for n, group in enumerate(groups) if _operations(group) >= smallest}
    ranked = sorted(sorted(large - exempt), key=lambda n: _value(groups[n]), reverse=True)
    selected = exempt.union(ranked if most is None else ranked[: max(most - len(exempt), 0)])
    dropped: dict[Node, Reason] = {}
    for n, group in enumerate(groups):
        if n not in selected:
            reason = _too_small(group, smallest) if n not in large else _too_many(most)
            dropped.update(dict.fromkeys(group, reason))
    return [groups[n] for n in sorted(selected)], dropped


def _too_small(group: Group, smallest: int) -> Reason:
    return Reason(
        ReasonCode.PARTITION_SIZE,
        f"its partition would have {_operations(group)} operation(s), "
        f"min_partition_nodes is {smallest}",
        remedy="Lower min_partition_nodes",
    )


def _too_many(most: int | None) -> Reason:
    return Reason(
        ReasonCode.PARTITION_LIMIT,
        f"its partition is not among the {most} of most FLOPs that max_partitions allows",
        remedy="Raise max_partitions",
    )


def _decompresses(call: Node) -> bool:
    return target_name(call.target) in DECOMPRESS


def _operations(group: Group) -> int:
    """Return the number of calls of a group, without parts."""
    return sum(not is_part(node) for node in group)


def _value(group: Group) -> tuple[int, int]:
    return sum(map(flops_of, group)), _operations(group)

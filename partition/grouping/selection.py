"""Selection of groups by size and estimated FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from coreml_delegate.ops import Reason, ReasonCode, flops_of
from coreml_delegate.ops.call import DECOMPRESS, target_name
from coreml_delegate.partition.grouping.stages import Group
from coreml_delegate.partition.verdicts.parts import is_part


@dataclass(frozen=True, slots=True)
class Selection:
    """The user's limits on partitions.

    Attributes:
        min_nodes: Minimum number of operations of a partition, without parts of calls.
        max_partitions: Maximum number of partitions, or None. Most estimated FLOPs win, then more
            operations, then the earlier partition.
    """

    min_nodes: int = 1
    max_partitions: int | None = None

    def apply(self, groups: Sequence[Group]) -> tuple[list[Group], dict[Node, Reason]]:
        """Select groups.

        A group that dequantizes compressed weights is exempt from the limits, but counts: the CPU
        cannot run it.

        Returns:
            The selected groups, in order, and the calls of the other groups with the reasons.
        """
        exempt = {n for n, group in enumerate(groups) if any(map(_decompresses, group))}
        large = {n for n, group in enumerate(groups) if operations(group) >= self.min_nodes}
        selected = sorted(
            exempt.union(self._most_valuable(groups, large - exempt, used=len(exempt)))
        )
        dropped: dict[Node, Reason] = {}
        for n in sorted(set(range(len(groups))).difference(selected)):
            reason = self._reason(groups[n], small=n not in large)
            dropped.update(dict.fromkeys(groups[n], reason))
        return [groups[n] for n in selected], dropped

    def _most_valuable(
        self, groups: Sequence[Group], candidates: set[int], *, used: int
    ) -> list[int]:
        ranked = sorted(sorted(candidates), key=lambda n: _value(groups[n]), reverse=True)
        limit = self.max_partitions
        return ranked if limit is None else ranked[: max(limit - used, 0)]

    def _reason(self, group: Group, *, small: bool) -> Reason:
        if small:
            return Reason(
                ReasonCode.PARTITION_SIZE,
                f"its partition would have {operations(group)} operation(s), "
                f"min_partition_nodes is {self.min_nodes}",
                remedy="Lower min_partition_nodes",
            )
        return Reason(
            ReasonCode.PARTITION_LIMIT,
            f"its partition is not among the {self.max_partitions} of most FLOPs "
            "that max_partitions allows",
            remedy="Raise max_partitions",
        )


def _decompresses(call: Node) -> bool:
    return target_name(call.target) in DECOMPRESS


def operations(group: Group) -> int:
    """Return the number of calls of a group, without parts."""
    return sum(not is_part(node) for node in group)


def _value(group: Group) -> tuple[int, int]:
    return sum(map(flops_of, group)), operations(group)

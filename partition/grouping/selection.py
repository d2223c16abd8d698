"""Selection of groups: those that are large enough, and among the most valuable."""

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
        min_nodes: Fewest operations of a partition, parts of calls not counted.
        max_partitions: Most partitions, or None. Those of most estimated FLOPs are kept, of equal
            ones the larger, then the earlier.
    """

    min_nodes: int = 1
    max_partitions: int | None = None

    def apply(self, groups: Sequence[Group]) -> tuple[list[Group], dict[Node, Reason]]:
        """Choose among groups.

        A group that dequantizes compressed weights passes whatever the limits, and counts: nothing
        runs it on the CPU.

        Returns:
            The groups that pass, in their order, and why the calls of the others stay on the CPU.
        """
        bound = {n for n, group in enumerate(groups) if any(map(_decompresses, group))}
        large = {n for n, group in enumerate(groups) if operations(group) >= self.min_nodes}
        kept = sorted(bound.union(self._most_valuable(groups, large - bound, beside=len(bound))))
        dropped: dict[Node, Reason] = {}
        for n in sorted(set(range(len(groups))).difference(kept)):
            reason = self._reason(groups[n], small=n not in large)
            dropped.update(dict.fromkeys(groups[n], reason))
        return [groups[n] for n in kept], dropped

    def _most_valuable(self, groups: Sequence[Group], among: set[int], *, beside: int) -> list[int]:
        ranked = sorted(sorted(among), key=lambda n: _value(groups[n]), reverse=True)
        limit = self.max_partitions
        return ranked if limit is None else ranked[: max(limit - beside, 0)]

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
    """Return how many calls of a group are no parts of others."""
    return sum(not is_part(node) for node in group)


def _value(group: Group) -> tuple[int, int]:
    return sum(map(flops_of, group)), operations(group)

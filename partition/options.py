"""``PartitionerOptions``: the options of ``CoreMLPartitioner`` and derived settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Self

from torch.fx import Node

from coreml_delegate.lowering.build import check_accepted
from coreml_delegate.lowering.multifunction import check_target
from coreml_delegate.options.compile_specs import Precision, WeightSharing
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.partition.verdicts.filters import Filters
from coreml_delegate.targets import Device


class PartitionerOptions(PartitionerKeywords):
    """The options of ``CoreMLPartitioner``, and the settings derived from them.

    Raises:
        OptionError: An invalid value, an unknown op, graph pass or MIL op, or options that exclude
            each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_target(self.compiling)
        self.compiling.check_compression()
        check_accepted(self.compiling)
        _ = self.filters

    @cached_property
    def filters(self) -> Filters:
        """The user's filters."""
        return Filters.of(
            skip_ops=self.skip_ops_for_coreml_delegation,
            only_ops=self.only_ops,
            skip_modules=self.skip_modules,
            only_modules=self.only_modules,
            node_filter=self.node_filter,
        )

    def in_fp16(self, in_fp32: Collection[str] = ()) -> Self:
        """Return the options with fp16 for precision ``auto``, and these calls in fp32."""
        keep_fp32 = self.keep_fp32

        def is_kept(node: Node) -> bool:
            return node.name in in_fp32 or (keep_fp32 is not None and keep_fp32(node))

        return replace(
            self,
            compile_specs=replace(self.compiling, precision=Precision.FLOAT16).to_specs(),
            keep_fp32=is_kept if in_fp32 else keep_fp32,
            precision_data=None,
        )

    @property
    def demands_everything(self) -> bool:
        """Whether an undelegated call is an error."""
        return self.lower_full_graph or self.strict

    @property
    def moves_calls(self) -> bool:
        """Whether calls that the neural engine does not run move to the CPU."""
        return self.compiling.device is Device.NEURAL_ENGINE and not self.demands_everything

    @property
    def shares_weights(self) -> bool:
        """Whether the n-th partitions of all methods have to become one model."""
        return self.compiling.weight_sharing is WeightSharing.POSITIONAL

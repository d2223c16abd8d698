"""``PartitionerOptions``: the checked keywords of ``CoreMLPartitioner``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self, cast

from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch import nn
from torch.fx import Node

from coreml_delegate.errors import OptionError
from coreml_delegate.lowering.coremltools_options import check_accepted
from coreml_delegate.lowering.multifunction import check_target
from coreml_delegate.options.checks import (
    Check,
    check_all,
    flag,
    function,
    list_of,
    number,
    positive,
)
from coreml_delegate.options.checks import optional as or_none
from coreml_delegate.options.compile_options import CompileOptions, Precision, WeightSharing
from coreml_delegate.partition.verdicts.filters import Filters, NodePredicate
from coreml_delegate.runtime.precision import MIN_SQNR_DB

_OPERATORS = or_none(list_of("operator names", str))
_MODULES = or_none(list_of("paths and classes of modules"))
_OF_A_NODE = or_none(function("a node of the graph"))
_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "skip_ops_for_coreml_delegation": _OPERATORS,
        "take_over_mutable_buffer": or_none(flag),  # ExecuTorch's own takes None for False
        "take_over_constant_data": flag,
        "lower_full_graph": flag,
        "only_ops": _OPERATORS,
        "skip_modules": _MODULES,
        "only_modules": _MODULES,
        "node_filter": _OF_A_NODE,
        "min_partition_nodes": positive,
        "max_partitions": or_none(positive),
        "strict": flag,
        "keep_fp32": _OF_A_NODE,
        "precision_data": or_none(list_of("samples, each a tuple of arguments", (list, tuple))),
        "min_sqnr_db": number,
    }
)
_FUNCTIONS = ("node_filter", "keep_fp32")


@dataclass(frozen=True, kw_only=True)
class PartitionerOptions:
    """The keywords of ``CoreMLPartitioner``, and the settings derived from them.

    Raises:
        OptionError: An invalid value, or options that exclude each other.
    """

    skip_ops_for_coreml_delegation: Collection[str] | None = None
    compile_specs: Sequence[CompileSpec] | None = None
    take_over_mutable_buffer: bool | None = True
    take_over_constant_data: bool = True
    lower_full_graph: bool = False
    only_ops: Collection[str] | None = None
    skip_modules: Collection[str | type[nn.Module]] | None = None
    only_modules: Collection[str | type[nn.Module]] | None = None
    node_filter: NodePredicate | None = None
    min_partition_nodes: int = 1
    max_partitions: int | None = None
    strict: bool = False
    keep_fp32: NodePredicate | None = None
    precision_data: Sequence[Sequence[Any]] | None = None
    min_sqnr_db: float = MIN_SQNR_DB

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        check_all(values, _CHECKS)
        check_target(self.compiling)
        self.compiling.check_compression()
        check_accepted(self.compiling)
        _ = self.filters
        if self.precision_data is not None and not self.measures_precision:
            raise OptionError(
                "precision_data is for precision auto",
                got=f"compute_precision={self.compiling.precision.value}",
                remedy='Pass generate_compile_specs(compute_precision="auto")',
            )
        if self.lower_full_graph:
            self._check_full_graph()
        for name, value in values.items():
            if isinstance(value, Collection):  # copied, because the caller may change it
                object.__setattr__(self, name, tuple(cast("Collection[Any]", value)))

    @cached_property
    def compiling(self) -> CompileOptions:
        """The compile options, decoded."""
        return CompileOptions.from_specs([] if self.compile_specs is None else self.compile_specs)

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

    @property
    def measures_precision(self) -> bool:
        """Whether a measurement decides which calls compute in fp32."""
        return self.compiling.precision is Precision.AUTO

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
    def shares_weights(self) -> bool:
        """Whether the n-th partitions of all methods have to become one model."""
        return self.compiling.weight_sharing is WeightSharing.POSITIONAL

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for ``pickle``; name the option that cannot be pickled.

        Raises:
            OptionError: A function among the options cannot be pickled.
        """
        for name in _FUNCTIONS:
            try:
                pickle.dumps(getattr(self, name))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise OptionError(
                    f"a partitioner with this {name} cannot be pickled",
                    got=str(error),
                    remedy="Pass a function that is defined at the top of a module, or copy the "
                    "partitioner by copy.deepcopy",
                ) from error
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Only the functions can have state.
        functions = {name: copy.deepcopy(getattr(self, name), memo) for name in _FUNCTIONS}
        return replace(self, **functions)

    def _check_full_graph(self) -> None:
        compatible = {
            "skip_ops_for_coreml_delegation": not self.skip_ops_for_coreml_delegation,
            "take_over_mutable_buffer": self.take_over_mutable_buffer,
            "take_over_constant_data": self.take_over_constant_data,
            "only_ops": self.only_ops is None,
            "skip_modules": not self.skip_modules,
            "only_modules": self.only_modules is None,
            "node_filter": self.node_filter is None,
            "min_partition_nodes": self.min_partition_nodes == 1,
        }
        clashing = [name for name, is_compatible in compatible.items() if not is_compatible]
        if clashing:
            raise OptionError(
                "lower_full_graph=True leaves nothing to the CPU",
                got=f"together with {', '.join(clashing)}",
                remedy="Drop these options, or set lower_full_graph=False",
            )

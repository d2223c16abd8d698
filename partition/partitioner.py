"""``CoreMLPartitioner``: the object a user hands to ``to_edge_transform_and_lower``."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.backend import CoreMLBackend, claim_name
from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.conversion.blob_cache import KeptBlob
from coreml_delegate.ops import Reason, record_of, required_opset
from coreml_delegate.ops.call import target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.partition.buffers import check_target as check_target_of_states
from coreml_delegate.partition.buffers import keep_initial_values, states_of
from coreml_delegate.partition.convertibility import Convertibility, parts_of
from coreml_delegate.partition.cpu_kernels import register_kernels
from coreml_delegate.partition.decision import decide
from coreml_delegate.partition.filters import Filters, NodePredicate
from coreml_delegate.partition.history import ReportHistory
from coreml_delegate.partition.isolation import unguarded
from coreml_delegate.partition.left_over import decompose_left_over
from coreml_delegate.partition.operator_support import refused_calls
from coreml_delegate.partition.options import PartitionerOptions
from coreml_delegate.partition.rehearsal import rehearse
from coreml_delegate.partition.report import DelegationReport, NodeReport, describe
from coreml_delegate.partition.tagging import tag_of
from coreml_delegate.targets import STATE_OPSET
from coreml_delegate.transforms.compressed_weights import (
    decompose_undelegated_dequantize,
    dequantize_per_use,
    require_target,
    unwrap_tensor_subclasses,
)
from coreml_delegate.transforms.constant_arguments import fold_constant_arguments
from coreml_delegate.transforms.executorch_gaps import (
    drop_linear_algebra_checks,
    replace_unnamed_containers,
)
from coreml_delegate.transforms.half_precision import promote_half_to_fp32

logger = logging.getLogger(__name__)

_EDGE = "EDGE"
_REPORTS = "reports"
_NOT_COPIED = frozenset({"_spec", "_work"})  # ExecuTorch's table, of a type that cannot be; ours
_DECOMPOSED = (
    "DEPRECATION WARNING: to_edge() + to_backend() shows Core ML a program whose composite ops are "
    "decomposed already; to_edge_transform_and_lower() keeps those whole that it takes as one"
)


_TRANSFORMS = (
    replace_unnamed_containers,
    unwrap_tensor_subclasses,
    drop_linear_algebra_checks,
    promote_half_to_fp32,
    fold_constant_arguments,
    dequantize_per_use,
)
"""Applied to a program, in this order, before ExecuTorch decomposes it."""


@dataclass(slots=True)
class _Work:
    """State that a partitioner gathers from the programs it has seen.

    Attributes:
        filters: Those of its options, with the modules seen.
        history: Its reports.
        wide: Constants that Core ML cannot hold.
        kept: Blobs that wait for ``CoreMLBackend.preprocess``.
        noted: Whether it was shown a program in ATen dialect.
        preserved: The last one for which it was asked, and its ops that are not to be decomposed.
        kept_whole: The ops of all programs that were not decomposed.
    """

    filters: Filters
    history: ReportHistory = field(default_factory=ReportHistory)
    wide: WideIntegers = field(default_factory=WideIntegers)
    kept: list[KeptBlob] = field(default_factory=list[KeptBlob])
    noted: bool = False
    preserved: tuple[weakref.ref[ExportedProgram], set[OpOverload]] | None = None
    kept_whole: set[OpOverload] = field(default_factory=set[OpOverload])


class CoreMLPartitioner(Partitioner):
    """Delegates to Core ML what it can take, and reports why not the rest.

    Modules are named by path (``layers.0``, which covers all below it), by path with wildcards
    (``layers.*.norm``), or by class, itself or its name (``torch.nn.LayerNorm``).

    A copy has the same options and reports. It knows nothing else of the programs its original has
    seen: copy before lowering, or after.

    Args:
        skip_ops_for_coreml_delegation: Op names to leave to the CPU: ``aten.add.Tensor``,
            ``add.Tensor``, ``aten.add`` or ``add``.
        compile_specs: From ``CoreMLBackend.generate_compile_specs``; None for its defaults.
        take_over_mutable_buffer: Make Core ML states of the mutable buffers that can be (needs
            iOS18); otherwise they become inputs and outputs. The report says of each which.
        take_over_constant_data: Give weights and constants to Core ML; otherwise they become
            inputs.
        lower_full_graph: Raise unless the entire graph can be delegated.
        only_ops: Op names to delegate, and no others.
        skip_modules: Modules to leave to the CPU.
        only_modules: Modules to delegate, and nothing outside them.
        node_filter: Called with every call, first in ATen and then in edge dialect, where nodes
            have other names; false keeps it on the CPU.
        min_partition_nodes: Leave partitions of fewer operations to the CPU.
        max_partitions: Leave all but so many partitions, those of most estimated FLOPs, to the CPU.
        strict: Raise if any call stays on the CPU, whatever the reason.
        keep_fp32: Called with every delegated call, in edge dialect; true keeps it in fp32 where
            the compile specs ask for fp16. They too can name what is kept.

    Raises:
        OptionError: A value of the wrong kind; an op, compile spec, graph pass or MIL op that is
            unknown; or options that exclude each other.
    """

    def __init__(
        self,
        *,
        skip_ops_for_coreml_delegation: Sequence[str] | None = None,
        compile_specs: list[CompileSpec] | None = None,
        take_over_mutable_buffer: bool = True,
        take_over_constant_data: bool = True,
        lower_full_graph: bool = False,
        only_ops: Sequence[str] | None = None,
        skip_modules: Sequence[str | type[nn.Module]] | None = None,
        only_modules: Sequence[str | type[nn.Module]] | None = None,
        node_filter: NodePredicate | None = None,
        min_partition_nodes: int = 1,
        max_partitions: int | None = None,
        strict: bool = False,
        keep_fp32: NodePredicate | None = None,
    ) -> None:
        super().__init__()
        self._given = PartitionerOptions(
            skip_ops_for_coreml_delegation=skip_ops_for_coreml_delegation,
            compile_specs=compile_specs,
            take_over_mutable_buffer=take_over_mutable_buffer,
            take_over_constant_data=take_over_constant_data,
            lower_full_graph=lower_full_graph,
            only_ops=only_ops,
            skip_modules=skip_modules,
            only_modules=only_modules,
            node_filter=node_filter,
            min_partition_nodes=min_partition_nodes,
            max_partitions=max_partitions,
            strict=strict,
            keep_fp32=keep_fp32,
        )
        self._work = _Work(self._given.filters.anew())
        # Canonical and complete, so that a .pte tells how it was made.
        self.delegation_spec = self._delegation(self.options)

    def __getstate__(self) -> dict[str, Any]:
        """What ``pickle`` keeps.

        Raises:
            OptionError: A function among the options cannot be pickled.
        """
        self._given.check_pickles()
        return self._state()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        attributes = dict(state)
        reports = attributes.pop(_REPORTS)
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        self._work = _Work(self._given.filters.anew(), ReportHistory(reports))

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__setstate__(self._state())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self._state(), memo))
        return made

    def _state(self) -> dict[str, Any]:
        """Options and reports; what belongs to programs that are being lowered stays here."""
        kept = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        return {**kept, _REPORTS: self.reports}

    @property
    def options(self) -> CompileOptions:
        """The compile options, decoded."""
        return self._given.compiling

    @property
    def report(self) -> DelegationReport:
        """The report on the program partitioned last, if only to be refused.

        Raises:
            ProgramError: Nothing was partitioned yet.
        """
        return self._work.history.latest

    @property
    def reports(self) -> tuple[DelegationReport, ...]:
        """The reports on every program partitioned so far: one per method, in order."""
        return self._work.history.all

    def plan(self, program: ExportedProgram) -> DelegationReport:
        """What lowering would report, without lowering.

        Nothing is written, ``reports`` stays as it is, and calls that stay on the CPU are no error,
        whatever ``lower_full_graph`` and ``strict`` say. What is converted to find out is kept for
        lowering with this partitioner.

        Args:
            program: From ``torch.export``, in ATen dialect; it is left as it is.

        Raises:
            OptionError: A module pattern that means no module of the program.
            ContractError: See ``partition``.
        """
        double = self._double()
        rehearse(program, double)
        self._keep(double._work.kept)
        _warn_of_missing_kernels(double.report)
        return double.report

    @unguarded()
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag what Core ML takes.

        Args:
            exported_program: In edge dialect.

        Raises:
            UnsupportedOperatorError: ``lower_full_graph`` or ``strict`` is set and a call stays on
                the CPU; lists every one.
            OptionError: A module pattern that means no module of the program.
            ContractError: Mutable buffers would become states and the target has none.
        """
        claim_name()  # before ExecuTorch looks for it
        if not self._work.noted:
            logger.warning(_DECOMPOSED)
        self._work.filters.note(exported_program)
        self._work.filters.check_patterns()
        conversions = Convertibility(exported_program, inside=self._given.ownership.constants)
        refused = self._tried(
            exported_program, self._refused(exported_program, conversions), conversions
        )
        require_target(refused)
        decision = decide(
            exported_program,
            refused,
            constants=stored_nodes(exported_program) if self._given.ownership.constants else (),
            selection=self._given.selection,
            ownership=self._given.ownership,
            confirm=lambda tagged, tags: self._confirm(tagged, tags, conversions),
        )
        self._keep(conversions.kept.values())
        keep_initial_values(exported_program, conversions.values)
        register_kernels(target_name(node.target) for node in decision.refused)
        report = describe(
            exported_program,
            decision,
            ownership=self._given.ownership,
            values=conversions.values,
            given=self.options.deployment_target,
            since=conversions.since,
            is_shared=self._given.shares_weights,
            compression=self.options.compression_demand,
            enumerated=self.options.enumerated_shapes,
        )
        self._work.history.add(report, conversions.kept)
        if self._given.is_complete:
            report.require_complete()
        for node in report.undelegated:
            logger.info("%s (%s) stays on the CPU: %s", node.name, node.op, node.reason)
        if self._work.history.is_final:
            _warn_of_missing_kernels(report)
        return PartitionResult(
            tagged_exported_program=exported_program,
            partition_tags={
                tag: self._delegation(self._options_for(tag, calls, exported_program, conversions))
                for tag, calls in decision.partitions.items()
            },
        )

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """The program in fp32, with plain tensors and containers, and without checks of results.

        See the modules of ``transforms``.
        """
        target, inside = self.options.deployment_target, self._given.ownership.constants
        program = exported_program
        for transform in _TRANSFORMS:
            program = transform(program)
        return decompose_undelegated_dequantize(
            program, target, veto=self._work.filters.refusal, constants_inside=inside
        )

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """The composite ops that Core ML has as one op and takes at every call in this program.

        ExecuTorch asks once more after lowering. What no backend took then is in the report, has
        perhaps no kernel, and is decomposed: ``ep`` is changed.
        """
        if ep.dialect == _EDGE:
            decompose_left_over(ep, self._work.kept_whole)
            return [], None
        if self._work.preserved is None or self._work.preserved[0]() is not ep:
            # ExecuTorch asks twice about the same program.
            self._work.preserved = weakref.ref(ep), self._ops_to_preserve(ep)
        return sorted(self._work.preserved[1], key=str), None

    @unguarded()
    def _ops_to_preserve(self, ep: ExportedProgram) -> set[OpOverload]:
        # Its edge dialect does not show all that is remembered here.
        self._work.noted = True
        self._work.wide.note(ep)
        self._work.filters.note(ep)
        conversions = Convertibility(ep, inside=self._given.ownership.constants)
        refused = self._tried(ep, self._refused(ep, conversions), conversions, only=_is_preserved)
        verdicts: dict[OpOverload, bool] = {}
        for node in ep.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                continue
            keep = _is_preserved(node) and node not in refused
            verdicts[node.target] = verdicts.get(node.target, True) and keep
        preserved = {op for op, keep in verdicts.items() if keep}
        self._work.kept_whole |= preserved
        return preserved

    def _refused(self, program: ExportedProgram, conversions: Convertibility) -> dict[Node, Reason]:
        return refused_calls(
            program,
            self.options.deployment_target,
            filters=self._work.filters,
            wide=self._work.wide,
            values=conversions.values,
            constants_inside=self._given.ownership.constants,
            enumerated=self.options.enumerated_shapes,
        )

    def _tried(
        self,
        program: ExportedProgram,
        refused: Mapping[Node, Reason],
        conversions: Convertibility,
        *,
        only: Callable[[Node], bool] = lambda _: True,
    ) -> dict[Node, Reason]:
        """``refused``, and the calls among ``only`` that coremltools fails to translate."""
        calls = [
            node
            for node in program.graph.nodes
            if node.op == "call_function" and node not in refused and only(node)
        ]
        failed = conversions.failed(calls, self.options.deployment_target)
        return {**refused, **failed, **parts_of(failed)}

    def _confirm(
        self, program: ExportedProgram, tags: Sequence[str], conversions: Convertibility
    ) -> Mapping[Node, Reason]:
        """Calls in these partitions that prove not to be convertible after all."""
        check_target_of_states(program, self.options.deployment_target)
        groups: dict[str, list[Node]] = {tag: [] for tag in tags}
        for node in program.graph.nodes:
            if node.op == "call_function" and tag_of(node) in groups:
                groups[str(tag_of(node))].append(node)
        failed = conversions.failures(
            {
                tag: self._options_for(tag, calls, program, conversions)
                for tag, calls in groups.items()
            }
        )
        return {**failed, **parts_of(failed)}

    @staticmethod
    def _delegation(options: CompileOptions) -> DelegationSpec:
        return DelegationSpec(CoreMLBackend.__name__, options.to_specs())

    def _keep(self, blobs: Iterable[KeptBlob]) -> None:
        """Hold blobs until they are taken, and no longer: they hold weights."""
        self._work.kept = [kept for kept in self._work.kept if kept.files is not None] + list(blobs)

    def _options_for(
        self,
        tag: str,
        calls: Sequence[Node],
        program: ExportedProgram,
        conversions: Convertibility,
    ) -> CompileOptions:
        """The compile options of one partition."""
        options = self.options
        tried = max((options.oldest_for_compression, *map(conversions.since, calls)))
        known = required_opset(calls)
        # What the rules and the boundary demand, preprocess finds out by itself.
        if options.deployment_target is None and (tried > known or self._given.shares_weights):
            newest = self._given.shares_weights or tag in states_of(program)
            demanded = max(tried, known, STATE_OPSET) if newest else tried
            options = replace(options, deployment_target=demanded)
        if self._given.keep_fp32 is not None:
            nodes = tuple(sorted(call.name for call in calls if self._given.keep_fp32(call)))
            options = replace(options, keep_fp32=replace(options.keep_fp32, nodes=nodes))
        return options

    def _double(self) -> Self:
        """A partitioner of the same options that has seen no program and demands nothing."""
        double = copy.copy(self)
        double._given = replace(self._given, lower_full_graph=False, strict=False)
        history = ReportHistory(is_final=False)
        double._work = _Work(self._given.filters.anew(), history)
        return double


def _warn_of_missing_kernels(report: DelegationReport) -> None:
    """Log, once for each operator, what runs neither on Core ML nor on ExecuTorch's runtime."""
    first: dict[str, NodeReport] = {}
    for node in report.without_kernel:
        first.setdefault(node.op, node)
    for op, node in first.items():
        place = f" at {node.place}" if node.place else ""
        obstacle = node.cpu_obstacle
        remedy = "" if obstacle is None else obstacle.remedy
        logger.warning("%s%s stays on the CPU, and %s. %s", op, place, obstacle, remedy)


def _is_preserved(node: Node) -> bool:
    rule = record_of(target_name(node.target)) if node.op == "call_function" else None
    return rule is not None and rule.preserve

"""``Partitioning``: of one program, from verdicts on its calls to the report."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from executorch.exir.passes.remove_graph_asserts_pass import RemoveGraphAssertsPass
from torch.export import ExportedProgram, default_decompositions
from torch.fx import GraphModule, Node

from coreml_delegate.lowering.build import cached_blob, check_accepted, check_translation
from coreml_delegate.lowering.contract import boundary_shapes
from coreml_delegate.lowering.delegation_tags import tag_of
from coreml_delegate.lowering.diagnostics import is_about_the_graph
from coreml_delegate.lowering.multifunction import check_target
from coreml_delegate.lowering.store import CachedBlob
from coreml_delegate.lowering.trial import ProgramTrials
from coreml_delegate.opaque_ops import restore_refused
from coreml_delegate.opaque_ops.compressed_weights import require_target, unwrap_tensor_subclasses
from coreml_delegate.opaque_ops.control_flow import Lowered, protect_control_flow, with_constants
from coreml_delegate.opaque_ops.recorded_compression import protect_recorded_weights
from coreml_delegate.opaque_ops.recurrent_layers import protect_recurrent_layers
from coreml_delegate.ops import Reason, required_opset
from coreml_delegate.ops.boundary import is_row_major
from coreml_delegate.ops.call import target_name
from coreml_delegate.ops.constants import NO_INPUTS, Inputs
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.partition.grouping.decision import decide
from coreml_delegate.partition.grouping.moved_calls import moved_calls
from coreml_delegate.partition.grouping.mutable_buffers import (
    check_state_target,
    keep_initial_values,
    states_by_tag,
)
from coreml_delegate.partition.report import DelegationReport, describe
from coreml_delegate.partition.undelegated import decompose_calls
from coreml_delegate.partition.verdicts.cpu_kernels import is_composite, register_kernels
from coreml_delegate.partition.verdicts.filters import Filters, NotedCalls, do_not_delegate
from coreml_delegate.partition.verdicts.half_calls import refused_half_calls
from coreml_delegate.partition.verdicts.operator_support import (
    is_preserved,
    refused_calls,
    refused_one_by_one,
)
from coreml_delegate.partition.verdicts.parts import refuse_results
from coreml_delegate.patches import patched
from coreml_delegate.patches.torch import SKIP_GUARD_CODE, OpOverload
from coreml_delegate.targets import STATE_OPSET
from coreml_delegate.transforms.antialiasing import resize_by_matrices
from coreml_delegate.transforms.complex_numbers import split_complex_numbers
from coreml_delegate.transforms.constant_folding import (
    compute_sizes,
    express_equal_bags,
    fold_constants,
)
from coreml_delegate.transforms.executorch_gaps import (
    copy_written_inputs,
    decompose_without_kernel,
    drop_assertions,
    drop_empty_parts,
    drop_linear_algebra_checks,
    drop_text_results,
    name_values,
    stride_over_bases,
)
from coreml_delegate.transforms.for_devices import shape_for_neural_engine
from coreml_delegate.transforms.half_precision import promote_half_to_fp32
from coreml_delegate.transforms.row_major import keep_row_major
from coreml_delegate.transforms.selections import compute_all_rows

logger = logging.getLogger(__name__)

_INTERFACE_TRANSFORMS = (name_values, drop_text_results, copy_written_inputs, drop_assertions)
"""Applied once to a program, before its control flow."""

_TRANSFORMS = (
    stride_over_bases,
    compute_all_rows,
    resize_by_matrices,
    decompose_without_kernel,
    drop_empty_parts,
    protect_recurrent_layers,
    unwrap_tensor_subclasses,
    split_complex_numbers,
    drop_linear_algebra_checks,
)
"""Applied to a program and to branches, in this order, before ExecuTorch decomposes them.

Constants are folded before, in the dtypes of the model, and after, for dtypes without kernels.
"""

_LOCK = threading.RLock()
"""Held while a program is partitioned: all partitioners share the caches of verdicts and blobs."""


class PartitionerOptions(PartitionerKeywords):
    """The options of ``CoreMLPartitioner``, checked against coremltools and the known operators.

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


@dataclass(frozen=True, slots=True)
class AtenNotes:
    """Facts on calls of programs in ATen dialect that edge dialect lacks.

    Attributes:
        wide: Integers beyond int32.
        excluded: Composite calls that the user excludes.
        in_half: Calls in half precision that the rules refuse.
    """

    wide: WideIntegers = field(default_factory=WideIntegers)
    excluded: NotedCalls = field(default_factory=NotedCalls)
    in_half: NotedCalls = field(default_factory=NotedCalls)


def transform(
    program: ExportedProgram, options: PartitionerOptions, notes: AtenNotes
) -> ExportedProgram:
    """Return a program in fp32, with plain tensors and containers, without assertions.

    Calls that stay on the CPU keep half precision, if the kernels there take it.

    Args:
        program: In ATen dialect, before decomposition; it is not changed.
        options: The partitioner's.
        notes: The calls that keep half precision by the rules are noted here.
    """
    for rewrite in _INTERFACE_TRANSFORMS:
        program = rewrite(program)
    if not options.demands_everything:
        program = keep_row_major(program)
    if options.moves_calls:
        program = shape_for_neural_engine(program, do_not_delegate)
    return _transform(program, options, notes)


def _transform(
    program: ExportedProgram,
    options: PartitionerOptions,
    notes: AtenNotes,
    inputs: Inputs = NO_INPUTS,
) -> ExportedProgram:
    target, constants_inside = options.compiling.deployment_target, options.take_over_constant_data
    veto = options.filters.refusal
    fold = partial(
        fold_constants, refused=partial(refused_one_by_one, target=target), inputs=inputs
    )
    program = express_equal_bags(compute_sizes(program, inputs), inputs)
    folded = fold(program)
    program = protect_control_flow(folded, partial(_lower_branch, options), veto, inputs)
    for rewrite in _TRANSFORMS:
        program = rewrite(program)

    def finish(program: ExportedProgram) -> ExportedProgram:
        """Return a program after promotion, with placeholder ops for what Core ML takes."""
        if program is not folded:
            program = fold(program)
        program = protect_recorded_weights(
            program, target, veto=veto, constants_inside=constants_inside
        )
        return restore_refused(program, target, veto=veto, constants_inside=constants_inside)

    promoted = promote_half_to_fp32(program, veto, constants_inside=constants_inside)
    finished = finish(promoted)
    if promoted is program:
        return finished
    refused = refused_half_calls(
        program, promoted, finished, partial(_refused_by_rules, options=options)
    )
    if not refused:
        return finished
    partly_promoted = promote_half_to_fp32(
        program,
        lambda node: veto(node) or refused.get(node.name),
        constants_inside=constants_inside,
    )
    for node in partly_promoted.graph.nodes:
        if node.name in refused:
            notes.in_half.note(node, refused[node.name])
    return finish(partly_promoted)


def _refused_by_rules(program: ExportedProgram, options: PartitionerOptions) -> dict[Node, Reason]:
    """Return the calls that the rules or the user refuse, with the reasons."""
    wide = WideIntegers()
    wide.note(program)
    refused = refused_calls(
        program,
        options.compiling.deployment_target,
        filters=options.filters,
        wide=wide,
        values={},
        constants_inside=options.take_over_constant_data,
        enumerated=options.compiling.enumerated_shapes,
    )
    return refused | (moved_calls(program, refused) if options.moves_calls else {})


def _lower_branch(
    options: PartitionerOptions, branch: ExportedProgram, constants: Inputs
) -> Lowered:
    """Lower a branch of control flow as ExecuTorch does; see ``LowerBranch``."""
    notes = AtenNotes()
    branch = _transform(branch, options, notes, constants).run_decompositions({})

    def judged(program: ExportedProgram) -> Partitioning:
        return Partitioning(with_constants(program, constants), options, notes)

    table = default_decompositions()
    refused = judged(branch).excluded_calls()
    if not refused:
        for op in judged(branch).ops_to_preserve():
            table.pop(op, None)
        branch = branch.run_decompositions(table)
        # Torch adds dtype assertions to casts; ExecuTorch removes them only at the root.
        RemoveGraphAssertsPass()(branch.graph_module)
        refused = judged(branch).refusals()
    for node, reason in refused.items():
        return replace(reason, text=f"{target_name(node.target)}: {reason.text}")
    return branch


@contextmanager
def _partitioning() -> Generator[None]:
    with _LOCK, patched(SKIP_GUARD_CODE):
        yield


class Partitioning:
    """The partitioning of one program, or of one branch of its control flow.

    Args:
        program: In ATen dialect to ask for ops to preserve, in edge dialect to partition.
        options: The partitioner's.
        notes: On the program in ATen dialect.
        records_constants: Whether blobs have all constants that fp16 rounds, to measure with.

    Attributes:
        compile_options: The compile options of each partition, by tag.
        blobs: The blobs of the partitions, by tag; ``preprocess`` finds them while referenced.
    """

    def __init__(
        self,
        program: ExportedProgram,
        options: PartitionerOptions,
        notes: AtenNotes,
        *,
        records_constants: bool = False,
    ) -> None:
        self._program = program
        self._options = options
        self._target = options.compiling.deployment_target
        self._notes = notes
        self._filters = options.filters.with_filter(notes.excluded)
        self._trials = ProgramTrials(program, constants_inside=options.take_over_constant_data)
        self._records_constants = records_constants
        self.compile_options: Mapping[str, CompileOptions] = {}
        self.blobs: Mapping[str, CachedBlob] = {}

    @_partitioning()
    def ops_to_preserve(self) -> set[OpOverload]:
        """Return the composite ops to protect from decomposition.

        These are the ops that Core ML has as one op and takes at every call, and the ops of calls
        that the user excludes. Refused calls of the latter are decomposed in the program.
        """
        refused = self.refusals(is_preserved)
        excluded = self.excluded_calls()
        for call, reason in excluded.items():
            self._notes.excluded.note(call, reason)
        unfit = [
            node
            for node in self._program.graph.nodes
            if (node in refused or not is_preserved(node)) and node not in excluded
        ]
        ops: set[Any] = {n.target for n in self._program.graph.nodes if n.op == "call_function"}
        with_excluded_calls: set[Any] = {
            call.target for call in excluded if self._keeps_op_whole(call)
        }
        fully_taken = {op for op in ops if isinstance(op, OpOverload)} - {
            call.target for call in unfit
        }
        if calls_to_decompose := [call for call in unfit if call.target in with_excluded_calls]:
            decompose_calls(calls_to_decompose, self._program)
        return with_excluded_calls | fully_taken

    def _keeps_op_whole(self, call: Node) -> bool:
        """Return whether a call that the user excludes protects its op from decomposition.

        Few partitioners look into branches, and ExecuTorch fails at a preserved op there. A
        recurrent layer would have results of another layout, which Core ML does not take.
        """
        results = tensors_of(call.meta["val"])
        return call.graph is self._program.graph and all(map(is_row_major, results))

    def excluded_calls(self) -> dict[Node, Reason]:
        """Return the composite calls that the user excludes, also in branches."""
        modules = [m for m in self._program.graph_module.modules() if isinstance(m, GraphModule)]
        calls = (
            node for module in modules for node in module.graph.nodes if is_composite(node.target)
        )
        reasons = ((call, self._filters.refusal(call)) for call in calls)
        return {call: reason for call, reason in reasons if reason is not None}

    @_partitioning()
    def tag(self, *, prefix: str = "") -> DelegationReport:
        """Tag the calls that Core ML takes, and report on every call.

        Args:
            prefix: Of the tags.

        Raises:
            OptionError: The enumerated shapes are of another program.
            ContractError: Mutable buffers would become states, which the target lacks.
        """
        program = self._program
        refused = self.refusals()
        require_target(refused)
        decision = decide(
            program,
            refused,
            self._options,
            confirm=self._confirm,
            prefix=prefix,
        )
        keep_initial_values(program, self._trials.values)
        register_kernels(target_name(node.target) for node in decision.refused)
        self.compile_options = self._options_by_tag(decision.partitions)
        return describe(program, decision, self._options, self._trials)

    def refusals(self, only: Callable[[Node], bool] | None = None) -> dict[Node, Reason]:
        """Return the calls refused by the rules, the user, or a trial, with the reasons.

        Args:
            only: Returns true for the calls to try; None for all calls.
        """
        refused = refused_calls(
            self._program,
            self._target,
            filters=self._filters.with_filter(self._notes.in_half),
            wide=self._notes.wide,
            values=self._trials.values,
            constants_inside=self._options.take_over_constant_data,
            enumerated=self._options.compiling.enumerated_shapes,
        )
        if self._options.moves_calls:
            refused |= moved_calls(self._program, refused)
        accepted = [
            node
            for node in self._program.graph.nodes
            if node.op == "call_function" and node not in refused and (only is None or only(node))
        ]
        failed = self._trials.untranslatable(accepted, self._target)
        return {**refused, **refuse_results(failed)}

    def _confirm(self, program: ExportedProgram, tags: Sequence[str]) -> Mapping[Node, Reason]:
        """Convert the partitions; return the calls at fault for partitions that do not convert.

        Args:
            program: The tagged program.
            tags: Its partitions.

        Raises:
            OptionError: Coremltools does not take an option.
            ContractError: See ``boundary_shapes``.
        """
        check_state_target(program, self._target)
        groups: dict[str, list[Node]] = {tag: [] for tag in tags}
        for node in program.graph.nodes:
            if node.op == "call_function" and tag_of(node) in groups:
                groups[str(tag_of(node))].append(node)
        options_by_tag = self._options_by_tag(groups)
        reasons: dict[Node, Reason] = {}
        blobs: dict[str, CachedBlob] = {}
        for tag, (subgraph, calls) in self._trials.partitions(tags).items():
            options, error = options_by_tag[tag], None
            boundary_shapes(subgraph, options)  # raises for every subgraph with such options
            try:
                if self._trials.has_all_values:
                    blobs[tag] = cached_blob(
                        subgraph, options, records_constants=self._records_constants
                    )
                else:
                    check_translation(subgraph, options)
            except Exception as failure:
                if not is_about_the_graph(failure):
                    raise
                error = failure
            if error is not None:
                blamed = self._trials.at_fault(subgraph, calls, error, options)
                names = ", ".join(node.name for node in blamed)
                logger.info("partition %s does not convert because of %s: %s", tag, names, error)
                reasons |= blamed
        # Release the blobs of the last round only now: this round has reused matching blobs.
        self.blobs = blobs
        return refuse_results(reasons)

    def _options_by_tag(
        self, partitions: Mapping[str, Sequence[Node]]
    ) -> dict[str, CompileOptions]:
        """Return the compile options of each partition of the tagged program."""
        with_states = states_by_tag(self._program).keys()
        return {
            tag: self._options_for(calls, has_states=tag in with_states)
            for tag, calls in partitions.items()
        }

    def _options_for(self, calls: Sequence[Node], *, has_states: bool) -> CompileOptions:
        options, keep_fp32 = self._options.compiling, self._options.keep_fp32
        is_shared = self._options.shares_weights
        translated = max((options.oldest_for_compression, *map(self._trials.since, calls)))
        required = required_opset(calls)
        # preprocess determines the target that rules and boundary demand.
        if options.deployment_target is None and (translated > required or is_shared):
            needed_target = (
                max(translated, required, STATE_OPSET) if is_shared or has_states else translated
            )
            options = replace(options, deployment_target=needed_target)
        if keep_fp32 is not None:
            nodes = tuple(sorted(call.name for call in calls if keep_fp32(call)))
            options = replace(options, keep_fp32=replace(options.keep_fp32, nodes=nodes))
        return options

"""``CoreMLPartitioner``, which users pass to ``to_edge_transform_and_lower``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.verification.verifier import EXIRATenDialectVerifier
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node

from coreml_delegate.backend import CoreMLBackend, claim_name
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.exported.module_scope import Scope, scopes_of
from coreml_delegate.lowering.delegation_tags import remove_tags
from coreml_delegate.lowering.store import CachedBlob, Outcome
from coreml_delegate.opaque_ops.recorded_compression import warn_of_records
from coreml_delegate.options.declaration import documented, options_of, takes
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition.branches import add_branch, branches_of
from coreml_delegate.partition.partitioning import (
    AtenNotes,
    PartitionerOptions,
    Partitioning,
    transform,
)
from coreml_delegate.partition.precision import (
    calls_by_handle,
    fp32_constants_of,
    interface_of,
    lower_tagged,
    samples_for,
)
from coreml_delegate.partition.report import DelegationReport, NodeReport
from coreml_delegate.partition.undelegated import decompose_undelegated, require_out_variants
from coreml_delegate.patches.executorch import forget_lowered
from coreml_delegate.patches.torch import OpOverload, SpecViolationError
from coreml_delegate.runtime.precision import (
    LoweredProgram,
    Measurements,
    Method,
    choose_fp32_calls,
)

logger = logging.getLogger(__name__)

_EDGE = "EDGE"
"""The dialect of a program that ExecuTorch has decomposed."""
_DECOMPOSED = (
    "DEPRECATION WARNING: to_edge() + to_backend() shows Core ML a program whose composite ops are "
    "decomposed already; to_edge_transform_and_lower() preserves the ops that Core ML has as one"
)
_NOT_COPIED = frozenset({"_spec", "_notes"})
"""Attributes that copies and pickles lack; ``_spec`` of ExecuTorch is a mapping proxy."""


@dataclass(slots=True)
class _Notes:
    """Notes on a lowering in progress.

    ExecuTorch passes every program (one per method) first in ATen dialect, then in edge dialect,
    without an association. So facts that edge dialect lacks are noted in ATen dialect.

    Attributes:
        aten: On calls.
        modules: The modules of all programs.
        has_seen_aten: Whether any program was shown in ATen dialect.
        preserved: The ops that ExecuTorch was asked not to decompose.
        answer: The latest program in ATen dialect, and the ops to preserve in it.
        blobs: ``CoreMLBackend.preprocess`` finds these blobs while they are referenced.
        samples: Inputs to measure programs with that are not partitioned yet, in order, by
            ``interface_of`` the program.
        outcomes: By number of the report and delegation tag. Whether partitions share weights is
            known only when all methods are lowered.
    """

    aten: AtenNotes = field(default_factory=AtenNotes)
    modules: set[Scope] = field(default_factory=set[Scope])
    has_seen_aten: bool = False
    preserved: set[OpOverload] = field(default_factory=set[OpOverload])
    answer: tuple[weakref.ref[ExportedProgram], set[OpOverload]] | None = None
    blobs: list[CachedBlob] = field(default_factory=list[CachedBlob])
    samples: dict[tuple[str, ...], list[list[list[Any]]]] = field(
        default_factory=dict[tuple[str, ...], list[list[list[Any]]]]
    )
    outcomes: dict[int, Mapping[str, Outcome]] = field(
        default_factory=dict[int, Mapping[str, Outcome]]
    )

    def note_modules(self, program: ExportedProgram) -> None:
        """Note the modules of the calls of a program."""
        for node in program.graph.nodes:
            self.modules.update(scopes_of(node))

    def keep(self, blobs: Iterable[CachedBlob]) -> None:
        """Reference blobs until they are taken, and no longer: they have weights."""
        self.blobs = [*(blob for blob in self.blobs if blob.files is not None), *blobs]


@documented(options_of(PartitionerOptions))
class CoreMLPartitioner(Partitioner):
    """Delegates the calls that Core ML can take, and reports why other calls stay on the CPU.

    Modules are given by path (``layers.0``, which includes its submodules), by path with wildcards
    (``layers.*.norm``), or by class or class name (``torch.nn.LayerNorm``).

    A copy, or a pickle, has the options and the reports, but no state of a lowering in progress:
    copy before or after lowering.

    Args:
        options: See ``PartitionerOptions``.

    Raises:
        OptionError: A value of the wrong type; an unknown op, compile spec, graph pass or MIL op;
            or options that exclude each other.
    """

    @takes(PartitionerOptions, PartitionerOptions)
    def __init__(self, options: PartitionerOptions) -> None:
        super().__init__()
        self._options = options
        # Canonical and complete, so that a .pte records all options.
        self.delegation_spec = _delegation(self.options)
        self._reports: list[DelegationReport] = []
        self._notes = _Notes()

    def __getstate__(self) -> dict[str, Any]:
        _ = self.reports  # completes them
        return {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(state)
        self._reports = list(self._reports)
        self._notes = _Notes()

    @property
    def options(self) -> CompileOptions:
        """The compile options, decoded."""
        return self._options.compiling

    @property
    def report(self) -> DelegationReport:
        """The report on the program partitioned last, even if it was refused.

        Raises:
            ProgramError: Nothing was partitioned yet.
        """
        if not self._reports:
            raise ProgramError(
                "no report yet", remedy="Lower a program with this partitioner first"
            )
        return self.reports[-1]

    @property
    def reports(self) -> tuple[DelegationReport, ...]:
        """The reports on every program partitioned so far: one per method, in order."""
        for index, outcomes in self._notes.outcomes.items():
            sharing = {tag: o.sharing for tag, o in outcomes.items() if o.sharing is not None}
            self._reports[index] = self._reports[index].with_sharing(sharing)
        return tuple(self._reports)

    def plan(self, program: ExportedProgram) -> DelegationReport:
        """Return the report that lowering would give, without lowering.

        ``reports`` does not change, and undelegated calls are no error, even with
        ``lower_full_graph`` or ``strict``. A later lowering with this partitioner reuses the blobs.

        Args:
            program: From ``torch.export``, in ATen dialect; it is not changed.

        Raises:
            OptionError: A module pattern matches no module of the program.
            ContractError: See ``partition``.
        """
        return self._plan(program)[0]

    def _plan(self, program: ExportedProgram) -> tuple[DelegationReport, Set[OpOverload]]:
        """Return the report on a program, and the ops that ExecuTorch would preserve."""
        notes = _Notes()
        planner = _Planner(self._options, notes)
        with torch.no_grad():  # which some operators demand
            to_edge_transform_and_lower(
                program,
                partitioner=[planner],
                # Preserved ops are undelegated here, which is no error.
                compile_config=EdgeCompileConfig(_check_ir_validity=False),
            )
        self._notes.keep(notes.blobs)
        return planner.report, notes.preserved

    def edge_compile_config(self, program: ExportedProgram) -> EdgeCompileConfig:
        """Return an ``EdgeCompileConfig`` that accepts the non-core operators that Core ML takes.

        ExecuTorch checks a program before it delegates, and refuses operators outside the core ATen
        opset, such as ``randn_like``. Operators of which Core ML takes every call are excepted from
        the check. A warning lists the other operators, for which ExecuTorch refuses the program
        unless ``_check_ir_validity`` is off.

        Args:
            program: See ``plan``, also for errors.
        """
        return EdgeCompileConfig(
            _core_aten_ops_exception_list=_delegated_refused_ops(*self._plan(program))
        )

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag the calls that Core ML takes.

        Args:
            exported_program: In edge dialect.

        Raises:
            UnsupportedOperatorError: ``lower_full_graph`` or ``strict`` is set and a call stays on
                the CPU; lists all such calls.
            OptionError: A module pattern matches no module of the program.
            ContractError: Mutable buffers would become states, which the target lacks.
        """
        claim_name()  # before ExecuTorch looks the backend up
        forget_lowered()
        options_by_tag, blobs = self._tag(exported_program)
        outcomes = {tag: blob.expect() for tag, blob in blobs.items()}
        self._notes.outcomes[len(self._reports) - 1] = outcomes
        return PartitionResult(
            tagged_exported_program=exported_program,
            partition_tags={tag: _delegation(options) for tag, options in options_by_tag.items()},
        )

    def _tag(
        self, program: ExportedProgram
    ) -> tuple[Mapping[str, CompileOptions], Mapping[str, CachedBlob]]:
        """Tag a program and the branches of its undelegated control flow, and report on them.

        Returns:
            The compile options and the cached blobs of partitions, by tag.
        """
        if not self._notes.has_seen_aten:
            if self._options.measures_precision:
                raise OptionError(
                    "precision auto needs the program before it is decomposed",
                    got="to_edge() and to_backend()",
                    remedy="Lower with to_edge_transform_and_lower",
                )
            logger.warning(_DECOMPOSED)
            warn_of_records(program)
        self._notes.note_modules(program)
        self._options.filters.check_patterns(self._notes.modules)
        if self._options.measures_precision:
            tagged = self._tag_measured(program)
        else:
            tagged = self._tag_with(program)
        report = tagged.report
        self._notes.keep(tagged.blobs.values())
        self._reports.append(report)
        if self._options.demands_everything:
            report.require_complete()
        for node in report.undelegated:
            logger.info("%s (%s) stays on the CPU: %s", node.name, node.op, node.reason)
        _warn_of_missing_kernels(report)
        return tagged.compile_options, tagged.blobs

    def _tag_with(self, program: ExportedProgram, in_fp32: frozenset[str] = frozenset()) -> _Tagged:
        """Tag a program and its branches; tags of an earlier call are replaced.

        ``in_fp32`` has the names of calls; the names of calls in branches begin with the path.
        """
        partitioning = self._partitioning(program, in_fp32)
        report = partitioning.tag()
        options_by_tag, blobs = dict(partitioning.compile_options), dict(partitioning.blobs)
        # Enumerated shapes are for the inputs of the program, not for those of branches.
        if not self.options.enumerated_shapes:
            for call, path, branch in branches_of(program.graph_module, program):
                start = f"{path}."
                names = {n.removeprefix(start) for n in in_fp32 if n.startswith(start)}
                partitioning = self._partitioning(branch, names)
                branch_report = partitioning.tag(prefix=path.replace(".", "_") + "_")
                report = add_branch(report, branch_report, path, call)
                options_by_tag.update(partitioning.compile_options)
                blobs.update(partitioning.blobs)
        return _Tagged(report, options_by_tag, blobs)

    def _tag_measured(self, program: ExportedProgram) -> _Tagged:
        """Tag a program, with the calls in fp32 that measurements show to be necessary."""
        options = self._options
        attempts: list[_Tagged] = []  # which keep their blobs for the last call

        samples = self._take_samples(program)

        def lower(in_fp32: frozenset[str]) -> LoweredProgram:
            tagged = self._tag_with(program, in_fp32)
            attempts.append(tagged)
            pte = lower_tagged(
                program,
                {tag: _delegation(options) for tag, options in tagged.compile_options.items()},
                tagged.blobs.values(),
                self._notes.preserved,
                tags_constants=options.take_over_constant_data,
            )
            constants = fp32_constants_of(tagged.blobs.values())
            measurements = Measurements(Method(pte, None, "forward", constants), samples)
            return LoweredProgram(measurements.measure, calls_by_handle(tagged.report))

        with torch.no_grad():
            choice = choose_fp32_calls(lower, options.min_sqnr_db)
        tagged = self._tag_with(program, choice.in_fp32)
        return replace(tagged, report=replace(tagged.report, precision=choice))

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Return the program in fp32, with plain tensors and containers, without assertions.

        See the modules of ``transforms``. The example inputs, with which precision ``auto`` is
        measured, are noted here: a program in edge dialect lacks them.
        """
        transformed = transform(exported_program, self._options, self._notes.aten)
        if self._options.measures_precision:
            samples = samples_for(exported_program, self._options.precision_data)
            self._notes.samples.setdefault(interface_of(transformed), []).append(samples)
        return transformed

    def _take_samples(self, program: ExportedProgram) -> list[list[Any]]:
        waiting = self._notes.samples.get(interface_of(program))
        if not waiting:
            raise ProgramError(
                "there are no inputs to measure this program with precision auto",
                got=f"inputs {', '.join(interface_of(program))}",
                expected="; ".join(", ".join(inputs) for inputs in self._notes.samples),
                remedy="Choose float16 or float32",
            )
        return waiting.pop(0)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """Return the composite ops that Core ML has as one op, if it takes every call in ``ep``.

        ExecuTorch calls the method again after lowering. It then decomposes the calls of these ops
        that no backend took, in place, because ExecuTorch may lack a kernel for them.
        """
        if ep.dialect == _EDGE:
            decompose_undelegated(ep, self._notes.preserved)
            require_out_variants(ep)
            return [], None
        notes = self._notes
        if notes.answer is None or notes.answer[0]() is not ep:  # ExecuTorch asks twice
            notes.has_seen_aten = True
            notes.aten.wide.note(ep)
            notes.note_modules(ep)
            preserved = self._partitioning(ep).ops_to_preserve()
            notes.answer = weakref.ref(ep), preserved
            notes.preserved |= preserved
        return sorted(notes.answer[1], key=str), None

    def _partitioning(
        self, program: ExportedProgram, in_fp32: Collection[str] = ()
    ) -> Partitioning:
        options = self._options
        is_measured = options.measures_precision
        options = options.in_fp16(in_fp32) if is_measured else options
        return Partitioning(program, options, self._notes.aten, records_constants=is_measured)


@dataclass(frozen=True, slots=True)
class _Tagged:
    """The partitions of a tagged program and of its branches.

    Attributes:
        report: On the program.
        compile_options: Of each partition, by tag.
        blobs: Cached blobs of the partitions, by tag.
    """

    report: DelegationReport
    compile_options: Mapping[str, CompileOptions]
    blobs: Mapping[str, CachedBlob]


class _Planner(CoreMLPartitioner):
    """Reports on every program, and delegates nothing."""

    def __init__(self, options: PartitionerOptions, notes: _Notes) -> None:
        Partitioner.__init__(self)
        options = options.in_fp16() if options.measures_precision else options
        self._options = replace(options, lower_full_graph=False, strict=False)
        self._reports = []
        self._notes = notes

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self._tag(exported_program)
        remove_tags(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        # ExecuTorch calls it again in edge dialect, to check that no preserved op is undelegated.
        return ([], None) if ep.dialect == _EDGE else super().ops_to_not_decompose(ep)


def _delegation(options: CompileOptions) -> DelegationSpec:
    return DelegationSpec(CoreMLBackend.__name__, options.to_specs())


def _warn_of_missing_kernels(report: DelegationReport) -> None:
    """Log, once per operator, the calls that neither Core ML nor ExecuTorch's runtime runs."""
    first_calls: dict[str, NodeReport] = {}
    for node in report.without_kernel:
        first_calls.setdefault(node.op, node)
    for op, node in first_calls.items():
        location = f" at {node.place}" if node.place else ""
        obstacle = node.cpu_obstacle
        remedy = "" if obstacle is None else obstacle.remedy
        logger.warning("%s%s stays on the CPU, and %s. %s", op, location, obstacle, remedy)


def _delegated_refused_ops(
    report: DelegationReport, preserved: Set[OpOverload]
) -> list[OpOverload]:
    """Return the operators that ExecuTorch's check refuses although Core ML takes every call.

    Args:
        report: Of the program.
        preserved: Operators that ExecuTorch was asked not to decompose. It excepts these itself if
            it has a decomposition.
    """
    excepted = preserved & default_decompositions().keys()
    verifier = EXIRATenDialectVerifier()
    delegated = {node.op: False for node in report.undelegated}
    delegated = {node.op: True for node in report.delegated} | delegated
    refused = {
        op: delegated[name]
        for name in sorted(delegated)
        if (op := _operator(name)) is not None and op not in excepted and _is_refused(verifier, op)
    }
    if unexcepted := [str(op) for op, is_delegated in refused.items() if not is_delegated]:
        logger.warning(
            "ExecuTorch refuses %s, outside the core ATen opset, of which a call stays on the CPU; "
            "EdgeCompileConfig(_check_ir_validity=False) lets every operator through",
            ", ".join(unexcepted),
        )
    return [op for op, is_delegated in refused.items() if is_delegated]


def _operator(name: str) -> OpOverload | None:
    """Return the ATen operator with the name ``aten.NAME.OVERLOAD``, or None."""
    namespace, _, qualified = name.partition(".")
    packet = (
        getattr(torch.ops.aten, qualified.partition(".")[0], None) if namespace == "aten" else None
    )
    return getattr(packet, qualified.partition(".")[2], None)


def _is_refused(verifier: Any, op: OpOverload) -> bool:
    try:
        verifier.check_valid_op(op)
    except SpecViolationError:
        return True
    return False

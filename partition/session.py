"""``LoweringSession``: the programs that ExecuTorch passes to a partitioner, and their reports."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.verification.verifier import EXIRATenDialectVerifier
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Node

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.errors import ProgramError
from coreml_delegate.lowering.delegation_tags import remove_tags
from coreml_delegate.lowering.store import CachedBlob, Outcome
from coreml_delegate.module_scope import Scope, scopes_of
from coreml_delegate.ops.integer_ranges import WideIntegers
from coreml_delegate.partition.branches import partition_with_branches
from coreml_delegate.partition.options import PartitionerOptions
from coreml_delegate.partition.report import DelegationReport, NodeReport
from coreml_delegate.partition.run import PartitionRun, transform
from coreml_delegate.partition.undelegated import decompose_undelegated, require_out_variants
from coreml_delegate.partition.verdicts.filters import ExcludedCalls
from coreml_delegate.patches.torch import OpOverload

logger = logging.getLogger(__name__)

EDGE = "EDGE"
"""The dialect of a program that ExecuTorch has decomposed."""
_DECOMPOSED = (
    "DEPRECATION WARNING: to_edge() + to_backend() shows Core ML a program whose composite ops are "
    "decomposed already; to_edge_transform_and_lower() preserves the ops that Core ML has as one"
)


class ReportHistory:
    """Reports in the order in which programs were partitioned.

    Whether partitions share weights with other methods is known only when all are lowered, after
    the last report: the property ``all`` adds it.

    Args:
        reports: Initial, complete reports.
    """

    def __init__(self, reports: Iterable[DelegationReport] = ()) -> None:
        self._reports = list(reports)
        self._outcomes: list[Mapping[str, Outcome]] = [{} for _ in self._reports]

    def add(self, report: DelegationReport, blobs_by_tag: Mapping[str, CachedBlob]) -> None:
        """Add a report, and the cached blobs of its partitions by tag."""
        self._reports.append(report)
        self._outcomes.append({tag: blob.expect() for tag, blob in blobs_by_tag.items()})

    @property
    def all(self) -> tuple[DelegationReport, ...]:
        """Every report."""
        for index, outcomes in enumerate(self._outcomes):
            sharing = {tag: o.sharing for tag, o in outcomes.items() if o.sharing is not None}
            self._reports[index] = self._reports[index].with_sharing(sharing)
        return tuple(self._reports)

    @property
    def latest(self) -> DelegationReport:
        """The last report.

        Raises:
            ProgramError: There is none.
        """
        if not self._reports:
            raise ProgramError(
                "no report yet", remedy="Lower a program with this partitioner first"
            )
        return self.all[-1]


class LoweringSession:
    """The programs of one partitioner, with notes from one dialect for the next.

    ExecuTorch passes every program (one per method) first in ATen dialect, then in edge dialect,
    without an association. The session notes facts in ATen dialect that edge dialect lacks.

    Args:
        options: The partitioner's.
        reports: Of earlier sessions.
        is_plan: Whether no lowering follows.

    Attributes:
        reports: The initial reports, then the reports of this session.
        blobs: Blobs cached for ``CoreMLBackend.preprocess``.
        preserved: The ops that ExecuTorch was asked not to decompose.
    """

    def __init__(
        self,
        options: PartitionerOptions,
        reports: Iterable[DelegationReport] = (),
        *,
        is_plan: bool = False,
    ) -> None:
        self.reports = ReportHistory(reports)
        self.blobs: list[CachedBlob] = []
        self._options = options
        self._is_plan = is_plan
        self._wide = WideIntegers()
        self._excluded = ExcludedCalls()
        self._modules: set[Scope] = set()
        self._has_seen_aten = False
        self._preserved: tuple[weakref.ref[ExportedProgram], set[OpOverload]] | None = None
        self.preserved: set[OpOverload] = set()

    def transform(self, program: ExportedProgram) -> ExportedProgram:
        """See ``run.transform``."""
        return transform(program, self._options)

    def ops_to_preserve(self, program: ExportedProgram) -> list[OpOverload]:
        """See ``PartitionRun.ops_to_preserve``; ExecuTorch asks twice about the same program."""
        if self._preserved is None or self._preserved[0]() is not program:
            self._has_seen_aten = True
            self._wide.note(program)
            self._note_modules(program)
            run = PartitionRun(program, self._options, self._wide, self._excluded)
            preserved = run.ops_to_preserve()
            self._preserved = weakref.ref(program), preserved
            self.preserved |= preserved
        return sorted(self._preserved[1], key=str)

    def partition(self, program: ExportedProgram) -> Mapping[str, CompileOptions]:
        """Tag a program and report on it; return the compile options of its partitions by tag.

        Raises:
            UnsupportedOperatorError: A call stays on the CPU, and the options forbid it.
            OptionError: A module pattern matches no module of the programs.
            ContractError: See ``PartitionRun.partition``.
        """
        if not self._has_seen_aten:
            logger.warning(_DECOMPOSED)
        self._note_modules(program)
        self._options.filters.check_patterns(self._modules)
        result = partition_with_branches(program, self._options, self._wide, self._excluded)
        self.keep(result.blobs.values())
        report = result.report
        self.reports.add(report, {} if self._is_plan else result.blobs)
        if self._options.demands_everything:
            report.require_complete()
        for node in report.undelegated:
            logger.info("%s (%s) stays on the CPU: %s", node.name, node.op, node.reason)
        _warn_of_missing_kernels(report)
        return result.compile_options

    def decompose_undelegated(self, program: ExportedProgram) -> None:
        """Decompose the calls of preserved ops that no backend took, in a lowered program.

        Raises:
            LoweringError: See ``require_out_variants``.
        """
        decompose_undelegated(program, self.preserved)
        require_out_variants(program)

    def keep(self, blobs: Iterable[CachedBlob]) -> None:
        """Reference blobs until they are taken, and no longer: they have weights."""
        self.blobs = [blob for blob in self.blobs if blob.files is not None] + list(blobs)

    def _note_modules(self, program: ExportedProgram) -> None:
        for node in program.graph.nodes:
            self._modules.update(scopes_of(node))


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


def plan(program: ExportedProgram, session: LoweringSession) -> DelegationReport:
    """Let ExecuTorch pass a program to a session, and return the report without lowering.

    Args:
        program: In ATen dialect; it is not changed.
        session: It gets the report and the cached blobs.
    """
    with torch.no_grad():  # which some operators demand
        to_edge_transform_and_lower(
            program,
            partitioner=[_PlanningPartitioner(session)],
            # Preserved ops are undelegated here, which is no error.
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    return session.reports.latest


def edge_compile_config(report: DelegationReport, preserved: Set[OpOverload]) -> EdgeCompileConfig:
    """Return a configuration that excepts operators that Core ML takes from ExecuTorch's check.

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
    return EdgeCompileConfig(
        _core_aten_ops_exception_list=[op for op, is_delegated in refused.items() if is_delegated]
    )


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


class _PlanningPartitioner(Partitioner):
    """Passes every program to a session, and delegates nothing."""

    def __init__(self, session: LoweringSession) -> None:
        super().__init__()
        self._session = session

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        return self._session.transform(exported_program)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self._session.partition(exported_program)
        remove_tags(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        # ExecuTorch calls it again in edge dialect, to check that no preserved op is undelegated.
        return [] if ep.dialect == EDGE else self._session.ops_to_preserve(ep), None

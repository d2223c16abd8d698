"""``CoreMLPartitioner``: the object a user hands to ``to_edge_transform_and_lower``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.backend import CoreMLBackend, check_single_backend
from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.errors import ContractError, OptionError, ProgramError
from coreml_delegate.op_rules import rule_of
from coreml_delegate.op_rules.constants import WideConstants
from coreml_delegate.op_rules.rule import target_name
from coreml_delegate.partition.operator_support import CoreMLOperatorSupport, normalize_skips
from coreml_delegate.partition.report import DelegationReport, node_report
from coreml_delegate.partition.tagging import tag_data, tag_partitions
from coreml_delegate.preprocess.package import unsupported_error
from coreml_delegate.targets import STATE_OPSET

logger = logging.getLogger(__name__)


class CoreMLPartitioner(Partitioner):
    """Delegates to Core ML what it can take, and reports why not the rest.

    Args:
        skip_ops_for_coreml_delegation: Op names to leave to the CPU: ``aten.add.Tensor``,
            ``add.Tensor``, ``aten.add`` or ``add``.
        compile_specs: From ``CoreMLBackend.generate_compile_specs``; None for its defaults.
        take_over_mutable_buffer: Make mutable buffers Core ML states (needs iOS18); otherwise they
            become inputs and outputs.
        take_over_constant_data: Give weights and constants to Core ML; otherwise they become
            inputs.
        lower_full_graph: Raise unless the entire graph can be delegated.

    Raises:
        OptionError: An unknown op name or compile spec, or options that exclude each other.
    """

    def __init__(
        self,
        *,
        skip_ops_for_coreml_delegation: Sequence[str] | None = None,
        compile_specs: list[CompileSpec] | None = None,
        take_over_mutable_buffer: bool = True,
        take_over_constant_data: bool = True,
        lower_full_graph: bool = False,
    ) -> None:
        super().__init__()
        self._options = CompileOptions.from_specs(compile_specs or [])
        self._skip = normalize_skips(_op_names(skip_ops_for_coreml_delegation))
        self._mutable_buffers = take_over_mutable_buffer
        self._constants = take_over_constant_data
        self._full_graph = lower_full_graph
        self._wide = WideConstants()
        self._reports: list[DelegationReport] = []
        if lower_full_graph:
            _check_full_graph(
                {
                    "skip_ops_for_coreml_delegation": not self._skip,
                    "take_over_mutable_buffer": take_over_mutable_buffer,
                    "take_over_constant_data": take_over_constant_data,
                }
            )
        # Canonical and complete, so that a .pte tells how it was made.
        self.delegation_spec = DelegationSpec(CoreMLBackend.__name__, self._options.to_specs())

    @property
    def options(self) -> CompileOptions:
        """The compile options, decoded."""
        return self._options

    @property
    def report(self) -> DelegationReport:
        """The report on the program partitioned last.

        Raises:
            ProgramError: Nothing was partitioned yet.
        """
        if not self._reports:
            raise ProgramError(
                "no report yet", remedy="Lower a program with this partitioner first"
            )
        return self._reports[-1]

    @property
    def reports(self) -> tuple[DelegationReport, ...]:
        """The reports on every program partitioned so far: one per method, in order."""
        return tuple(self._reports)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag what Core ML takes.

        Args:
            exported_program: In edge dialect.

        Raises:
            UnsupportedOperatorError: ``lower_full_graph`` is set and an operator is not supported.
            ContractError: Mutable buffers are to be taken over and the target has no states.
            LoweringError: Another backend named ``CoreMLBackend`` is loaded.
        """
        check_single_backend()
        self._check_state(exported_program)
        support = self._support(exported_program)
        calls = [n for n in exported_program.graph.nodes if n.op == "call_function"]
        if self._full_graph:
            _require_all(calls, support)
        tags = tag_partitions(exported_program, support)
        tag_data(exported_program, constants=self._constants, mutable_buffers=self._mutable_buffers)
        report = DelegationReport(
            tuple(node_report(n, n.meta.get("delegation_tag"), support.obstacle(n)) for n in calls)
        )
        self._reports.append(report)
        for node in report.undelegated:
            logger.info("%s (%s) stays on the CPU: %s", node.name, node.op, node.reason)
        return PartitionResult(
            tagged_exported_program=exported_program,
            partition_tags=dict.fromkeys(tags, self.delegation_spec),
        )

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """The composite ops that Core ML has as one op and takes at every call in this program.

        An op some of whose calls are not supported is decomposed throughout: ExecuTorch would find
        the others left over, neither decomposed nor delegated, and abort.
        """
        self._wide.note(ep)
        support = self._support(ep)
        verdicts: dict[OpOverload, bool] = {}
        for node in ep.graph.nodes:
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                continue
            rule = rule_of(target_name(node.target))
            keep = rule is not None and rule.preserve and support.obstacle(node) is None
            verdicts[node.target] = verdicts.get(node.target, True) and keep
        return sorted((op for op, keep in verdicts.items() if keep), key=str), None

    def _support(self, program: ExportedProgram) -> CoreMLOperatorSupport:
        return CoreMLOperatorSupport(
            program,
            self._options.deployment_target,
            skip=self._skip,
            constants_inside=self._constants,
            wide=self._wide,
        )

    def _check_state(self, program: ExportedProgram) -> None:
        buffers = sorted(program.graph_signature.buffers_to_mutate.values())
        target = self._options.deployment_target
        if buffers and self._mutable_buffers and target is not None and target < STATE_OPSET:
            raise ContractError(
                f"mutable buffers become Core ML states, which need {STATE_OPSET.name}",
                got=f"minimum_deployment_target {target.name} and {', '.join(buffers)}",
                remedy="Raise it, or set take_over_mutable_buffer=False",
            )


def _op_names(names: Sequence[str] | None) -> Sequence[str]:
    if isinstance(names, str):
        raise OptionError(
            "skip_ops_for_coreml_delegation is a list", got=repr(names), expected=f"[{names!r}]"
        )
    return names or ()


def _check_full_graph(compatible: dict[str, bool]) -> None:
    clashing = [name for name, fine in compatible.items() if not fine]
    if clashing:
        raise OptionError(
            "lower_full_graph=True leaves nothing to the CPU",
            got=f"together with {', '.join(clashing)}",
            remedy="Drop these options, or set lower_full_graph=False",
        )


def _require_all(calls: Sequence[Node], support: CoreMLOperatorSupport) -> None:
    obstacles: dict[str, list[str]] = {}
    for node in calls:
        reason = support.obstacle(node)
        if reason is not None:
            obstacles.setdefault(str(reason), []).append(node.name)
    if obstacles:
        raise unsupported_error(obstacles)

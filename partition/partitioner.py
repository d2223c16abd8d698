"""``CoreMLPartitioner``, which users pass to ``to_edge_transform_and_lower``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executorch.exir import EdgeCompileConfig
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.backend import CoreMLBackend, claim_name
from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.partition.options import PartitionerOptions
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.partition.session import EDGE, LoweringSession, edge_compile_config, plan
from coreml_delegate.partition.verdicts.filters import NodePredicate
from coreml_delegate.patches.torch import OpOverload

_REPORTS = "reports"
_NOT_COPIED = frozenset({"_spec", "_session"})
"""``_spec`` of ExecuTorch is a mapping proxy, which cannot be copied."""


class CoreMLPartitioner(Partitioner):
    """Delegates the calls that Core ML can take, and reports why other calls stay on the CPU.

    Modules are given by path (``layers.0``, which includes its submodules), by path with wildcards
    (``layers.*.norm``), or by class or class name (``torch.nn.LayerNorm``).

    A copy, or a pickle, has the options and the reports, but no state of a lowering in progress:
    copy before or after lowering.

    Args:
        skip_ops_for_coreml_delegation: Op names to keep on the CPU: ``aten.add.Tensor``,
            ``add.Tensor``, ``aten.add`` or ``add``.
        compile_specs: From ``CoreMLBackend.generate_compile_specs``; None for its defaults.
        take_over_mutable_buffer: Turn suitable mutable buffers into Core ML states (needs iOS18);
            other buffers become inputs and outputs. The report lists both.
        take_over_constant_data: Store weights and constants in the Core ML models; otherwise they
            become inputs.
        lower_full_graph: Raise unless the entire graph can be delegated.
        only_ops: Delegate only these ops.
        skip_modules: Modules to keep on the CPU.
        only_modules: Delegate only calls in these modules.
        node_filter: Called with every call, first in ATen and then in edge dialect, where nodes
            have other names; false keeps the call on the CPU.
        min_partition_nodes: Keep partitions of fewer operations on the CPU.
        max_partitions: Delegate at most this many partitions, by estimated FLOPs.
        strict: Raise if any call stays on the CPU, for any reason.
        keep_fp32: Called with every delegated call, in edge dialect; true keeps it in fp32 if the
            compile specs demand fp16. Compile specs can name such calls too.

    Raises:
        OptionError: A value of the wrong type; an unknown op, compile spec, graph pass or MIL op;
            or options that exclude each other.
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
        self._options = PartitionerOptions(
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
        self._session = LoweringSession(self._options)
        # Canonical and complete, so that a .pte records all options.
        self.delegation_spec = _delegation(self.options)

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
        return {**attributes, _REPORTS: self.reports}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        vars(self).update(state)
        self._session = LoweringSession(self._options, vars(self).pop(_REPORTS))

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
        return self._session.reports.latest

    @property
    def reports(self) -> tuple[DelegationReport, ...]:
        """The reports on every program partitioned so far: one per method, in order."""
        return self._session.reports.all

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

    def edge_compile_config(self, program: ExportedProgram) -> EdgeCompileConfig:
        """Return an ``EdgeCompileConfig`` that accepts the non-core operators that Core ML takes.

        ExecuTorch checks a program before it delegates, and refuses operators outside the core ATen
        opset, such as ``randn_like``. Operators of which Core ML takes every call are excepted from
        the check. A warning lists the other operators, for which ExecuTorch refuses the program
        unless ``_check_ir_validity`` is off.

        Args:
            program: See ``plan``, also for errors.
        """
        report, session = self._plan(program)
        return edge_compile_config(report, session.preserved)

    def _plan(self, program: ExportedProgram) -> tuple[DelegationReport, LoweringSession]:
        tolerant = replace(self._options, lower_full_graph=False, strict=False)
        session = LoweringSession(tolerant, is_plan=True)
        report = plan(program, session)
        self._session.keep(session.blobs)
        return report, session

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
        options_by_tag = self._session.partition(exported_program)
        return PartitionResult(
            tagged_exported_program=exported_program,
            partition_tags={tag: _delegation(options) for tag, options in options_by_tag.items()},
        )

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Return the program in fp32, with plain tensors and containers, without assertions.

        See the modules of ``transforms``.
        """
        return self._session.transform(exported_program)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """Return the composite ops that Core ML has as one op, if it takes every call in ``ep``.

        ExecuTorch calls the method again after lowering. It then decomposes the calls of these ops
        that no backend took, in place, because ExecuTorch may lack a kernel for them.
        """
        if ep.dialect == EDGE:
            self._session.decompose_undelegated(ep)
            return [], None
        return self._session.ops_to_preserve(ep), None


def _delegation(options: CompileOptions) -> DelegationSpec:
    return DelegationSpec(CoreMLBackend.__name__, options.to_specs())

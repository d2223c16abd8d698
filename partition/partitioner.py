"""``CoreMLPartitioner``: the object a user hands to ``to_edge_transform_and_lower``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executorch.exir import EdgeCompileConfig
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.backend import CoreMLBackend, claim_name
from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.partition.options import PartitionerOptions
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.partition.session import EDGE, LoweringSession, edge_compile_config, plan
from coreml_delegate.partition.verdicts.filters import NodePredicate

_REPORTS = "reports"
_NOT_COPIED = frozenset({"_spec", "_session"})
"""``_spec`` is ExecuTorch's, a mapping proxy, which cannot be copied."""


class CoreMLPartitioner(Partitioner):
    """Delegates to Core ML the calls that it can take, and reports why not the others.

    Modules are named by path (``layers.0``, which covers all below it), by path with wildcards
    (``layers.*.norm``), or by class, itself or its name (``torch.nn.LayerNorm``).

    A copy, and a pickle, has the options and the reports. It has nothing of a lowering under way:
    copy before lowering, or after.

    Args:
        skip_ops_for_coreml_delegation: Op names to leave to the CPU: ``aten.add.Tensor``,
            ``add.Tensor``, ``aten.add`` or ``add``.
        compile_specs: From ``CoreMLBackend.generate_compile_specs``; None for its defaults.
        take_over_mutable_buffer: Make Core ML states of the mutable buffers that can be (needs
            iOS18); otherwise they become inputs and outputs. The report says which buffer became
            which.
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
        # Canonical and complete, so that a .pte tells how it was made.
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
        """The report on the program partitioned last, if only to be refused.

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

        Nothing is written, ``reports`` stays as it is, and calls that stay on the CPU are no error,
        whatever ``lower_full_graph`` and ``strict`` say. A lowering with this partitioner takes
        over the blobs that are made to find out.

        Args:
            program: From ``torch.export``, in ATen dialect; it is left as it is.

        Raises:
            OptionError: A module pattern that names no module of the program.
            ContractError: See ``partition``.
        """
        return self._plan(program)[0]

    def edge_compile_config(self, program: ExportedProgram) -> EdgeCompileConfig:
        """Return the configuration with which ExecuTorch takes a program that Core ML takes.

        ExecuTorch checks a program before it delegates, and refuses operators outside the core ATen
        opset, such as ``randn_like``. Those of which Core ML takes every call are excepted; all
        else is checked. Of the others a warning is logged: ExecuTorch refuses the program, unless
        ``_check_ir_validity`` is switched off.

        Args:
            program: See ``plan``, as for the errors.
        """
        report, session = self._plan(program)
        return edge_compile_config(report, session.preserved)

    def _plan(self, program: ExportedProgram) -> tuple[DelegationReport, LoweringSession]:
        demands_nothing = replace(self._options, lower_full_graph=False, strict=False)
        session = LoweringSession(demands_nothing, is_plan=True)
        report = plan(program, session)
        self._session.keep(session.blobs)
        return report, session

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag the calls that Core ML takes.

        Args:
            exported_program: In edge dialect.

        Raises:
            UnsupportedOperatorError: ``lower_full_graph`` or ``strict`` is set and a call stays on
                the CPU; lists every one.
            OptionError: A module pattern that names no module of the program.
            ContractError: Mutable buffers would become states and the target has none.
        """
        claim_name()  # before ExecuTorch looks for it
        options_by_tag = self._session.partition(exported_program)
        return PartitionResult(
            tagged_exported_program=exported_program,
            partition_tags={tag: _delegation(options) for tag, options in options_by_tag.items()},
        )

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Return the program in fp32, with plain tensors and containers, without checks of results.

        See the modules of ``transforms``.
        """
        return self._session.transform(exported_program)

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        """Return the composite ops that Core ML has as one op and takes at every call in ``ep``.

        ExecuTorch asks once more after lowering. The calls that no backend took then are in the
        report, have perhaps no kernel, and are decomposed: ``ep`` is changed.
        """
        if ep.dialect == EDGE:
            self._session.decompose_undelegated(ep)
            return [], None
        return self._session.ops_to_preserve(ep), None


def _delegation(options: CompileOptions) -> DelegationSpec:
    return DelegationSpec(CoreMLBackend.__name__, options.to_specs())

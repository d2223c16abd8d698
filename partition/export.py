"""Models to a ``.pte`` by ``torch.export`` and ExecuTorch, with explained errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    to_edge_transform_and_lower,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument

from coreml_delegate.dynamic_shapes.symbols import bounds_of, input_tensors
from coreml_delegate.errors import LoweringError
from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.partition.partitioner import CoreMLPartitioner
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.patches.third_party import wrap_errors
from coreml_delegate.transforms.executorch_gaps import name_values

Bounds: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""Smallest and largest size of each dimension of each input tensor."""


def export_model(source: SourceModel) -> ExportedProgram:
    """Export a model with ``torch.export``.

    Raises:
        OptionError: ``torch.export`` cannot capture the model.
        LoweringError: The model returns no tensor, which ExecuTorch cannot emit.
    """
    program = source.export()
    _check_outputs(program)
    return program


def lower_methods(
    methods: Mapping[str, ExportedProgram],
    partitioner: CoreMLPartitioner,
    constants: Mapping[str, Any] | None = None,
    *,
    generate_etrecord: bool = False,
    write_in_place: bool = False,
) -> Any:
    """Lower the methods of one program; the partitioner stores their reports.

    Args:
        methods: Exported programs in ATen dialect, by method name.
        partitioner: The partitioner of all methods.
        constants: Values of constant methods by name, or None.
        generate_etrecord: Whether ExecuTorch stores the graphs for its Inspector.
        write_in_place: Whether ExecuTorch's kernels write rows of a mutable buffer in place, not
            into a copy.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte`` and has the ETRecord.

    Raises:
        CoreMLDelegateError: The partitioner or the backend refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    # Read first, because lowering replaces sizes in the exported programs too.
    bounds = {name: _bounds(program) for name, program in methods.items()}
    if generate_etrecord:  # it has the program, and its reader may not know the program's classes
        methods = {name: name_values(program) for name, program in methods.items()}
    with _wrap_executorch_errors(), torch.no_grad():
        edge = to_edge_transform_and_lower(
            dict(methods),
            partitioner=[partitioner],
            constant_methods=None if constants is None else dict(constants),
            generate_etrecord=generate_etrecord,
            # Operators outside the core ATen opset stay on the CPU; the report has their kernels.
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        for report in partitioner.reports:
            report.require_lowerable()
        for name, before in bounds.items():
            _check_bounds(before, _bounds(edge.exported_program(name)))
        return edge.to_executorch(
            ExecutorchBackendConfig(run_reinplace_pass=True) if write_in_place else None
        )


def plan(program: ExportedProgram, partitioner: CoreMLPartitioner) -> DelegationReport:
    """Return the delegation report of a program without lowering it.

    Raises:
        CoreMLDelegateError: The partitioner refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    with _wrap_executorch_errors():
        return partitioner.plan(program)


def _check_outputs(program: ExportedProgram) -> None:
    """Refuse outputs that ExecuTorch cannot emit, with a better message than its own."""
    outputs = [spec.arg for spec in program.graph_signature.output_specs]
    constants = [arg.value for arg in outputs if isinstance(arg, ConstantArgument)]
    if not any(isinstance(arg, TensorArgument) for arg in outputs):
        raise LoweringError(
            "the model returns no tensor, which ExecuTorch requires",
            got=", ".join(map(repr, constants)) or f"{len(outputs)} outputs",
            expected="a tensor among the outputs, or an input or buffer that is written",
        )


def _check_bounds(exported: Bounds, lowered: Bounds) -> None:
    """Refuse a program if lowering narrowed the size ranges of its inputs."""
    for before, after in zip(exported, lowered, strict=True):
        if before != after:
            raise LoweringError(
                "an operator of the model lets ExecuTorch take fewer sizes than were asked for",
                got=_shape_text(after),
                expected=_shape_text(before),
                remedy="Export a program for each size",
            )


def _bounds(program: ExportedProgram) -> Bounds:
    """Return the smallest and largest size of every dimension of every input tensor."""
    return [
        [
            bounds_of(size, program.range_constraints)
            if isinstance(size, torch.SymInt)
            else (size, size)
            for size in tensor.shape
        ]
        for tensor in input_tensors(program).values()
    ]


def _shape_text(bounds: Sequence[tuple[int, int]]) -> str:
    return str([low if low == high else f"{low}..{high}" for low, high in bounds]).replace("'", "")


def _wrap_executorch_errors() -> AbstractContextManager[None]:
    return wrap_errors("ExecuTorch cannot lower the model", kind=LoweringError)

"""From a source to a ``.pte``, or to a plan of one, the way every command does it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument

from coreml_delegate.dynamic_shapes.symbols import bounds_of, input_tensors
from coreml_delegate.errors import CoreMLDelegateError, LoweringError
from coreml_delegate.partition import CoreMLPartitioner, DelegationReport
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs.source import Source

Bounds: TypeAlias = Sequence[Sequence[tuple[int, int]]]


def lower(source: Source, partitioner: CoreMLPartitioner) -> Any:
    """Lower a model; the partitioner keeps the report.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte``.

    Raises:
        CoreMLDelegateError: Our part of the lowering refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    exported = _exported(source)
    with console.step("Lowering to Core ML"):
        return lower_methods({"forward": exported}, partitioner)


def lower_methods(
    methods: Mapping[str, ExportedProgram],
    partitioner: CoreMLPartitioner,
    constants: Mapping[str, Any] | None = None,
) -> Any:
    """Lower the methods of one program; the partitioner keeps the reports.

    Args:
        methods: By name, in ATen dialect.
        partitioner: For all of them.
        constants: Further methods by name, each with the value it returns; None for none.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte``.

    Raises:
        CoreMLDelegateError: See ``lower``.
    """
    # Lowering replaces sizes in the exported programs as well.
    bounds = {name: _bounds(program) for name, program in methods.items()}
    with _blaming_executorch(), torch.no_grad():
        edge = to_edge_transform_and_lower(
            dict(methods),
            partitioner=[partitioner],
            constant_methods=None if constants is None else dict(constants),
            # Operators outside the core ATen opset stay on the CPU; the report says what runs them.
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        for report in partitioner.reports:
            report.require_lowerable()
        for name, before in bounds.items():
            _check_bounds(before, _bounds(edge.exported_program(name)))
        return edge.to_executorch()


def plan(source: Source, partitioner: CoreMLPartitioner) -> DelegationReport:
    """What lowering a model would report.

    Raises:
        CoreMLDelegateError: Our part of the lowering refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    exported = _exported(source)
    with console.step("Planning"), _blaming_executorch():
        return partitioner.plan(exported)


def _exported(source: Source) -> ExportedProgram:
    with console.step("Exporting with torch.export"):
        program = source.export()
    _check_outputs(program)
    return program


def _check_outputs(program: ExportedProgram) -> None:
    """Refuse what ExecuTorch cannot emit, of which it says nothing that helps."""
    outputs = [spec.arg for spec in program.graph_signature.output_specs]
    constants = [arg.value for arg in outputs if isinstance(arg, ConstantArgument)]
    if texts := [value for value in constants if isinstance(value, str)]:
        raise LoweringError(
            "the model returns text, which no .pte can",
            got=", ".join(map(repr, texts)),
            expected="tensors, numbers and None",
            remedy="Leave it out of what forward returns",
        )
    if not any(isinstance(arg, TensorArgument) for arg in outputs):
        raise LoweringError(
            "the model returns no tensor, and ExecuTorch lowers no such program",
            got=", ".join(map(repr, constants)) or f"{len(outputs)} outputs",
            expected="a tensor among the outputs, or an input or buffer that is written",
        )


def _check_bounds(exported: Bounds, lowered: Bounds) -> None:
    """Refuse a program whose inputs have lost sizes that they were exported with."""
    for before, after in zip(exported, lowered, strict=True):
        if before != after:
            raise LoweringError(
                "an operator of the model lets ExecuTorch take fewer sizes than were asked for",
                got=_shape(after),
                expected=_shape(before),
                remedy="Export a program for each size",
            )


def _bounds(program: ExportedProgram) -> Bounds:
    """The smallest and the largest size of every dimension of every input that is a tensor."""
    return [
        [
            bounds_of(size, program.range_constraints)
            if isinstance(size, torch.SymInt)
            else (size, size)
            for size in tensor.shape
        ]
        for tensor in input_tensors(program).values()
    ]


def _shape(bounds: Sequence[tuple[int, int]]) -> str:
    return str([low if low == high else f"{low}..{high}" for low, high in bounds]).replace("'", "")


@contextmanager
def _blaming_executorch() -> Generator[None]:
    try:
        with console.captured():
            yield
    except CoreMLDelegateError:
        raise
    except Exception as error:
        raise LoweringError(
            "ExecuTorch cannot lower the model", got=console.first_line(error)
        ) from error

"""``save_mlpackage``: a whole program as one Core ML model, for apps without ExecuTorch.

The program is lowered as for a ``.pte``. Its only delegate becomes the package, and everything that
a ``.pte`` does outside its delegates is an error.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.errors import LoweringError, OptionError, UnsupportedOperatorError
from coreml_delegate.exported.containers import input_names_of
from coreml_delegate.exported.value_names import OUTPUT
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.files import require_absent, write_folder
from coreml_delegate.formats.mlpackage import MAIN, SUFFIX, empty_folders
from coreml_delegate.lowering.interface import Ports, declare_interface
from coreml_delegate.options.model_interface import ModelInterface
from coreml_delegate.partition.export import lower_methods
from coreml_delegate.partition.partitioner import CoreMLPartitioner
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.patches.torch import pytree
from coreml_delegate.runtime.delegate import blob_files, resolve
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID
from coreml_delegate.runtime.program.plan import (
    DelegateCall,
    FreeCall,
    KernelCall,
    MethodInfo,
    TensorSpec,
)
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.program.signature import input_names, mutated_inputs, output_names

_METHOD = "forward"


def save_mlpackage(
    program: ExportedProgram,
    path: Path | str,
    partitioner: CoreMLPartitioner | None = None,
    interface: ModelInterface | None = None,
    *,
    overwrite: bool = False,
) -> DelegationReport:
    """Lower a whole program to an ``.mlpackage``; equal programs and options give equal bytes.

    Args:
        program: From ``torch.export``.
        path: The package to write, a folder ``NAME.mlpackage``.
        partitioner: It must leave no call to the CPU; None for
            ``CoreMLPartitioner(lower_full_graph=True)``.
        interface: Names, images, labels and description; None for the names of the model.
        overwrite: Replace a package that is already there.

    Returns:
        The delegation report.

    Raises:
        LoweringError: Core ML cannot take the whole program; the message lists the calls.
        OptionError: The interface does not fit the program, or ``path`` has another suffix.
        ProgramError: ``path`` exists and ``overwrite`` is false.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise OptionError("unknown kind of file", got=str(path), expected=SUFFIX)
    require_absent(path, overwrite=overwrite)  # before the work
    partitioner = partitioner or CoreMLPartitioner(lower_full_graph=True)
    inputs = example_inputs(program)
    with naming_the_remedy():
        lowered = lower_methods({_METHOD: program}, partitioner)
        partitioner.report.require_complete()
    require_states(partitioner.report)
    files = package_files(lowered.buffer, interface or ModelInterface(), inputs)
    write_folder(files, path, folders=empty_folders(files), overwrite=overwrite)
    return partitioner.report


@contextmanager
def naming_the_remedy() -> Generator[None]:
    """Add to an error about calls that Core ML cannot take that a ``.pte`` runs them."""
    try:
        yield
    except UnsupportedOperatorError as error:
        raise UnsupportedOperatorError(
            error.what,
            got=error.got,
            expected=error.expected,
            remedy="Change the model, or export a .pte, which runs them on the CPU",
        ) from error


def require_states(report: DelegationReport) -> None:
    """Check that all mutable buffers of a program are states.

    Raises:
        LoweringError: One is passed in and out, which only ExecuTorch's runtime does; lists all.
    """
    passed_buffers = [buffer for buffer in report.buffers if not buffer.is_state]
    if passed_buffers:
        raise LoweringError(
            "a mutable buffer is no state, and Core ML keeps only states",
            got="; ".join(f"{buffer.name}: {buffer.reason}" for buffer in passed_buffers),
            remedy="Export a .pte, whose runtime keeps it, or take and return it in the model",
        )


def example_inputs(
    program: ExportedProgram, leaves: Sequence[Any] | None = None
) -> list[tuple[str, Any]]:
    """Return the name and example of each input of a program.

    Args:
        program: From ``torch.export``, before it is lowered.
        leaves: Flattened examples; None for those of the program.
    """
    names = input_names_of(program)
    if leaves is None and program.example_inputs is not None:
        leaves = pytree.tree_leaves(program.example_inputs)
    return list(zip(names, leaves or [None] * len(names), strict=True))


def package_files(
    program: Path | bytes,
    interface: ModelInterface,
    inputs: Sequence[tuple[str, Any]] | None = None,
) -> dict[str, Buffer]:
    """Return the files of the ``.mlpackage`` of a program with a single Core ML delegate.

    Args:
        program: A ``.pte`` with one method.
        interface: See ``save_mlpackage``.
        inputs: See ``example_inputs``; None for the names in the ``.pte`` and the default shapes of
            the delegate.

    Raises:
        LoweringError: The program has several methods, computes outside the delegate, or does not
            use an input.
        OptionError: The interface does not fit the program.
        ProgramError: The program is damaged.
    """
    opened = PteProgram.open(program)
    if len(opened.methods) != 1:
        raise LoweringError(
            "the program is not one Core ML model",
            got=f"the methods {', '.join(opened.method_names)}",
            expected="one method",
        )
    (method,) = opened.methods
    if inputs is None:
        inputs = [(name, None) for name in input_names(method)]
    if mutated := mutated_inputs(method):
        raise LoweringError(
            "the model writes to an input, which Core ML cannot",
            got=", ".join(inputs[position][0] for position in mutated.values()),
            remedy="Return the new value",
        )
    call = _only_call(method)
    delegate = method.delegates[call.delegate]
    if delegate.backend_id != COREML_BACKEND_ID:
        raise LoweringError(
            "the delegate is not for Core ML", got=delegate.backend_id, expected=COREML_BACKEND_ID
        )
    blob, function = resolve(delegate.processed, opened.named_data)
    if function not in (None, MAIN):
        raise LoweringError(
            "the delegate is one function of a model that methods share",
            got=function,
            expected="a model of its own",
        )
    files, metadata = blob_files(blob)
    features = metadata.method(method.name)
    count = len(features.input_names)
    by_input = dict(zip(call.args[:count], features.input_names, strict=True))
    by_output = dict(zip(call.args[count:], features.output_names, strict=True))
    if own := [method.values[index] for index in by_input if index not in method.inputs]:
        raise LoweringError(
            "the program passes a value of its own to the delegate",
            got=", ".join(map(str, own)),
            remedy="Export the model again, with its constants inside the delegate",
        )
    tensors = [
        (index, name, example)
        for index, (name, example) in zip(method.inputs, inputs, strict=True)
        if isinstance(method.values[index], TensorSpec)
    ]
    if unused := [name for index, name, _ in tensors if index not in by_input]:
        raise LoweringError(
            "the model does not use an input, which Core ML's model would lack",
            got=", ".join(unused),
            remedy="Leave it out of the model's forward",
        )
    values = by_input | by_output
    ports = Ports(
        [(by_input[index], name) for index, name, _ in tensors],
        [(values[index], name) for index, name in _outputs(method, values)],
        {
            by_input[index]: tuple(example.shape)
            for index, _, example in tensors
            if isinstance(example, torch.Tensor)
        },
    )
    return declare_interface(files, interface, ports)


def _only_call(method: MethodInfo) -> DelegateCall:
    """Return the call of the only delegate.

    Raises:
        LoweringError: The program does anything else.
    """
    instructions = [
        instruction
        for chain in method.chains
        for instruction in chain
        if not isinstance(instruction, FreeCall)
    ]
    calls = [call for call in instructions if isinstance(call, DelegateCall)]
    steps = [step for step in instructions if not isinstance(step, DelegateCall)]
    if len(calls) == 1 and not steps:
        return calls[0]
    described = [f"{len(calls)} delegates"] if len(calls) != 1 else []
    for instruction in steps:
        is_kernel = isinstance(instruction, KernelCall)
        described.append(instruction.operator if is_kernel else type(instruction).__name__)
    raise LoweringError(
        "the program is not one Core ML model",
        got=", ".join(dict.fromkeys(described)),
        expected="one delegate, and no operation outside it",
        remedy="Export to a .pte, whose runtime carries out the rest",
    )


def _outputs(method: MethodInfo, values: Mapping[int, str]) -> list[tuple[int, str]]:
    """Return the index of the value and the name of each output that is a tensor.

    Raises:
        LoweringError: An output is constant.
    """
    names = output_names(method)
    if len(names) == 1 and names[0] == f"{OUTPUT}_0":
        names = (OUTPUT,)
    outputs: list[tuple[int, str]] = []
    for index, name in zip(method.outputs, names, strict=True):
        if index in values:
            outputs.append((index, name))
        elif method.values[index] is not None:  # None is left out
            raise LoweringError(
                "an output does not depend on the model's inputs",
                got=f"{name}, {method.values[index]}",
                remedy="Leave it out of the results",
            )
    return outputs

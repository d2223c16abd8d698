"""Compare a program's outputs with the outputs of its model in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from coreml_delegate.errors import ProgramError
from coreml_delegate.exported.source_model import SourceModel, copy_inputs
from coreml_delegate.runtime.accuracy import Accuracy, Int32Watch
from coreml_delegate.runtime.loading import LoadedProgram
from coreml_delegate.scripts.inputs.data_sets import Sample


def compare(
    source: SourceModel, program: LoadedProgram, samples: Iterable[Sample]
) -> dict[str, Accuracy]:
    """Compare a program with its model.

    Args:
        source: The model.
        program: The program.
        samples: Inputs of several calls, iterated once and not kept.

    Returns:
        Accuracy over all samples, by output name.

    Raises:
        ProgramError: Their outputs differ in number or in shape.
        CoreMLDelegateError: Either refuses the inputs.
    """
    results: dict[str, Accuracy] = {}
    for sample in samples:
        actual = program.run(copy_inputs(sample.leaves))
        with Int32Watch() as watch:
            outcome = source.execute(program.model_inputs(sample.leaves))
        expected = program.expected(outcome.results, outcome.inputs)
        if len(actual) != len(expected):
            raise ProgramError(
                "program and model have different numbers of outputs",
                got=str(len(actual)),
                expected=str(len(expected)),
            )
        for (name, got), want in zip(actual.items(), expected, strict=True):
            results.setdefault(name, Accuracy()).add(want, got, watch.first, sample.labels)
    return results

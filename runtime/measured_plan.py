"""Measured costs of a model's operations, in the form of coremltools' compute plans.

Core ML's plans estimate each operation's share of a prediction, and coremltools' benchmarker
multiplies the time of predictions by it. Without Core ML, the shares are measured by an engine that
times its kernels.

Source: coremltools 9.0, ``models/compute_plan.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coreml_delegate.formats.mlpackage import map_folder
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.mil.program import Block
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.observation import Observer

_RUNS = 3


class MeasuredPlan:
    """A compute plan of one function of an mlpackage, which an engine measures.

    ``model_structure`` has the operations of the model, as coremltools describes them.
    """

    def __init__(
        self, package: Path, function_name: str | None, engine: str, options: EngineOptions
    ) -> None:
        model = Model.from_files(
            map_folder(package),
            function_name=function_name,
            engine=engine,
            options=replace(options, profiling=True),
        )
        self.model_structure = _structure({model.function.name: model.function.block})
        self._shares = _shares(model)

    def get_compute_device_usage_for_mlprogram_operation(self, _: Any) -> None:
        """Return None, because the processor that would run an operation is unknown."""

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
        """Return an operation's share of the time, 0 to 1; None if it was not measured."""
        from coremltools.models.compute_plan import MLComputePlanCost

        share = self._shares.get(operation.outputs[0].name) if operation.outputs else None
        return None if share is None else MLComputePlanCost(share)


def _shares(model: Model) -> Mapping[str, float]:
    """Return each operation's share of the total time, by the name of its first output."""
    rng = np.random.default_rng(0)
    inputs = {
        feature.name: _example(rng, feature.type.dtype.numpy, feature.type.shape or ())
        for feature in model.function.inputs
    }
    state = model.make_state()
    observer = Observer(model, None)
    events = [observer.run(inputs, state, with_values=False)[1] for _ in range(_RUNS)][-1]
    total = sum(event.nanoseconds for event in events)
    return {
        event.symbol.rpartition(":")[0]: event.nanoseconds / total if total else 0.0
        for event in events
    }


def _example(rng: np.random.Generator, dtype: Any, shape: tuple[int | None, ...]) -> Any:
    sizes = [1 if size is None else size for size in shape]
    if np.issubdtype(dtype, np.floating):
        return rng.random(sizes).astype(dtype)
    return np.zeros(sizes, dtype)


def _structure(blocks: Mapping[str, Block]) -> Any:
    from coremltools.models import compute_plan as theirs

    def described(block: Block) -> Any:
        operations = [
            theirs.MLModelStructureProgramOperation(
                {},
                op.type,
                [
                    theirs.MLModelStructureProgramNamedValueType(
                        out.name, theirs.MLModelStructureProgramValueType()
                    )
                    for out in op.outputs
                ],
                [described(inner) for inner in op.blocks],
                None,
            )
            for op in block.ops
        ]
        return theirs.MLModelStructureProgramBlock([], operations, list(block.outputs))

    functions = {
        name: theirs.MLModelStructureProgramFunction([], described(block))
        for name, block in blocks.items()
    }
    return theirs.MLModelStructure(None, theirs.MLModelStructureProgram(functions), None)

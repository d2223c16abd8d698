"""The flows of the suite: how a model is lowered and where the program runs.

ExecuTorch's own Core ML backend and ours share a name and must not meet in one process, so a
process serves one of the two, and only then imports it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from executorch.backends.test.harness import Tester
from executorch.backends.test.harness.stages import (
    Serialize,
    StageType,
    ToEdgeTransformAndLower,
)
from executorch.backends.test.suite.flow import TestFlow
from torch.utils import _pytree as pytree

from coreml_delegate import runtime
from coreml_delegate.targets import Opset

Report = Mapping[str, tuple[str, ...]]
"""Why nodes stay on the CPU: reasons by op; empty where a partitioner gives none."""


class Source(enum.StrEnum):
    """Whose partitioner and backend lower."""

    OURS = "coreml_delegate"
    UPSTREAM = "executorch"


@dataclass(frozen=True)
class Lowering:
    """What a flow asks of the backend.

    Attributes:
        target: Deployment target, None for the smallest that a model needs.
        precision: Name of coremltools' compute precision.
    """

    target: Opset | None
    precision: str


LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        # ExecuTorch's own flow of this name: iOS 15 and the default precision.
        "coreml": Lowering(Opset.iOS15, "FLOAT16"),
        # Whatever the model needs, in fp32: wrong translations do not hide behind rounding.
        "coreml_fp32": Lowering(None, "FLOAT32"),
    }
)


class RunHere(Serialize):
    """The stage that executes a program, with our runtime.

    Args:
        engine: Engine of the delegates.
    """

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = engine

    def run_artifact(self, inputs: Any) -> list[torch.Tensor]:
        program = runtime.load_program(self.artifact, host="python", engine=self._engine)
        return program.run("forward", pytree.tree_leaves(inputs))


class SuiteTester(Tester):
    """Takes one model through the stages.

    Args:
        module: The model.
        example_inputs: Inputs it is exported with.
        partitioner: Fresh, for this model alone.
        engine: Engine of the delegates.
    """

    def __init__(
        self, module: torch.nn.Module, example_inputs: Any, *, partitioner: Any, engine: str
    ) -> None:
        stages = Tester.default_stage_classes() | {
            StageType.TO_EDGE_TRANSFORM_AND_LOWER: lambda: ToEdgeTransformAndLower(
                lambda: partitioner
            ),
            StageType.SERIALIZE: lambda: RunHere(engine),
        }
        super().__init__(module, example_inputs, stage_classes=stages)
        self._partitioner = partitioner

    def report(self) -> Report:
        """Why nodes stay on the CPU, as far as lowering came and the partitioner tells."""
        reports = getattr(self._partitioner, "reports", ())
        found: dict[str, list[str]] = {}
        for node in reports[-1].undelegated if reports else ():
            found.setdefault(node.op, []).append(str(node.reason))
        return {op: tuple(sorted(set(reasons))) for op, reasons in sorted(found.items())}


def partitioner_factory(source: Source, lowering: Lowering) -> Callable[[], Any]:
    """Makes partitioners of one of the two backends; imports that one."""
    if source is Source.OURS:
        from coreml_delegate import CoreMLBackend, CoreMLPartitioner
    else:
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner
    import coremltools as ct

    target = lowering.target
    specs = {
        "minimum_deployment_target": None if target is None else ct.target(int(target)),
        "compute_precision": ct.precision[lowering.precision],
    }

    def make() -> Any:
        return CoreMLPartitioner(compile_specs=CoreMLBackend.generate_compile_specs(**specs))

    return make


def make_flow(
    name: str, source: Source, engine: str, made: Callable[[SuiteTester], None]
) -> TestFlow:
    """A flow for the suite's runner.

    Args:
        name: Key of ``LOWERINGS``.
        source: Whose backend.
        engine: Engine of the delegates.
        made: Is told every tester that the suite makes.
    """
    new_partitioner = partitioner_factory(source, LOWERINGS[name])

    def new_tester(module: torch.nn.Module, inputs: Any) -> SuiteTester:
        tester = SuiteTester(module, inputs, partitioner=new_partitioner(), engine=engine)
        made(tester)
        return tester

    # The suite runs no program without a delegate unless none is expected; here all are to run.
    return TestFlow(name, backend="coreml", tester_factory=new_tester, is_delegated=False)

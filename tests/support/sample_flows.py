"""Samples of calls lowered together in several ways, and run.

Most of a lowering's time does not depend on the size of the program.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from ops.op_samples.sample import Calls, Sample

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.partition import DelegationReport
from coreml_delegate.targets import Opset
from support.lowering import fp32_specs
from support.tolerances import ATOL_RTOL

_BATCH = 120


@dataclass(frozen=True)
class Flow:
    """A way to lower and run.

    Attributes:
        name: For test ids.
        precision: Row of the tolerance table.
        target: Deployment target of calls without their own.
        core: Decompose to core ATen first.
        engines: Engines to run on.
        share: One in ``share`` samples is part of the default run, chosen by a digest of its name;
            the others are slow.
    """

    name: str
    precision: str
    target: Opset | None
    core: bool
    engines: tuple[str, ...]
    share: int = 1

    def is_slow(self, sample: Sample) -> bool:
        return zlib.crc32(f"{self.name} {sample.id}".encode()) % self.share != 0

    def specs(self, target: Opset | None) -> list[Any]:
        options = {"minimum_deployment_target": target or self.target}
        if self.precision == "fp32":
            return fp32_specs(**options)
        return CoreMLBackend.generate_compile_specs(**options)


@dataclass(frozen=True)
class Outcome:
    """Report and results of one batch of samples."""

    report: DelegationReport
    expected: dict[str, tuple[torch.Tensor, ...]]
    actual: dict[str, dict[str, list[torch.Tensor]]]  # by engine, then sample


def lower_and_run(samples: Sequence[Sample], flow: Flow, engines: Sequence[str]) -> Outcome:
    module = Calls(samples)
    inputs = module.inputs()
    exported = torch.export.export(module, inputs, dynamic_shapes=module.dynamic_shapes())
    partitioner = CoreMLPartitioner(compile_specs=flow.specs(samples[0].target_opset))
    # Operators of other dialects than core ATen are part of what is tested.
    config = EdgeCompileConfig(_check_ir_validity=False)
    if flow.core:
        edge = to_edge(exported, compile_config=config).to_backend(partitioner)
    else:
        edge = to_edge_transform_and_lower(
            exported, partitioner=[partitioner], compile_config=config
        )
    pte = edge.to_executorch().buffer
    results = {
        engine: runtime.load_program(pte, engine=engine).run("forward", list(inputs))
        for engine in engines
    }
    eager = iter(module(*inputs))
    expected = {
        s.id: tuple(next(eager) for _ in s.call(s.inputs(), s.constants())) for s in samples
    }
    return Outcome(
        partitioner.report, expected, {e: _split(r, expected) for e, r in results.items()}
    )


def _split(
    results: Sequence[torch.Tensor], expected: dict[str, tuple[torch.Tensor, ...]]
) -> dict[str, list[torch.Tensor]]:
    values = iter(results)
    return {name: [next(values) for _ in tensors] for name, tensors in expected.items()}


def batches(samples: Sequence[Sample]) -> Iterator[tuple[Sample, ...]]:
    """Samples to lower together: one deployment target each."""
    groups: dict[tuple[Opset | None, bool], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.target_opset, sample.dynamic].append(sample)
    for group in groups.values():
        for start in range(0, len(group), _BATCH):
            yield tuple(group[start : start + _BATCH])


@functools.cache
def batch_outcome(samples: tuple[Sample, ...], flow: Flow) -> Outcome | None:
    """The outcome of lowering together, None if one of them makes it fail."""
    try:
        return lower_and_run(samples, flow, flow.engines)
    except Exception:  # noqa: BLE001 - each is then lowered by itself, and the culprit fails
        return None


def assert_close(outcome: Outcome, sample: Sample, precision: str) -> None:
    for results in outcome.actual.values():
        for actual, expected in zip(results[sample.id], outcome.expected[sample.id], strict=True):
            atol, rtol = ATOL_RTOL[precision if expected.is_floating_point() else "int32"]
            torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, equal_nan=True)

"""Lower a model of the table, and compare it with PyTorch."""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from models.rows import Row
from support.tolerances import sqnr_db
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.partition import DelegationReport

ENGINES = ("openvino", "reference")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Measured:
    """A row of the table.

    Attributes:
        partitions: Delegates of the program.
        on_cpu: Calls that stay on the CPU.
        seconds: From the exported program to the ``.pte``, of processor time.
        decibels: Of the worst output over eager PyTorch, by precision and engine.
        reasons: How often each op stays on the CPU, and why.
    """

    partitions: int
    on_cpu: int
    seconds: float
    decibels: Mapping[tuple[str, str], float]
    reasons: Mapping[tuple[str, str], int]


def measure(row: Row, precisions: Iterable[Precision], engines: Iterable[str]) -> Measured:
    """Lower and run a model.

    Args:
        row: The model.
        precisions: Compute precisions to lower it in, each anew; the last is timed.
        engines: Engines to run it on.
    """
    model, inputs = row.build()
    expected = expected_outputs(model, inputs)
    seconds, report, decibels = 0.0, None, {}
    for precision in precisions:
        pte, report, seconds = _lower(model, inputs, precision)
        for engine in engines:
            actual = runtime.load_program(pte, engine=engine).run("forward", list(inputs))
            order = _by_box if row.picks else list
            decibels[precision.value, engine] = worst_db(order(expected), order(actual))
    assert report is not None
    reasons = Counter((node.op, str(node.reason)) for node in report.undelegated)
    return Measured(
        len(report.partitions), len(report.undelegated), seconds, decibels, dict(reasons)
    )


@dataclass(frozen=True)
class MeasuredPrecision:
    """A row of the table of precisions.

    Attributes:
        fp16_db: Of the worst output over eager PyTorch, in plain fp16.
        auto_db: The same with precision ``auto``.
        islands: Islands of fp32 that ``auto`` makes.
        calls: Calls in these islands.
        fp16_seconds: From the exported program to the ``.pte``, in plain fp16, of processor time.
        auto_seconds: The same with precision ``auto``.
    """

    fp16_db: float
    auto_db: float
    islands: int
    calls: int
    fp16_seconds: float
    auto_seconds: float


def measure_precision(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> MeasuredPrecision:
    """Lower a model in fp16 and with precision ``auto``, and run both on the reference engine."""
    expected = expected_outputs(model, inputs)
    decibels: dict[Precision, float] = {}
    seconds: dict[Precision, float] = {}
    islands, calls = 0, 0
    for precision in (Precision.FLOAT16, Precision.AUTO):
        pte, report, seconds[precision] = _lower(model, inputs, precision)
        actual = runtime.load_program(pte, engine="reference").run("forward", list(inputs))
        decibels[precision] = worst_db(expected, actual)
        if report.precision is not None:
            islands, calls = len(report.precision.islands), len(report.precision.in_fp32)
    return MeasuredPrecision(
        decibels[Precision.FLOAT16],
        decibels[Precision.AUTO],
        islands,
        calls,
        seconds[Precision.FLOAT16],
        seconds[Precision.AUTO],
    )


def expected_outputs(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the outputs of eager PyTorch, in fp32."""
    with torch.no_grad():
        return _tensors(_in_fp32(model, inputs)(*map(_widened, inputs)))


def _lower(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], precision: Precision
) -> tuple[bytes, DelegationReport, float]:
    """Return the ``.pte`` of a model, the report, and seconds of processor time without export."""
    exported = torch.export.export(model, inputs)
    specs = CoreMLBackend.generate_compile_specs(compute_precision=precision)
    partitioner = CoreMLPartitioner(compile_specs=specs)
    start = time.process_time()
    manager = to_edge_transform_and_lower(
        exported,
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    pte = bytes(manager.to_executorch().buffer)
    return pte, partitioner.report, time.process_time() - start


def _by_box(detections: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return detections in an order of their labels and boxes, which rounding does not change.

    The order of scores changes where two are about equal.

    Args:
        detections: Boxes [rows, 4], scores and labels [rows], and what else has rows.
    """
    boxes, _, labels, *_ = detections
    rows = np.lexsort((boxes.sum(1).numpy(), labels.numpy()))
    return [tensor[rows] for tensor in detections]


def worst_db(expected: Iterable[torch.Tensor], actual: Iterable[torch.Tensor]) -> float:
    """The lowest ratio of signal to error of several outputs, in dB."""
    pairs = itertools.zip_longest(expected, actual)
    return min(sqnr_db(e.double().numpy(), a.double().numpy()) for e, a in pairs)


def _in_fp32(model: nn.Module, inputs: Iterable[torch.Tensor]) -> nn.Module:
    """Return the model, one of half precision as one that computes with its weights in fp32.

    Eager half precision rounds every value on the way, which Core ML need not do.
    """
    is_half = any(x.dtype in _HALF for x in inputs)
    return copy.deepcopy(model).float() if is_half else model


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _HALF else x


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)

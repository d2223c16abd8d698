"""Run one job in this process, by the functions that ``export``, ``verify`` and ``run`` call.

Everything that decides a result has one thread, so that numbers do not depend on how many jobs run
at a time or where. Only latency is measured with the engine's own number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coreml_delegate.exported.source_model import SourceModel
from coreml_delegate.formats.files import new_file
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition import CoreMLPartitioner, DelegationReport
from coreml_delegate.partition.export import export_model, lower_methods
from coreml_delegate.quantization import QuantizationAssignment
from coreml_delegate.quantization.apply import quantize_model
from coreml_delegate.quantization.configs import compile_keywords
from coreml_delegate.runtime import EngineOptions, load
from coreml_delegate.scripts.arguments import SAMPLES
from coreml_delegate.scripts.inputs.data_sets import DataSet, Sample, read_calibration
from coreml_delegate.scripts.inputs.input_files import random_inputs
from coreml_delegate.scripts.inputs.random_tensors import generator, resampled
from coreml_delegate.scripts.inputs.source import load_source
from coreml_delegate.scripts.model_comparison import compare
from coreml_delegate.scripts.program_arguments import median_latency
from coreml_delegate.scripts.sweeping.contents import machine
from coreml_delegate.scripts.sweeping.jobs import AUTO, Job, Model
from coreml_delegate.scripts.sweeping.sweep_file import assignment_of


def measure(job: Job, program: Path) -> dict[str, Any]:
    """Lower a model, and compare the program with it.

    Args:
        job: The job; paths in it are relative to the current folder.
        program: Where the ``.pte`` is written.

    Returns:
        Plain data: ``result``, which equal jobs have in common, and ``lower_seconds``.

    Raises:
        CoreMLDelegateError: The model cannot be loaded, quantized, lowered, run or compared.
    """
    source = _load(job.model)
    assignment = assignment_of(job.options, Path())
    started = time.perf_counter()
    report, in_float = _lower(source, job, assignment, program)
    seconds = time.perf_counter() - started
    # Loaded again, because quantization may have modified it.
    source = _load(job.model)
    engine = None if job.options.engine == AUTO else job.options.engine
    loaded = load(program, engine=engine, options=EngineOptions(threads=1))
    samples = _Counted(_samples(job.model, source))
    accuracies = compare(source, loaded, samples)
    result = {
        "program_bytes": program.stat().st_size,
        "sqnr_db": min((a.sqnr_db for a in accuracies.values()), default=math.inf),
        "max_abs_error": max((a.max_abs_error for a in accuracies.values()), default=0.0),
        "top1_agreement": _least(a.top1_agreement for a in accuracies.values()),
        "top5_agreement": _least(a.top5_agreement for a in accuracies.values()),
        "top1_accuracy": _least(a.hits.top1 for a in accuracies.values()),
        "top5_accuracy": _least(a.hits.top5 for a in accuracies.values()),
        "model_top1_accuracy": _least(a.model_hits.top1 for a in accuracies.values()),
        "model_top5_accuracy": _least(a.model_hits.top5 for a in accuracies.values()),
        "samples": samples.count,
        "engines": {name: list(types) for name, types in loaded.execution.engines.items()},
        "outputs": {
            name: {"sqnr_db": a.sqnr_db, "max_abs_error": a.max_abs_error}
            for name, a in accuracies.items()
        },
        "coverage": _coverage(report),
        "missing_kernels": sorted({node.op for node in report.without_kernel}),
        "in_float": dict(in_float),
    }
    return {"result": result, "lower_seconds": seconds}


def measure_latency(job: Job, program: Path, repeat: int) -> dict[str, Any]:
    """Run a program with random inputs, after one run that warms up.

    Returns:
        Plain data, the median in milliseconds.
    """
    loaded = load(program, engine=job.options.engine)
    inputs = random_inputs(loaded.inputs, generator(job.model.seed))
    loaded.run(inputs)
    return {
        "median_ms": median_latency(loaded, inputs, repeat),
        "runs": repeat,
        "engines": list(loaded.execution.engines),
        "machine": machine(),
    }


def _load(model: Model) -> SourceModel:
    weights = None if model.weights is None else Path(model.weights)
    return load_source(model.source, shapes=model.input_shape, weights=weights, seed=model.seed)


def _lower(
    source: SourceModel, job: Job, assignment: QuantizationAssignment | None, program: Path
) -> tuple[DelegationReport, Mapping[str, str]]:
    in_float: Mapping[str, str] = {}
    if assignment is not None:
        calibration = job.model.calibration if assignment.activations else None
        samples = (
            []
            if calibration is None
            else read_calibration(calibration, source, limit=job.model.calibration_samples)
        )
        quantized = quantize_model(source, assignment, samples)
        source, in_float = quantized.source, quantized.in_float
    target = job.options.opset
    compiling: dict[str, Any] = {
        "compute_precision": job.options.precision,
        "minimum_deployment_target": target,
    }
    if assignment is not None:
        compiling |= compile_keywords(assignment, target)
    specs = CompileOptions.from_keywords(**compiling).to_specs()
    partitioner = CoreMLPartitioner(compile_specs=specs)
    lowered = lower_methods({"forward": export_model(source)}, partitioner)
    with new_file(program) as file:
        lowered.write_to_file(file)
    return partitioner.report, in_float


def _samples(model: Model, source: SourceModel) -> Iterable[Sample]:
    if model.data is not None:
        return DataSet(model.data, source, limit=model.samples)
    return map(Sample, resampled(source.leaves, model.samples or SAMPLES, model.seed))


class _Counted:
    """Samples, counted while they are read."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples
        self.count = 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in self._samples:
            self.count += 1
            yield sample


def _least(shares: Iterable[float | None]) -> float | None:
    """Return the smallest share of any output; None if no output has classes."""
    return min((share for share in shares if share is not None), default=None)


def _coverage(report: DelegationReport) -> dict[str, int]:
    flops = report.flops
    return {
        "partitions": len(report.partitions),
        "nodes": len(report.nodes),
        "cpu_nodes": len(report.undelegated),
        "flops": flops.total,
        "cpu_flops": flops.total - flops.delegated,
    }

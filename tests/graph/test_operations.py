"""Every operation computes what NumPy or JAX does, with each element type, on each engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
from graph import operation_table
from graph.samples import SAMPLES, Sample
from support.graph_samples import computed
from support.tolerances import ATOL_RTOL

from coreml_delegate import graph
from coreml_delegate.graph.emitter import OPERATIONS
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.runtime import EngineOptions

ENGINES = ("reference", "openvino")
_OWN_CARRIERS = ("float32", "int32", "bool")
_OPTIONS = EngineOptions(exact_nan=True)
# What has no value by itself; sizes of tensors are those of test_symbolic_shapes.py.
_STRUCTURAL = {"argument", "parameter", "size"}


def _build(builder: graph.Builder, samples: list[Sample]) -> dict[str, graph.Value]:
    outputs: dict[str, graph.Value] = {}
    for number, sample in enumerate(samples):
        values = [
            builder.parameter(f"x{number}_{n}", np.asarray(a).dtype, np.shape(a))
            for n, a in enumerate(sample.arrays)
        ]
        returned = sample.build(builder, *values)
        results = returned if isinstance(returned, tuple | list) else (returned,)
        outputs |= {f"y{number}_{n}": value for n, value in enumerate(results)}
    return outputs


def _some(samples: list[Sample]) -> list[Sample]:
    """Half of the samples of types that others are carried as, and a share of the rest."""

    def is_kept(sample: Sample) -> bool:
        digest = zlib.crc32(f"{sample.operation} {sample.case} {sample.dtype}".encode())
        return digest % ((6 if is_many else 2) if sample.dtype in _OWN_CARRIERS else 12) == 0

    is_many = len(samples) > 50
    return list(filter(is_kept, samples)) or samples[:2]


@pytest.mark.share(4)
@pytest.mark.parametrize("of", [_some, pytest.param(list, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", SAMPLES)
def test_results_are_those_of_numpy(
    operation: str, of: Callable[[list[Sample]], list[Sample]]
) -> None:
    samples = computed(of(SAMPLES[operation]))
    # All in one graph: most of a conversion's time is not the graph's.
    builder = graph.Backend("reference").builder(operation)
    executable = builder.compile(_build(builder, samples))
    arrays = [np.asarray(array) for sample in samples for array in sample.arrays]
    wrong: list[str] = []
    for engine in ENGINES:
        results = executable.on(engine, _OPTIONS).run(*arrays)
        outputs = dict(zip(executable.outputs, results, strict=True))
        for number, sample in enumerate(samples):
            for n, expected in enumerate(sample.results):
                complaint = _difference(outputs[f"y{number}_{n}"], expected, sample)
                if complaint:
                    wrong.append(
                        f"{engine}, {sample.case}, {sample.dtype}, result {n}: {complaint}"
                    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_an_arithmetic_shift_repeats_the_highest_bit(dtype: str) -> None:
    """Unsigned integers are shifted like signed ones of the same bits."""
    x = np.array([1, np.iinfo(dtype).max // 2 + 1], dtype)
    builder = graph.Backend("reference").builder("shift")
    value = builder.parameter("x", dtype, x.shape)
    shift = builder.constant(np.ones_like(x))
    executable = builder.compile(builder.shift_right_arithmetic(value, shift))
    for engine in ENGINES:
        (result,) = executable.on(engine, _OPTIONS).run(x)
        signed = x.view(dtype.removeprefix("u"))
        np.testing.assert_array_equal(result, (signed >> 1).view(dtype))


def _difference(actual: np.ndarray, expected: np.ndarray, sample: Sample) -> str | None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype}{actual.shape} is not {expected.dtype}{expected.shape}"
    kind = DType.of(expected.dtype).storage_dtype
    atol, rtol = sample.tolerance or ATOL_RTOL[kind]
    if kind in ("int32", "bool"):
        atol, rtol = sample.tolerance or (0.0, 0.0)
    with np.errstate(invalid="ignore"):  # casting some NaNs, which are equal to any other here
        wide = actual.astype(np.float64), expected.astype(np.float64)
    if np.allclose(*wide, rtol, atol, equal_nan=True):
        return None
    return f"{actual.ravel()[:8]} is not {expected.ravel()[:8]}"


def test_every_operation_and_element_type_has_a_sample() -> None:
    missing = [
        f"{name} of {dtype.label}"
        for name, record in OPERATIONS.items()
        if name not in _STRUCTURAL
        for dtype in record.dtypes
        if dtype.label not in {sample.dtype for sample in SAMPLES.get(name, ())}
    ]
    assert not missing, "\n".join(sorted(missing))


def test_the_documented_table_is_that_of_the_records() -> None:
    text = operation_table.PAGE.read_text()
    assert operation_table.page(text) == text, "run python -m tests.graph.operation_table"

"""Coremltools' experimental inspector, validator, comparator and benchmarker on our engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mil import builder_program, ct, mb
from support.tolerances import ATOL_RTOL

from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.runtime import patch_coremltools
from coreml_delegate.targets import Opset

with quiet_import():
    from coremltools.models.ml_program.experimental import async_wrapper
    from coremltools.models.ml_program.experimental.debugging_utils import (
        MLModelComparator,
        MLModelInspector,
        MLModelValidator,
        compute_snr_and_psnr,
    )
    from coremltools.models.ml_program.experimental.perf_utils import MLModelBenchmarker

WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
X = np.array([[1.0, -2.0, 3.0]], np.float32)


def saved(folder: Path, weight: np.ndarray) -> str:
    """A model of three operations, ``log(relu(x @ weight.T) - 1)``, and its file."""

    def net(x):
        hidden = mb.relu(x=mb.linear(x=x, weight=weight, name="product"), name="positive")
        return mb.log(x=mb.sub(x=hidden, y=np.float32(1), name="shifted"), name="result")

    path = folder / f"model{len(list(folder.iterdir()))}.mlpackage"
    ct.convert(
        builder_program(net, {"x": X}, Opset.iOS16),
        convert_to="mlprogram",
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS16,
    ).save(str(path))
    return str(path)


@pytest.fixture(params=["openvino", "reference"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    path = saved(tmp_path, WEIGHT)
    with patch_coremltools(request.param):
        yield ct.models.MLModel(path)


async def inspected(model: Any) -> dict[str, np.ndarray]:
    inspector = MLModelInspector(model)
    return {
        name: value async for name, value in inspector.inspect(inputs={"x": X}) if value is not None
    }


def test_the_inspector_sees_the_values_of_operations(model: Any) -> None:
    values = asyncio.run(inspected(model))
    product = X @ WEIGHT.T
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = {
            "product": product,
            "positive": np.maximum(product, 0),
            "shifted": np.maximum(product, 0) - 1,
        }
    assert expected.keys() <= values.keys()
    for name, value in expected.items():
        atol, rtol = ATOL_RTOL["fp32"]
        np.testing.assert_allclose(values[name], value, rtol=rtol, atol=atol)


def test_the_validator_finds_the_first_operation_that_gives_nan(model: Any) -> None:
    found = asyncio.run(MLModelValidator(model).find_failing_ops_with_nan_output(inputs={"x": X}))
    assert [each.outputs[0].name for each in found] == ["result"]


def test_the_comparator_finds_the_operation_with_a_fault(model: Any, tmp_path: Path) -> None:
    wrong = WEIGHT.copy()
    wrong[1] += 3
    other = ct.models.MLModel(saved(tmp_path, wrong))

    def close(_: object, reference: np.ndarray, target: np.ndarray) -> bool:
        return bool(np.allclose(reference, target, equal_nan=True))

    comparator = MLModelComparator(reference_model=model, target_model=other)
    found = asyncio.run(comparator.find_failing_ops(inputs={"x": X}, compare_outputs=close))
    assert [each.outputs[0].name for each in found] == ["product"]
    right, faulty = X @ WEIGHT.T, X @ wrong.T
    snr, _ = compute_snr_and_psnr(right, faulty)
    assert snr < 20


def test_the_benchmarker_measures_loading_and_predicting(model: Any) -> None:
    benchmarker = MLModelBenchmarker(model)
    loaded = asyncio.run(benchmarker.benchmark_load(iterations=2))
    predicted = asyncio.run(benchmarker.benchmark_predict(iterations=3, inputs={"x": X}))
    assert len(loaded.samples) == 2
    assert len(predicted.samples) == 3
    assert all(sample > 0 for sample in (*loaded.samples, *predicted.samples))


def test_times_of_operations_add_up_to_the_prediction(model: Any) -> None:
    benchmarker = MLModelBenchmarker(model)
    found = asyncio.run(benchmarker.benchmark_operation_execution(inputs={"x": X}, iterations=3))
    measured = {each.spec.outputs[0].name: each.measurement.samples for each in found}
    assert {"product", "positive", "shifted", "result"} <= measured.keys()
    timed = [samples for samples in measured.values() if samples]
    assert all(len(samples) == 3 for samples in timed)
    totals = [sum(samples) for samples in zip(*timed, strict=True)]
    assert all(total > 0 for total in totals)
    # Sorted, the slowest first.
    medians = [e.measurement.statistics.median for e in found if e.measurement.samples]
    assert medians == sorted(medians, reverse=True)


def test_coremltools_is_as_before_afterwards() -> None:
    before = dict(vars(async_wrapper.LocalMLModelAsyncWrapper))
    with patch_coremltools():
        assert dict(vars(async_wrapper.LocalMLModelAsyncWrapper)) != before
    assert dict(vars(async_wrapper.LocalMLModelAsyncWrapper)) == before

"""Islands in fp32: the values of mixed programs, and the search for the smallest set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from support.lowering import Function, lower_unchecked
from support.tolerances import SQNR_FP16_GUARDED

from coreml_delegate import CoreMLBackend, runtime
from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.mil.mixed_precision import (
    MixedPrecision,
    fp16_ops,
    in_fp16,
    in_fp32,
)
from coreml_delegate.runtime.mil.widening import widen_function
from coreml_delegate.runtime.precision import (
    LoweredProgram,
    Measurements,
    Method,
    choose_fp32_calls,
    measure_method,
    measure_model,
    runs,
)
from coreml_delegate.runtime.precision.islands import (
    _reduce,  # pyright: ignore[reportPrivateUsage]
    _shortest_prefix,  # pyright: ignore[reportPrivateUsage]
    worst,
)

TARGET = SQNR_FP16_GUARDED


def _overflow(x: torch.Tensor) -> torch.Tensor:
    return torch.log((x.exp() * 5000).sum(-1) * 900)


def _pte(function: Callable[..., object], *inputs: torch.Tensor) -> bytes:
    specs = CoreMLBackend.generate_compile_specs()
    return bytes(lower_unchecked(Function(function), inputs, compile_specs=specs).pte)


X = torch.linspace(-2, 2, 32).reshape(2, 16)


@pytest.fixture(scope="module")
def pte() -> bytes:
    return _pte(_overflow, X)


@pytest.fixture(scope="module")
def model(pte: bytes) -> runtime.Model:
    program = runtime.load_program(pte, host="python", engine="reference")
    (delegate,) = program.delegates("forward")
    return delegate.model  # pyright: ignore[reportAttributeAccessIssue]


def _run(model: runtime.Model, function: object) -> Mapping[str, np.ndarray]:
    compiled = REFERENCE.compile(function, EngineOptions())  # pyright: ignore[reportArgumentType]
    return compiled({name: X.numpy() for name in model.input_names})


def test_without_islands_a_mixed_program_is_the_program(model: runtime.Model) -> None:
    mixed = _run(model, MixedPrecision(model.function).mix(()))
    for name, value in _run(model, model.function).items():
        np.testing.assert_array_equal(mixed[name], value)


def test_with_all_operations_in_fp32_a_mixed_program_computes_what_pytorch_does(
    model: runtime.Model,
) -> None:
    names = [op.outputs[0].name for op in fp16_ops(model.function)]
    (mixed,) = _run(model, MixedPrecision(model.function).mix(names)).values()
    np.testing.assert_allclose(mixed, _overflow(X), rtol=1e-5)
    (wide,) = _run(model, widen_function(model.function)).values()
    np.testing.assert_array_equal(mixed, wide)


def test_each_operation_is_compared_on_operands_from_fp32(model: runtime.Model) -> None:
    values: dict[str, np.ndarray] = {}
    function = MixedPrecision(model.function).compare()
    compiled = REFERENCE.compile(function, EngineOptions())
    arrays = {name: X.numpy() for name in model.input_names}
    compiled.run(arrays, listener=lambda value: values.update({value.name: value.array}))
    for op in fp16_ops(model.function):
        name = op.outputs[0].name
        narrow, wide = values[in_fp16(name)], values[in_fp32(name)]
        assert (narrow.dtype, wide.dtype) == (np.float16, np.float32)
        assert np.isfinite(wide).all()
        if op.type in ("mul", "exp"):  # one rounding of operands and of the result
            finite = np.isfinite(narrow)
            np.testing.assert_allclose(narrow[finite], wide[finite], rtol=4e-3)


def test_the_islands_restore_the_outputs_and_none_can_be_left_out(pte: bytes) -> None:
    measured = measure_method(pte, [[X]], min_sqnr_db=TARGET)
    assert not measured.holds
    assert worst(measured.before_db) == -math.inf
    assert measured.is_reached
    assert measured.is_minimal
    assert measured.islands
    assert all(island.without_db < TARGET for island in measured.islands)
    assert {"reduce_sum"} <= {island.op_type for island in measured.islands}
    lossy = {operation.name: operation for operation in measured.lossy}
    overflowing = lossy[next(o.name for o in measured.islands if o.op_type == "reduce_sum")]
    assert math.isinf(overflowing.fp16)
    assert 65504 < overflowing.fp32 < 1e6


def test_no_smaller_set_of_operations_reaches_the_target(model: runtime.Model) -> None:
    measured = measure_model(model, [[X]], min_sqnr_db=TARGET)
    islands = {island.name for island in measured.islands}
    names = [op.outputs[0].name for op in fp16_ops(model.function)]
    smaller = itertools.combinations(names, len(islands) - 1)
    for chosen in smaller:
        (output,) = _run(model, MixedPrecision(model.function).mix(chosen)).values()
        error = np.square(output.astype(np.float64) - _overflow(X).numpy()).sum()
        assert not error < np.square(_overflow(X).numpy()).sum() * 10 ** (-TARGET / 10)


def test_operations_without_a_name_are_not_reported_as_islands(model: runtime.Model) -> None:
    program = LoweredProgram(partial(measure_model, model, [[X]]), {})
    report = choose_fp32_calls(lambda _: program, TARGET)
    assert report.islands == ()
    assert not report.is_reached
    assert "reduce_sum" in {call.operation for call in report.lossy}


def test_variants_compute_as_functions_that_are_compiled_alone(model: runtime.Model) -> None:
    names = [op.outputs[0].name for op in fp16_ops(model.function)]
    mixed = MixedPrecision(model.function)
    arrays = {name: X.numpy() for name in model.input_names}
    for count in (3, len(names), 0, 2):
        chosen = names[-count:] if count else []
        variant = model.with_variant(mixed.mix(chosen)).compute(arrays)
        alone = _run(model, MixedPrecision(model.function).mix(chosen))
        for name, value in alone.items():
            np.testing.assert_array_equal(variant[name], value)


def test_a_search_that_ends_early_has_the_smallest_set_so_far(
    pte: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MIN_RUNS", 2)
    monkeypatch.setattr(runs, "MAX_RUNS", 2)
    early = measure_method(pte, [[X]], min_sqnr_db=TARGET)
    assert early.is_reached
    assert not early.is_minimal
    monkeypatch.undo()
    assert len(early.islands) >= len(measure_method(pte, [[X]], min_sqnr_db=TARGET).islands)


def test_a_higher_target_runs_no_set_twice(pte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = Measurements(Method(pte, None, "forward"), [[X]])
    first = measurements.measure(TARGET)
    assert measurements.measure(TARGET) == first
    higher = measurements.measure(TARGET + 15)
    assert higher == measure_method(pte, [[X]], min_sqnr_db=TARGET + 15)
    monkeypatch.setattr(Method, "run", None)  # fails when called
    assert measurements.measure(TARGET) == first
    assert measurements.measure(TARGET + 15) == higher


def test_a_program_that_holds_has_no_islands() -> None:
    pte = _pte(lambda x: torch.relu(x) * 2 + 1, X)
    measured = measure_method(pte, [[X]], min_sqnr_db=TARGET)
    assert measured.holds
    assert measured.is_minimal
    assert (measured.islands, measured.lossy) == ((), ())


def test_integers_and_booleans_have_to_be_equal() -> None:
    # In fp16 both numbers are 1000.5, and the first of equal numbers is the largest.
    x = torch.tensor([[1000.4, 1000.6]])
    measured = measure_method(_pte(lambda x: (x * 1.0003).argmax(-1), x), [[x]], min_sqnr_db=TARGET)
    assert list(measured.before_db.values()) == [-math.inf]
    assert list(measured.after_db.values()) == [math.inf]


def test_every_sample_counts(pte: bytes) -> None:
    small = torch.full((2, 16), -9.0)
    assert measure_method(pte, [[small]], min_sqnr_db=TARGET).holds
    assert not measure_method(pte, [[small], [X]], min_sqnr_db=TARGET).holds


def test_equal_programs_have_equal_islands(pte: bytes) -> None:
    first, second = (measure_method(pte, [[X]], min_sqnr_db=TARGET) for _ in range(2))
    assert first == second


def test_a_sample_of_the_wrong_shape_is_refused(pte: bytes) -> None:
    with pytest.raises(CoreMLDelegateError):
        measure_method(pte, [[torch.zeros(3)]], min_sqnr_db=TARGET)


@pytest.mark.parametrize("needed", [(), (0,), (15,), (3, 4), (1, 8, 15), tuple(range(16))])
def test_the_candidates_are_reduced_to_the_needed_units(needed: tuple[int, ...]) -> None:
    runs = 0

    def suffices(units: Iterable[int]) -> bool:
        nonlocal runs
        runs += 1
        return set(needed) <= set(units)

    assert _shortest_prefix(suffices, range(16)) == max(needed, default=-1) + 1
    assert runs <= 1 + math.log2(16)
    runs = 0
    assert sorted(_reduce(suffices, range(16))) == list(needed)
    count = max(len(needed), 1)
    assert runs <= min(2 * count * (math.log2(16 / count) + 1.5), 1.5 * 16)

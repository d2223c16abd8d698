"""The graph builder does what GoMLX's conformance tests want of a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graph.gomlx import GROUPS, SLOW, Case
from graph.gomlx.not_carried import NOT_CARRIED, WRONG, Refusal
from graph.gomlx.standard_operations import (
    OTHER_OPERATIONS,
    STANDARD_OPERATIONS,
    StandardOperation,
)
from support.tolerances import ATOL_RTOL

from coreml_delegate import graph
from coreml_delegate.errors import GraphError, InputError
from coreml_delegate.graph.emitter import OPERATIONS
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.runtime import Model

ENGINES = ("reference", "openvino")
# GoMLX's interface, less complex numbers, FFT and normalization by the batch.
_SUPPORTED = 94


def _marks(group: str) -> list[pytest.MarkDecorator]:
    """One process compiles all cases of a group in one graph."""
    in_one_process = pytest.mark.xdist_group(f"gomlx {group}")
    return [in_one_process, pytest.mark.slow] if group in SLOW else [in_one_process]


_CASES = [
    pytest.param(group, number, id=f"{group}-{case}", marks=_marks(group))
    for group, cases in GROUPS.items()
    for number, case in enumerate(cases)
]


def _build(cases: list[Case]) -> graph.Executable:
    """Compile cases as one graph: most of a conversion's time is not the graph's."""
    builder = graph.Backend("reference").builder()
    outputs: dict[str, graph.Value] = {}
    for number, case in enumerate(cases):
        shapes = case.shapes or tuple(array.shape for array in case.arrays)
        values = [
            builder.parameter(
                f"x{number}_{n}",
                array.dtype,
                [f"{size}_{number}" if isinstance(size, str) else size for size in shape],
            )
            for n, (array, shape) in enumerate(zip(case.arrays, shapes, strict=True))
        ]
        returned = case.build(builder, *values)
        results = returned if isinstance(returned, tuple | list) else (returned,)
        outputs |= {f"y{number}_{n}": value for n, value in enumerate(results)}
    return builder.compile(outputs)


@functools.cache
def _executable(group: str) -> graph.Executable:
    return _build(GROUPS[group])


@functools.cache
def _results(group: str, engine: str) -> list[list[list[np.ndarray]]]:
    """Return the results by case, run and output; cases with fewer runs repeat their last."""
    cases, executable = GROUPS[group], _executable(group)
    executable.model = Model.from_files(executable.files, engine=engine)
    found: list[list[list[np.ndarray]]] = [[] for _ in cases]
    for turn in range(max(len(case.runs) for case in cases)):
        given = [array for case in cases for array in case.runs[: turn + 1][-1][0]]
        outputs = iter(executable.run(*given))
        for case, results in zip(cases, found, strict=True):
            results.append([next(outputs) for _ in case.expected])
    return found


@pytest.mark.share(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("group", "number"), _CASES)
def test_a_case_of_gomlx(group: str, number: int, engine: str) -> None:
    case = GROUPS[group][number]
    for (_, expected), actual in zip(case.runs, _results(group, engine)[number], strict=False):
        for wanted, result in zip(expected, actual, strict=True):
            assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
            dtype = DType.of(wanted.dtype)
            atol, rtol = case.tolerance or ATOL_RTOL[dtype.storage_dtype]
            np.testing.assert_allclose(
                result.astype(np.float64), wanted.astype(np.float64), rtol, atol
            )


@pytest.mark.parametrize("refusal", [*NOT_CARRIED, *WRONG], ids=lambda refusal: refusal.test)
def test_what_is_refused_is_refused_with_a_message(refusal: Refusal) -> None:
    with pytest.raises(GraphError, match=refusal.message):
        refusal.call(graph.Backend().builder())


def test_the_standard_operations_are_those_of_gomlx() -> None:
    names = {operation.name for operation in STANDARD_OPERATIONS}
    assert len(names) == len(STANDARD_OPERATIONS)
    assert sum(not operation.is_refused for operation in STANDARD_OPERATIONS) >= _SUPPORTED


@pytest.mark.parametrize(
    "standard", [*STANDARD_OPERATIONS, *OTHER_OPERATIONS], ids=lambda standard: standard.name
)
def test_an_operation_of_gomlx_is_there_or_refused(standard: StandardOperation) -> None:
    capabilities = graph.Backend().capabilities()
    for name in standard.operations:
        if standard.is_refused:
            assert isinstance(capabilities[name], str)
            assert name not in OPERATIONS
        else:
            assert name in OPERATIONS
            assert isinstance(capabilities[name], tuple)


@functools.cache
def _random_bits(count: int) -> graph.Executable:
    builder = graph.Backend("reference").builder()
    seed = builder.parameter("seed", "uint32", (4,))
    return builder.compile(builder.rng_bit_generator(seed, "uint32", (count,))[1])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_random_bits_are_even(engine: str) -> None:
    """``SpecialOps/RNGBitsGenerator``: each tenth of the range has its share, within a tenth."""
    count, bins = 100_000, 10
    executable = _random_bits(count)
    executable.model = Model.from_files(executable.files, engine=engine)
    (bits,) = executable.run(np.zeros(4, np.uint32))
    counts, _ = np.histogram(bits, bins, (0, 2**32))
    assert np.abs(counts - count // bins).max() <= count // bins / 10


def _negation() -> graph.Executable:
    builder = graph.Backend("reference").builder()
    return builder.compile(builder.negate(builder.parameter("x", "float32", (3,))))


@pytest.mark.parametrize(
    "arrays",
    [
        [np.ones(3, np.float32)] * 2,
        [np.ones(4, np.float32)],
        [np.ones(3, np.uint32)],
    ],
    ids=["number", "shape", "element type"],
)
def test_wrong_arrays_are_refused(arrays: list[Any]) -> None:
    """``Exec/WrongNumberOfParameters`` and ``Exec/IncompatibleParameters``."""
    with pytest.raises(InputError):
        _negation().run(*arrays)


def _nested(builder: graph.Builder, function: Callable[..., Any]) -> graph.Closure:
    return builder.closure("outer", lambda: builder.call(builder.closure("inner", function)))


def test_closures_may_be_in_closures() -> None:
    """``Functions/ClosureCreation``, ``NestedClosures`` and ``NamedFunctionCreation``."""
    builder = graph.Backend("reference").builder()
    closure = _nested(builder, lambda: builder.constant([1.0, 2.0]))
    assert closure.name == "outer"
    assert closure.scope.outer is builder.scope
    assert builder.compile(builder.call(closure)).run()[0].tolist() == [1, 2]

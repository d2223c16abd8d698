"""Delegates of small programs are called without Python, and give what Python gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.damage import native_arguments
from support.gates import needs_compiler
from support.kept_and_flexible import (
    Counting,
    Scaled,
    Writing,
    counting_steps,
    lower_scaled,
    lower_stateful,
)
from support.lowering import PRECISIONS, Function, lower
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate import CoreMLBackend, graph, runtime
from coreml_delegate.errors import ExecutionError, InputError
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime import delegate
from coreml_delegate.runtime.delegate import CoreMLDelegate
from coreml_delegate.runtime.engines.openvino.session import inference, native_calls
from coreml_delegate.runtime.native import NATIVE_RESIZE, NATIVE_RUN

ATOL, RTOL = ATOL_RTOL["fp32"]
STATE_ATOL, STATE_RTOL = ATOL_RTOL["fp16"]
HOSTS = ["python", pytest.param("stock", marks=needs_compiler)]
pytestmark = needs_compiler


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 23 - 11).to(dtype)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "perceptron": (_mlp, (_numbers(2, 8),)),
    "tensors that are bound": (
        lambda: Function(lambda x, y: torch.relu(x) - y * 2),
        (_numbers(80, 90), _numbers(80, 90) / 7),
    ),
    "integers of 64 bits": (
        lambda: Function(lambda n, m: (n + m, n * 2)),
        (_numbers(3, 4, dtype=torch.int64), _numbers(3, 4, dtype=torch.int64)),
    ),
    "integers of 32 bits": (
        lambda: Function(lambda n, x: (n + 2, x + n)),
        (_numbers(7, dtype=torch.int32), _numbers(7)),
    ),
    "scalars": (lambda: Function(lambda x: (x.sum(), x * x.mean())), (_numbers(5),)),
    "inputs in another order": (
        lambda: Function(lambda x, y, z: (z - x, torch.tanh(y), x / 3)),
        (_numbers(4), _numbers(2, 3), _numbers(4) * 2),
    ),
    "a delegate between operators": (
        lambda: Function(lambda x: torch.asinh(torch.relu(torch.asinh(x)) + x)),
        (_numbers(3, 5),),
    ),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the delegates' calls that are made in Python."""
    made: list[str] = []
    original = CoreMLDelegate.__call__

    def call(self: CoreMLDelegate, inputs: Any) -> Any:
        made.append(self.model.function.name)
        return original(self, inputs)

    monkeypatch.setattr(CoreMLDelegate, "__call__", call)
    return made


def _load(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    host: str,
    precision: Precision = Precision.FLOAT32,
    **options: Any,
) -> Any:
    specs = CoreMLBackend.generate_compile_specs(compute_precision=precision)
    pte = lower(module, inputs, compile_specs=specs).pte
    return runtime.load_program(pte, host=host, engine="openvino", **options)


@pytest.mark.share(3)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_calls_enter_no_python_and_compute_the_same(
    precision: Precision, case: str, host: str, threads: int, calls: list[str]
) -> None:
    make, inputs = CASES[case]
    module = make().eval()
    options = runtime.EngineOptions(threads=threads)
    program = _load(module, inputs, host, precision, options=options)
    atol, rtol = ATOL_RTOL["fp32" if precision is Precision.FLOAT32 else "fp16"]
    for change in (0, 1):  # other numbers in other memory
        given = tuple(x + change for x in inputs)
        expected = module(*given)
        results = program.run("forward", given)
        for result, wanted in zip(
            results, expected if isinstance(expected, tuple) else (expected,), strict=True
        ):
            assert result.dtype == wanted.dtype
            torch.testing.assert_close(result, wanted, atol=atol, rtol=rtol)
    assert calls == []


def _called(call: Any, *arrays: np.ndarray) -> None:
    arguments = native_arguments(*arrays)
    assert NATIVE_RUN(call.run)(call.model, arguments, len(arrays), None, None) == 0


def test_every_half_is_converted_exactly() -> None:
    """An output of half precision becomes a tensor of single precision, as in Python."""
    module, x = Function(torch.neg), torch.zeros(1 << 16)
    program = _load(module, (x,), "python", Precision.FLOAT16)
    (delegate,) = program.delegates("forward")
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    result = np.empty(1 << 16, np.float32)
    _called(delegate.native, halves.astype(np.float32), result)
    np.testing.assert_array_equal(result, -halves.astype(np.float32))


def test_tensors_of_half_precision_are_converted_as_numpy_does() -> None:
    _program, call = _native(Function(torch.neg), (torch.zeros(1 << 18),))
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        middles = (halves.astype(np.float32) + np.roll(halves, -1).astype(np.float32)) / 2
        near = [np.nextafter(middles, np.float32(end)) for end in (np.inf, -np.inf)]
        values = np.concatenate([halves.astype(np.float32), middles, *near])
        rounded = values.astype(np.float16)
    half, single = np.empty(values.shape, np.float16), np.empty(values.shape, np.float32)
    _called(call, values, half)
    np.testing.assert_array_equal(half, -rounded)
    _called(call, rounded, single)
    np.testing.assert_array_equal(single, -rounded.astype(np.float32))


@pytest.mark.parametrize("host", HOSTS)
def test_results_stay_as_they_are(host: str) -> None:
    program = _load(Function(lambda x: x * 2), (_numbers(90, 90),), host)
    (first,) = program.run("forward", (torch.ones(90, 90),))
    (second,) = program.run("forward", (torch.zeros(90, 90),))
    assert (first.unique().tolist(), second.unique().tolist()) == ([2.0], [0.0])


@pytest.mark.parametrize("host", HOSTS)
def test_integers_beyond_32_bits_are_refused_in_words(host: str, calls: list[str]) -> None:
    program = _load(Function(lambda n: n + 1), (_numbers(3, dtype=torch.int64),), host)
    with pytest.raises(InputError, match=r"beyond int32: got 1 to 4294967296"):
        program.run("forward", (torch.tensor([1, 2, 2**32]),))
    assert calls == ["main"]
    (result,) = program.run("forward", (torch.tensor([1, 2, 3]),))
    assert result.tolist() == [2, 3, 4]
    assert calls == ["main"]


@pytest.mark.parametrize("host", HOSTS)
def test_transposed_inputs_are_called_in_some_way(host: str) -> None:
    program = _load(Function(lambda x: x * 3), (_numbers(4, 6),), host)
    x = _numbers(6, 4).t()
    (result,) = program.run("forward", (x,))
    torch.testing.assert_close(result, x * 3)


def test_large_blobs_are_called_in_python(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delegate, "SMALL", 100)
    _load(_mlp(), (_numbers(2, 8),), "python").run("forward", (_numbers(2, 8),))
    assert calls == ["main"]


@pytest.mark.parametrize("host", HOSTS)
def test_states_are_read_and_written(host: str, calls: list[str]) -> None:
    program = runtime.load_program(lower_stateful(Counting()), host=host, engine="openvino")
    eager = Counting()
    for step in counting_steps():
        for result, wanted in zip(program.run("forward", step), eager(*step), strict=True):
            torch.testing.assert_close(result, wanted, atol=STATE_ATOL, rtol=STATE_RTOL)
    assert calls == []


@pytest.mark.parametrize("host", HOSTS)
def test_states_are_saved_restored_and_reset(host: str, calls: list[str]) -> None:
    program = runtime.load_program(lower_stateful(Counting()), host=host, engine="openvino")
    first, *rest = counting_steps()
    program.run("forward", first)
    saved = program.snapshot_state()
    expected = [program.run("forward", step)[1] for step in rest]
    program.restore_state(saved)
    assert [program.run("forward", step)[1].tolist() for step in rest] == [
        rows.tolist() for rows in expected
    ]
    program.reset_state()
    count, *_ = program.run("forward", first)
    torch.testing.assert_close(count, 2 * first[0][0, 0], atol=STATE_ATOL, rtol=STATE_RTOL)
    assert calls == []


@pytest.mark.parametrize("host", HOSTS)
def test_two_programs_have_states_of_their_own(host: str) -> None:
    pte = lower_stateful(Counting())
    one, other = (runtime.load_program(pte, host=host, engine="openvino") for _ in range(2))
    first, second, *_ = counting_steps()
    one.run("forward", first)
    count, *_ = other.run("forward", second)
    torch.testing.assert_close(count, 2 * second[0][0, 0], atol=STATE_ATOL, rtol=STATE_RTOL)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("outside", [[0, 6], [-7, 0]])
def test_a_row_that_does_not_exist_is_refused_in_words(
    host: str, outside: list[int], calls: list[str]
) -> None:
    program = runtime.load_program(lower_stateful(Writing()), host=host, engine="openvino")
    (x, places), *_ = counting_steps()
    program.run("forward", (x, places))
    before = program.snapshot_state()
    assert [value.any() for value in before.values()] == [True]
    assert calls == []
    with pytest.raises(ExecutionError, match=r"row written to state .* does not exist: got \["):
        program.run("forward", (x + 1, torch.tensor(outside)))
    assert calls == ["main"]
    for name, value in program.snapshot_state().items():
        np.testing.assert_array_equal(value, before[name])


def _check_scaled(program: Any, rows: int, columns: int) -> None:
    inputs = _numbers(rows, 30) / 3, _numbers(columns, 4) / 7
    for result, wanted in zip(program.run("forward", inputs), Scaled()(*inputs), strict=True):
        torch.testing.assert_close(result, wanted, atol=ATOL, rtol=RTOL)


_DIM = torch.export.Dim


@pytest.mark.parametrize("host", HOSTS)
def test_shapes_within_bounds_enter_no_python(host: str, calls: list[str]) -> None:
    sizes = ({0: _DIM("rows", min=2, max=900)}, {0: _DIM("others", min=2, max=50)})
    program = runtime.load_program(lower_scaled(sizes), host=host, engine="openvino")
    # The largest are bound, the others copied.
    for rows, columns in ((2, 2), (900, 50), (6, 6), (7, 3), (899, 4), (2, 2)):
        _check_scaled(program, rows, columns)
    assert calls == []
    with pytest.raises(InputError, match="901 in dimension 0, at most 900"):
        program.run("forward", (torch.randn(901, 30), torch.randn(6, 4)))


class ScaledAndCounted(Scaled):
    """Keeps how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count.add_(1)
        return (*super().forward(x, y), self.count + 0)


def test_a_call_whose_outputs_cannot_be_resized_changes_no_state() -> None:
    sizes = ({0: _DIM("rows", min=2, max=9)}, {0: _DIM("others", min=2, max=9)})
    pte = lower_scaled(sizes, ScaledAndCounted())
    program = runtime.load_program(pte, engine="openvino")
    (delegate,) = program.delegates("forward")
    names = delegate.model.output_names
    given = {name: np.ones((3, width), np.float32) for name, width in (("x", 30), ("y", 4))}
    results = delegate.model.predict(given, delegate.model.make_state())
    order = [n for n, _, _ in delegate._inputs]
    outputs = [np.empty([1] * results[name].ndim, np.float32) for name in names]
    arguments = native_arguments(*(given[name] for name in order), *outputs)
    call = delegate.model.native_call(order, names, delegate.state)
    asked: list[tuple[int, ...]] = []

    def refuse(_: object, n: int, sizes: Any, rank: int) -> None:
        asked.append((n, *sizes[:rank]))

    for resize in (NATIVE_RESIZE(refuse), None):
        assert NATIVE_RUN(call.run)(call.model, arguments, len(arguments), resize, None) == 1
    assert asked
    assert not any(value.any() for value in delegate.state.snapshot().values())


@pytest.mark.parametrize("host", HOSTS)
def test_equal_sizes_are_asked_for_without_python(host: str, calls: list[str]) -> None:
    rows = _DIM("rows", min=2, max=90)
    program = runtime.load_program(
        lower_scaled(({0: rows}, {0: rows})), host=host, engine="openvino"
    )
    for size in (6, 2, 90):
        _check_scaled(program, size, size)
    assert calls == []
    with pytest.raises(InputError, match=r"expected 5 \(equal to dimension 0 of"):
        program.run("forward", (torch.randn(5, 30), torch.randn(6, 4)))


def test_sizes_given_by_formulas_need_python(calls: list[str]) -> None:
    rows = _DIM("rows", min=2, max=90)
    pte = lower_scaled(({0: rows}, {0: 2 * rows}), others=12)
    program = runtime.load_program(pte, host="python", engine="openvino")
    _check_scaled(program, 3, 6)
    assert calls == ["main"]
    (delegate,) = program.delegates("forward")
    assert delegate.python_reason == "sizes of its inputs are given by formulas"


@pytest.mark.parametrize("host", HOSTS)
def test_python_is_entered_once_for_each_listed_shape(host: str, calls: list[str]) -> None:
    sizes = ({0: _DIM.AUTO(min=2, max=900)}, {0: _DIM.AUTO(min=2, max=5)})
    listed = {"x": [[900, 30], [6, 30], [2, 30]], "y": [[4, 4], [5, 4], [2, 4]]}
    pte = lower_scaled(sizes, listed=listed)
    program = runtime.load_program(pte, host=host, engine="openvino")
    shapes = [(x[0], y[0]) for x, y in zip(*listed.values(), strict=True)]
    for rows, columns in (*shapes, *reversed(shapes), *shapes):
        _check_scaled(program, rows, columns)
    assert len(calls) == 2  # the first is there from the start
    with pytest.raises(InputError, match="not enumerated together"):
        program.run("forward", (torch.randn(900, 30), torch.randn(5, 4)))


def test_listed_shapes_beyond_those_kept_are_called_in_python(calls: list[str]) -> None:
    listed = {"x": [[n, 30] for n in range(2, 12)], "y": [[n, 4] for n in range(2, 12)]}
    sizes = ({0: _DIM.AUTO(min=2, max=11)}, {0: _DIM.AUTO(min=2, max=11)})
    program = runtime.load_program(lower_scaled(sizes, listed=listed), engine="openvino")
    for _ in range(2):
        for size in range(2, 12):
            _check_scaled(program, size, size)
    assert len(calls) == 7 + 2 + 2


def test_the_reference_engine_has_no_native_calls(calls: list[str]) -> None:
    program = runtime.load_program(lower(_mlp(), (_numbers(2, 8),)).pte, engine="reference")
    program.run("forward", (_numbers(2, 8),))
    assert calls == ["main"]


def test_without_a_compiler_calls_are_made_in_python(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    native_calls._library.cache_clear()
    try:
        program = _load(_mlp(), (_numbers(2, 8),), "python")
        (result,) = program.run("forward", (_numbers(2, 8),))
        (delegate,) = program.delegates("forward")
    finally:
        native_calls._library.cache_clear()
    torch.testing.assert_close(result, _mlp()(_numbers(2, 8)), atol=ATOL, rtol=RTOL)
    assert calls == ["main"]
    assert "the C++ compiler that CXX names was not found" in delegate.python_reason


def _native(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
    program = _load(module, inputs, "python")
    (loaded,) = program.delegates("forward")
    assert loaded.native is not None
    return program, loaded.native


@pytest.mark.parametrize(
    "arrays",
    [
        (np.ones((2, 8), np.float32),),
        (np.ones((2, 8), np.float32), np.empty((2, 4), np.float32), np.empty(1, np.float32)),
        (np.ones((2, 8), np.float64), np.empty((2, 4), np.float32)),
        (np.ones((2, 8), np.float32), np.empty((2, 4), np.int32)),
        (np.ones((8, 2), np.float32), np.empty((2, 4), np.float32)),
        (np.ones((2, 8), np.float32), np.empty((2, 4, 1), np.float32)),
        (np.ones(16, np.float32), np.empty((2, 4), np.float32)),
    ],
)
def test_calls_that_do_not_fit_are_declined_and_touch_nothing(arrays: Any) -> None:
    _program, call = _native(_mlp(), (_numbers(2, 8),))
    before = [array.copy() for array in arrays]
    arguments = native_arguments(*arrays)
    assert NATIVE_RUN(call.run)(call.model, arguments, len(arrays), None, None) == 1
    for array, kept in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), kept.view(np.uint8))


def _in_threads(function: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=function, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def executable(monkeypatch: pytest.MonkeyPatch) -> graph.Executable:
    """A graph whose calls fail where they are made through OpenVINO's Python package."""
    builder = graph.Backend("openvino").builder("small")
    x = builder.parameter("x", "float32", (3, 200, 50))
    n = builder.parameter("n", "int32", ())
    factor = builder.broadcast_in_dim(builder.convert(n, "float32"), x.shape, ())
    outputs = {
        "scaled": builder.multiply(x, factor),
        "following": builder.add(n, builder.constant(1, "int32")),
        "flag": builder.greater(x, builder.constant(np.zeros(x.shape, np.float32))),
    }
    executable = builder.compile(outputs)

    def fail(*_: Any) -> Any:
        raise AssertionError("called in Python")

    monkeypatch.setattr(inference._Request, "run", fail)
    return executable


def test_graphs_are_called_natively_with_arrays_of_any_strides(
    executable: graph.Executable,
) -> None:
    x = np.random.default_rng(0).standard_normal((50, 200, 3)).astype(np.float32).T
    for n in (3, -2):
        scaled, following, flag = executable.run(x, np.int32(n))
        np.testing.assert_allclose(scaled, x * n, rtol=RTOL)
        assert following == n + 1
        np.testing.assert_array_equal(flag, x > 0)


def test_graphs_are_called_from_several_threads(executable: graph.Executable) -> None:
    x = np.ones((3, 200, 50), np.float32)
    wrong: list[int] = []

    def repeat(seed: int) -> None:
        for _ in range(200):
            scaled, following, _flag = executable.run(x, np.int32(seed))
            if not (scaled == seed).all() or following != seed + 1:
                wrong.append(seed)

    _in_threads(repeat, 4)
    assert wrong == []


def test_eight_threads_of_a_program_get_their_own_results() -> None:
    """Delegates, and an operator between them, whose results lie in memory that is planned."""
    module = Function(lambda x: torch.asinh(torch.tanh(x) * 3) * x)
    program = _load(module, (_numbers(4, 6),), "python")
    wrong: list[int] = []

    def repeat(seed: int) -> None:
        x = _numbers(4, 6) + seed
        expected = module(x)
        for _ in range(1000):
            (result,) = program.run("forward", [x])
            if not torch.allclose(result, expected, RTOL, ATOL):
                wrong.append(seed)

    _in_threads(repeat, 8)
    assert wrong == []


def test_eight_threads_get_their_own_results() -> None:
    module = _mlp()
    _program, call = _native(module, (_numbers(2, 8),))
    run, wrong = NATIVE_RUN(call.run), list[int]()

    def repeat(seed: int) -> None:
        x = np.full((2, 8), seed, np.float32)
        expected = module(torch.from_numpy(x)).detach().numpy()
        y = np.empty((2, 4), np.float32)
        arguments = native_arguments(x, y)
        for _ in range(1000):
            y.fill(np.nan)
            if run(call.model, arguments, 2, None, None) or not np.allclose(
                y, expected, ATOL, RTOL
            ):
                wrong.append(seed)

    _in_threads(repeat, 8)
    assert wrong == []

"""The OpenVINO engine around its ops: boundary, states, threads, shapes, refusals."""

from __future__ import annotations

import ctypes
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openvino as ov
import pytest
from support import handmade, mil
from support.mil import ct, mb, types
from support.tolerances import ATOL_RTOL

from coreml_delegate import graph
from coreml_delegate.errors import (
    EngineUnavailableError,
    ExecutionError,
    InputError,
    UnsupportedOpError,
)
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO, engine
from coreml_delegate.runtime.engines.openvino.session.compilation import compile_function
from coreml_delegate.runtime.mil.reader import read_program
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)


def _compile(function, inputs, opset=Opset.iOS18, options=None):
    main = mil.main(mil.build(function, inputs, opset))
    return OPENVINO.compile(main, options or EngineOptions())


def _read(program):
    """A builder program with states or flexible shapes, serialized and read back."""
    message = mil.load(program, weights_dir="", specification_version=9)
    return mil.main(read_program(message.SerializeToString(), {}))


def _double(x):
    return mb.mul(x=x, y=np.asarray(2, dtype=types.nptype_from_builtin(x.dtype)))


# Below and above the size from which arrays are bound instead of copied.
@pytest.mark.parametrize("shape", [(2, 3), (64, 1024)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_inputs_may_have_any_strides_and_outputs_own_their_memory(shape, dtype):
    base = _RNG.integers(-9, 9, shape).astype(dtype)
    compiled = _compile(_double, {"x": base})
    frozen = base.copy()
    frozen.flags.writeable = False
    for x in (base, np.asfortranarray(base), np.repeat(base, 2, 1)[:, ::2], frozen):
        (first,) = compiled({"x": x}).values()
        (second,) = compiled({"x": x}).values()
        assert first.dtype == dtype
        assert first.flags.c_contiguous
        assert not np.shares_memory(first, second)
        np.testing.assert_array_equal(first, base * 2)
        np.testing.assert_array_equal(x, base)


@pytest.mark.parametrize("shape", [(2, 3), (64, 1024)])
def test_an_input_changed_in_place_is_read_again(shape):
    x = np.ones(shape, np.float32)
    compiled = _compile(_double, {"x": x})
    compiled({"x": x})
    x += 1
    (result,) = compiled({"x": x}).values()
    np.testing.assert_array_equal(result, np.full(shape, 4))


def test_views_of_one_memory_are_told_apart():
    x = _RNG.standard_normal((256, 256)).astype(np.float32)
    compiled = _compile(_double, {"x": x})
    # The same address and shape, and yet another matrix.
    for view in (x, x[:], x.T, x[:], x.view()):
        (result,) = compiled({"x": view}).values()
        np.testing.assert_array_equal(result, view * 2)
    x += 1
    (result,) = compiled({"x": x[:]}).values()
    np.testing.assert_array_equal(result, x * 2)


def test_outputs_keep_declaration_order_and_may_repeat_values():
    x = np.ones((2, 2), np.float32)

    def function(x):
        total = mb.add(x=x, y=x)
        return mb.relu(x=total), total, mb.identity(x=x)

    main = mil.main(mil.build(function, {"x": x}))
    results = OPENVINO.compile(main, EngineOptions())({"x": x})
    assert list(results) == [feature.name for feature in main.outputs]
    assert [int(value[0, 0]) for value in results.values()] == [2, 2, 1]


def test_weights_outlive_the_program():
    weight = _RNG.standard_normal((512, 512)).astype(np.float32)
    x = _RNG.standard_normal((1, 512)).astype(np.float32)
    compiled = _compile(lambda x: mb.linear(x=x, weight=weight), {"x": x})
    gc.collect()
    (result,) = compiled({"x": x}).values()
    atol, rtol = ATOL_RTOL["fp32"]
    np.testing.assert_allclose(result, x @ weight.T, atol=atol * 100, rtol=rtol)


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``. Source: mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated_bytes():
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def _python_objects():
    return len(gc.get_objects())


@pytest.mark.parametrize(
    ("measure", "limit"),
    [
        pytest.param(
            _allocated_bytes,
            4096,
            marks=pytest.mark.skipif(
                sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
                reason="counts what glibc has allocated",
            ),
        ),
        (_python_objects, 1),
    ],
)
def test_repeated_compilations_leak_nothing(measure, limit):
    x = np.ones((2, 3), np.float32)
    main = mil.main(mil.build(_double, {"x": x}))

    def cycles(count):
        for _ in range(count):
            OPENVINO.compile(main, EngineOptions())({"x": x})
        gc.collect()
        return measure()

    before, count = cycles(5), 20
    assert cycles(count) - before < limit * count


def test_threads_may_call_at_the_same_time():
    weight = _RNG.standard_normal((256, 256)).astype(np.float32)
    compiled = _compile(
        lambda x: mb.relu(x=mb.linear(x=x, weight=weight)), {"x": np.zeros((64, 256), np.float32)}
    )
    inputs = [_RNG.standard_normal((64, 256)).astype(np.float32) for _ in range(8)]
    expected = [next(iter(compiled({"x": x}).values())) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            results = pool.map(lambda x: next(iter(compiled({"x": x}).values())), inputs)
            for result, answer in zip(results, expected, strict=True):
                np.testing.assert_array_equal(result, answer)


def _counter():
    @mb.program(
        input_specs=[
            mb.TensorSpec((2,), dtype=types.fp16),
            mb.StateTensorSpec((2,), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(x, total):
        before = mb.read_state(input=total)
        after = mb.coreml_update_state(state=total, value=mb.add(x=before, y=x))
        return mb.add(x=after, y=before)

    return _read(program)


def test_states_persist_and_are_independent():
    main = _counter()
    compiled = OPENVINO.compile(main, EngineOptions())
    first, second = compiled.make_state(), compiled.make_state()
    x = {"x": np.array([1, 2], np.float16)}
    (name,) = first.snapshot()
    for step in range(1, 4):
        (result,) = compiled(x, first).values()
        np.testing.assert_array_equal(result, x["x"] * (2 * step - 1))
        np.testing.assert_array_equal(first.snapshot()[name], x["x"] * step)
    assert first.snapshot()[name].dtype == np.float16
    np.testing.assert_array_equal(second.snapshot()[name], [0, 0])


def test_a_state_of_another_kind_is_refused():
    compiled = OPENVINO.compile(_counter(), EngineOptions())
    with pytest.raises(InputError, match="expected a state from make_state"):
        compiled({"x": np.zeros(2, np.float16)})
    stateless = _compile(_double, {"x": np.zeros(2, np.float32)})
    assert stateless.make_state() is None
    with pytest.raises(InputError, match="expected None"):
        stateless({"x": np.zeros(2, np.float32)}, compiled.make_state())


def test_run_time_shapes():
    size = mil.mb.TensorSpec((ct.RangeDim(1, 9).symbol, 4), dtype=types.fp32)

    @mb.program(input_specs=[size], opset_version=ct.target.iOS17)
    def program(x):
        flat = mb.reshape(x=x, shape=[-1])
        return mb.softmax(x=x), mb.concat(values=[flat, flat], axis=0)

    main = _read(program)
    compiled = OPENVINO.compile(main, EngineOptions())
    for rows in (1, 5, 3):
        x = _RNG.standard_normal((rows, 4)).astype(np.float32)
        softmax, doubled = compiled({"x": x}).values()
        np.testing.assert_allclose(softmax.sum(-1), np.ones(rows), rtol=1e-5)
        np.testing.assert_array_equal(doubled, np.tile(x.reshape(-1), 2))


def test_unsupported_returns_every_reason_once():
    ops = [
        handmade.op("classify", "label", probabilities="x"),
        handmade.op("relu", "positive", x="label"),
        handmade.op("pad", "padded", x="positive", pad="x", mode=handmade.text("circular")),
        handmade.op("relu", "y", x="padded"),
    ]
    main = handmade.function(ops, ["y"])
    first, second = OPENVINO.unsupported(main)
    assert first.startswith("classify (output 'label'): no translation in opset CoreML")
    assert second.startswith("pad (output 'padded'): unknown pad mode")
    with pytest.raises(UnsupportedOpError, match=r"classify .*reference engine"):
        OPENVINO.compile(main, EngineOptions())


class _WithoutGeneratedKernels:
    """A core that compiles nothing with generated kernels; ``refused`` counts such attempts."""

    def __init__(self) -> None:
        self.refused = 0

    def get_property(self, device: str, name: str) -> object:
        return ov.Core().get_property(device, name)

    def compile_model(self, model: ov.Model, device: str, config: dict[str, object]) -> object:
        if config.get("SNIPPETS_MODE") != "DISABLE":
            self.refused += 1
            raise RuntimeError("not enough registers")
        return ov.Core().compile_model(model, device, config)


def test_what_generated_kernels_cannot_do_is_compiled_without_them():
    x = _RNG.standard_normal((2, 3)).astype(np.float32)
    main = mil.main(mil.build(_double, {"x": x}))
    core = _WithoutGeneratedKernels()
    (result,) = compile_function(core, main, EngineOptions(), None)({"x": x}).values()
    np.testing.assert_array_equal(result, 2 * x)
    assert core.refused == 1


def test_a_failure_of_openvino_at_run_time_is_an_execution_error():
    compiled = _compile(
        lambda x, s: mb.reshape(x=x, shape=s),
        {"x": np.zeros((2, 3), np.float32), "s": np.array([3, 2], np.int32)},
    )
    with pytest.raises(ExecutionError, match="OpenVINO failed"):
        compiled({"x": np.zeros((2, 3), np.float32), "s": np.array([4, 2], np.int32)})
    (result,) = compiled(
        {"x": np.ones((2, 3), np.float32), "s": np.array([6, 1], np.int32)}
    ).values()
    assert result.shape == (6, 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_option_reaches_openvino(threads):
    compiled = _compile(
        _double, {"x": np.zeros(2, np.float32)}, options=EngineOptions(threads=threads)
    ).compiled
    streams = compiled.get_property("NUM_STREAMS")
    # Of one thread each, as many as there are CPUs; or one stream of all that are asked for.
    expected = streams if threads == 1 else threads
    assert compiled.get_property("INFERENCE_NUM_THREADS") == expected
    assert threads == 1 or streams == 1
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


def test_a_missing_openvino_package_makes_the_engine_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    engine._core.cache_clear()
    assert "cannot be imported" in OPENVINO.unavailable_reason()
    main = mil.main(mil.build(_double, {"x": np.zeros(2, np.float32)}))
    with pytest.raises(EngineUnavailableError, match="pip install openvino"):
        OPENVINO.compile(main, EngineOptions())


@pytest.mark.parametrize("size", [4, 90, 300], ids=["copied", "copied in Python", "bound"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_inputs_that_are_outputs_are_returned_as_they_are(size, is_alone):
    """OpenVINO would compute with the memory that is bound to such an output."""
    builder = graph.Backend("openvino").builder("passing on")
    x = builder.parameter("x", "float32", (size, size))
    executable = builder.compile({"input": x} if is_alone else {"input": x, "y": builder.tanh(x)})
    for shift in range(3):
        array = np.random.default_rng(shift).standard_normal((size, size)).astype(np.float32)
        given, *computed = executable.run(array)
        np.testing.assert_array_equal(given, array)
        for result in computed:
            np.testing.assert_allclose(result, np.tanh(array), rtol=1e-5, atol=1e-6)

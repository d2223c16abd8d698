"""Graphs with precision ``auto``: nodes in fp32 by measurement, compared with NumPy in float64."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tolerances import SQNR_FP16_GUARDED, sqnr_db

from coreml_delegate import graph, runtime
from coreml_delegate.errors import GraphError, InputError, OptionError
from coreml_delegate.graph import Builder, Executable, Value
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.runtime.program.pte import PteProgram

ENGINES = ("reference", "openvino")
RANDOM = np.random.RandomState(0)
SMALL = RANDOM.randn(2, 16).astype(np.float32)
LARGE = (RANDOM.rand(2, 64) * 100 + 500).astype(np.float32)


def _sum(b: Builder, x: Value) -> Value:
    scaled = b.multiply(b.exponential(x), b.constant(5000.0))
    return b.log(b.reduce_sum(scaled, (1,)))


def _variance(b: Builder, x: Value) -> Value:
    share = b.constant(1 / 64)
    mean = b.reduce_sum(b.multiply(x, share), (1,))
    return b.subtract(b.reduce_sum(b.multiply(b.square(x), share), (1,)), b.square(mean))


def _softplus(b: Builder, x: Value) -> Value:
    exponential = b.exponential(b.multiply(x, b.constant(20.0)))
    return b.log(b.add(exponential, b.constant(1.0)))


def _ratio(b: Builder, x: Value) -> Value:
    exponential = b.exponential(b.multiply(x, b.constant(7.0)))
    return b.divide(exponential, b.add(exponential, b.constant(3e5)))


def _product(b: Builder, x: Value) -> Value:
    return b.sqrt(b.multiply(b.multiply(x, b.constant(300.0)), x))


Function = Callable[[Builder, Value], Value]

LOST: dict[str, tuple[Function, Callable[[np.ndarray], np.ndarray], np.ndarray]] = {
    "a sum beyond 65504": (_sum, lambda x: np.log((np.exp(x) * 5000).sum(1)), SMALL),
    "a difference of large squares": (_variance, lambda x: x.var(1), LARGE),
    "a logarithm of a large power": (_softplus, lambda x: np.logaddexp(20 * x, 0), SMALL),
    "a ratio of large powers": (
        _ratio,
        lambda x: np.exp(7 * x) / (np.exp(7 * x) + 3e5),
        SMALL,
    ),
    "a root of a product": (_product, lambda x: np.sqrt(300) * x, LARGE),
}
"""Functions that plain fp16 loses, with their values in NumPy and an input."""


def _builder(precision: str = "auto", **options: Any) -> Builder:
    return graph.Backend("reference", precision=precision, **options).builder()


def _compiled(function: Function, x: np.ndarray, **options: Any) -> Executable:
    b = _builder()
    value = function(b, b.parameter("x", "float32", x.shape))
    return b.compile(value, precision_data=[(x,)], **options)


def _sqnr(executable: Executable, engine: str, want: np.ndarray, *arrays: Any) -> float:
    (got,) = executable.on(engine).run(*arrays)
    return sqnr_db(want, got)


def test_rounding_of_constants_is_measured() -> None:
    random = np.random.default_rng(0)
    weight = 1 + 1e-3 * random.standard_normal((64, 64), np.float32)
    x = random.standard_normal((4, 64), np.float32)
    x -= x.mean(-1, keepdims=True)

    def product(b: Builder, value: Value) -> Value:
        return b.dot(value, b.constant(weight))

    executable = _compiled(product, x)
    assert executable.precision is not None
    assert executable.precision.before_db < SQNR_FP16_GUARDED
    want = x.astype(np.float64) @ weight.astype(np.float64)
    for engine in ENGINES:
        assert _sqnr(executable, engine, want, x) >= SQNR_FP16_GUARDED
    again = executable.measure_precision([(x,)])
    assert again.before_db == executable.precision.after_db


@pytest.mark.parametrize("name", LOST)
def test_nodes_that_lose_their_numbers_compute_in_fp32(name: str) -> None:
    function, reference, x = LOST[name]
    want = reference(x.astype(np.float64))
    b = _builder("float16")
    plain = b.compile(function(b, b.parameter("x", "float32", x.shape)))
    assert _sqnr(plain, "reference", want, x) < SQNR_FP16_GUARDED
    executable = _compiled(function, x)
    for engine in ENGINES:
        assert _sqnr(executable, engine, want, x) >= SQNR_FP16_GUARDED
    assert executable.precision is not None
    assert executable.precision.before_db < SQNR_FP16_GUARDED
    assert executable.precision.is_reached
    assert executable.precision.is_minimal
    assert all(c.without_db < SQNR_FP16_GUARDED for c in executable.precision.islands)


def test_other_nodes_compute_in_fp16() -> None:
    weight = RANDOM.randn(16, 16).astype(np.float32) / 4

    def layer_and_sum(b: Builder, x: Value) -> Value:
        return _sum(b, b.dot_general(x, b.constant(weight), contracting=((1,), (0,))))

    executable = _compiled(layer_and_sum, SMALL)
    assert executable.precision is not None
    names = {name.partition("#")[0] for name in executable.precision.in_fp32}
    assert names == {"reduce_sum", "log"}
    assert 0 < executable.precision.share < 0.5
    types = {op.type: op.outputs[0].type for op in executable.model.function.block.ops}
    assert "fp16" in str(types["linear"])
    assert "fp32" in str(types["reduce_sum"])


def test_a_report_names_the_line_that_made_a_node() -> None:
    executable = _compiled(_sum, SMALL)
    assert executable.precision is not None
    line = _sum.__code__.co_firstlineno + 2
    assert {call.place for call in executable.precision.islands} == {f"test_precision.py:{line}"}


def test_equal_graphs_and_inputs_give_equal_bytes() -> None:
    first, second = (_compiled(_variance, LARGE).files for _ in range(2))
    assert {name: bytes(content) for name, content in first.items()} == {
        name: bytes(content) for name, content in second.items()
    }


def test_the_samples_decide() -> None:
    b = _builder()
    value = _sum(b, b.parameter("x", "float32", SMALL.shape))
    small = [(np.full_like(SMALL, -9),), (np.full_like(SMALL, -8),)]
    precision = b.compile(value, precision_data=small).precision
    assert precision is not None
    assert precision.islands == ()
    precision = b.compile(value, precision_data=[*small, (SMALL,)]).precision
    assert precision is not None
    assert precision.islands


def test_a_pte_names_its_nodes_in_fp32_and_runs(tmp_path: Path) -> None:
    executable = _compiled(_sum, SMALL)
    executable.save(tmp_path / "sum.pte")
    (delegate,) = PteProgram.open(tmp_path / "sum.pte").methods[0].delegates
    options = CompileOptions.from_pairs(delegate.compile_specs)
    assert executable.precision is not None
    assert options.precision is Precision.FLOAT16
    assert set(options.keep_fp32.nodes) == executable.precision.in_fp32
    program = runtime.load(tmp_path / "sum.pte", host="python", engine="reference")
    (output,) = program.run([torch.from_numpy(SMALL)]).values()
    want = LOST["a sum beyond 65504"][1](SMALL.astype(np.float64))
    assert output is not None
    assert sqnr_db(want, output.numpy()) >= SQNR_FP16_GUARDED


def test_a_scalar_input_beyond_fp16_is_read_in_fp32() -> None:
    b = _builder()
    x, scale = b.parameter("x", "float32", SMALL.shape), b.parameter("scale", "float32")
    value = b.multiply(x, b.multiply(scale, b.constant(1e-4)))
    arrays = SMALL, np.float32(200_000)
    executable = b.compile(value, precision_data=[arrays])
    for engine in ENGINES:
        assert _sqnr(executable, engine, SMALL * 20.0, *arrays) >= SQNR_FP16_GUARDED
    assert executable.precision is not None
    assert "scale" in executable.precision.in_fp32


def test_sizes_may_be_symbolic_and_parameters_states() -> None:
    b = _builder()
    x = b.parameter("x", "float32", ("n", 16))
    total = b.parameter("total", "float32", (16,))
    new_total = b.add(total, b.constant(np.ones(16, np.float32)))
    rows = b.add(_sum(b, x), b.reduce_sum(new_total, (0,)))
    samples = [(SMALL,), (np.concatenate([SMALL, SMALL, SMALL]),)]
    executable = b.compile(rows, states={total: new_total}, precision_data=samples)
    for engine in ENGINES:
        on_engine = executable.on(engine)
        state = on_engine.make_state()
        for turn, (sample,) in enumerate(samples):
            (got,) = on_engine.run(sample, state=state)
            want = LOST["a sum beyond 65504"][1](sample.astype(np.float64)) + 16 * (turn + 1)
            assert sqnr_db(want, got) >= SQNR_FP16_GUARDED


def test_a_closure_is_part_of_the_node_that_calls_it() -> None:
    b = _builder()
    x = b.parameter("x", "float32", SMALL.shape)
    product = b.reduce(  # (1 + y) * (1 + z) - 1
        b.abs(b.multiply(x, b.constant(4.0))),
        b.constant(0.0),
        (1,),
        lambda y, z: b.add(b.add(y, z), b.multiply(y, z)),
    )
    executable = b.compile(b.log(product), precision_data=[(SMALL,)])
    want = np.log(np.prod(1 + 4 * np.abs(SMALL.astype(np.float64)), axis=1) - 1)
    for engine in ENGINES:
        assert _sqnr(executable, engine, want, SMALL) >= SQNR_FP16_GUARDED
    assert executable.precision is not None
    assert executable.precision.before_db < SQNR_FP16_GUARDED
    assert {name.partition("#")[0] for name in executable.precision.in_fp32} == {"reduce", "log"}


def test_nodes_that_become_one_operation_are_chosen_together() -> None:
    def log_of_mean(b: Builder, x: Value) -> Value:
        total = b.reduce_sum(b.multiply(x, b.constant(300.0)), (1,))
        return b.log(b.multiply(total, b.constant(1 / 64)))

    executable = _compiled(log_of_mean, LARGE)
    want = np.log((LARGE.astype(np.float64) * 300).mean(1))
    for engine in ENGINES:
        assert _sqnr(executable, engine, want, LARGE) >= SQNR_FP16_GUARDED
    assert executable.precision is not None
    nodes = {call.operation: call.nodes for call in executable.precision.islands}
    assert [name.partition("#")[0] for name in nodes["reduce_mean"]] == ["reduce_sum", "multiply"]


def test_a_missed_target_is_a_warning_and_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    b = _builder()
    x = b.parameter("x", "float32", SMALL.shape)
    # The operations of a loop stay in fp16.
    _, value = b.while_(
        lambda n, _: b.less(n, b.constant(3)),
        lambda n, y: (b.add(n, b.constant(1)), b.multiply(b.multiply(y, y), b.constant(1e-3))),
        b.constant(0),
        b.multiply(x, b.constant(1000.0)),
    )
    with caplog.at_level(logging.WARNING):
        precision = b.compile(value, precision_data=[(SMALL,)]).precision
    assert precision is not None
    assert not precision.is_reached
    assert "the report lists the operations that lose most" in caplog.text


def test_integers_alone_need_no_fp32() -> None:
    b = _builder()
    x = b.parameter("x", "int32", (3,))
    executable = b.compile(b.multiply(x, x), precision_data=[(np.arange(3, dtype=np.int32),)])
    assert executable.precision is not None
    assert (executable.precision.before_db, executable.precision.islands) == (math.inf, ())
    assert executable.run(np.arange(3, dtype=np.int32))[0].tolist() == [0, 1, 4]


def test_integers_that_follow_from_floats_have_to_be_equal() -> None:
    # In fp16 both numbers are 1000.5, and the first of equal numbers is the largest.
    x = np.float32([[1000.4, 1000.6]])
    executable = _compiled(lambda b, v: b.arg_max(b.multiply(v, b.constant(1.0003)), 1), x)
    assert executable.precision is not None
    assert executable.precision.before_db == -math.inf
    assert executable.precision.is_reached
    for engine in ENGINES:
        assert executable.on(engine).run(x)[0].tolist() == [1]


def test_a_graph_without_inputs_needs_no_samples() -> None:
    b = _builder()
    large = b.multiply(b.constant([60_000.0]), b.constant([2.0]))
    executable = b.compile(large)
    assert executable.precision is not None
    assert executable.run()[0].tolist() == [120_000.0]


def test_plain_fp16_is_measured_on_demand() -> None:
    b = _builder("float16")
    executable = b.compile(_sum(b, b.parameter("x", "float32", SMALL.shape)))
    assert executable.precision is None
    report = executable.measure_precision([(SMALL,)])
    assert report.before_db == -math.inf
    assert report.after_db >= SQNR_FP16_GUARDED
    assert {name.partition("#")[0] for name in report.in_fp32} == {"reduce_sum", "log"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, OptionError, "example inputs: got no example inputs, expected arrays for x"),
        ({"precision_data": []}, OptionError, "got an empty list"),
        ({"precision_data": SMALL}, OptionError, "precision_data must be a list of samples"),
        ({"precision_data": [SMALL]}, OptionError, "precision_data must be a list of samples"),
        ({"precision_data": [(SMALL, SMALL)]}, InputError, "wrong number of arrays: got 2"),
        ({"precision_data": [(LARGE,)]}, InputError, "'x' has the wrong shape"),
        ({"precision_data": [(SMALL,)], "min_sqnr_db": math.nan}, OptionError, "finite number"),
        ({"precision_data": [(SMALL,)], "min_sqnr_db": -5}, OptionError, "above 0: got int -5"),
    ],
)
def test_wrong_samples_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    b = _builder()
    x = b.parameter("x", "float32", SMALL.shape)
    with pytest.raises(error, match=message):
        b.compile(_sum(b, x), **options)


def test_samples_are_for_precision_auto() -> None:
    b = _builder("float16")
    x = b.parameter("x", "float32", SMALL.shape)
    with pytest.raises(OptionError, match="is for precision auto: got precision float16"):
        b.compile(x, precision_data=[(SMALL,)])
    with pytest.raises(GraphError, match="nothing to compile"):
        _builder().compile([], precision_data=[(SMALL,)])

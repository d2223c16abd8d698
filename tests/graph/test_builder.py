"""Parameters, constants, compilation and the executable, whatever the operations are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coreml_delegate import graph, runtime
from coreml_delegate.errors import GraphError, InputError, LoweringError, OptionError
from coreml_delegate.graph import Builder, Dimension
from coreml_delegate.options.model_interface import ModelInterface


@pytest.fixture
def builder() -> Builder:
    return graph.Backend("reference").builder("test")


def _double(builder: Builder, *, dtype: str = "float32", shape: Any = (2, 3)) -> graph.Executable:
    x = builder.parameter("x", dtype, shape)
    return builder.compile({"y": builder.add(x, x)})


@pytest.mark.parametrize("name", ["", "1x", "_x", "a b", "a.b", "é", "state", "int32"])
def test_names_of_parameters_are_identifiers(builder: Builder, name: str) -> None:
    with pytest.raises(GraphError, match="not a name for a parameter"):
        builder.parameter(name, "float32", ())


def test_two_parameters_cannot_have_one_name(builder: Builder) -> None:
    builder.parameter("x", "float32", ())
    with pytest.raises(GraphError, match="has a parameter of this name: got 'x'"):
        builder.parameter("x", "int32", (2,))


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16", "float8_e5m2", "string"])
def test_types_that_core_ml_cannot_carry_are_refused(builder: Builder, dtype: str) -> None:
    with pytest.raises(GraphError, match="no such element type"):
        builder.parameter("x", dtype, (2,))


def test_a_negative_size_is_refused(builder: Builder) -> None:
    with pytest.raises(GraphError, match="a size is negative: got -2"):
        builder.parameter("x", "float32", (3, -2))


def test_one_dimension_has_one_range(builder: Builder) -> None:
    builder.parameter("x", "float32", (Dimension("n", 1, 8),))
    with pytest.raises(GraphError, match="'n' has two ranges"):
        builder.parameter("y", "float32", (Dimension("n", 1, 9),))


@pytest.mark.parametrize(("least", "most"), [(0, 4), (3, 2)])
def test_a_range_is_not_empty(least: int, most: int) -> None:
    with pytest.raises(GraphError, match="impossible range"):
        Dimension("n", least, most)


def test_constants_beyond_32_bits_are_refused(builder: Builder) -> None:
    with pytest.raises(GraphError, match="int64 values are beyond 32 bits"):
        builder.constant(np.array([2**40]))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (1.5, "float32"),
        (2, "int32"),
        ([True], "bool"),
        (np.float16(1), "float16"),
        ([[1], [2]], "int32"),
    ],
)
def test_python_numbers_become_32_bit_constants(builder: Builder, given: Any, dtype: str) -> None:
    assert builder.constant(given).dtype.label == dtype


def test_values_of_another_graph_are_refused(builder: Builder) -> None:
    other = graph.Backend().builder().parameter("x", "float32", (2,))
    own = builder.parameter("x", "float32", (2,))
    with pytest.raises(GraphError, match="add: an operand belongs to another graph"):
        builder.add(own, other)
    with pytest.raises(GraphError, match="is not a value of this graph"):
        builder.compile(other)


def test_errors_say_which_types_an_operation_takes(builder: Builder) -> None:
    flag = builder.parameter("flag", "bool", (2,))
    with pytest.raises(GraphError, match="subtract does not take this element type: got bool"):
        builder.subtract(flag, flag)


def test_operands_have_one_type_and_shapes_that_fit(builder: Builder) -> None:
    x = builder.parameter("x", "float32", (2, 3))
    with pytest.raises(GraphError, match="element types of operands differ"):
        builder.add(x, builder.parameter("i", "int32", (2, 3)))
    with pytest.raises(GraphError, match=r"got float32\[2, 3\] and float32\[3, 2\]"):
        builder.add(x, builder.parameter("t", "float32", (3, 2)))
    with pytest.raises(GraphError, match="shapes of operands differ"):
        builder.add(x, builder.parameter("v", "float32", (3,)))


def test_an_empty_compilation_is_refused(builder: Builder) -> None:
    with pytest.raises(GraphError, match="nothing to compile"):
        builder.compile([])


def test_names_of_outputs_are_identifiers(builder: Builder) -> None:
    x = builder.parameter("x", "float32", (2,))
    with pytest.raises(GraphError, match="not a name for an output: got 'state'"):
        builder.compile({"state": x})


def test_an_output_is_not_named_as_a_parameter(builder: Builder) -> None:
    x = builder.parameter("x", "float32", (2,))
    with pytest.raises(GraphError, match="an output has the name of a parameter"):
        builder.compile({"x": x})


def test_outputs_may_be_parameters_constants_and_one_value_twice(builder: Builder) -> None:
    x = builder.parameter("x", "int16", ())
    executable = builder.compile([x, builder.constant([1, 2]), builder.add(x, x), x])
    outputs = executable.run(np.int16(-3))
    assert [array.tolist() for array in outputs] == [-3, [1, 2], -6, -3]
    assert [str(array.dtype) for array in outputs] == ["int16", "int32", "int16", "int16"]


@pytest.mark.parametrize("engine", ["reference", "openvino"])
def test_a_graph_without_parameters_runs(engine: str) -> None:
    builder = graph.Backend(engine).builder()
    assert builder.compile(builder.constant([[1.5]])).run()[0].tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((), "wrong number of arrays: got 0, expected 1: x"),
        ((np.zeros((2, 3), np.float32),) * 2, "wrong number of arrays: got 2"),
        (
            (np.zeros((3, 2), np.float32),),
            r"'x' has the wrong shape: got \[3, 2\], expected \[2, 3\]",
        ),
        ((np.zeros((2, 3), np.float64),), "'x': wrong element type: got float64, expected float32"),
        ((np.zeros((2, 3), np.int32),), "'x': wrong element type: got int32"),
        (("text",), "'x': wrong element type"),
    ],
)
def test_wrong_arrays_are_refused(builder: Builder, arrays: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _double(builder).run(*arrays)


def test_64_bit_integers_are_checked_where_they_enter(builder: Builder) -> None:
    executable = _double(builder, dtype="int64", shape=(2,))
    assert executable.run(np.array([1, -5]))[0].tolist() == [2, -10]
    with pytest.raises(InputError, match="'x': int64 values are beyond 32 bits"):
        executable.run(np.array([1, 2**31]))


def test_symbolic_sizes_are_checked_and_agree(builder: Builder) -> None:
    n = Dimension("n", 2, 4)
    x, y = builder.parameter("x", "float32", (n, 3)), builder.parameter("y", "float32", ("n", 1))
    executable = builder.compile(builder.multiply(x, y))
    (output,) = executable.run(np.ones((3, 3), np.float32), np.full((3, 1), 2, np.float32))
    assert output.tolist() == [[2.0] * 3] * 3
    for rows, other in ((1, 1), (5, 5), (3, 4)):
        with pytest.raises(InputError, match=r"has the wrong shape.*n \(2 to 4"):
            executable.run(np.ones((rows, 3), np.float32), np.ones((other, 1), np.float32))


def test_arrays_of_other_frameworks_are_taken(builder: Builder) -> None:
    (output,) = _double(builder).run(torch.full((2, 3), 1.5))
    assert isinstance(output, np.ndarray)
    assert output.tolist() == [[3.0] * 3] * 2


def test_buffers_go_in_and_out_without_a_copy(builder: Builder) -> None:
    executable = _double(builder)
    array = np.ones((2, 3), np.float32)
    buffer = graph.Backend().buffer(array)
    assert np.shares_memory(buffer.stored, array)
    (output,) = executable.execute(buffer)
    (again,) = executable.execute(output)
    assert np.array_equal(np.asarray(again), 4 * array)
    assert torch.from_dlpack(again).tolist() == (4 * array).tolist()
    assert np.shares_memory(again.numpy(), again.stored)


def test_one_executable_serves_several_threads(builder: Builder) -> None:
    executable = _double(builder, shape=(64,))
    arrays = [np.full(64, n, np.float32) for n in range(100)]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda array: executable.run(array)[0], arrays))
    assert all(np.array_equal(y, 2 * x) for x, y in zip(arrays, outputs, strict=True))


def _bytes(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_equal_graphs_are_saved_as_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        executable = _double(graph.Backend().builder())
        executable.save(tmp_path / f"{name}.mlpackage")
        executable.save(tmp_path / f"{name}.pte")
    assert _bytes(tmp_path / "a.mlpackage") == _bytes(tmp_path / "b.mlpackage")
    assert (tmp_path / "a.pte").read_bytes() == (tmp_path / "b.pte").read_bytes()


def test_a_saved_model_computes_the_same(builder: Builder, tmp_path: Path) -> None:
    _double(builder).save(tmp_path / "double.mlpackage")
    model = runtime.load_mlpackage(tmp_path / "double.mlpackage")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(model.predict({"x": x})["y"], 2 * x)


@pytest.mark.parametrize("host", ["python", "stock"])
def test_a_pte_has_the_types_that_cross_a_delegate(host: str, tmp_path: Path) -> None:
    builder = graph.Backend().builder()
    x = builder.parameter("x", "float32", (Dimension("n", 1, 4), 2))
    i = builder.parameter("i", "int8", (2,))
    builder.compile([builder.add(x, x), builder.add(i, i)]).save(tmp_path / "graph.pte")
    program = runtime.load_program(tmp_path / "graph.pte", host=host)
    for rows in (1, 3):
        given = torch.ones(rows, 2), torch.tensor([100, 3], dtype=torch.int32)
        doubled, wrapped = program.run("forward", given)
        assert doubled.tolist() == [[2.0, 2.0]] * rows
        assert wrapped.tolist() == [-56, 6]


def test_files_of_other_kinds_are_refused(builder: Builder, tmp_path: Path) -> None:
    executable = _double(builder)
    with pytest.raises(OptionError, match=r"unknown kind of file.*\.mlpackage or \.pte"):
        executable.save(tmp_path / "graph.onnx")
    with pytest.raises(OptionError, match=r"only an \.mlpackage has an interface: got .*pte"):
        executable.save(tmp_path / "graph.pte", ModelInterface())
    assert not any(tmp_path.iterdir())


def test_tensors_without_elements_are_no_features(builder: Builder, tmp_path: Path) -> None:
    x, e = builder.parameter("x", "float32", (2,)), builder.parameter("e", "float32", (0, 3))
    executable = builder.compile([builder.add(x, x), e])
    doubled, empty = executable.run(np.ones(2, np.float32), np.ones((0, 3), np.float32))
    assert doubled.tolist() == [2, 2]
    assert empty.shape == (0, 3)
    with pytest.raises(LoweringError, match="'e' has no elements"):
        executable.save(tmp_path / "graph.pte")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graph.Backend("gpu"), "unknown engine: got 'gpu'"),
        (lambda: graph.Backend(compute_units="TPU"), "unknown compute unit: got 'TPU'"),
        (lambda: graph.Backend(target="iOS3"), "unknown deployment target"),
        (lambda: graph.Backend(precision="bf16"), "unknown precision"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_options_of_coremltools_are_taken() -> None:
    import coremltools as ct

    backend = graph.Backend(
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        target=ct.target.iOS17,
        precision=ct.precision.FLOAT16,
    )
    assert backend.compile_options.compute_unit.value == "cpu_and_ne"
    assert backend.opset.name == "iOS17"
    assert backend.compile_options.precision.value == "float16"


def test_a_state_is_replaced_after_each_run() -> None:
    for engine in ("reference", "openvino"):
        builder = graph.Backend(engine).builder()
        total = builder.parameter("total", "float16", (2,))
        x = builder.parameter("x", "float16", (2,))
        after = builder.add(total, x)
        executable = builder.compile({"y": after}, states={total: after})
        one, other = executable.make_state(), executable.make_state()
        x = np.array([1, 2], np.float16)
        assert executable.run(x, state=one)[0].tolist() == [1, 2]
        assert executable.run(x, state=one)[0].tolist() == [2, 4]
        assert executable.run(x, state=other)[0].tolist() == [1, 2]
        with pytest.raises(InputError, match="the graph has states"):
            executable.run(x)

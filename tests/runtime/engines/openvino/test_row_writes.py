"""Partial state updates: equal to the reference engine, and without a copy of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import mil
from support.mil import ct, mb, types
from support.tolerances import ATOL_RTOL

from coreml_delegate.errors import ExecutionError, InputError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.session.state_tensors import Interface
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.targets import Opset

_HEADS, _ROWS, _WIDTH = 2, 12, 4
_CACHE = (_HEADS, _ROWS, _WIDTH)
_CALLS = 3

Reader = Callable[..., Any]
"""From the cache as written and a query [heads, 3, width] to what a program returns."""


def _function(reader: Reader, rows: int, *, axis: int = 1, times: int = 1) -> Function:
    """A program that writes ``rows`` rows of a cache at ``places``, and reads it."""
    written = tuple(rows if place == axis else size for place, size in enumerate(_CACHE))

    @mb.program(
        input_specs=[
            mb.TensorSpec(written, types.fp16),
            mb.TensorSpec((rows,), types.int32),
            mb.TensorSpec((_HEADS, 3, _WIDTH), types.fp16),
            mb.StateTensorSpec(_CACHE, types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(new: Any, places: Any, query: Any, cache: Any) -> Any:
        value = mb.read_state(input=cache)
        for _ in range(times):
            value = mb.scatter(
                data=value,
                indices=places,
                updates=new,
                axis=axis,
                mode="update",
                validate_indices=False,
            )
            new, places = mb.mul(x=new, y=np.float16(2)), mb.add(x=places, y=np.int32(1))
        value = mb.coreml_update_state(state=cache, value=value)
        return reader(value, query)

    return mil.main(mil.serialized(program, Opset.iOS18))


def _run(engine: Any, function: Function, places: list[int]) -> tuple[Any, list[Any], Any]:
    """The compiled function, its results of some calls, and the cache afterwards."""
    random = np.random.default_rng(0)
    compiled = engine.compile(function, EngineOptions(cache=None))
    state = compiled.make_state()
    types_ = {param.name: param.type for param in function.params}
    results: list[Any] = []
    for call in range(_CALLS):
        inputs = {
            name: random.standard_normal(types_[name].shape).astype(np.float16)
            for name in ("new", "query")
        }
        moved = [place + call if place >= 0 else place - call for place in places]
        results.append(list(compiled({**inputs, "places": np.int32(moved)}, state).values()))
    (kept,) = state.snapshot().values()
    return compiled, results, kept


def _equal_reference(function: Function, places: list[int]) -> Any:
    _, expected, kept = _run(REFERENCE, function, places)
    compiled, actual, held = _run(OPENVINO, function, places)
    atol, rtol = ATOL_RTOL["fp16"]
    for ours, theirs in zip(actual, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, atol=atol, rtol=rtol)
    assert held.dtype == kept.dtype == np.float16
    np.testing.assert_array_equal(held, kept)
    return compiled


def _copies(compiled: Any) -> int:
    """Nodes of the graph that runs that make a tensor of the size of the cache."""
    return sum(
        int(np.prod(node.get_output_shape(0))) == np.prod(_CACHE)
        for node in compiled.compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].value not in ("Input", "Output", "Const", "Reshape")
    )


def _scores(cache: Any, query: Any) -> Any:
    return mb.matmul(x=query, y=cache, transpose_y=True)


def _attention(cache: Any, query: Any) -> Any:
    return mb.matmul(x=mb.softmax(x=_scores(cache, query), axis=-1), y=cache)


def _swapped(cache: Any) -> Any:
    return mb.transpose(x=cache, perm=[0, 2, 1])


_SHARES = np.linspace(0, 1, _HEADS * _ROWS * 3).reshape(_HEADS, 3, _ROWS).astype(np.float16)
_APART: dict[str, Reader] = {
    "scores": _scores,
    "attention": _attention,
    "scores, cache first": lambda cache, query: mb.matmul(x=cache, y=query, transpose_y=True),
    "scores, transposed": lambda cache, query: mb.matmul(x=query, y=_swapped(cache)),
    "sum": lambda cache, _: mb.matmul(x=_SHARES, y=cache),
    "sum, cache first": lambda cache, _: mb.matmul(
        x=cache, y=_SHARES, transpose_x=True, transpose_y=True
    ),
    "sum, both transposed": lambda cache, _: mb.matmul(
        x=_SHARES.transpose(0, 2, 1), y=_swapped(cache), transpose_x=True, transpose_y=True
    ),
    "rows": lambda cache, _: mb.gather(x=cache, indices=[4, 3, -1, 5, 4], axis=1),
    "row": lambda cache, _: mb.gather(x=cache, indices=5, axis=1),
    "another view": lambda cache, query: _scores(
        mb.squeeze(x=mb.reshape(x=cache, shape=[1, *_CACHE]), axes=[0]), query
    ),
    "several": lambda cache, query: (_scores(cache, query), mb.gather(x=cache, indices=4, axis=1)),
    "nothing": lambda _, query: mb.relu(x=query),
}
_WHOLE: dict[str, Reader] = {
    "itself": lambda cache, _: mb.identity(x=cache),
    "elementwise": lambda cache, _: mb.exp(x=cache),
    "along heads": lambda cache, _: mb.gather(x=cache, indices=1, axis=0),
    "merged": lambda cache, _: mb.reshape(x=cache, shape=[_HEADS, _ROWS * _WIDTH]),
    "with itself": lambda cache, _: mb.matmul(x=cache, y=cache, transpose_y=True),
}
_PLACES = {"one": [3], "several": [3, 4, 5], "repeated": [4, 4, 3], "from the end": [-1, -2]}


@pytest.mark.parametrize("places", _PLACES)
@pytest.mark.parametrize("reader", _APART)
def test_readers_of_separate_rows_copy_no_state(reader: str, places: str) -> None:
    written = _PLACES[places]
    compiled = _equal_reference(_function(_APART[reader], len(written)), written)
    assert compiled.interface.writes == ((1,),)
    assert _copies(compiled) == 0


@pytest.mark.parametrize("reader", _WHOLE)
def test_readers_of_the_whole_state_still_get_it(reader: str) -> None:
    compiled = _equal_reference(_function(_WHOLE[reader], 2), [3, 4])
    assert compiled.interface.writes == ((1,),)


@pytest.mark.parametrize("reader", ["attention", "rows"])
def test_rows_may_be_written_several_times(reader: str) -> None:
    compiled = _equal_reference(_function(_APART[reader], 2, times=3), [3, 5])
    assert compiled.interface.writes == ((1, 1, 1),)
    assert _copies(compiled) == 0


@pytest.mark.parametrize("axis", [0, 2])
def test_rows_along_another_axis(axis: int) -> None:
    places = [0] if axis == 0 else [1, 0]
    random = np.random.default_rng(0).standard_normal((_HEADS, 3, _WIDTH)).astype(np.float16)
    function = _function(lambda cache, _: _scores(cache, random), len(places), axis=axis)
    compiled = OPENVINO.compile(function, EngineOptions(cache=None))
    assert compiled.interface.writes == ((axis,),)
    results = []
    for engine in (REFERENCE, OPENVINO):
        compiled = engine.compile(function, EngineOptions(cache=None))
        state = compiled.make_state()
        shape = next(param.type.shape for param in function.params if param.name == "new")
        inputs = {"new": np.ones(shape, np.float16), "query": random, "places": np.int32(places)}
        results.append([*compiled(inputs, state).values(), *state.snapshot().values()])
    atol, rtol = ATOL_RTOL["fp16"]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=rtol)


@pytest.mark.parametrize("reader", ["nothing", "scores", "sum"])
@pytest.mark.parametrize("place", [_ROWS, -_ROWS - 1])
def test_an_index_out_of_range_is_an_error_and_changes_nothing(reader: str, place: int) -> None:
    compiled = OPENVINO.compile(_function(_APART[reader], 1), EngineOptions(cache=None))
    state = compiled.make_state()
    inputs = {
        "new": np.ones((_HEADS, 1, _WIDTH), np.float16),
        "query": np.ones((_HEADS, 3, _WIDTH), np.float16),
        "places": np.int32([place]),
    }
    with pytest.raises(ExecutionError):
        compiled(inputs, state)
    (kept,) = state.snapshot().values()
    assert not kept.any()


def test_a_state_of_rows_is_restored_in_the_dtype_of_the_program() -> None:
    compiled = OPENVINO.compile(_function(_APART["scores"], 1), EngineOptions(cache=None))
    state = compiled.make_state()
    (name,) = state.snapshot()
    value = np.full(_CACHE, 0.1, np.float32)
    state.restore({name: value})
    np.testing.assert_array_equal(state.snapshot()[name], value.astype(np.float16))
    state.reset()
    assert not state.snapshot()[name].any()
    state.write(name, value)
    # What the graph reads is what the program's dtype holds, and a snapshot is a copy.
    inputs = {
        "new": np.zeros((_HEADS, 1, _WIDTH), np.float16),
        "query": np.ones((_HEADS, 3, _WIDTH), np.float16),
        "places": np.int32([0]),
    }
    (scores,) = compiled(inputs, state).values()
    assert np.unique(scores[..., 1:]) == np.float16(4 * np.float32(np.float16(0.1)))
    for wrong in (np.zeros((1,)), np.zeros(_CACHE, complex)):
        with pytest.raises(InputError):
            state.write(name, wrong)


def test_a_state_is_rearranged_for_a_function_that_writes_it_in_another_way() -> None:
    """As those of the same program for other shapes may."""
    rows = OPENVINO.compile(_function(_APART["scores"], 2), EngineOptions(cache=None))
    whole = OPENVINO.compile(_function(_APART["scores"], _ROWS), EngineOptions(cache=None))
    assert whole.interface.writes == (None,)
    state = rows.make_state()
    expected = np.zeros(_CACHE, np.float16)
    for number, (compiled, count) in enumerate([(rows, 2), (whole, _ROWS), (rows, 2)], 1):
        new = np.full((_HEADS, count, _WIDTH), number, np.float16)
        query = np.ones((_HEADS, 3, _WIDTH), np.float16)
        compiled({"new": new, "query": query, "places": np.arange(count, dtype=np.int32)}, state)
        expected[:, :count] = number
        np.testing.assert_array_equal(next(iter(state.snapshot().values())), expected)


def test_the_cache_keeps_how_states_are_written() -> None:
    interface = OPENVINO.compile(_function(_APART["sum"], 1), EngineOptions(cache=None)).interface
    assert Interface.decode(interface.encode()) == interface

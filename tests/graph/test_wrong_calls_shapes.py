"""Wrong arguments of operations on shapes, regions and indices are refused when they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coreml_delegate import graph
from coreml_delegate.errors import CoreMLDelegateError, GraphError

_GATHER: dict[str, Any] = {
    "offset_dims": (1,),
    "collapsed_slice_dims": (0,),
    "start_index_map": (0,),
    "index_vector_dim": 1,
    "slice_sizes": (1, 3),
}
_SCATTER: dict[str, Any] = {
    "update_window_dims": (1,),
    "inserted_window_dims": (0,),
    "scatter_dims_to_operand_dims": (0,),
    "index_vector_dim": 1,
}


def _gather(**changed: Any) -> Callable[..., Any]:
    return lambda b, v: b.gather(v["x"], v["rows"], **(_GATHER | changed))


def _scatter(body: Any = "add", **changed: Any) -> Callable[..., Any]:
    return lambda b, v: b.scatter(v["x"], v["rows"], v["updates"], body, **(_SCATTER | changed))


# x: float32[4, 3], k: int32[4, 3], i: int32[], s: float32[], flag: bool[], sizes: int32[2] that are
# known at run time only, rows: int32[5, 1], updates: float32[5, 3], empty: float32[0, 3]
_CALLS: list[tuple[Callable[..., Any], str]] = [
    (
        lambda b, v: b.reshape(v["x"], (5, 2)),
        r"elements: got float32\[4, 3\] to \[5, 2\]",
    ),
    (lambda b, v: b.reshape(v["x"], (-1, -1)), "more than one size is -1"),
    (lambda b, v: b.reshape(v["x"], (-1, 5)), "different numbers of elements"),
    (lambda b, v: b.reshape(v["empty"], (-1, 0)), "different numbers of elements"),
    (lambda b, v: b.reshape(v["x"], (-2, 6)), "a size is too small: got -2"),
    (lambda b, v: b.reshape(v["x"], (12.0,)), "not a size: got 12.0"),
    (lambda b, v: b.reshape(v["x"], (True, 12)), "not a size: got True"),
    (
        lambda b, v: b.transpose(v["x"], (0,)),
        "wrong number of dimensions in the perm",
    ),
    (lambda b, v: b.transpose(v["x"], (0, 0)), "dimensions of a permutation repeat"),
    (lambda b, v: b.transpose(v["x"], (0, 2)), "no such dimensions of a permutation: got 2"),
    (lambda b, v: b.broadcast_in_dim(v["x"], (4, 5), (0, 1)), "dimension 1 does not fit"),
    (lambda b, v: b.broadcast_in_dim(v["x"], (4, 3), (0,)), "wrong number of broadcast dimensions"),
    (lambda b, v: b.broadcast_in_dim(v["x"], (4, 4), (0, 0)), "broadcast dimensions repeat"),
    (lambda b, v: b.broadcast(v["x"], (3,)), "fewer dimensions than the tensor"),
    (lambda b, v: b.concatenate([], 0), "no values"),
    (lambda b, v: b.concatenate([v["i"]], 0), "does not take tensors of rank 0"),
    (lambda b, v: b.concatenate([v["x"], v["k"]], 0), "element types of operands differ"),
    (lambda b, v: b.concatenate([v["x"], v["updates"]], 1), "shapes differ beside dimension 1"),
    (lambda b, v: b.concatenate([v["rows"], v["sizes"]], 0), "shapes differ beside dimension 0"),
    (lambda b, v: b.concatenate([v["x"]], 2), "no such dimension: got 2"),
    (lambda b, v: b.reverse(v["x"], (0, -2)), "dimensions repeat"),
    (lambda b, v: b.iota("bool", (3,), 0), "iota does not make this element type: got bool"),
    (lambda b, v: b.iota("int32", (), 0), "no such dimension"),
    (lambda b, v: b.iota("int32", (-1,), 0), "a size is too small"),
    (lambda b, v: b.get_dimension_size(v["x"], 2), "no such dimension: got 2"),
    (lambda b, v: b.squeeze(v["x"], 0), "dimension 0 is not of size 1"),
    (lambda b, v: b.expand_dims(v["x"], 3), "no such axes"),
    (lambda b, v: b.dynamic_reshape(v["x"], v["sizes"]), "sizes are known at run time only"),
    (lambda b, v: b.dynamic_reshape(v["x"], v["i"]), r"not a vector of integers: got int32\[\]"),
    (lambda b, v: b.dynamic_iota("int32", v["x"], 0), "not a vector of integers"),
    (lambda b, v: b.slice(v["x"], (0,), (4, 3)), "wrong number of starts: got 1, expected 2"),
    (
        lambda b, v: b.slice(v["x"], (0, 0), (4, 4)),
        "not within its dimension: got 0 to 4",
    ),
    (
        lambda b, v: b.slice(v["x"], (3, 0), (2, 3)),
        "not within its dimension: got 3 to 2",
    ),
    (lambda b, v: b.slice(v["x"], (-1, 0), (2, 3)), "a size is too small: got -1"),
    (lambda b, v: b.slice(v["x"], (0, 0), (2, 3), (0, 1)), "a size is too small: got 0"),
    (lambda b, v: b.dynamic_slice(v["x"], [v["i"]], (2, 3)), "wrong number of starts"),
    (lambda b, v: b.dynamic_slice(v["x"], [v["i"]] * 2, (2,)), "wrong number of sizes"),
    (lambda b, v: b.dynamic_slice(v["x"], [v["i"]] * 2, (2, 4)), "larger than the tensor"),
    (lambda b, v: b.dynamic_slice(v["x"], [v["s"]] * 2, (2, 3)), "not an integer of rank 0"),
    (lambda b, v: b.dynamic_slice(v["x"], [v["flag"]] * 2, (2, 3)), "not an integer of rank 0"),
    (lambda b, v: b.dynamic_slice(v["x"], [v["sizes"]] * 2, (2, 3)), "not an integer of rank 0"),
    (
        lambda b, v: b.dynamic_update_slice(v["x"], v["updates"], [v["i"]] * 2),
        r"larger than the tensor: got float32\[5, 3\], expected within float32\[4, 3\]",
    ),
    (lambda b, v: b.dynamic_update_slice(v["x"], v["k"], [v["i"]] * 2), "element types"),
    (lambda b, v: b.dynamic_update_slice(v["x"], v["s"], [v["i"]] * 2), "dimensions of the update"),
    (lambda b, v: b.pad(v["x"], v["i"], (0, 0), (0, 0)), "element types of operands differ"),
    (lambda b, v: b.pad(v["x"], v["x"], (0, 0), (0, 0)), "the value is not of rank 0"),
    (lambda b, v: b.pad(v["x"], v["s"], (0,), (0, 0)), "wrong number of sizes in 'low'"),
    (lambda b, v: b.pad(v["x"], v["s"], (-3, 0), (-2, 0)), "more is removed than there is"),
    (lambda b, v: b.pad(v["x"], v["s"], (0, 0), (0, 0), (-1, 0)), "a size is too small"),
    (
        lambda b, v: b.dynamic_pad(v["x"], v["s"], v["sizes"], v["sizes"], v["sizes"]),
        "known at run time only",
    ),
    (lambda b, v: b.real_dynamic_slice(v["x"], *[v["sizes"]] * 3), "known at run time only"),
    (_gather(mode="fill"), "unknown mode: got 'fill'"),
    (_gather(index_vector_dim=3), "no such index vector dimension: got 3"),
    (_gather(start_index_map=(0, 1)), "index vectors have a wrong number of elements: got 1"),
    (_gather(index_vector_dim=0), "index vectors have a wrong number of elements: got 5"),
    (_gather(slice_sizes=(1,)), "wrong number of slice sizes"),
    (_gather(slice_sizes=(1, 4)), "a slice does not fit dimension 1"),
    (_gather(slice_sizes=(2, 3)), "a slice does not fit dimension 0 .* got 2, expected 1"),
    (_gather(offset_dims=(0, 1)), "wrong number of offset dimensions"),
    (_gather(offset_dims=(2,)), "no such offset dimensions"),
    (_gather(collapsed_slice_dims=(0, 0)), "collapsed slice dimensions repeat"),
    (
        _gather(operand_batching_dims=(0,), start_indices_batching_dims=(0,)),
        "batching dimensions do not fit",
    ),
    (
        _gather(operand_batching_dims=(0,), start_indices_batching_dims=()),
        "batching dimensions do not fit",
    ),
    (lambda b, v: b.gather(v["x"], v["updates"], **_GATHER), "indices are no integers"),
    (lambda b, v: b.gather(v["k"], v["flag"], **_GATHER), "indices are no integers"),
    (_scatter("div"), "a body that MIL's scatter cannot express: got div"),
    (
        lambda b, v: _scatter(lambda old, new: b.add(b.add(old, new), new))(b, v),
        "cannot express: got add of add, argument",
    ),
    (lambda b, v: _scatter(lambda old, new: b.subtract(new, old))(b, v), "cannot express"),
    (lambda b, v: _scatter(lambda old, new: [old, new])(b, v), "wrong results of 'body'"),
    (_scatter(update_window_dims=(0,)), "the updates do not fit"),
    (_scatter(update_window_dims=()), "wrong number of window dimensions"),
    (_scatter(inserted_window_dims=()), "wrong number of window dimensions"),
    (_scatter(index_vector_dim=0), "index vectors have a wrong number of elements"),
    (lambda b, v: b.scatter(v["x"], v["rows"], v["k"], "add", **_SCATTER), "element types"),
    (lambda b, v: b.take(v["x"], v["i"], 2), "no such axis: got 2"),
    (lambda b, v: b.one_hot(v["x"], 3), "one_hot does not take this element type: got float32"),
    (lambda b, v: b.one_hot(v["i"], -1), "a size is too small"),
]


@pytest.fixture(scope="module")
def builder() -> graph.Builder:
    builder = graph.Backend("reference").builder()
    builder.parameter("x", "float32", (4, 3))
    builder.parameter("k", "int32", (4, 3))
    builder.parameter("i", "int32")
    builder.parameter("s", "float32")
    builder.parameter("flag", "bool")
    builder.parameter("sizes", "int32", (2,))
    builder.parameter("rows", "int32", (5, 1))
    builder.parameter("updates", "float32", (5, 3))
    builder.parameter("empty", "float32", (0, 3))
    return builder


@pytest.mark.parametrize("number", range(len(_CALLS)))
def test_a_wrong_call_is_refused(builder: graph.Builder, number: int) -> None:
    call, message = _CALLS[number]
    with pytest.raises(GraphError, match=message):
        call(builder, builder.parameters)


def test_a_batching_dimension_is_not_indexed(builder: graph.Builder) -> None:
    x = builder.constant(np.zeros((5, 3), np.float32))
    with pytest.raises(GraphError, match="a batching dimension is dropped or indexed, too"):
        builder.gather(
            x,
            builder.parameters["rows"],
            **(_GATHER | {"operand_batching_dims": (0,), "start_indices_batching_dims": (0,)}),
        )


def test_scatter_of_bools_does_not_subtract(builder: graph.Builder) -> None:
    x = builder.constant(np.zeros((4, 3), bool))
    updates = builder.constant(np.zeros((5, 3), bool))
    with pytest.raises(GraphError, match="cannot express: got sub"):
        builder.scatter(x, builder.parameters["rows"], updates, "sub", **_SCATTER)


def test_lookups_in_too_many_dimensions_are_refused(builder: graph.Builder) -> None:
    x = builder.constant(np.zeros((2,) * 6, np.float32))
    taken = builder.take(x, builder.parameters["i"], 0)
    with pytest.raises(CoreMLDelegateError, match="gather of a tensor with too many dimensions"):
        builder.compile(taken)


def test_regions_in_too_many_dimensions_are_refused(builder: graph.Builder) -> None:
    x = builder.iota("float32", (3,) * 6, 0)
    with pytest.raises(CoreMLDelegateError, match="treats too many dimensions differently: got 6"):
        builder.compile(builder.slice(x, (1,) * 6, (3,) * 6))

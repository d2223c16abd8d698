"""Operations on shapes, regions and indices where sizes are known at run time only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coreml_delegate import graph
from coreml_delegate.errors import GraphError
from coreml_delegate.runtime import Model

_RANDOM = np.random.default_rng(0)
_PLACE = np.array(1, np.int32)
_ROWS = np.array([4, 0, 1], np.int32)


def _arrays(n: int, m: int) -> dict[str, np.ndarray]:
    return {
        "x": _RANDOM.standard_normal((n, 3)).astype(np.float32),
        "k": _RANDOM.integers(-9, 9, (n, 3)).astype(np.int32),
        "a": _RANDOM.standard_normal((n, m)).astype(np.float32),
        "row": _RANDOM.standard_normal((1, 3)).astype(np.float32),
        "i": _PLACE,
        "rows": _ROWS,
        "wide": _RANDOM.integers(0, 3, (n,)).astype(np.int32),
    }


def _clip_take(x: np.ndarray, places: Any, axis: int) -> np.ndarray:
    return np.take(x, places, axis, mode="clip")


def _padded(x: np.ndarray, value: Any) -> np.ndarray:
    return np.pad(x, [(1, 2), (0, 1)], constant_values=value)


def _spread(x: np.ndarray) -> np.ndarray:
    wide = np.full((2 * len(x) - 1, x.shape[1]), 7, x.dtype)
    wide[::2] = x
    return wide


def _written(x: np.ndarray, row: np.ndarray, at: int) -> np.ndarray:
    result = x.copy()
    result[min(at, len(x) - 1)] = row[0]
    return result


def _scattered(x: np.ndarray, rows: np.ndarray, updates: np.ndarray, *, add: bool) -> np.ndarray:
    result = x.copy()
    for place, update in zip(rows, updates, strict=True):
        if place < len(x):
            result[place] = result[place] + update if add else update
    return result


def _scatter_rows(b: Any, v: Any, mode: str) -> Any:
    return b.scatter(
        v.x,
        b.expand_dims(v.rows, 1),
        b.broadcast(v.row, (3, 3)),
        mode,
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=1,
    )


def _along(b: Any, v: Any) -> Any:
    """One element of each row."""
    return b.gather(
        v.x,
        b.expand_dims(v.wide, 1),
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        index_vector_dim=1,
        slice_sizes=(1, 1),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )


def _elements(b: Any, v: Any) -> Any:
    """Elements at (wide, wide) of a tensor of unknown height."""
    pairs = b.concatenate([b.expand_dims(v.wide, 1)] * 2, 1)
    return b.gather(
        v.x,
        pairs,
        offset_dims=(),
        collapsed_slice_dims=(0, 1),
        start_index_map=(0, 1),
        index_vector_dim=1,
        slice_sizes=(1, 1),
    )


def _regions(b: Any, v: Any) -> Any:
    """Parts of rows, at (wide, 0), by arithmetic of indices."""
    pairs = b.concatenate([b.expand_dims(v.wide, 1)] * 2, 1)
    return b.gather(
        v.x,
        pairs,
        offset_dims=(1,),
        collapsed_slice_dims=(0,),
        start_index_map=(0, 1),
        index_vector_dim=1,
        slice_sizes=(1, 2),
    )


def _flat(b: Any, v: Any) -> Any:
    """A shape computed of a size: [n, 3] to [3, n]."""
    size = b.reshape(b.get_dimension_size(v.x, 0), (1,))
    return b.dynamic_reshape(v.x, b.concatenate([b.constant([3]), size], 0))


def _repeated(b: Any, v: Any) -> Any:
    size = b.reshape(b.get_dimension_size(v.x, 0), (1,))
    shape = b.concatenate([size, b.constant([2, 3])], 0)
    return b.dynamic_broadcast_in_dim(v.row, shape, (1, 2))


class _Values:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


_CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "reshape, one unknown": (lambda b, v: b.reshape(v.x, (-1,)), lambda v: v.x.reshape(-1)),
    "reshape, sizes of 1 added": (
        lambda b, v: b.expand_dims(v.a, (0, 2)),
        lambda v: v.a[None, :, None],
    ),
    "reshape, sizes of 1 dropped": (
        lambda b, v: b.squeeze(b.expand_dims(v.a, (0, 2)), 0),
        lambda v: v.a[:, None],
    ),
    "reshape, two unknown": (
        lambda b, v: b.reshape(b.expand_dims(v.a, 0), (v.a.shape[1], v.a.shape[0])),
        lambda v: v.a.reshape(v.a.shape[::-1]),
    ),
    "transpose": (lambda b, v: b.transpose(v.a, (1, 0)), lambda v: v.a.T),
    "broadcast_in_dim": (
        lambda b, v: b.broadcast_in_dim(v.row, (2, v.x.shape[0], 3), (1, 2)),
        lambda v: np.broadcast_to(v.row, (2, len(v.x), 3)),
    ),
    "broadcast_in_dim of rank 0": (
        lambda b, v: b.broadcast(v.i, v.a.shape),
        lambda v: np.broadcast_to(v.i, v.a.shape),
    ),
    "concatenate": (
        lambda b, v: b.concatenate([v.x, v.row, v.x], 0),
        lambda v: np.concatenate([v.x, v.row, v.x]),
    ),
    "slice": (
        lambda b, v: b.slice(v.x, (0, 1), (v.x.shape[0], 3)),
        lambda v: v.x[:, 1:],
    ),
    "slice to a size": (
        lambda b, v: b.slice(b.concatenate([v.x, v.x], 0), (1, 0), (v.x.shape[0] + 1, 3)),
        lambda v: np.concatenate([v.x, v.x])[1 : len(v.x) + 1],
    ),
    "slice with strides": (
        lambda b, v: b.slice(v.x, (0, 0), v.x.shape, (2, 1)),
        lambda v: v.x[::2],
    ),
    "reverse": (lambda b, v: b.reverse(v.a, (0,)), lambda v: v.a[::-1]),
    "iota": (
        lambda b, v: b.iota("float32", v.a.shape, 0),
        lambda v: np.broadcast_to(np.arange(len(v.a), dtype=np.float32)[:, None], v.a.shape),
    ),
    "iota along a known size": (
        lambda b, v: b.iota("int32", (v.x.shape[0], 4), 1),
        lambda v: np.broadcast_to(np.arange(4, dtype=np.int32), (len(v.x), 4)),
    ),
    "pad": (
        lambda b, v: b.pad(v.x, b.constant(2.0), (1, 0), (2, 1)),
        lambda v: _padded(v.x, 2),
    ),
    "pad of integers": (
        lambda b, v: b.pad(v.k, v.i, (1, 0), (2, 1)),
        lambda v: _padded(v.k, 1),
    ),
    "pad between": (
        lambda b, v: b.pad(v.x, b.constant(7.0), (0, 0), (0, 0), (1, 0)),
        lambda v: _spread(v.x),
    ),
    "dynamic_slice of whole rows": (
        lambda b, v: b.dynamic_slice(v.x, [v.i, v.i], (v.x.shape[0], 1)),
        lambda v: v.x[:, 1:2],
    ),
    "dynamic_slice of one row": (
        lambda b, v: b.dynamic_slice(v.x, [v.i, v.i], (1, 3)),
        lambda v: v.x[min(1, len(v.x) - 1)][None],
    ),
    "dynamic_update_slice": (
        lambda b, v: b.dynamic_update_slice(v.x, v.row, [v.i, v.i]),
        lambda v: _written(v.x, v.row, 1),
    ),
    "take of an unknown size": (
        lambda b, v: b.take(v.x, v.rows, 0),
        lambda v: _clip_take(v.x, v.rows, 0),
    ),
    "take as many as are": (
        lambda b, v: b.take(v.row, v.wide, 1),
        lambda v: v.row[:, v.wide],
    ),
    "gather along an axis": (_along, lambda v: v.x[np.arange(len(v.x)), v.wide]),
    "gather elements": (_elements, lambda v: v.x[np.minimum(v.wide, len(v.x) - 1), v.wide]),
    "gather regions": (
        _regions,
        lambda v: np.stack([v.x[min(w, len(v.x) - 1), min(w, 1) : min(w, 1) + 2] for w in v.wide]),
    ),
    "scatter, add": (
        lambda b, v: _scatter_rows(b, v, "add"),
        lambda v: _scattered(v.x, v.rows, np.repeat(v.row, 3, 0), add=True),
    ),
    "scatter, update": (
        lambda b, v: _scatter_rows(b, v, "update"),
        lambda v: _scattered(v.x, v.rows, np.repeat(v.row, 3, 0), add=False),
    ),
    "one_hot": (
        lambda b, v: b.one_hot(v.wide, 3),
        lambda v: np.eye(3, dtype=np.float32)[v.wide],
    ),
    "get_dimension_size": (
        lambda b, v: b.get_dimension_size(v.a, 1),
        lambda v: np.int32(v.a.shape[1]),
    ),
    "dynamic_reshape": (_flat, lambda v: v.x.reshape(3, -1)),
    "dynamic_broadcast_in_dim": (
        _repeated,
        lambda v: np.broadcast_to(v.row, (len(v.x), 2, 3)),
    ),
}
_SHAPES = {"x": ("n", 3), "k": ("n", 3), "a": ("n", "m"), "wide": ("n",)}


@pytest.fixture(scope="module")
def executable() -> graph.Executable:
    builder = graph.Backend("reference").builder()
    values = {
        name: builder.parameter(name, array.dtype, _SHAPES.get(name, array.shape))
        for name, array in _arrays(2, 2).items()
    }
    outputs = [build(builder, _Values(values)) for build, _ in _CASES.values()]
    return builder.compile({f"y{n}": output for n, output in enumerate(outputs)})


@pytest.mark.parametrize("engine", ["reference", "openvino"])
def test_sizes_known_at_run_time(executable: graph.Executable, engine: str) -> None:
    executable.model = Model.from_files(executable.files, engine=engine)
    for n, m in ((5, 2), (1, 1), (2, 4)):
        arrays = _arrays(n, m)
        results = executable.run(*arrays.values())
        for (name, (_, expect)), result in zip(_CASES.items(), results, strict=True):
            expected = np.asarray(expect(_Values(arrays)))
            assert result.dtype == expected.dtype, name
            np.testing.assert_array_equal(result, expected, err_msg=f"{name}, n={n}, m={m}")


def test_sizes_that_cannot_be_equal_are_refused() -> None:
    builder = graph.Backend("reference").builder()
    x = builder.parameter("x", "float32", ("n", 3))
    (size, _) = x.shape
    with pytest.raises(GraphError, match=r"different numbers of elements: got float32\[n, 3\] to"):
        builder.reshape(x, (size, 4))
    with pytest.raises(GraphError, match="not within its dimension"):
        builder.slice(x, (0, 0), (size + 1, 3))
    with pytest.raises(GraphError, match="region is larger than the tensor"):
        builder.dynamic_slice(x, [builder.constant(0)] * 2, (size + 1, 3))
    with pytest.raises(GraphError, match="strides have to be numbers"):
        builder.slice(x, (0, 0), x.shape, (size, 1))


def test_regions_are_written_on_older_targets() -> None:
    builder = graph.Backend("reference", target="iOS17").builder()
    x = builder.parameter("x", "float32", (4, 5, 2))
    update = builder.parameter("update", "float32", (2, 3, 2))
    start = builder.parameter("start", "int32")
    written = builder.dynamic_update_slice(x, update, [start, start, start])
    arrays = [np.zeros((4, 5, 2), np.float32), np.ones((2, 3, 2), np.float32), np.int32(1)]
    expected = arrays[0].copy()
    expected[1:3, 1:4] = 1
    for engine in ("reference", "openvino"):
        executable = builder.compile(written)
        executable.model = Model.from_files(executable.files, engine=engine)
        np.testing.assert_array_equal(executable.run(*arrays)[0], expected)

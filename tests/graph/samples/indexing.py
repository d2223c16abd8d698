"""Samples of reading and writing at indices that are values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from graph.samples.sample import Sample
from jax import lax
from support.graph_samples import ALL, INTEGERS, by_jax, of

_ARITHMETIC = ("add", "sub", "mul")
_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True)
class _Form:
    """Dimension numbers of a gather, and of the scatter that writes where it reads.

    Attributes:
        case: Name.
        shape: Of the operand.
        indices: Index vectors along the last axis; most are out of range somewhere.
        window: Dimensions of the gather's result that are those of a slice.
        dropped: Dimensions of the operand that the result lacks.
        mapped: Which dimension of the operand each element of an index vector is.
        sizes: Of a slice.
        batching: Of the operand, and of the indices.
    """

    case: str
    shape: tuple[int, ...]
    indices: Any
    window: tuple[int, ...]
    dropped: tuple[int, ...]
    mapped: tuple[int, ...]
    sizes: tuple[int, ...]
    batching: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def gather(self, dtype: str, *, indices_dtype: str = "int32", **options: Any) -> Sample:
        x, indices = of(dtype, self.shape), np.array(self.indices, indices_dtype)
        numbers = lax.GatherDimensionNumbers(self.window, self.dropped, self.mapped, *self.batching)
        expected = by_jax(
            lax.gather,
            x,
            indices,
            dimension_numbers=numbers,
            slice_sizes=self.sizes,
            mode=_CLIP,
        )
        arguments = {
            "offset_dims": self.window,
            "collapsed_slice_dims": self.dropped,
            "start_index_map": self.mapped,
            "slice_sizes": self.sizes,
            "operand_batching_dims": self.batching[0],
            "start_indices_batching_dims": self.batching[1],
            **options,
        }
        given, place = self._placed(indices, options)
        return Sample(
            "gather",
            f"{self.case}, indices of {indices_dtype}{options or ''}",
            lambda b, x, i: b.gather(x, i, **(arguments | place)),
            (x, given),
            expected,
        )

    def scatter(
        self,
        dtype: str,
        mode: str = "update",
        body: Any = None,
        *,
        fixed: bool = False,
        **options: Any,
    ) -> Sample:
        most = 200 if dtype in ("int64", "uint64") and mode in _ARITHMETIC else None
        x, indices = of(dtype, self.shape, most), np.array(self.indices, "int32")
        updates = of(dtype, self._result_shape(), most)
        where = lax.ScatterDimensionNumbers(self.window, self.dropped, self.mapped, *self.batching)
        function = {"update": lax.scatter}.get(mode) or getattr(lax, f"scatter_{mode}")
        if dtype == "bool" and mode in ("add", "mul"):
            function = {"add": lax.scatter_max, "mul": lax.scatter_min}[mode]
        expected = by_jax(function, x, indices, updates, dimension_numbers=where, mode=_DROP)
        arguments = {
            "update_window_dims": self.window,
            "inserted_window_dims": self.dropped,
            "scatter_dims_to_operand_dims": self.mapped,
            "input_batching_dims": self.batching[0],
            "scatter_indices_batching_dims": self.batching[1],
        }
        given, place = self._placed(indices, options)
        case = f"{self.case}, {mode}{', a traced body' if body else ''}{options or ''}"
        if fixed:
            return Sample(
                "scatter",
                f"{case}, constant indices",
                lambda b, x, u: b.scatter(
                    x, b.constant(given), u, body or mode, **(arguments | place)
                ),
                (x, updates),
                expected,
            )
        return Sample(
            "scatter",
            case,
            lambda b, x, i, u: b.scatter(x, i, u, body(b) if body else mode, **(arguments | place)),
            (x, given, updates),
            expected,
        )

    def _result_shape(self) -> tuple[int, ...]:
        dropped = {*self.dropped, *self.batching[0]}
        inner = iter([size for d, size in enumerate(self.sizes) if d not in dropped])
        outer = iter(np.shape(self.indices)[:-1])
        rank = np.ndim(self.indices) - 1 + len(self.sizes) - len(dropped)
        return tuple(next(inner if n in self.window else outer) for n in range(rank))

    def _placed(self, indices: np.ndarray, options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        axis = options.get("index_vector_dim", indices.ndim - 1)
        if axis == indices.ndim:  # scalars
            return indices[..., 0], {"index_vector_dim": indices.ndim - 1}
        return np.moveaxis(indices, -1, axis), {"index_vector_dim": axis}


_ROWS = _Form("rows", (5, 3), [[4], [0], [9], [-2], [2]], (1,), (0,), (0,), (1, 3))
_COLUMNS = _Form("columns", (2, 5), [[[4], [0]], [[7], [3]]], (0,), (1,), (1,), (2, 1))
_RANGES = _Form("ranges of rows", (6, 2), [[4], [0], [9], [-1]], (1, 2), (), (0,), (2, 2))
_KEPT = _Form("rows that are kept", (5, 3), [[3], [1], [8]], (1, 2), (), (0,), (1, 3))
_ELEMENTS = _Form("elements", (4, 5), [[0, 4], [3, 9], [-1, 2], [1, 1]], (), (0, 1), (0, 1), (1, 1))
_ALONG = _Form(
    "along an axis",
    (2, 5),
    [[[1], [4], [8]], [[0], [3], [-3]]],
    (),
    (1,),
    (1,),
    (1, 1),
    ((0,), (0,)),
)
_FORMS = [
    _ROWS,
    _COLUMNS,
    _RANGES,
    _KEPT,
    _ELEMENTS,
    _ALONG,
    _Form("one row", (5, 3), [[3]], (1,), (0,), (0,), (1, 3)),
    _Form("one row out of range", (5, 3), [[7]], (1,), (0,), (0,), (1, 3)),
    _Form("one vector", (5, 3), [2], (0,), (0,), (0,), (1, 3)),
    _Form("one region", (5, 4), [2, 1], (0, 1), (), (0, 1), (2, 3)),
    _Form("one region out of range", (5, 4), [4, -1], (0, 1), (), (0, 1), (2, 3)),
    _Form("one region, part of it", (5, 4, 2), [[1, 3]], (1, 2), (1,), (0, 1), (2, 1, 2)),
    _Form("one whole", (2, 3), [0, 0], (0, 1), (), (0, 1), (2, 3)),
    _Form("one whole out of range", (2, 3), [0, 1], (0, 1), (), (0, 1), (2, 3)),
    _Form("an element of a vector", (5,), [3], (), (0,), (0,), (1,)),
    _Form("no index", (2, 3), np.zeros((4, 0)), (1, 2), (), (), (2, 3)),
    _Form("no index, a part", (4, 3), np.zeros((2, 0)), (1, 2), (), (), (2, 3)),
    _Form("no index, once", (2, 3), np.zeros((0,)), (0, 1), (), (), (2, 3)),
    _Form("no index, rank 0", (), np.zeros((3, 0)), (), (), (), ()),
    _Form("no index vectors", (2, 3), np.zeros((0, 1)), (1,), (0,), (0,), (1, 3)),
    _Form("wholes", (2, 3), [[0, 0], [0, 1], [0, 0]], (1, 2), (), (0, 1), (2, 3)),
    _Form("swapped coordinates", (4, 5), [[4, 0], [1, 3], [9, 0]], (), (0, 1), (1, 0), (1, 1)),
    _Form(
        "slices at coordinates",
        (3, 4, 2),
        [[[0, 1], [2, 3]], [[1, 1], [0, 7]]],
        (2,),
        (0, 1),
        (0, 1),
        (1, 1, 2),
    ),
    _Form("points around a slice", (3, 2, 4), [[2, 0], [1, 3]], (1,), (0, 2), (2, 0), (1, 2, 1)),
    _Form("regions", (5, 6), [[0, 1], [3, 3], [1, 4], [4, 0]], (1, 2), (), (0, 1), (2, 3)),
    _Form("ranges in rows", (5, 6, 2), [[0, 1], [3, 2], [4, 5]], (1, 2), (0,), (0, 1), (1, 3, 2)),
    _Form("windows first", (5, 6), [[0, 1], [3, 2], [4, 5]], (0, 1), (), (0, 1), (2, 3)),
    _Form("rows, part of them", (5, 4), [[0], [4], [6]], (1,), (0,), (0,), (1, 2)),
    _Form("a dimension of 1 dropped", (5, 1, 2), [[4], [1]], (1,), (0, 1), (0,), (1, 1, 2)),
    _Form("a dimension of 1 indexed", (5, 1, 2), [[4, 0], [1, 0]], (1,), (0, 1), (0, 1), (1, 1, 2)),
    _Form(
        "rows of a batch",
        (2, 5, 3),
        [[[1], [4]], [[0], [9]]],
        (2,),
        (1,),
        (1,),
        (1, 1, 3),
        ((0,), (0,)),
    ),
    _Form(
        "a batch of one",
        (1, 5, 3),
        [[[1], [4], [9]]],
        (2,),
        (1,),
        (1,),
        (1, 1, 3),
        ((0,), (0,)),
    ),
    _Form(
        "ranges of a batch, which is not first",
        (3, 5, 2),
        [[[1], [0]], [[4], [2]], [[0], [9]]],
        (0, 2),
        (),
        (1,),
        (3, 2, 1),
        ((2,), (1,)),
    ),
    _Form(
        "elements of a batch",
        (2, 4, 3),
        [[[1, 2], [3, 0]], [[0, 9], [2, 2]]],
        (),
        (1, 2),
        (1, 2),
        (1, 1, 1),
        ((0,), (0,)),
    ),
    _Form(
        "regions of a batch",
        (2, 4, 3),
        [[[1, 1], [3, 0]], [[0, 9], [2, 0]]],
        (2, 3),
        (),
        (1, 2),
        (1, 2, 2),
        ((0,), (0,)),
    ),
    _Form(
        "along the middle axis",
        (2, 4, 3),
        np.arange(18).reshape(2, 3, 3, 1) % 5,
        (),
        (1,),
        (1,),
        (1, 1, 1),
        ((0, 2), (0, 2)),
    ),
    _Form(
        "one along each row",
        (3, 4),
        [[0], [3], [5]],
        (),
        (1,),
        (1,),
        (1, 1),
        ((0,), (0,)),
    ),
    _Form("only a batch", (2, 3), np.zeros((2, 4, 0)), (2,), (), (), (1, 3), ((0,), (0,))),
    # More dimensions than Core ML has
    _Form(
        "rows at many places",
        (5, 3),
        np.arange(32).reshape(2, 1, 2, 2, 2, 2, 1) % 7 - 1,
        (3,),
        (0,),
        (0,),
        (1, 3),
    ),
    _Form(
        "regions with dimensions of 1",
        (4, 1, 3, 5, 1, 2),
        [[[0, 0, 1], [2, 0, 4]], [[3, 0, 0], [1, 0, 2]]],
        (0, 2, 4, 5),
        (2, 4),
        (0, 4, 3),
        (2, 1, 1, 3, 1, 2),
    ),
    _Form(
        "elements of a batch at many places",
        (2, 4, 1, 3),
        np.arange(32).reshape(2, 2, 2, 2, 1, 2) % 5,
        (4,),
        (1, 3),
        (1, 3),
        (1, 1, 1, 1),
        ((0,), (1,)),
    ),
]
# A gather's index_vector_dim may be any dimension of the indices, or their rank.
_PLACES = [(_ROWS, 0), (_ROWS, 2), (_ELEMENTS, 0), (_COLUMNS, 1), (_ALONG, 0), (_ALONG, 3)]
_INDICES = _Form("rows", (5, 3), [[4], [0], [100], [2]], (1,), (0,), (0,), (1, 3))


def _shifted(form: _Form, axis: int) -> _Form:
    """Return a form whose index vectors are not last: dimensions of the indices move."""
    moved = tuple(n + (n >= axis) for n in form.batching[1])
    return _Form(**(form.__dict__ | {"batching": (form.batching[0], moved)}))


def _at_axis(form: _Form, axis: int) -> Sample:
    options: dict[str, Any] = {"index_vector_dim": axis}
    if form.batching[0] and axis < len(np.shape(form.indices)):
        options["start_indices_batching_dims"] = _shifted(form, axis).batching[1]
    return form.gather("float32", **options)


def _take(case: str, x: np.ndarray, indices: Any, axis: int) -> Sample:
    places = np.array(indices, np.int32)
    return Sample(
        "take",
        case,
        lambda b, x, i: b.take(x, i, axis),
        (x, places),
        np.take(x, places, axis, mode="clip"),
    )


def _one_hot(dtype: str, indices: Any, depth: int, result: str) -> Sample:
    places = np.array(indices, dtype)
    return Sample(
        "one_hot",
        f"of {result}",
        lambda b, i: b.one_hot(i, depth, result),
        (places,),
        (places[..., None] == np.arange(depth)).astype(result),
    )


def _add(b: Any) -> Any:
    return lambda old, new: b.add(new, old)


def _subtract(b: Any) -> Any:
    return lambda old, new: b.subtract(old, new)


def _replace(b: Any) -> Any:
    return lambda old, new: new


def _closure(b: Any) -> Any:
    from coreml_delegate.graph import DType, TensorType

    return b.trace("body", b.multiply, [TensorType(DType.FLOAT32, ())] * 2)


def _keep() -> Sample:
    x, u = of("float32", (3,)), of("float32", (1,))
    return Sample(
        "scatter",
        "a body that keeps what was there",
        lambda b, x, u: b.scatter(
            x,
            b.constant([[1]]),
            u,
            lambda old, new: old,
            update_window_dims=(),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
            index_vector_dim=1,
        ),
        (x, u),
        x,
    )


def _known() -> Sample:
    x = of("float32", (4, 2))
    return Sample(
        "take",
        "sizes, of which a shape is made",
        lambda b, x: b.dynamic_reshape(x, b.take(b.constant([4, 9, 2]), b.constant([2, 0]), 0)),
        (x,),
        x.reshape(2, 4),
    )


_REPEATED = _Form("a row three times", (4, 2), [[1], [1], [3], [1]], (1,), (0,), (0,), (1, 2))
_MODES = ("add", "sub", "mul", "min", "max")
# Which of two updates remains is not defined.
_OVERLAPPING = {
    "columns",
    "no index",
    "no index, a part",
    "wholes",
    "regions",
    "windows first",
    "ranges of a batch, which is not first",
    "along the middle axis",
    "regions of a batch",
    "only a batch",
}
# XLA fails itself where every index vector is empty and the tensor has rank 0.
_SCATTERED = [form for form in _FORMS if form.case != "no index, rank 0"]

SAMPLES = [
    *(form.gather("float32") for form in _FORMS),
    *(_ROWS.gather(dtype) for dtype in ALL[1:]),
    *(_at_axis(form, axis) for form, axis in _PLACES),
    *(_INDICES.gather("float32", indices_dtype=dtype) for dtype in INTEGERS),
    _Form("rows", (5, 3), [[2**32 - 1], [0]], (1,), (0,), (0,), (1, 3)).gather(
        "float32", indices_dtype="uint32"
    ),
    _Form("rows in range", (5, 3), [[3], [0]], (1,), (0,), (0,), (1, 3)).gather(
        "float32", mode="promise_in_bounds"
    ),
    *(form.scatter("float32") for form in _SCATTERED if form.case not in _OVERLAPPING),
    *(form.scatter("int32", "add") for form in _SCATTERED),
    *(_ROWS.scatter(dtype) for dtype in ALL[1:]),
    *(
        _REPEATED.scatter(dtype, mode)
        for dtype in ALL[:-1]
        for mode in _MODES
        if (dtype, mode) != ("uint64", "sub")
    ),  # below 0
    *(_REPEATED.scatter("bool", mode) for mode in ("add", "mul", "min", "max")),
    *(form.scatter("float32", mode) for form in (_ROWS, _ELEMENTS, _ALONG) for mode in _MODES),
    *(form.scatter("float32", fixed=True) for form in (_ROWS, _ELEMENTS, _ALONG)),
    _Form("in range", (5, 3), [[3], [0]], (1,), (0,), (0,), (1, 3)).scatter("float32", fixed=True),
    _Form("in range", (5, 3), [[3, 1], [0, 1]], (), (0, 1), (0, 1), (1, 1)).scatter(
        "float32", fixed=True
    ),
    *(_ROWS.scatter("float32", index_vector_dim=axis) for axis in (0, 2)),
    _REPEATED.scatter("float32", "add", _add),
    _REPEATED.scatter("int8", "sub", _subtract),
    _ROWS.scatter("float32", "update", _replace),
    _REPEATED.scatter("float32", "mul", _closure),
    _keep(),
    *(_take("rows", of(dtype, (4, 3)), [[2, 0], [9, -1]], 0) for dtype in ALL),
    _take("a scalar index", of("float32", (4, 3)), 1, -1),
    _take("no indices", of("float32", (4, 3)), np.zeros((0, 2)), 1),
    _known(),
    *(_one_hot(dtype, [[0, 2], [3, 1]], 3, "float32") for dtype in INTEGERS),
    *(_one_hot("int32", [0, -1, 2, 7], 3, result) for result in ALL),
    _one_hot("int32", 1, 3, "float32"),
    _one_hot("uint32", [2**32 - 1, 1], 3, "float32"),
    _one_hot("int32", [1], 0, "float32"),
]

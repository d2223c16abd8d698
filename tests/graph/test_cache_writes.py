"""Rows written into a state, as language models keep keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coreml_delegate import graph


def _slice(b: graph.Builder, cache: Any, row: Any, place: Any) -> Any:
    return b.dynamic_update_slice(cache, b.reshape(row, (1, 2)), [place, b.constant(0)])


def _scatter(b: graph.Builder, cache: Any, row: Any, place: Any) -> Any:
    return b.scatter(
        cache,
        b.reshape(place, (1,)),
        row,
        "update",
        update_window_dims=(0,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        index_vector_dim=0,
    )


@pytest.mark.parametrize("engine", ["reference", "openvino"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("write", [_slice, _scatter])
def test_rows_are_kept_between_runs(engine: str, precision: str, write: Callable[..., Any]) -> None:
    builder = graph.Backend(engine, precision=precision).builder()
    # Core ML has states of float16 only.
    cache = builder.parameter("cache", "float16", (4, 2))
    row = builder.parameter("row", "float16", (2,))
    place = builder.parameter("place", "int32")
    written = write(builder, cache, row, place)
    executable = builder.compile(written, states={cache: written})
    state = executable.make_state()
    expected = np.zeros((4, 2), np.float16)
    for n in (1, 3, 0):
        expected[n] = n + 1
        given = np.full(2, n + 1, np.float16)
        np.testing.assert_array_equal(executable.run(given, np.int32(n), state=state)[0], expected)

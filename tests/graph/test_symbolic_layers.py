"""Loops, sorts and whole layers of tensors whose sizes are known at run time only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from coreml_delegate import graph
from coreml_delegate.runtime import Model

ENGINES = ("reference", "openvino")


def _three_turns(b: Any, turn: Callable[..., Any], *initial: Any) -> Any:
    def body(i: Any, *rest: Any) -> tuple[Any, ...]:
        return (b.add(i, b.constant(1)), *turn(*rest))

    return b.while_(lambda i, *_: b.less(i, b.constant(3)), body, b.constant(0), *initial)[1]


def _causal(x: np.ndarray) -> np.ndarray:
    scores = np.where(np.tri(len(x), dtype=bool), x @ x.T / np.sqrt(3), -np.inf)
    return np.asarray(jax.nn.softmax(scores)) @ x


_WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)

_CALLS: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], Any]]] = {
    "sort": (lambda b, x: b.sort((x,), 0)[0], lambda x: np.sort(x, 0)),
    "top_k": (lambda b, x: b.top_k(x, 2)[0], lambda x: -np.sort(-x)[:, :2]),
    "softmax": (lambda b, x: b.softmax(x, 0), lambda x: jax.nn.softmax(x, 0)),
    "layer_norm": (
        lambda b, x: b.layer_norm(x),
        lambda x: jax.nn.standardize(x, epsilon=1e-5),
    ),
    "dense": (lambda b, x: b.dense(x, b.constant(_WEIGHT)), lambda x: x @ _WEIGHT.T),
    "attention": (lambda b, x: b.scaled_dot_product_attention(x, x, x, is_causal=True), _causal),
    "loop": (lambda b, x: _three_turns(b, lambda v: (b.add(v, x),), x), lambda x: 4 * x),
    "loop that swaps": (
        lambda b, x: _three_turns(b, lambda v, w: (w, v), x, b.add(x, x)),
        lambda x: 2 * x,
    ),
    "branch": (
        lambda b, x: b.if_(
            b.less(b.get_dimension_size(x, 0), b.constant(3)), lambda: b.add(x, x), lambda: x
        )[0],
        lambda x: x if len(x) >= 3 else 2 * x,
    ),
}


@pytest.mark.parametrize("call", _CALLS)
def test_sizes_may_be_known_at_run_time_only(call: str) -> None:
    build, function = _CALLS[call]
    b = graph.Backend("reference").builder()
    executable = b.compile(build(b, b.parameter("x", "float32", ("n", 3))))
    for engine in ENGINES:
        executable.model = Model.from_files(executable.files, engine=engine)
        for count in (1, 2, 5):
            x = np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)
            (actual,) = executable.run(x)
            np.testing.assert_allclose(actual, np.asarray(function(x)), rtol=1e-5, atol=1e-6)

"""Wrong calls of branches, loops, sorts and whole layers are refused, with what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coreml_delegate import graph
from coreml_delegate.errors import CoreMLDelegateError, GraphError

_INT8 = np.ones((6, 4), np.int8)
_SCALES = np.ones(6, np.float32)


@pytest.fixture
def b() -> graph.Builder:
    return graph.Backend("reference").builder()


def _values(b: graph.Builder) -> dict[str, Any]:
    return {
        "x": b.parameter("x", "float32", (2, 4)),
        "y": b.parameter("y", "float32", (4,)),
        "k": b.parameter("k", "int32", ()),
        "p": b.parameter("p", "bool", ()),
        "n": b.parameter("n", "float32", ("n", 4)),
    }


def _ended(b: Any, x: Any) -> Any:
    """Return a closure of a scope that is complete."""
    found: list[Any] = []

    def body(v: Any) -> Any:
        found.append(b.closure("inner", lambda u: u, x.type))
        return v

    b.if_(b.constant(True), body, lambda v: v, x)
    return found[0]


_WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "loop without variables": (lambda b, **_: b.while_(lambda: 0, lambda: 0), "no variables"),
    "condition of rank 1": (
        lambda b, y, **_: b.while_(lambda v: b.less(v, v), lambda v: v, y),
        "results of 'condition'",
    ),
    "condition that is no flag": (
        lambda b, k, **_: b.while_(lambda v: v, lambda v: v, k),
        "results of 'condition'",
    ),
    "body of another type": (
        lambda b, y, p, **_: b.while_(lambda v: p, lambda v: b.convert(v, "int32"), y),
        "results of 'body'",
    ),
    "body with too many results": (
        lambda b, y, p, **_: b.while_(lambda v: p, lambda v: (v, v), y),
        "results of 'body'",
    ),
    "body that returns a number": (
        lambda b, y, p, **_: b.while_(lambda v: p, lambda v: (1,), y),
        "values of the graph",
    ),
    "predicate of rank 1": (
        lambda b, y, **_: b.if_(b.less(y, y), lambda: y, lambda: y),
        "the predicate of if is no scalar",
    ),
    "predicate that is no flag": (
        lambda b, k, **_: b.if_(k, lambda: k, lambda: k),
        "does not take this element type",
    ),
    "branches of two types": (
        lambda b, p, k, y, **_: b.if_(p, lambda: k, lambda: y),
        "results of 'on_false'",
    ),
    "no branches": (lambda b, k, **_: b.case(k, []), "no branches"),
    "index of rank 1": (
        lambda b, y, **_: b.case(b.convert(y, "int32"), [lambda: y]),
        "the index of case is no scalar",
    ),
    "branch of another type": (
        lambda b, k, y, **_: b.case(k, [lambda: y, lambda: k]),
        "results of 'branch 1'",
    ),
    "arguments of another type": (
        lambda b, k, y, **_: b.call(b.closure("f", lambda v: v, y.type), k),
        "parameters of 'f'",
    ),
    "closure out of its scope": (
        lambda b, y, **_: b.call(_ended(b, y), y),
        "a closure that is complete",
    ),
    "sort of nothing": (lambda b, **_: b.sort(()), "no operands"),
    "sort of two shapes": (lambda b, x, y, **_: b.sort((x, y)), "shapes of operands differ"),
    "sort of a scalar": (lambda b, k, **_: b.sort((k,)), "no such dimension"),
    "unknown order": (lambda b, x, **_: b.sort((x,), 0, "upwards"), "unknown order"),
    "comparator that is no flag": (
        lambda b, x, **_: b.sort((x,), 0, lambda u, v: u),
        "returns no flag",
    ),
    "comparator with a loop": (
        lambda b, x, p, **_: b.sort(
            (x,), 0, lambda u, v: b.less(*b.while_(lambda *_: p, lambda s, t: (t, s), u, v))
        ),
        "not made of operations on each element",
    ),
    "unknown comparator of many": (
        lambda b, **_: b.sort(
            (b.parameter("m", "float32", (2049,)),), 0, lambda u, v: b.less(b.abs(u), b.abs(v))
        ),
        "too many",
    ),
    "unknown comparator of an unknown size": (
        lambda b, n, **_: b.sort((n,), 1, lambda u, v: b.less(b.abs(u), b.abs(v))),
        "fixed size of 2048",
    ),
    "top_k of a scalar": (lambda b, k, **_: b.top_k(k, 1), "takes no scalars"),
    "too many largest": (lambda b, x, **_: b.top_k(x, 5), "no such number"),
    "negative number of largest": (lambda b, x, **_: b.top_k(x, -1), "no such number"),
    "axis of softmax": (lambda b, x, **_: b.softmax(x, 2), "no such axis"),
    "softmax of integers": (lambda b, k, **_: b.softmax(k), "does not take this element type"),
    "gelu": (lambda b, x, **_: b.gelu(x, "sigmoid"), "unknown approximation"),
    "no axes": (lambda b, x, **_: b.layer_norm(x, ()), "no axes"),
    "scale of another shape": (
        lambda b, x, y, **_: b.layer_norm(x, 0, y),
        "another shape than the axes",
    ),
    "norm of six dimensions": (
        lambda b, **_: b.rms_norm(b.parameter("m", "float32", (1,) * 6)),
        "too many dimensions",
    ),
    "weight of another size": (lambda b, x, n, **_: b.dense(n, b.reshape(x, (4, 2))), "fit"),
    "no features": (
        lambda b, **_: b.dense(
            b.constant(np.zeros((2, 0), np.float32)), b.constant(np.zeros((3, 0), np.float32))
        ),
        "no features",
    ),
    "activation": (lambda b, x, **_: b.dense(x, x, activation="step"), "unknown activation"),
    "attention of two sizes": (
        lambda b, x, **_: b.scaled_dot_product_attention(x, b.reshape(x, (4, 2)), x),
        "shapes do not fit",
    ),
    "mask of another shape": (
        lambda b, x, **_: b.scaled_dot_product_attention(x, x, x, x),
        "the mask does not fit",
    ),
    "mask of integers": (
        lambda b, x, k, **_: b.scaled_dot_product_attention(x, x, x, k),
        "wrong element type of the mask",
    ),
    "parts of a projection": (
        lambda b, x, **_: b.qkv_projection(x, b.constant(np.ones((6, 4), np.float32)), None, 3, 2),
        "another size than its parts",
    ),
    "weight of floats": (
        lambda b, x, **_: b.quantized_dense(x, np.ones((6, 4)), _SCALES),
        "wrong weight",
    ),
    "weight that is computed": (
        lambda b, x, **_: b.quantized_dense(x, b.convert(x, "int8"), _SCALES),
        "has to be a constant",
    ),
    "values beyond 4 bits": (
        lambda b, x, **_: b.quantized_dense(x, _INT8 * 8, _SCALES, bits=4),
        "values beyond 4 bits",
    ),
    "3 bits": (lambda b, x, **_: b.quantized_dense(x, _INT8, _SCALES, bits=3), "number of bits"),
    "scales": (lambda b, x, **_: b.quantized_dense(x, _INT8, _SCALES[:5]), "wrong scales"),
    "zero points of another shape": (
        lambda b, x, **_: b.quantized_dense(
            x, _INT8, np.ones((6, 2), np.float32), np.zeros(6, np.int8)
        ),
        "differ in shape",
    ),
    "features of another size": (
        lambda b, x, **_: b.quantized_dense(b.reshape(x, (4, 2)), _INT8, _SCALES),
        "shapes do not fit",
    ),
    "bias of another type": (
        lambda b, x, y, **_: b.quantized_dense(x, _INT8, _SCALES, None, y),
        "wrong bias",
    ),
    "embedding of integers": (
        lambda b, k, **_: b.quantized_embedding(_INT8, _SCALES, k, dtype="int32"),
        "floating-point",
    ),
}


@pytest.mark.parametrize("case", _WRONG)
def test_wrong_calls_are_refused(b: graph.Builder, case: str) -> None:
    call, message = _WRONG[case]
    with pytest.raises(GraphError, match=message):
        call(b, **_values(b))


def test_weights_of_4_bits_need_a_recent_target() -> None:
    b = graph.Backend("reference", target="iOS17").builder()
    x = b.parameter("x", "float32", (2, 4))
    y = b.quantized_dense(x, _INT8, _SCALES, bits=4)
    with pytest.raises(CoreMLDelegateError, match="need iOS18"):
        b.compile(y)


@pytest.mark.parametrize("target", ["iOS16", "iOS17"])
def test_older_targets_have_attention_and_weights_of_8_bits(target: str) -> None:
    b = graph.Backend("reference", target=target).builder()
    x = b.parameter("x", "float32", (2, 4))
    y = b.scaled_dot_product_attention(x, x, x, b.constant(np.eye(2, dtype=bool)))
    executable = b.compile((y, b.quantized_dense(x, _INT8 * 3, _SCALES, _INT8[:, 0])))
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    attended, dense = executable.run(array)
    np.testing.assert_allclose(attended, array)
    np.testing.assert_allclose(dense, array @ np.full((4, 6), 2, np.float32))


def test_quantized_weights_are_stored_in_their_bits() -> None:
    b = graph.Backend("reference").builder()
    rows = np.tile(np.arange(-8, 8, dtype=np.int8), (64, 16))
    x = b.parameter("x", "float32", (1, 256))
    executable = b.compile(b.quantized_dense(x, rows, np.ones(64, np.float32), bits=4))
    (weights,) = (data for name, data in executable.files.items() if name.endswith("weight.bin"))
    assert rows.size / 2 <= len(bytes(weights)) < rows.size

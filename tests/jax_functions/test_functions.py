"""Compiled JAX functions are called as the functions are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import checkify, io_callback
from support.stablehlo_runs import assert_close

from coreml_delegate import jax as cj
from coreml_delegate.errors import GraphError, InputError, LoweringError, OptionError
from coreml_delegate.runtime import load_mlpackage, load_program

_REFERENCE = {"engine": "reference"}
_X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Pair(NamedTuple):
    """A tree of JAX."""

    first: Any
    second: Any


def _assert_trees(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_close(jax.tree.leaves(actual), jax.tree.leaves(expected))


def test_trees_go_in_and_come_out() -> None:
    def function(params: Any, pair: Pair, *, scale: Any) -> Any:
        x = pair.first @ params["w"] * scale
        return {"pair": Pair(x, pair.second + 1), "list": [x.sum(), None]}

    params = {"w": np.ones((3, 2), np.float32), "unused": np.ones(4, np.float32)}
    given = (params, Pair(_X, np.int32(3)))
    compiled = cj.compile(function, *given, scale=np.float32(2), options=_REFERENCE)
    _assert_trees(compiled(*given, scale=np.float32(2)), function(*given, scale=jnp.float32(2)))


def test_python_numbers_have_the_types_that_jax_gives_them() -> None:
    compiled = cj.compile(lambda x, n: x * n, _X, 2, options=_REFERENCE)
    assert_close([compiled(_X, 3)], [_X * 3])
    assert list(map(str, compiled.program.parameters.values())) == ["float32[2, 3]", "int32[]"]


def test_static_arguments_are_fixed() -> None:
    jitted = jax.jit(lambda x, n, mode: x * n if mode == "mul" else x + n, static_argnums=(1, 2))
    compiled = cj.compile(jitted, _X, 3, "mul", options=_REFERENCE)
    assert_close([compiled(_X, 3, "mul")], [_X * 3])
    with pytest.raises(InputError, match=r"static argument 1 is another.*got 4"):
        compiled(_X, 4, "mul")


def test_static_arguments_by_name_are_fixed() -> None:
    jitted = jax.jit(lambda x, *, n: x * n, static_argnames="n")
    compiled = cj.compile(jitted, _X, n=3, options=_REFERENCE)
    assert_close([compiled(_X, n=3)], [_X * 3])
    with pytest.raises(InputError, match="static argument 'n'"):
        compiled(_X, n=4)


def test_another_tree_is_an_input_error() -> None:
    compiled = cj.compile(lambda d: d["a"] + 1, {"a": _X}, options=_REFERENCE)
    for wrong in [({"b": _X},), (_X,), ({"a": _X}, _X), ()]:
        with pytest.raises(InputError, match="another structure"):
            compiled(*wrong)
    with pytest.raises(InputError):
        compiled({"a": _X[:1]})


def test_keys_of_random_numbers_are_arguments() -> None:
    def draw(key: Any) -> Any:
        return jax.random.normal(key, (4,)), jax.random.fold_in(key, 7)

    key = jax.random.key(3)
    compiled = cj.compile(draw, key, options=_REFERENCE)
    expected, folded = draw(key)
    normal, data = compiled(key)
    assert_close([normal], [expected])
    np.testing.assert_array_equal(data, jax.random.key_data(folded))


def _step(cache: Any, x: Any, n: Any) -> Any:
    cache = {"seen": cache["seen"].at[n].set(x), "count": cache["count"] + 1}
    return cache["seen"].sum(0), cache


_CACHE = {"seen": np.zeros((4, 3), np.float32), "count": np.zeros((1,), np.float32)}


def test_states_are_kept_between_calls() -> None:
    compiled = cj.compile(_step, _CACHE, _X[0], np.int32(0), states={0: 1}, options=_REFERENCE)
    session, other = compiled.session(), compiled.session()
    total = np.zeros(3, np.float32)
    for n, x in enumerate([_X[0], _X[1], _X[1]]):
        total = total + x
        (result,) = session(x, np.int32(n))
        assert_close([result], [total])
    (result,) = other(_X[1], np.int32(0))
    assert_close([result], [_X[1]])
    with pytest.raises(InputError, match=r"session\(\)"):
        compiled(_CACHE, _X[0], np.int32(0))


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({5: 1}, "an argument that the function does not have"),
        ({"cache": 1}, "an argument that the function does not have"),
        ({0: 2}, "a result that the function does not have"),
        ({0: 0}, "a result of another structure"),
    ],
)
def test_wrong_states_are_named(states: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cj.compile(_step, _CACHE, _X[0], np.int32(0), states=states, options=_REFERENCE)


def test_a_state_that_is_not_used_is_refused() -> None:
    with pytest.raises(OptionError, match="is not used"):
        cj.compile(lambda s, x: (x, x), _X, _X, states={0: 1}, options=_REFERENCE)


def test_symbolic_sizes_become_ranges(tmp_path: Path) -> None:
    (b,) = jax.export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b, 3), jnp.float32)
    compiled = cj.compile(jax.nn.softmax, spec, options=_REFERENCE)
    for count in (1, 4):
        x = np.ones((count, 3), np.float32)
        assert_close([compiled(x)], [jax.nn.softmax(x)])
    cj.save(cj.export(jax.jit(jax.nn.softmax), spec), tmp_path / "softmax.mlpackage")
    model = load_mlpackage(tmp_path / "softmax.mlpackage", engine="reference")
    (name,) = model.input_names
    (outputs,) = model.predict({name: np.ones((7, 3), np.float32)}).values()
    np.testing.assert_allclose(outputs, np.full((7, 3), 1 / 3), rtol=1e-3)


def test_a_saved_program_runs_as_any_pte(tmp_path: Path) -> None:
    compiled = cj.compile(lambda x: jnp.tanh(x) + 1, _X, options=_REFERENCE)
    compiled.save(tmp_path / "tanh.pte")
    (result,) = load_program(tmp_path / "tanh.pte").run("forward", [torch.from_numpy(_X)])
    assert_close([result.numpy()], [np.tanh(_X) + 1])


def test_a_function_is_called_from_several_threads() -> None:
    compiled = cj.compile(lambda x: (x * 2).sum(), _X)
    wrong: list[float] = []

    def call(n: int) -> None:
        for k in range(20):
            result = compiled(np.full((2, 3), n + k, np.float32))
            if result != (n + k) * 12:
                wrong.append(float(result))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_core_ml_lacks_is_refused_at_its_line() -> None:
    with pytest.raises(LoweringError, match=r"called at .*test_functions\.py:\d+"):
        cj.compile(lambda x: jnp.fft.fft(x).imag, _X, options=_REFERENCE)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises((OptionError, TypeError), match="engines"):
        cj.compile(lambda x: x, _X, options={"engines": "reference"})


def test_bfloat16_arguments_are_taken_where_they_are_read_as_float32() -> None:
    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    options = {**_REFERENCE, "bfloat16": "float32"}
    compiled = cj.compile(lambda n, x: x * 2 + n, np.float32(1), x, options=options)
    for given in (x, np.asarray(x), _X):
        assert_close([compiled(np.float32(1), given)], [_X * 2 + 1])
    with pytest.raises(InputError, match="parameter 'n': wrong element type: got bfloat16"):
        compiled(jnp.bfloat16(1), x)


def _printing(x: Any) -> Any:
    jax.debug.print("{x}", x=x)
    return x + 1


def _ordered(x: Any) -> Any:
    return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)


def _checked(x: Any) -> Any:
    checkify.check(x.sum() > 0, "negative")
    return x + 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_printing, r"it calls Python.*debug_print, test_functions\.py:\d+.*Leave callbacks"),
        (_ordered, "stablehlo.token.*Leave ordered callbacks out"),
        (_checked, r"checks of checkify.*checkify\.checkify\(function\)"),
    ],
)
def test_callbacks_are_refused_with_a_remedy(function: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        cj.compile(function, _X, options=_REFERENCE)


def test_a_function_that_returns_its_error_is_compiled() -> None:
    compiled = cj.compile(checkify.checkify(_checked), _X, options=_REFERENCE)
    error, result = compiled(-_X)
    assert "negative" in str(error.get())
    assert_close([result], [1 - _X])


_SIX_AXES = np.sin(np.arange(96, dtype=np.float32)).reshape(3, 2, 2, 2, 2, 2)
_TWELVE = np.sin(np.arange(12, dtype=np.float32))


@pytest.mark.parametrize("axis", [0, 2, 5])
def test_reductions_of_six_axes(axis: int) -> None:
    def function(x: Any) -> Any:
        running = jnp.cumsum(x, axis), jax.lax.cummax(x, axis), jax.lax.cumprod(x, axis)
        return *running, x.sum(axis) * 2, x.max(axis), (x > 0).any(axis), jnp.argmax(x, axis)

    compiled = cj.compile(function, _SIX_AXES, options=_REFERENCE)
    _assert_trees(compiled(_SIX_AXES), function(_SIX_AXES))


def test_sums_along_several_of_six_axes() -> None:
    def function(x: Any) -> Any:
        return x.sum((0, 2, 4)), x.sum(), x.sum((1, 2, 3, 4, 5)), x.sum(0) * 2 + x[0]

    compiled = cj.compile(function, _SIX_AXES, options=_REFERENCE)
    _assert_trees(compiled(_SIX_AXES), function(_SIX_AXES))


def test_other_bodies_of_six_axes_are_refused() -> None:
    with pytest.raises(GraphError, match="too many dimensions"):
        cj.compile(lambda x: jax.lax.reduce(x, np.float32(0), jnp.hypot, (0,)), _SIX_AXES)


_BEFORE_AND_INSIDE: dict[str, tuple[Any, Any]] = {
    "reshapes": (lambda x: x.reshape(2, 6), lambda y: y.reshape(12)),
    "transposes": (lambda x: x.reshape(3, 4).T, lambda y: y.T.reshape(12)),
    "mean": (lambda x: x.reshape(4, 3).sum(1), lambda y: (y / 3).sum()),
    "pads": (lambda x: jnp.pad(x, (1, 1)), lambda y: jnp.pad(y, (1, 0))[:12]),
}


@pytest.mark.parametrize("name", _BEFORE_AND_INSIDE)
def test_ops_of_a_body_after_ops_outside(name: str) -> None:
    before, inside = _BEFORE_AND_INSIDE[name]

    def function(x: Any) -> Any:
        outside = before(x)
        looped = jax.lax.fori_loop(0, 2, lambda _, y: y + inside(outside), x)
        return looped, jax.lax.cond(x[1] > 0, lambda y: y * inside(outside), lambda y: y, x)

    compiled = cj.compile(function, _TWELVE, options=_REFERENCE)
    _assert_trees(compiled(_TWELVE), function(_TWELVE))

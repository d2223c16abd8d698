"""StableHLO and JAX functions with precision ``auto``, compared with JAX in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.stablehlo_runs import ENGINES
from support.tolerances import SQNR_FP16_GUARDED, sqnr_db

from coreml_delegate import jax as cj
from coreml_delegate import stablehlo
from coreml_delegate.errors import InputError, OptionError

AUTO = {"precision": "auto", "engine": "reference"}
X = np.random.RandomState(1).randn(4, 16).astype(np.float32)
WEIGHT = np.random.RandomState(2).randn(16, 16).astype(np.float32) / 4


def _score(x: Any) -> Any:
    return jnp.log((jnp.exp(x @ WEIGHT) * 5000).sum(-1))


def _partition(x: Any) -> Any:
    """Logarithm of a sum of powers without the maximum before."""
    return jnp.log(jnp.exp(x * 8).sum(-1) + 1)


def _sigmoid(x: Any) -> Any:
    return jnp.exp(7 * x) / (jnp.exp(7 * x) + 3e5)


@pytest.mark.parametrize("function", [_score, _partition, _sigmoid])
def test_operations_that_lose_their_numbers_compute_in_fp32(function: Callable[..., Any]) -> None:
    want = np.asarray(jax.jit(function)(X))
    plain = cj.compile(function, X, options=AUTO | {"precision": "float16"})
    assert sqnr_db(want, plain(X)) < SQNR_FP16_GUARDED
    compiled = cj.compile(function, X, options=AUTO)
    for engine in ENGINES:
        (got,) = compiled.program.on(engine).run(X)
        assert sqnr_db(want, got) >= SQNR_FP16_GUARDED
    precision = compiled.program.precision
    assert precision is not None
    assert precision.is_reached
    assert precision.is_minimal
    assert all("test_precision.py:" in call.place for call in precision.islands)
    assert all("(stablehlo." in call.place for call in precision.islands)


def test_equal_programs_and_samples_give_equal_bytes() -> None:
    exported = jax.export.export(jax.jit(_score))(X)
    programs = [stablehlo.compile(exported, **AUTO, precision_data=[(X,)]) for _ in range(2)]
    first, second = (
        {name: bytes(content) for name, content in program.executable.files.items()}
        for program in programs
    )
    assert first == second


def test_samples_have_the_arguments_of_the_function() -> None:
    def function(params: dict[str, Any], x: Any, *, scale: Any) -> Any:
        return {"y": jnp.log((jnp.exp(x @ params["w"]) * scale).sum(-1)), "n": params["n"] + 1}

    params = {"w": WEIGHT, "n": np.int32(2)}
    scale = np.float32(5000)
    lost = cj.compile(function, params, X, scale=scale, options=AUTO)
    assert lost.program.precision is not None
    assert lost.program.precision.islands
    small = [(params, np.full_like(X, 0)), (params | {"w": WEIGHT * 0}, X)]
    options = AUTO | {"precision_data": small}
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype)
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    plain = cj.compile(function, specs, spec, scale=np.float32(1), options=options)
    assert plain.program.precision is not None
    assert plain.program.precision.islands == ()
    want, got = function(params, X, scale=scale), lost(params, X, scale=scale)
    assert sqnr_db(np.asarray(want["y"]), got["y"]) >= SQNR_FP16_GUARDED
    assert got["n"] == 3


def test_states_are_no_part_of_a_sample() -> None:
    def step(total: Any, x: Any) -> tuple[Any, Any]:
        new_total = total + 1
        return _score(x) + new_total.sum(), new_total

    total = np.zeros(4, np.float32)
    compiled = cj.compile(step, total, X, states={0: 1}, options=AUTO)
    assert compiled.program.precision is not None
    assert compiled.program.precision.is_reached
    session = compiled.session()
    for turn in (1, 2):
        (got,) = session(X)
        assert sqnr_db(np.asarray(_score(X)) + 4 * turn, got) >= SQNR_FP16_GUARDED


def test_bfloat16_samples_are_read_as_float32() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    exported = jax.export.export(jax.jit(lambda x: _score(x.astype(jnp.float32))))(x)
    program = stablehlo.compile(exported, **AUTO, bfloat16="float32", precision_data=[(x,)])
    assert program.precision is not None
    assert program.precision.islands
    assert program.measure_precision([(x,)]).before_db >= SQNR_FP16_GUARDED


def test_shapes_alone_cannot_be_measured() -> None:
    with pytest.raises(OptionError, match=r"got jax\.ShapeDtypeStruct, expected arrays"):
        cj.compile(_score, jax.ShapeDtypeStruct(X.shape, X.dtype), options=AUTO)


def test_an_exported_program_needs_samples() -> None:
    exported = jax.export.export(jax.jit(_score))(X)
    with pytest.raises(OptionError, match="expected arrays for x"):
        stablehlo.compile(exported, **AUTO)
    with pytest.raises(OptionError, match="precision_data must be a list of samples"):
        stablehlo.compile(exported, **AUTO, precision_data=X)
    with pytest.raises(InputError, match="wrong number of arrays"):
        stablehlo.compile(exported, **AUTO, precision_data=[()])
    with pytest.raises(OptionError, match="is for precision auto"):
        stablehlo.compile(exported, precision_data=[(X,)])

"""The harnesses, and what becomes of one."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from coreml_delegate import stablehlo
from coreml_delegate.errors import ConversionError, GraphError, LoweringError, UnsupportedOpError

ENGINES = ("reference", "openvino")
PASSED, REFUSED, WRONG, CRASHED, EXCLUDED = "passed", "refused", "wrong", "crashed", "excluded"

_CARRIED = frozenset(
    np.dtype(name)
    for name in [
        "float32",
        "float16",
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
        "uint32",
        "bool",
    ]
)
# dtype -> (share of the largest expected element, relative): two rightly rounded kernels differ by
# the order of sums, and by a few units in the last place of a function.
_TOLERANCE: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"float32": (1e-5, 1e-4), "float16": (2e-3, 4e-3)}
)


@dataclass
class Outcome:
    """The outcome of a harness.

    Attributes:
        outcome: ``passed``: right on the reference engine, and on OpenVINO unless that declines the
            program; ``refused``: not compiled, with a reason; ``wrong``; ``crashed``: anything else
            was raised, or the process ended, or took too long; ``excluded``: not one to be run.
        primitive: What it is a call of.
        reason: Why it did not pass.
        engines: What became of it on each engine.
    """

    outcome: str
    primitive: str
    reason: str = ""
    engines: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


@functools.cache
def harnesses() -> Mapping[str, Any]:
    """JAX's harnesses by name, sorted: their order in JAX depends on memory addresses."""
    module = importlib.import_module("jax._src.internal_test_util.test_harnesses")
    by_name = sorted(module.all_harnesses, key=lambda harness: harness.fullname)
    found = MappingProxyType({harness.fullname: harness for harness in by_name})
    assert len(found) == len(by_name), "two harnesses share a name"
    return found


def digest(name: str) -> bytes:
    """Return the number that puts a harness into the sample and seeds its random numbers."""
    return hashlib.sha256(name.encode()).digest()


def in_sample(name: str, share: float) -> bool:
    """Whether a harness belongs to the sample of that share; a larger one holds every smaller."""
    return int.from_bytes(digest(name)[:8], "big") < share * 2**64


def run(name: str) -> Outcome:
    """Compile a harness and compare what it computes with JAX."""
    harness = harnesses()[name]
    primitive = str(harness.group_name)
    seed = int.from_bytes(digest(name)[:4], "little")
    try:
        prepared = _prepare(harness, seed)
    except Exception as error:  # noqa: BLE001 - JAX itself cannot run it
        return Outcome(EXCLUDED, primitive, f"JAX: {_line(error)}")
    if isinstance(prepared, str):
        return Outcome(EXCLUDED, primitive, prepared)
    arrays, lowered, expected = prepared
    keys = _keys_of_unstable_sort(harness)
    try:
        program = stablehlo.compile(lowered, ENGINES[0])
    except Exception as error:  # noqa: BLE001 - what is not ours is a crash
        is_refusal = isinstance(error, LoweringError | GraphError)
        is_refusal &= not isinstance(error, ConversionError)
        return Outcome(REFUSED if is_refusal else CRASHED, primitive, _line(error))
    engines = {engine: _run_on(engine, program, arrays, expected, keys) for engine in ENGINES}
    bad = [f"{e}: {said}" for e, said in engines.items() if said not in (PASSED, "declined")]
    kind = CRASHED if any(": crashed" in said for said in bad) else WRONG
    return Outcome(kind if bad else PASSED, primitive, "; ".join(bad), engines)


def _prepare(harness: Any, seed: int) -> str | tuple[list[Any], Any, list[Any]]:
    """Return arguments, the lowered function and JAX's results, or why it is not one to be run."""
    import jax
    import jax.numpy as jnp

    if not harness.filter("cpu"):
        return "JAX does not implement it on the CPU"
    given = harness.dyn_args_maker(np.random.RandomState(seed))
    if any(
        jnp.issubdtype(getattr(a, "dtype", None) or np.float32, jax.dtypes.extended) for a in given
    ):
        return "an argument is a key"
    arrays = [np.asarray(jnp.asarray(argument)) for argument in given]
    other = {array.dtype for array in arrays} - _CARRIED
    if other or (not arrays and np.dtype(harness.dtype) not in _CARRIED):
        return f"arguments of {', '.join(sorted(map(str, other or [np.dtype(harness.dtype)])))}"
    function = jax.jit(harness.dyn_fun, keep_unused=True)
    results = [np.asarray(leaf) for leaf in jax.tree.leaves(function(*arrays))]
    return arrays, function.lower(*arrays), results


def _keys_of_unstable_sort(harness: Any) -> int | None:
    """Return how many operands a sort orders by, if JAX leaves the order of equal ones open."""
    is_unstable = harness.group_name == "sort" and not harness.params.get("is_stable", True)
    return int(harness.params.get("num_keys", 1)) if is_unstable else None


def _without_order_of_ties(results: list[Any]) -> list[Any]:
    order = np.lexsort(results[::-1])
    return [result[order] for result in results]


def _run_on(
    engine: str, program: Any, arrays: list[Any], expected: list[Any], keys: int | None
) -> str:
    try:
        results = program.on(engine).run(*arrays)
    except UnsupportedOpError:
        return "declined"
    except Exception as error:  # noqa: BLE001 - what is not ours is a crash
        return f"crashed: {_line(error)}"
    pairs = list(zip(results, expected, strict=True))
    if keys is not None and all(array.ndim == 1 for array in expected):
        tied = map(_without_order_of_ties, (list(results), expected))
        pairs = [*pairs[:keys], *zip(*tied, strict=True)]
    complaints = [_difference(actual, wanted) for actual, wanted in pairs]
    return next((complaint for complaint in complaints if complaint), PASSED)


def _difference(actual: Any, expected: Any) -> str | None:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype}{actual.shape} is not {expected.dtype}{expected.shape}"
    share, relative = _TOLERANCE.get(str(expected.dtype), (0.0, 0.0))
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.abs(b[np.isfinite(b)])
    absolute = share * (min(1.0, float(finite.max())) if finite.size else 1.0)
    if relative == 0.0 and actual.dtype.kind not in "f":
        wrong = actual != expected
    else:
        wrong = ~np.isclose(a, b, relative, absolute, equal_nan=True)
    if not wrong.any():
        return None
    at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    return f"{int(wrong.sum())} of {wrong.size}, {actual[at]} is not {expected[at]}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]

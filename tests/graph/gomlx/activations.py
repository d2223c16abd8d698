"""Activations and their gradients, which GoMLX has as operations of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from graph.gomlx.case import Case, case, f16, f32

Function = Callable[..., Any]

# Of self-normalizing networks (Klambauer et al., 2017).
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


def _like(b: Any, x: Any, number: float) -> Any:
    return b.constant(np.array(number, x.dtype.label))


def _clamped_line(b: Any, x: Any, slope: float) -> Any:
    """Return ``slope * x + 1/2``, within 0 and 1."""
    line = b.add(b.multiply(x, _like(b, x, slope)), _like(b, x, 0.5))
    return b.clamp(_like(b, x, 0), line, _like(b, x, 1))


def _leaky_relu(b: Any, x: Any) -> Any:
    is_negative = b.less(x, _like(b, x, 0))
    return b.select(is_negative, b.multiply(x, _like(b, x, 0.3)), x)


def _selu(b: Any, x: Any) -> Any:
    below = b.multiply(b.exponential_minus_one(x), _like(b, x, _SELU_ALPHA))
    kept = b.select(b.less(x, _like(b, x, 0)), below, x)
    return b.multiply(kept, _like(b, x, _SELU_SCALE))


def gated(b: Any, x: Any) -> Any:
    """Return SwiGLU: the first half of the last axis, activated, times the second."""
    halves = b.reshape(x, (*x.shape[:-1], 2, -1))
    whole = halves.shape
    starts = [[0] * x.rank + [0], [0] * (x.rank - 1) + [1, 0]]
    limits = [[*whole[:-2], 1, whole[-1]], list(whole)]
    first, second = (
        b.reshape(b.slice(halves, start, limit), (*whole[:-2], whole[-1]))
        for start, limit in zip(starts, limits, strict=True)
    )
    return b.multiply(b.silu(first), second)


ACTIVATIONS: dict[str, tuple[Function, list[float], float]] = {
    "None": (lambda b, x: b.identity(x), [0, -1, 2, -3, 4, -5, 6], 0.0),
    "Relu": (lambda b, x: b.relu(x), [0, 0, 2, 0, 4, 0, 6], 0.0),
    "Sigmoid": (
        lambda b, x: b.logistic(x),
        [0.5, 0.26894143, 0.8807971, 0.047425873, 0.98201376, 0.006692851, 0.9975274],
        1e-5,
    ),
    "HardSigmoid": (
        lambda b, x: _clamped_line(b, x, 0.2),
        [0.5, 0.3, 0.9, 0.0, 1.0, 0.0, 1.0],
        1e-6,
    ),
    "LeakyRelu": (_leaky_relu, [0, -0.3, 2, -0.9, 4, -1.5, 6], 1e-6),
    "Selu": (
        _selu,
        [0.0, -1.1113307, 2.101402, -1.6705687, 4.202804, -1.7462534, 6.304206],
        1e-5,
    ),
    "Silu": (
        lambda b, x: b.silu(x),
        [0, -0.26894143, 1.7615942, -0.14227763, 3.928055, -0.03346425, 5.9851646],
        1e-5,
    ),
    "HardSwish": (
        lambda b, x: b.multiply(x, _clamped_line(b, x, 1 / 6)),
        [0, -0.33333334, 1.6666666, 0, 4, 0, 6],
        1e-6,
    ),
    "Tanh": (
        lambda b, x: b.tanh(x),
        [0, -0.76159416, 0.9640276, -0.99505475, 0.9993293, -0.9999092, 0.9999877],
        1e-5,
    ),
    "GeluExact": (
        lambda b, x: b.gelu(x),
        [0, -0.15865526, 1.9544997, -4.0496886e-03, 3.9998736, -1.3411045e-06, 6],
        1e-5,
    ),
    "GeluApproximate": (
        lambda b, x: b.gelu(x, "tanh"),
        [0, -0.15880796, 1.9545977, -3.6375225e-03, 3.9999294, 0, 6],
        1e-5,
    ),
}
"""By GoMLX's name: the function, its values at ``POINTS``, and how far from them it may be."""

POINTS = [0, -1, 2, -3, 4, -5, 6]


def _bell(b: Any, x: Any) -> tuple[Any, Any]:
    """Return distribution function and density of the normal distribution."""
    scaled = b.multiply(x, _like(b, x, np.sqrt(0.5)))
    below = b.multiply(b.add(b.erf(scaled), _like(b, x, 1)), _like(b, x, 0.5))
    density = b.exponential(b.negate(b.multiply(scaled, scaled)))
    return below, b.multiply(density, _like(b, x, 1 / np.sqrt(2 * np.pi)))


def _gradient_of_gelu(b: Any, x: Any, outer: Any) -> Any:
    below, density = _bell(b, x)
    return b.multiply(outer, b.add(below, b.multiply(x, density)))


def _gradient_of_silu(b: Any, x: Any, outer: Any) -> Any:
    s = b.logistic(x)
    slope = b.add(s, b.multiply(b.multiply(x, s), b.subtract(_like(b, x, 1), s)))
    return b.multiply(outer, slope)


def _gradient_of_tanh(b: Any, y: Any, outer: Any) -> Any:
    return b.multiply(outer, b.subtract(_like(b, y, 1), b.multiply(y, y)))


def _gradient_of_logistic(b: Any, y: Any, outer: Any) -> Any:
    return b.multiply(b.multiply(outer, y), b.subtract(_like(b, y, 1), y))


def _gradient_of_clamped_line(b: Any, y: Any, outer: Any) -> Any:
    inside = b.and_(b.greater(y, _like(b, y, 0)), b.less(y, _like(b, y, 1)))
    return b.select(inside, b.multiply(outer, _like(b, y, 0.2)), _like(b, y, 0))


def _gradient_of_relu(b: Any, y: Any, outer: Any) -> Any:
    return b.select(b.greater(y, _like(b, y, 0)), outer, _like(b, y, 0))


def _gradient_of_leaky_relu(b: Any, y: Any, outer: Any) -> Any:
    is_kept = b.greater_equal(y, _like(b, y, 0))
    return b.select(is_kept, outer, b.multiply(outer, _like(b, y, 0.3)))


_THREE = f32([1, 2, 3])
_TANH = np.tanh(f32([0, -1, 2]))
_LOGISTIC = 1 / (1 + np.exp(-f32([0, -1, 2])))


def _gradient(
    test: str, build: Function, given: Any, outer: Any, wanted: Any, absolute: float = 1e-5
) -> Case:
    return case(
        f"FusedOps/FusedActivationVJP/{test}",
        build,
        [f32(given), f32(outer)],
        f32(wanted),
        tolerance=(absolute, 0.0),
    )


_GRADIENTS = [
    _gradient("Relu", _gradient_of_relu, [0, 0, 2, 0, 4, 0, 6], [1] * 7, [0, 0, 1, 0, 1, 0, 1]),
    _gradient("Tanh", _gradient_of_tanh, _TANH, _THREE, _THREE * (1 - _TANH * _TANH)),
    _gradient(
        "Sigmoid",
        _gradient_of_logistic,
        _LOGISTIC,
        _THREE,
        _THREE * _LOGISTIC * (1 - _LOGISTIC),
    ),
    _gradient(
        "HardSigmoid",
        _gradient_of_clamped_line,
        [0.5, 0.3, 0.9, 0.0, 1.0],
        [1] * 5,
        [0.2, 0.2, 0.2, 0.0, 0.0],
    ),
    _gradient(
        "LeakyRelu",
        _gradient_of_leaky_relu,
        [0, -0.3, 2, -0.9, 4],
        [1] * 5,
        [1.0, 0.3, 1.0, 0.3, 1.0],
    ),
    _gradient("Gelu", _gradient_of_gelu, [0, 1, 2], [1] * 3, [0.5, 1.0833154, 1.0852319], 1e-4),
    _gradient("Silu", _gradient_of_silu, [0, 1, -1], [1] * 3, [0.5, 0.9276703, 0.0723297], 1e-4),
]

CASES = [
    *(
        case(
            f"FusedOps/FusedActivation/{test}",
            function,
            [f32(POINTS)],
            f32(wanted),
            tolerance=(absolute, 0.0),
        )
        for test, (function, wanted, absolute) in ACTIVATIONS.items()
    ),
    case(
        "FusedOps/FusedActivation/SwiGLU",
        gated,
        [f32([[0, 1, 2, 3], [-1, -2, 4, 5]])],
        f32([[0, 2.1931758], [-1.0757657, -1.1920292]]),
        tolerance=(1e-5, 0.0),
    ),
    case(
        "FusedOps/FusedActivation/Float16",
        "relu",
        [f16(POINTS[:5])],
        f16([0, 0, 2, 0, 4]),
    ),
    *_GRADIENTS,
]

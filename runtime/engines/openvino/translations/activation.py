"""Activations."""

from __future__ import annotations

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import per_channel, rank, scalar
from coreml_delegate.runtime.engines.openvino.plugin import nan
from coreml_delegate.runtime.engines.openvino.translations import register_expressions, translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor, refusal


@translation("relu")
def relu(x: Tensor, *, exact_nan: bool = False) -> Result:
    """``max(x, 0)``."""
    return nan.keep_nan(x, ops.relu(x)) if exact_nan else ops.relu(x)


@translation("relu6")
def relu6(x: Tensor, *, exact_nan: bool = False) -> Result:
    """``min(max(x, 0), 6)``."""
    bounded = ops.clamp(x, 0.0, 6.0)
    return nan.keep_nan(x, bounded) if exact_nan else bounded


@translation("clamped_relu")
def clamped_relu(x: Tensor, alpha: float, beta: float) -> Result:
    """Leaky ReLU bounded above by ``beta``."""
    return nan.keep_nan(x, ops.minimum(leaky_relu(x, alpha), scalar(beta, x)))


@translation("leaky_relu")
def leaky_relu(x: Tensor, alpha: float) -> Result:
    """``x`` where positive, ``alpha * x`` elsewhere."""
    return ops.prelu(x, scalar(alpha, x))


@translation("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Result:
    """GELU, ``x * 0.5 * (1 + erf(x / sqrt(2)))``, exact or by its tanh or sigmoid approximation."""
    if mode == "SIGMOID_APPROXIMATION":
        return ops.swish(x, scalar(1.702, x))
    approximations = {"EXACT": "erf", "TANH_APPROXIMATION": "tanh"}
    if mode not in approximations:
        raise refusal("unknown gelu mode", mode, "EXACT, TANH_APPROXIMATION, SIGMOID_APPROXIMATION")
    return ops.gelu(x, approximations[mode])


@translation("sigmoid_hard")
def sigmoid_hard(x: Tensor, alpha: float, beta: float) -> Result:
    """``min(max(alpha * x + beta, 0), 1)``."""
    line = linear_activation(x, alpha, beta)
    return nan.keep_nan(line, ops.clamp(line, 0.0, 1.0))


@translation("linear_activation")
def linear_activation(x: Tensor, alpha: float, beta: float) -> Result:
    """``alpha * x + beta``."""
    return ops.add(ops.multiply(x, scalar(alpha, x)), scalar(beta, x))


def _softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Result:
    axes = rank(x)
    inner = ops.softplus(ops.multiply(x, per_channel(beta, axes)))
    return ops.multiply(inner, per_channel(alpha, axes))


_ALPHA = {"alpha": float}

register_expressions(
    {
        "elu": (_ALPHA, lambda x, alpha: ops.elu(x, alpha)),
        "sigmoid": ({}, lambda x: ops.sigmoid(x)),
        "silu": ({}, lambda x: ops.swish(x)),
        "softmax": ({"axis": int}, lambda x, axis=-1: nan.softmax(x, axis)),
        "softplus": ({}, lambda x: ops.softplus(x)),
        "softsign": ({}, lambda x: ops.softsign(x)),
        "scaled_tanh": (
            {"alpha": float, "beta": float},
            lambda x, alpha, beta: ops.multiply(
                ops.tanh(ops.multiply(x, scalar(beta, x))), scalar(alpha, x)
            ),
        ),
        # Also NaN stays, which is not less.
        "thresholded_relu": (
            _ALPHA,
            lambda x, alpha: ops.select(ops.less(x, scalar(alpha, x)), scalar(0, x), x),
        ),
        # A factor per channel: [C], for [N, C, *spatial].
        "prelu": ({"alpha": Tensor}, lambda x, alpha: ops.prelu(x, alpha)),
        "softplus_parametric": ({"alpha": Tensor, "beta": Tensor}, _softplus_parametric),
    }
)

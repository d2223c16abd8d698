"""Activations."""

from __future__ import annotations

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import per_channel, rank, scalar
from coreml_delegate.runtime.engines.openvino.plugin import nan
from coreml_delegate.runtime.engines.openvino.translations import translation
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


@translation("prelu")
def prelu(x: Tensor, alpha: Tensor) -> Result:
    """Leaky ReLU with a slope per channel: ``alpha`` [C], ``x`` [N, C, *spatial]."""
    return ops.prelu(x, alpha)


@translation("elu")
def elu(x: Tensor, alpha: float) -> Result:
    """``x`` where positive, ``alpha * (exp(x) - 1)`` elsewhere."""
    return ops.elu(x, alpha)


@translation("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Result:
    """GELU, ``x * 0.5 * (1 + erf(x / sqrt(2)))``, exact or by its tanh or sigmoid approximation."""
    if mode == "SIGMOID_APPROXIMATION":
        return ops.swish(x, scalar(1.702, x))
    approximations = {"EXACT": "erf", "TANH_APPROXIMATION": "tanh"}
    if mode not in approximations:
        raise refusal("unknown gelu mode", mode, "EXACT, TANH_APPROXIMATION, SIGMOID_APPROXIMATION")
    return ops.gelu(x, approximations[mode])


@translation("sigmoid")
def sigmoid(x: Tensor) -> Result:
    """``1 / (1 + exp(-x))``."""
    return ops.sigmoid(x)


@translation("sigmoid_hard")
def sigmoid_hard(x: Tensor, alpha: float, beta: float) -> Result:
    """``min(max(alpha * x + beta, 0), 1)``."""
    line = linear_activation(x, alpha, beta)
    return nan.keep_nan(line, ops.clamp(line, 0.0, 1.0))


@translation("silu")
def silu(x: Tensor) -> Result:
    """``x * sigmoid(x)``."""
    return ops.swish(x)


@translation("linear_activation")
def linear_activation(x: Tensor, alpha: float, beta: float) -> Result:
    """``alpha * x + beta``."""
    return ops.add(ops.multiply(x, scalar(alpha, x)), scalar(beta, x))


@translation("scaled_tanh")
def scaled_tanh(x: Tensor, alpha: float, beta: float) -> Result:
    """``alpha * tanh(beta * x)``."""
    return ops.multiply(ops.tanh(ops.multiply(x, scalar(beta, x))), scalar(alpha, x))


@translation("softplus")
def softplus(x: Tensor) -> Result:
    """``log(1 + exp(x))``, computed without overflow."""
    return ops.softplus(x)


@translation("softplus_parametric")
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Result:
    """``alpha * log(1 + exp(beta * x))``: ``alpha`` and ``beta`` [C], ``x`` [N, C, *spatial]."""
    axes = rank(x)
    inner = ops.softplus(ops.multiply(x, per_channel(beta, axes)))
    return ops.multiply(inner, per_channel(alpha, axes))


@translation("softsign")
def softsign(x: Tensor) -> Result:
    """``x / (1 + |x|)``."""
    return ops.softsign(x)


@translation("softmax")
def softmax(x: Tensor, axis: int = -1) -> Result:
    """``exp(x) / sum(exp(x), axis)``."""
    return nan.softmax(x, axis)


@translation("thresholded_relu")
def thresholded_relu(x: Tensor, alpha: float) -> Result:
    """Zero where ``x < alpha``, ``x`` elsewhere, NaN included."""
    return ops.select(ops.less(x, scalar(alpha, x)), scalar(0, x), x)

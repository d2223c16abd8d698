"""How each operation of StableHLO and CHLO is read: calls of the builder, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coreml_delegate.errors import near_matches
from coreml_delegate.stablehlo.operations import (
    computing,
    control,
    custom_calls,
    elementwise,
    shapes,
)
from coreml_delegate.stablehlo.source_op import Rule

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **elementwise.RULES,
        **shapes.RULES,
        **computing.RULES,
        **control.RULES,
        **custom_calls.RULES,
    }
)
"""The rule of every operation that is read, by name."""

_COMPLEX = "Core ML has no complex numbers"
_DEVICES = "a Core ML model runs on one device alone"
_LINEAR_ALGEBRA = "Core ML has no decompositions or solvers of matrices"
_FEEDS = "a Core ML model takes its inputs before it runs, and returns its outputs after"
_QUANTIZED = "quantized element types have no counterpart in a Core ML program"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "stablehlo.all_gather": _DEVICES,
        "stablehlo.all_reduce": _DEVICES,
        "stablehlo.all_to_all": _DEVICES,
        "stablehlo.async_done": _DEVICES,
        "stablehlo.async_start": _DEVICES,
        "stablehlo.batch_norm_grad": "it is of training",
        "stablehlo.batch_norm_training": "it is of training",
        "stablehlo.cholesky": _LINEAR_ALGEBRA,
        "stablehlo.collective_broadcast": _DEVICES,
        "stablehlo.collective_permute": _DEVICES,
        "stablehlo.complex": _COMPLEX,
        "stablehlo.cross-replica-sum": _DEVICES,
        "stablehlo.fft": _COMPLEX,
        "stablehlo.imag": _COMPLEX,
        "stablehlo.infeed": _FEEDS,
        "stablehlo.outfeed": _FEEDS,
        "stablehlo.real": _COMPLEX,
        "stablehlo.recv": _FEEDS,
        "stablehlo.reduce_scatter": _DEVICES,
        "stablehlo.rng": "what it draws is left to the implementation, so that no result is right; "
        "jax.random and rng_bit_generator are exact",
        "stablehlo.send": _FEEDS,
        "stablehlo.set_dimension_size": "sizes of a Core ML tensor cannot be set",
        "stablehlo.triangular_solve": _LINEAR_ALGEBRA,
        "stablehlo.uniform_dequantize": _QUANTIZED,
        "stablehlo.uniform_quantize": _QUANTIZED,
        "chlo.conj": _COMPLEX,
    }
)
"""Why other operations are refused, by name."""


def refusal_reason(name: str) -> str:
    """Return why an operation without a rule cannot be expressed."""
    if name in REFUSED:
        return REFUSED[name]
    if name.partition(".")[0] in ("stablehlo", "chlo"):
        near = near_matches(name, RULES, "", cutoff=0.8)
        return f"it is not known{f', {near}' if near else ''}"
    return "it is no operation of StableHLO"

"""The reasons for which a match stays in float."""

from __future__ import annotations

from collections.abc import Callable

import torch

from coreml_delegate.ops.call import MAX_RANK
from coreml_delegate.ops.quantization import Output
from coreml_delegate.quantizer.matcher import Match
from coreml_delegate.quantizer.qspec import output_spec


def refusal(match: Match) -> str | None:
    """Return why a match stays in float, or None if it is quantized.

    Earlier calls in the graph must be annotated already.
    """
    for check in _CHECKS:
        reason = check(match)
        if reason is not None:
            return reason
    return None


def _settings_quantize(match: Match) -> str | None:
    settings = match.choice.settings
    if settings is None:
        return f"{match.choice.origin} leaves it in float"
    if not settings.quantizes:
        return f"{match.choice.origin} leaves weights and activations in float32"
    if match.pattern.weight is None and settings.activation is None:
        return f"{match.choice.origin} leaves activations in float32"
    if match.pattern.output is Output.FLOAT and settings.weight is None:
        return f"{match.choice.origin} leaves weights in float32"
    return None


def _computes_float32(match: Match) -> str | None:
    weights = [match.weight] if match.weight is not None else []
    for node in (*match.data, *weights, *match.results):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            got = str(getattr(value, "dtype", "no tensor")).removeprefix("torch.")
            return f"{node.name!r} is {got}, only float32 is quantized"
    return None


def _has_rank_of_core_ml(match: Match) -> str | None:
    """Core ML supports higher ranks only between two reshapes without a quantize op."""
    for node in (*match.data, *match.results):
        if node.meta["val"].dim() > MAX_RANK:
            return f"{node.name!r} has rank {node.meta['val'].dim()}, Core ML takes {MAX_RANK}"
    return None


def _has_constant_weight(match: Match) -> str | None:
    if match.pattern.weight is None:
        return None
    if match.weight is None or not match.has_constant_weight:
        return "its weight is computed, not a parameter"
    return None


def _takes_tensors(match: Match) -> str | None:
    if match.pattern.output is Output.FLOAT or match.data:
        return None
    return "it takes no tensor"


def _follows_quantized(match: Match) -> str | None:
    if match.follows and output_spec(match.data[0]) is None:
        return f"its input {match.data[0].name!r} is not quantized"
    return None


def _condition_holds(match: Match) -> str | None:
    condition = match.pattern.condition
    return None if condition is None else condition(match.call)


_CHECKS: tuple[Callable[[Match], str | None], ...] = (
    _settings_quantize,
    _computes_float32,
    _has_rank_of_core_ml,
    _has_constant_weight,
    _takes_tensors,
    _follows_quantized,
    _condition_holds,
)

"""Rules that read operations of StableHLO and CHLO as calls of the builder, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coreml_delegate.errors import near_matches
from coreml_delegate.graph import emitter as graph
from coreml_delegate.stablehlo.operations import computing, control, elementwise, shapes
from coreml_delegate.stablehlo.parse import QUANTIZED
from coreml_delegate.stablehlo.source_op import Rule

RULES: Mapping[str, Rule] = MappingProxyType(
    {**elementwise.RULES, **shapes.RULES, **computing.RULES, **control.RULES}
)
"""The rule of every supported operation by name."""

_DEVICES = "a Core ML model runs on one device only"
_FEEDS = "a Core ML model takes its inputs before it runs, and returns its outputs after"
_BY_REASON: Mapping[str, tuple[str, ...]] = {
    _DEVICES: (
        *("all_gather", "all_reduce", "all_to_all", "async_done", "async_start"),
        *("collective_broadcast", "collective_permute", "cross-replica-sum", "reduce_scatter"),
    ),
    _FEEDS: ("infeed", "outfeed", "recv", "send"),
    QUANTIZED: ("uniform_dequantize", "uniform_quantize"),
    "sizes of a Core ML tensor cannot be set": ("set_dimension_size",),
}

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "chlo.conj": graph.REFUSED["conj"],
        "chlo.scan": "Core ML has no scan of any function; use stablehlo.while",
        **{f"stablehlo.{name}": reason for name, reason in graph.REFUSED.items()},
        **{f"stablehlo.{name}": reason for reason, names in _BY_REASON.items() for name in names},
    }
)
"""The reason why an operation is refused, by name."""


def refusal_reason(name: str) -> str:
    """Return the reason why an operation without a rule cannot be expressed."""
    if name in REFUSED:
        return REFUSED[name]
    if name.partition(".")[0] in ("stablehlo", "chlo"):
        near = near_matches(name, RULES, "", cutoff=0.8)
        return f"it is not known{f', {near}' if near else ''}"
    return "it is no operation of StableHLO"

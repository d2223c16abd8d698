"""The conformance tests of GoMLX's backends as tables.

GoMLX (github.com/gomlx/compute) tests every backend with the same graphs; ``Case`` has one of them.
"""

from __future__ import annotations

from graph.gomlx import (
    activations,
    contractions,
    control,
    dynamic,
    elementwise,
    fused,
    reductions,
    shapes,
)
from graph.gomlx.case import Case

GROUPS: dict[str, list[Case]] = {
    "elementwise": elementwise.CASES,
    "shapes": shapes.CASES,
    "reductions": reductions.CASES,
    "contractions": contractions.CASES,
    "convolutions": contractions.CONVOLUTIONS,
    "integer convolutions": contractions.INTEGER_CONVOLUTIONS,
    "activations": activations.CASES,
    "fused": fused.CASES,
    "control": control.CASES,
    "dynamic": dynamic.CASES,
}
"""Cases that are compiled as one graph."""

SLOW = {"integer convolutions"}
"""Groups that are compiled in seconds."""

__all__ = ["GROUPS", "SLOW", "Case"]

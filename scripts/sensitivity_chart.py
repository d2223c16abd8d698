"""The ranking of layers as bars, for whatever draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coreml_delegate.scripts.commands.quantize_report import decibels
from coreml_delegate.scripts.sensitivity import Sensitivity

ROW = 22
"""Height of a bar with the space around it, in pixels."""
LABELS = 320
"""Width of the layers' names, in pixels."""
LENGTH = 480
"""Length of the longest bar, in pixels."""
VALUES = 120
"""Width of the numbers behind the bars, in pixels."""
TICK = 10
"""Between two lines of the scale, in dB."""
_LETTERS = 44


@dataclass(frozen=True, slots=True)
class Bar:
    """A layer.

    Attributes:
        label: Its path, shortened at the front.
        path: Its path.
        value: The number, for a reader.
        length: In pixels.
        relieved: Whether the suggestion treats it otherwise.
        suggested: What the suggestion makes of it.
    """

    label: str
    path: str
    value: str
    length: float
    relieved: bool
    suggested: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars over a scale in dB.

    Attributes:
        bars: From top to bottom.
        ticks: Values of the scale, dB, with their distance from its left end in pixels.
        target: Distance of the suggestion's target, in pixels, or None if it is off the scale.
    """

    bars: tuple[Bar, ...]
    ticks: tuple[tuple[int, float], ...]
    target: float | None


def chart_of(sensitivity: Sensitivity) -> Chart:
    """The chart of a ranking; a layer that loses nothing has the longest bar."""
    finite = [x.sqnr_db for x in sensitivity.layers if math.isfinite(x.sqnr_db)]
    end = TICK * max(math.ceil(max([*finite, 0.0, TICK]) / TICK), 1)
    scale = LENGTH / end

    def place(value: float) -> float:
        return round(min(max(value, 0.0), end) * scale, 1) if not math.isnan(value) else 0.0

    bars: list[Bar] = []
    for layer in sensitivity.layers:
        mode = sensitivity.suggestion.mode_for(layer.path)
        bars.append(
            Bar(
                label=shortened(layer.path),
                path=layer.path,
                value=decibels(layer.sqnr_db),
                length=place(layer.sqnr_db),
                relieved=layer.path in sensitivity.suggestion.modules,
                suggested="float" if mode is None else mode.name,
            )
        )
    step = TICK * max(math.ceil(end / TICK / 8), 1)
    ticks = tuple((value, place(value)) for value in range(0, end + 1, step))
    within = 0 <= sensitivity.target_db <= end
    return Chart(tuple(bars), ticks, place(sensitivity.target_db) if within else None)


def shortened(path: str) -> str:
    """A path that fits, by what is most particular about it: its end."""
    return path if len(path) <= _LETTERS else f"…{path[1 - _LETTERS :]}"


def height(bars: Sequence[Bar]) -> int:
    """Of all the bars, in pixels."""
    return ROW * len(bars)

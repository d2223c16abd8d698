"""The ranking of layers as a picture."""

from __future__ import annotations

import io
from typing import Any

from coreml_delegate.scripts import sensitivity_chart as chart
from coreml_delegate.scripts.commands.quantize_report import decibels
from coreml_delegate.scripts.inputs.images import import_pillow
from coreml_delegate.scripts.sensitivity import Sensitivity

_MARGIN = 16
_HEADING = 56
_FOOT = 24
_GAP = 6
_INK, _SOFT, _LINE = "#1c2430", "#5b6675", "#d5dbe3"
_BAR, _RELIEVED = "#4f7cac", "#d1603d"
_SCALE = 2  # pixels of the file for each of the layout, for sharp text


def to_png(sensitivity: Sensitivity) -> bytes:
    """Draw the ranking.

    Raises:
        OptionError: Pillow is not installed.
    """
    pillow = import_pillow()
    drawn = chart.chart_of(sensitivity)
    below = _HEADING + chart.height(drawn.bars)
    width = 2 * _MARGIN + chart.LABELS + chart.LENGTH + chart.VALUES
    image = pillow.Image.new("RGB", (_SCALE * width, _SCALE * (below + _FOOT)), "white")
    pen = _Pen(pillow, image)
    _heading(pen, sensitivity)
    left = _MARGIN + chart.LABELS
    for value, place in drawn.ticks:
        pen.line(left + place, _HEADING, below, _LINE)
        pen.text(left + place, below + 12, f"{value} dB", _SOFT, "mm")
    for number, bar in enumerate(drawn.bars):
        top = _HEADING + number * chart.ROW
        middle = top + chart.ROW / 2
        colour = _RELIEVED if bar.relieved else _BAR
        pen.text(left - _GAP, middle, bar.label, _INK, "rm")
        pen.box(left, top + 4, left + bar.length, top + chart.ROW - 4, colour)
        pen.text(left + bar.length + _GAP, middle, bar.value, _INK, "lm")
    if drawn.target is not None:
        pen.line(left + drawn.target, _HEADING, below, _INK)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _heading(pen: _Pen, sensitivity: Sensitivity) -> None:
    title = f"SQNR with one layer quantized by {sensitivity.mode.name}"
    facts = (
        f"all: {decibels(sensitivity.uniform_db)}   "
        f"suggested, {len(sensitivity.suggestion.modules)} layers otherwise: "
        f"{decibels(sensitivity.suggested_db)}   line: {decibels(sensitivity.target_db)}"
    )
    pen.text(_MARGIN, 16, title, _INK, "lm", size=15)
    pen.text(_MARGIN, 38, facts, _SOFT, "lm")


class _Pen:
    """Draws in the units of the layout."""

    def __init__(self, pillow: Any, image: Any) -> None:
        self._font = pillow.ImageFont.load_default
        self._draw = pillow.ImageDraw.Draw(image)

    def text(
        self, x: float, y: float, text: str, colour: str, anchor: str, *, size: int = 12
    ) -> None:
        """Text at its anchor, as Pillow names it."""
        font = self._font(size=size * _SCALE)
        self._draw.text((x * _SCALE, y * _SCALE), text, fill=colour, font=font, anchor=anchor)

    def line(self, x: float, top: float, bottom: float, colour: str) -> None:
        """A vertical line."""
        ends = [(x * _SCALE, top * _SCALE), (x * _SCALE, bottom * _SCALE)]
        self._draw.line(ends, fill=colour, width=_SCALE)

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """A filled rectangle."""
        corners = [(left * _SCALE, top * _SCALE), (right * _SCALE, bottom * _SCALE)]
        self._draw.rectangle(corners, fill=colour)

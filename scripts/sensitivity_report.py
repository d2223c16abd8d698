"""The result of a sensitivity study as a table, an HTML page and a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coreml_delegate.formats.html_pages import page_template
from coreml_delegate.formats.text import decibels
from coreml_delegate.quantization import QuantizationAssignment
from coreml_delegate.quantization.sensitivity import Sensitivity
from coreml_delegate.scripts import console
from coreml_delegate.scripts.inputs.images import import_pillow

_TEMPLATE = "sensitivity_report.html.j2"

# The bar chart of page and picture, in pixels.
_ROW = 22  # height of a bar with the space around it
_LABELS = 320  # width of the layers' names
_LENGTH = 480  # length of the longest bar
_VALUES = 120  # width of the numbers behind the bars
_TICK = 10  # dB between two lines of the scale
_LETTERS = 44  # that fit into a label

# For the picture only.
_MARGIN = 16
_HEADING = 56
_FOOT = 24
_GAP = 6
_INK, _SOFT, _LINE = "#1c2430", "#5b6675", "#d5dbe3"
_BAR, _RELIEVED = "#4f7cac", "#d1603d"
_SCALE = 2  # pixels of the file for each of the layout, for sharp text


def to_table(sensitivity: Sensitivity) -> str:
    """Return the ranking and the suggestion for a terminal."""
    rows: list[tuple[str, ...]] = [("layer", "kind", "weights", "SQNR alone", "suggested")]
    for layer in sensitivity.layers:
        suggested = _suggested(sensitivity, layer.path)
        alone = decibels(layer.sqnr_db)
        rows.append((layer.path, layer.kind, str(layer.weights), alone, suggested))
    uniform = QuantizationAssignment(sensitivity.mode)
    relieved = len(sensitivity.suggestion.modules)
    return "\n".join(
        (
            console.columns(rows),
            f"all by {sensitivity.mode.name}: {decibels(sensitivity.uniform_db)}, "
            f"{sensitivity.bits(uniform):.2f} bits per weight",
            f"suggested, {relieved} of {len(sensitivity.layers)} layers in other modes: "
            f"{decibels(sensitivity.suggested_db)}, "
            f"{sensitivity.bits(sensitivity.suggestion):.2f} bits per weight",
        )
    )


def to_html(sensitivity: Sensitivity) -> str:
    """Return one page, which needs no network: the total loss, the bars and the suggestion."""
    chart = _chart(sensitivity)
    return page_template("coreml_delegate.scripts", _TEMPLATE, decibels=decibels).render(
        sensitivity=sensitivity,
        chart=chart,
        row=_ROW,
        labels=_LABELS,
        width=_LABELS + _LENGTH + _VALUES,
        height=_ROW * len(chart.bars),
        uniform_bits=sensitivity.bits(QuantizationAssignment(sensitivity.mode)),
        suggested_bits=sensitivity.bits(sensitivity.suggestion),
        config=sensitivity.suggestion.to_json(),
    )


def to_png(sensitivity: Sensitivity) -> bytes:
    """Return the bars as a PNG.

    Raises:
        OptionError: Pillow is not installed.
    """
    pillow = import_pillow()
    chart = _chart(sensitivity)
    below = _HEADING + _ROW * len(chart.bars)
    width = 2 * _MARGIN + _LABELS + _LENGTH + _VALUES
    image = pillow.Image.new("RGB", (_SCALE * width, _SCALE * (below + _FOOT)), "white")
    pen = _Pen(pillow, image)
    _heading(pen, sensitivity)
    left = _MARGIN + _LABELS
    for value, position in chart.ticks:
        pen.line(left + position, _HEADING, below, _LINE)
        pen.text(left + position, below + 12, f"{value} dB", _SOFT, "mm")
    for number, bar in enumerate(chart.bars):
        top = _HEADING + number * _ROW
        middle = top + _ROW / 2
        colour = _RELIEVED if bar.relieved else _BAR
        pen.text(left - _GAP, middle, bar.label, _INK, "rm")
        pen.box(left, top + 4, left + bar.length, top + _ROW - 4, colour)
        pen.text(left + bar.length + _GAP, middle, bar.value, _INK, "lm")
    if chart.target is not None:
        pen.line(left + chart.target, _HEADING, below, _INK)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _heading(pen: _Pen, sensitivity: Sensitivity) -> None:
    title = f"SQNR with one layer quantized by {sensitivity.mode.name}"
    facts = (
        f"all: {decibels(sensitivity.uniform_db)}   "
        f"suggested, {len(sensitivity.suggestion.modules)} layers in other modes: "
        f"{decibels(sensitivity.suggested_db)}   "
        f"line: {decibels(sensitivity.target_db)}"
    )
    pen.text(_MARGIN, 16, title, _INK, "lm", size=15)
    pen.text(_MARGIN, 38, facts, _SOFT, "lm")


class _Pen:
    """Draws in layout pixels, scaled to the pixels of the file."""

    def __init__(self, pillow: Any, image: Any) -> None:
        self._font = pillow.ImageFont.load_default
        self._draw = pillow.ImageDraw.Draw(image)

    def text(
        self, x: float, y: float, text: str, colour: str, anchor: str, *, size: int = 12
    ) -> None:
        """Draw text at an anchor, named as Pillow names it."""
        font = self._font(size=size * _SCALE)
        self._draw.text((x * _SCALE, y * _SCALE), text, fill=colour, font=font, anchor=anchor)

    def line(self, x: float, top: float, bottom: float, colour: str) -> None:
        """Draw a vertical line."""
        ends = [(x * _SCALE, top * _SCALE), (x * _SCALE, bottom * _SCALE)]
        self._draw.line(ends, fill=colour, width=_SCALE)

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """Draw a filled rectangle."""
        corners = [(left * _SCALE, top * _SCALE), (right * _SCALE, bottom * _SCALE)]
        self._draw.rectangle(corners, fill=colour)


@dataclass(frozen=True, slots=True)
class _Bar:
    """One layer of the chart.

    Attributes:
        label: The layer's path, shortened at the front.
        value: SQNR, for a reader.
        relieved: Whether the suggestion gives the layer another mode.
    """

    label: str
    path: str
    value: str
    length: float
    relieved: bool
    suggested: str


@dataclass(frozen=True, slots=True)
class _Chart:
    """Bars over a scale in dB.

    Attributes:
        ticks: Values of the scale in dB, with their distance from its left end in pixels.
        target: The same distance of the target; None if it is off the scale.
    """

    bars: tuple[_Bar, ...]
    ticks: tuple[tuple[int, float], ...]
    target: float | None


def _chart(sensitivity: Sensitivity) -> _Chart:
    """Lay the bars out; a layer that loses nothing has the longest."""
    finite = [x.sqnr_db for x in sensitivity.layers if math.isfinite(x.sqnr_db)]
    end = _TICK * max(math.ceil(max([*finite, 0.0, _TICK]) / _TICK), 1)
    scale = _LENGTH / end

    def position(value: float) -> float:
        return round(min(max(value, 0.0), end) * scale, 1) if not math.isnan(value) else 0.0

    bars = tuple(
        _Bar(
            label=_shorten(layer.path),
            path=layer.path,
            value=decibels(layer.sqnr_db),
            length=position(layer.sqnr_db),
            relieved=layer.path in sensitivity.suggestion.modules,
            suggested=_suggested(sensitivity, layer.path),
        )
        for layer in sensitivity.layers
    )
    step = _TICK * max(math.ceil(end / _TICK / 8), 1)
    ticks = tuple((value, position(value)) for value in range(0, end + 1, step))
    within = 0 <= sensitivity.target_db <= end
    return _Chart(bars, ticks, position(sensitivity.target_db) if within else None)


def _shorten(path: str) -> str:
    """Return a path that fits into a label; its end says most, so the front is cut."""
    return path if len(path) <= _LETTERS else f"…{path[1 - _LETTERS :]}"


def _suggested(sensitivity: Sensitivity, path: str) -> str:
    mode = sensitivity.suggestion.mode_for(path)
    return "float" if mode is None else mode.name


FORMS: Mapping[str, Callable[[Sensitivity], bytes]] = {
    ".html": lambda sensitivity: to_html(sensitivity).encode(),
    ".json": lambda sensitivity: f"{console.as_json(sensitivity.as_dict())}\n".encode(),
    ".png": to_png,
    ".txt": lambda sensitivity: f"{to_table(sensitivity)}\n".encode(),
}
"""Contents of a report by the suffix of its file."""

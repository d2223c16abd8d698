"""The ranking of layers as one HTML page that works without a network."""

from __future__ import annotations

import functools
from typing import Any

from coreml_delegate.html_pages import page_template
from coreml_delegate.quantization_modes import QuantizationAssignment
from coreml_delegate.scripts import sensitivity_chart as chart
from coreml_delegate.scripts.commands.quantize_report import decibels
from coreml_delegate.scripts.sensitivity import Sensitivity

_TEMPLATE = "sensitivity.html.j2"


def to_html(sensitivity: Sensitivity) -> str:
    """The page: what is lost in all, the bars, and the suggestion."""
    uniform = QuantizationAssignment(sensitivity.mode)
    drawn = chart.chart_of(sensitivity)
    return _template().render(
        sensitivity=sensitivity,
        chart=drawn,
        row=chart.ROW,
        labels=chart.LABELS,
        width=chart.LABELS + chart.LENGTH + chart.VALUES,
        height=chart.height(drawn.bars),
        uniform_bits=sensitivity.bits(uniform),
        suggested_bits=sensitivity.bits(sensitivity.suggestion),
        config=sensitivity.suggestion.to_json(),
    )


@functools.cache
def _template() -> Any:
    return page_template("coreml_delegate.scripts", _TEMPLATE, decibels=decibels)

"""Plain data as JSON text, and numbers for readers."""

from __future__ import annotations

import json
from typing import Any


def to_json(document: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return ``document`` as JSON, with inf and nan as strings, as JSON has no such numbers."""
    return json.dumps(_finite(document), allow_nan=False, indent=indent, sort_keys=sort_keys)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value


def decibels(value: float) -> str:
    """Return a ratio of signal to error for a reader; it is infinite if values are equal."""
    return "equal" if value == float("inf") else f"{value:.1f} dB"

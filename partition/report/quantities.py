"""Numbers for a reader."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(count: int, unit: str) -> str:
    """A number with its unit in decimal prefixes: ``2.4 MB``, ``12 FLOPs``."""
    for factor, prefix in _PREFIXES:
        if count >= factor:
            return f"{count / factor:.1f} {prefix}{unit}"
    return f"{count} {unit}"

"""Whether the shape of an input is one that its function takes."""

from __future__ import annotations

from coreml_delegate.errors import InputError
from coreml_delegate.runtime.mil.program import Feature

Range = tuple[int, int | None]


def check_shape(feature: Feature, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the description of an input excludes.

    Args:
        feature: The input.
        shape: Of the array to be passed to it.

    Raises:
        InputError: Names the input, the first dimension that does not fit, its size, and its range.
    """
    if feature.shapes:
        if shape not in feature.shapes:
            raise InputError(
                f"input {feature.name!r} has a shape that is not enumerated",
                got=str(list(shape)),
                expected=" | ".join(str(list(listed)) for listed in feature.shapes),
            )
        return
    ranges = _ranges(feature)
    if ranges is None:
        return
    if len(shape) != len(ranges):
        raise InputError(
            f"input {feature.name!r} has the wrong rank",
            got=f"{len(shape)} (shape {list(shape)})",
            expected=f"{len(ranges)} (shape {_listed(ranges)})",
        )
    for axis, (size, (low, high)) in enumerate(zip(shape, ranges, strict=True)):
        if size < low or (high is not None and size > high):
            raise InputError(
                f"input {feature.name!r} has the wrong size in dimension {axis}",
                got=f"{size} (shape {list(shape)})",
                expected=f"{_range((low, high))} (shape {_listed(ranges)})",
            )


def smallest_shape(feature: Feature) -> tuple[int, ...]:
    """The shape of an input that is left out: the first listed, or the smallest allowed."""
    if feature.shapes:
        return feature.shapes[0]
    return tuple(max(low, 1) for low, _ in _ranges(feature) or ())


def _ranges(feature: Feature) -> tuple[Range, ...] | None:
    """The sizes each dimension may have; None when the rank itself is free."""
    if feature.bounds:
        return feature.bounds
    declared = feature.type.shape
    if declared is None:
        return None
    return tuple((0, None) if size is None else (size, size) for size in declared)


def _range(bounds: Range) -> str:
    low, high = bounds
    if low == high:
        return str(low)
    return f"{low}.." if high is None else f"{low}..{high}"


def _listed(ranges: tuple[Range, ...]) -> str:
    return f"[{', '.join(map(_range, ranges))}]"

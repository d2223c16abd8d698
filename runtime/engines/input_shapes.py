"""Check the shapes of inputs against the shapes that their function accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coreml_delegate.dynamic_shapes import input_sizes
from coreml_delegate.dynamic_shapes.expressions import SizeExpression
from coreml_delegate.dynamic_shapes.input_sizes import Sizes
from coreml_delegate.errors import BlobFormatError, InputError, OptionError
from coreml_delegate.runtime.mil.program import Feature, Function, Program
from coreml_delegate.runtime.native import InputLimits, SizeLimit

Range = tuple[int, int | None]
Shape = tuple[int, ...]


class InputShapes:
    """The shapes that a function accepts: of each input, and in which combinations.

    Args:
        features: The inputs of the function.
        sizes: How sizes depend on each other, if known; see ``dynamic_shapes.input_sizes``.

    Attributes:
        names: The inputs whose shape is not fixed.

    Raises:
        BlobFormatError: ``sizes`` has an input that does not exist, or has another rank.
    """

    def __init__(self, features: Sequence[Feature], sizes: Mapping[str, Sizes]) -> None:
        self._features = {feature.name: feature for feature in features}
        self._open = [f for f in features if f.shapes or f.bounds]
        listed = [f for f in features if f.shapes]
        # If several inputs have equally many shapes, their n-th shapes go together.
        tied = len(listed) > 1 and len({len(f.shapes) for f in listed}) == 1
        self._tied = listed if tied else []
        self._related = list(_dimensions_with_expressions(features, sizes))
        self.names = tuple(f.name for f in self._open)

    @classmethod
    def of(cls, program: Program, function: Function) -> InputShapes:
        """Return the shapes that a function of a program accepts.

        Raises:
            BlobFormatError: See the class, or the metadata are malformed.
        """
        return cls(function.inputs, input_sizes.read(program.metadata, function.name))

    def enumerated(self) -> list[dict[str, Shape]]:
        """Return every combination of shapes of the inputs with enumerated shapes, by name."""
        listed = [feature for feature in self._open if feature.shapes]
        shapes = [feature.shapes for feature in listed]
        combinations = zip(*shapes, strict=True) if self._tied else itertools.product(*shapes)
        names = [feature.name for feature in listed]
        return [dict(zip(names, shapes, strict=True)) for shapes in combinations] if listed else []

    @property
    def native_obstacle(self) -> str | None:
        """The reason why native calls cannot check the shapes, or None if they can."""
        is_formula = not all(dimension.is_plain for dimension in self._related)
        return "sizes of its inputs are given by formulas" if is_formula else None

    def limits(self, inputs: Sequence[str]) -> tuple[InputLimits, ...] | None:
        """Return the limits that ``check`` checks, for native calls; without enumerated shapes.

        Returns:
            The limits of each of ``inputs``, in the order of calls; None if there is an obstacle.
        """
        if self.native_obstacle is not None:
            return None
        firsts: dict[str, tuple[int, int]] = {}
        same_as: dict[tuple[str, int], tuple[int, int]] = {}
        for dimension in self._related:
            first = firsts.setdefault(
                dimension.expression.text, (inputs.index(dimension.name), dimension.axis)
            )
            same_as[dimension.name, dimension.axis] = first
        return tuple(self._input_limits(self._features[name], same_as) for name in inputs)

    @staticmethod
    def _input_limits(
        feature: Feature, same_as: Mapping[tuple[str, int], tuple[int, int]]
    ) -> InputLimits:
        ranges = None if feature.shapes else _allowed_sizes(feature)
        if ranges is None:
            return None
        return tuple(
            SizeLimit(low, high, same_as.get((feature.name, axis)))
            for axis, (low, high) in enumerate(ranges)
        )

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Refuse shapes, at least of the inputs in ``names``, that the function does not accept.

        Raises:
            InputError: Names the input, the dimension, its size, and what was expected.
        """
        for feature in self._open:
            check_shape(feature, shapes[feature.name])
        self._check_combination(shapes)
        self._check_relations(shapes)

    def _check_combination(self, shapes: Mapping[str, Shape]) -> None:
        combination = tuple(shapes[feature.name] for feature in self._tied)
        combinations = list(zip(*(feature.shapes for feature in self._tied), strict=True))
        if self._tied and combination not in combinations:
            raise InputError(
                "inputs have shapes that are not enumerated together",
                got=self._described(combination),
                expected=" | ".join(self._described(shapes_) for shapes_ in combinations),
            )

    def _described(self, combination: Sequence[Shape]) -> str:
        pairs = zip(self._tied, combination, strict=True)
        return ", ".join(f"{feature.name!r} {list(shape)}" for feature, shape in pairs)

    def _check_relations(self, shapes: Mapping[str, Shape]) -> None:
        solved: dict[str, tuple[int, _Dimension]] = {}
        for dimension in self._related:
            if dimension.symbol is None or (dimension.symbol in solved and not dimension.is_plain):
                continue
            size = dimension.size_in(shapes)
            value = dimension.expression.solve(size)
            if value is None:
                raise InputError(
                    f"input {dimension.name!r} has the wrong size in dimension {dimension.axis}",
                    got=f"{size} (shape {list(shapes[dimension.name])})",
                    expected=f"{dimension.expression.text} for a whole number {dimension.symbol}",
                )
            if dimension.symbol not in solved:
                solved[dimension.symbol] = value, dimension
        values = {symbol: value for symbol, (value, _) in solved.items()}
        for dimension in self._related:
            if not dimension.expression.symbols <= values.keys():
                continue
            size, expected = dimension.size_in(shapes), _evaluate(dimension.expression, values)
            if size != expected:
                sources = (solved[symbol] for symbol in sorted(dimension.expression.symbols))
                origin = " and ".join(str(source) for _, source in sources)
                what = (
                    "equal to" if dimension.is_plain else f"{dimension.expression.text}, given by"
                )
                raise InputError(
                    f"input {dimension.name!r} has the wrong size in dimension {dimension.axis}",
                    got=f"{size} (shape {list(shapes[dimension.name])})",
                    expected=f"{expected} ({what} {origin})",
                )


def _evaluate(expression: SizeExpression, values: Mapping[str, int]) -> int:
    try:
        return expression.evaluate(values)
    except OptionError as error:
        raise BlobFormatError("a stored size has no value", got=str(error)) from error


@dataclass(frozen=True, slots=True)
class _Dimension:
    """A dimension of an input whose size is an expression of symbols."""

    name: str
    axis: int
    expression: SizeExpression

    @property
    def symbol(self) -> str | None:
        """The symbol whose value the size determines, or None."""
        return next(iter(self.expression.symbols)) if self.expression.is_solvable else None

    @property
    def is_plain(self) -> bool:
        """Whether the size is a bare symbol."""
        return self.expression.text in self.expression.symbols

    def size_in(self, shapes: Mapping[str, Shape]) -> int:
        """Return the size of this dimension."""
        return shapes[self.name][self.axis]

    def __str__(self) -> str:
        return f"dimension {self.axis} of {self.name!r}"


def _dimensions_with_expressions(
    features: Sequence[Feature], sizes: Mapping[str, Sizes]
) -> Iterator[_Dimension]:
    """Return the dimensions with expressions as sizes, bare symbols first."""
    ranks = {f.name: len(f.bounds) for f in features if f.bounds}
    dimensions: list[_Dimension] = []
    for name, listed in sizes.items():
        open_sizes = [(i, e) for i, e in enumerate(listed) if isinstance(e, SizeExpression)]
        if open_sizes and ranks.get(name) != len(listed):
            raise BlobFormatError(
                f"stored sizes of input {name!r} do not fit the inputs of the function",
                got=f"{len(listed)} sizes",
                expected=", ".join(f"{n} {rank}" for n, rank in ranks.items()) or "none",
            )
        dimensions += [_Dimension(name, axis, expression) for axis, expression in open_sizes]
    return iter(sorted(dimensions, key=lambda dimension: not dimension.is_plain))


def check_shape(feature: Feature, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the description of an input does not allow.

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
    ranges = _allowed_sizes(feature)
    if ranges is None:
        return
    if len(shape) != len(ranges):
        raise InputError(
            f"input {feature.name!r} has the wrong rank",
            got=f"{len(shape)} (shape {list(shape)})",
            expected=f"{len(ranges)} (shape {_format_ranges(ranges)})",
        )
    for axis, (size, (low, high)) in enumerate(zip(shape, ranges, strict=True)):
        if size < low or (high is not None and size > high):
            raise InputError(
                f"input {feature.name!r} has the wrong size in dimension {axis}",
                got=f"{size} (shape {list(shape)})",
                expected=f"{_format_range((low, high))} (shape {_format_ranges(ranges)})",
            )


def smallest_shape(feature: Feature) -> tuple[int, ...]:
    """Return the shape for a missing input: the first enumerated, or the smallest allowed."""
    if feature.shapes:
        return feature.shapes[0]
    return tuple(max(low, 1) for low, _ in _allowed_sizes(feature) or ())


def _allowed_sizes(feature: Feature) -> tuple[Range, ...] | None:
    """Return the sizes that each dimension may have; None if any rank is allowed."""
    if feature.bounds:
        return feature.bounds
    declared = feature.type.shape
    if declared is None:
        return None
    return tuple((0, None) if size is None else (size, size) for size in declared)


def _format_range(bounds: Range) -> str:
    low, high = bounds
    if low == high:
        return str(low)
    return f"{low}.." if high is None else f"{low}..{high}"


def _format_ranges(ranges: tuple[Range, ...]) -> str:
    return f"[{', '.join(map(_format_range, ranges))}]"

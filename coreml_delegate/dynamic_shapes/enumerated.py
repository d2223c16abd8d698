"""Enumerated shapes of a model's inputs, as stored in the compile spec ``enumerated_shapes``.

The spec is a JSON list with an entry per symbolic shape: ``[{"shape": [size, ...]}, [shapes,
names]]``. A size is an integer or ``{"key_name": expression, "low": int | null, "high": int |
null}``; ``names`` are the inputs of this symbolic shape and ``shapes`` their possible shapes. The
n-th shapes of all entries form a combination.

Source: ExecuTorch 1.5, Core ML backend, ``enumerated_shape_utils``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from coreml_delegate.dynamic_shapes.expressions import SizeExpression
from coreml_delegate.errors import OptionError

Shape = tuple[int, ...]

MAX_SHAPES = 128
"""Core ML's maximum number of shapes."""


@dataclass(frozen=True, slots=True)
class SymbolicSize:
    """A dimension of dynamic size.

    Attributes:
        expression: The size in symbols of the exported program, ``s0`` or ``2*s0``.
        low: Smallest size that the program was exported for, None if it has no lower bound.
        high: Largest size, None if it has no upper bound.
    """

    expression: str
    low: int | None = None
    high: int | None = None

    def admits(self, size: int) -> bool:
        """Return whether the program was exported for this size.

        Torch specializes size 1 and starts ranges at 2, even if 1 was requested.
        """
        low = 1 if self.low == 2 else self.low
        return (low is None or size >= low) and (self.high is None or size <= self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else self.low
        return f"{self.expression} in {low}..{'' if self.high is None else self.high}"


Size = int | SymbolicSize


@dataclass(frozen=True, slots=True)
class EnumeratedInput:
    """The shapes of all inputs of one symbolic shape.

    Attributes:
        names: Names of the inputs in the exported program.
        sizes: The symbolic shape.
        shapes: The shape in each combination.
    """

    names: tuple[str, ...]
    sizes: tuple[Size, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class EnumeratedShapes:
    """The combinations of input shapes that a model may be called with.

    Attributes:
        inputs: The inputs of symbolic shape; the n-th shapes of all inputs form a combination.

    Raises:
        OptionError: There is no input, numbers of shapes differ, or sizes contradict each other.
    """

    inputs: tuple[EnumeratedInput, ...]

    def __post_init__(self) -> None:
        counts = {name: len(entry.shapes) for entry in self.inputs for name in entry.names}
        if len(set(counts.values())) != 1:
            raise OptionError(
                "inputs have different numbers of enumerated shapes",
                got=", ".join(f"{name!r} {count}" for name, count in counts.items()) or "no input",
                remedy="List as many shapes for each: the n-th shapes of all inputs go together",
            )
        self.bindings()

    @property
    def count(self) -> int:
        """Number of combinations."""
        return len(self.inputs[0].shapes)

    def bindings(self) -> tuple[Mapping[str, int], ...]:
        """Return the symbol values of each combination, by symbol name."""
        return tuple(self._binding(index) for index in range(self.count))

    def _binding(self, index: int) -> dict[str, int]:
        solved: dict[str, tuple[int, str]] = {}
        sizes = list(self._sizes(index))
        for expression, size, location in sizes:
            if not expression.is_solvable:
                continue
            (symbol,) = expression.symbols
            value = expression.solve(size)
            if value is None or (symbol in solved and solved[symbol][0] != value):
                raise _contradiction(index, expression, size, location, solved)
            solved.setdefault(symbol, (value, location))
        binding = {symbol: value for symbol, (value, _) in solved.items()}
        for expression, size, location in sizes:
            if expression.symbols <= binding.keys() and expression.evaluate(binding) != size:
                raise _contradiction(index, expression, size, location, solved)
        return binding

    def _sizes(self, index: int) -> Iterator[tuple[SizeExpression, int, str]]:
        for entry in self.inputs:
            for dim, (size, value) in enumerate(zip(entry.sizes, entry.shapes[index], strict=True)):
                if isinstance(size, SymbolicSize):
                    location = f"dimension {dim} of {entry.names[0]!r}"
                    yield SizeExpression.parse(size.expression), value, location

    def encode(self) -> list[Any]:
        """Return the shapes as lists and dictionaries, for JSON."""
        return [
            [
                {"shape": [_encode_size(size) for size in entry.sizes]},
                [[list(shape) for shape in entry.shapes], list(entry.names)],
            ]
            for entry in self.inputs
        ]

    @classmethod
    def decode(cls, content: Any) -> EnumeratedShapes:
        """Read shapes that ``encode``, or ExecuTorch's own backend, has written.

        Raises:
            OptionError: The content has another form.
        """
        try:
            entries = [_decode_input(key, shapes, names) for key, (shapes, names) in content]
        except (TypeError, ValueError, KeyError) as error:
            raise OptionError("not a list of enumerated shapes", got=str(error)) from error
        return cls(tuple(entries))

    def describe(self) -> str:
        """Return the combinations as readable text."""
        listed = (
            ", ".join(
                f"{name} {list(entry.shapes[index])}"
                for entry in self.inputs
                for name in entry.names
            )
            for index in range(self.count)
        )
        return " | ".join(listed)


def _contradiction(
    index: int,
    expression: SizeExpression,
    size: int,
    location: str,
    solved: Mapping[str, tuple[int, str]],
) -> OptionError:
    symbols = sorted(expression.symbols & solved.keys())
    bindings = "; ".join(f"{s} is {solved[s][0]} by {solved[s][1]}" for s in symbols)
    return OptionError(
        f"enumerated shapes number {index} do not go together",
        got=f"{size} as {location}",
        expected=f"{expression.text}{f', where {bindings}' if bindings else ''}",
        remedy="The program was exported with sizes that depend on each other: list shapes that "
        "do, or export with dimensions that are independent",
    )


def _encode_size(size: Size) -> Any:
    if isinstance(size, int):
        return size
    return {"key_name": size.expression, "low": size.low, "high": size.high}


def _decode_input(key: Any, shapes: Any, names: Any) -> EnumeratedInput:
    entry = EnumeratedInput(
        names=tuple(_text(name) for name in names),
        sizes=tuple(_decode_size(size) for size in key["shape"]),
        shapes=tuple(tuple(_integer(size) for size in shape) for shape in shapes),
    )
    if not entry.names or any(len(shape) != len(entry.sizes) for shape in entry.shapes):
        raise ValueError("a shape of another rank, or of no input")
    return entry


def _decode_size(content: Any) -> Size:
    if not isinstance(content, Mapping):
        return _integer(content)
    fields = cast("Mapping[str, Any]", content)
    low, high = fields["low"], fields["high"]
    return SymbolicSize(
        SizeExpression.parse(_text(fields["key_name"])).text,
        None if low is None else _integer(low),
        None if high is None else _integer(high),
    )


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} where an integer should be")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a text should be")
    return value

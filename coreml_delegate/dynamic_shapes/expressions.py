"""Sizes as expressions of symbols: parsed from text, evaluated and solved.

A dependent size has the text that torch prints: ``2*s0``, ``((s0 - 1)//2) + 1``, ``Max(1, s0)``.
The text may come from a file, so it is parsed, never executed.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from coreml_delegate.errors import OptionError

_MAX_LENGTH = 4096
_MAX_VALUE = 2**63
_HIGHEST_POWER = 8

_Values = Mapping[str, int]
_Number = int | Fraction


def _power(base: _Number, exponent: _Number) -> _Number:
    if exponent.denominator != 1 or not 0 <= exponent <= _HIGHEST_POWER:
        raise ValueError(f"a power of {exponent}")
    return base ** int(exponent)


_OPERATORS: Mapping[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Div: lambda a, b: Fraction(a) / b,
    ast.Pow: _power,
}

# By the names that torch and sympy print.
_FUNCTIONS: Mapping[str, Callable[..., _Number]] = {
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "IntTrueDiv": lambda a, b: Fraction(a) / b,
    "FloatTrueDiv": lambda a, b: Fraction(a) / b,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "ToFloat": Fraction,
    "TruncToInt": lambda a: math.trunc(a),
    "floor": math.floor,
    "ceiling": math.ceil,
    "Abs": lambda a: abs(a),
}


@dataclass(frozen=True, slots=True)
class SizeExpression:
    """A size, or another number, that depends on symbols.

    Attributes:
        text: The original text.
        symbols: Names of its symbols.
    """

    text: str
    symbols: frozenset[str]
    _tree: ast.expr = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> SizeExpression:
        """Read an expression.

        Args:
            text: An expression in Python's notation, of numbers, names, ``+ - * / // % **``, and
                the functions that torch prints.

        Raises:
            OptionError: The text is no such expression.
        """
        return _parse(text)

    def evaluate(self, values: _Values) -> int:
        """Return the size for given values of the symbols.

        Raises:
            OptionError: A symbol has no value, or the result is not an integer.
        """
        try:
            result = _evaluate(self._tree, values)
        except KeyError as error:
            raise OptionError(f"size {self.text} needs a value of {error.args[0]}") from None
        except (ValueError, ArithmeticError) as error:
            raise self._no_value(values, str(error)) from None
        if result.denominator != 1:
            raise self._no_value(values, f"{result}, which is not an integer")
        return int(result)

    def _no_value(self, values: _Values, got: str) -> OptionError:
        assignments = ", ".join(f"{name} = {values[name]}" for name in sorted(self.symbols))
        return OptionError(f"size {self.text} has no value for {assignments}", got=got)

    def solve(self, size: int) -> int | None:
        """Return the value of the only symbol at which the expression is ``size``.

        None without such a value, or if the expression is not linear in one symbol.
        """
        linear = self._linear()
        if linear is None:
            return None
        factor, constant = linear
        value = (size - constant) / factor
        return int(value) if value.denominator == 1 else None

    @property
    def is_solvable(self) -> bool:
        """Whether the expression is linear in one symbol, as ``solve`` needs it."""
        return self._linear() is not None

    def _linear(self) -> tuple[Fraction, Fraction] | None:
        """Return factor and constant of ``factor * symbol + constant``, None if not linear."""
        if len(self.symbols) != 1:
            return None
        linear = _affine(self._tree)
        return None if linear is None or not linear[0] else linear


# A program has few distinct expressions, many times.
@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> SizeExpression:
    if len(text) > _MAX_LENGTH:
        raise OptionError(
            "expression of a size is too long",
            got=f"{len(text)} characters",
            expected=f"at most {_MAX_LENGTH}",
        )
    try:
        tree = ast.parse(text, mode="eval").body
        symbols = frozenset(_symbols(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OptionError(
            "not an expression of a size",
            got=f"{text[:80]!r} ({error})",
            expected="for example 2*s0",
        ) from None
    return SizeExpression(text, symbols, tree)


def _symbols(tree: ast.expr) -> set[str]:
    """Return the symbols of an expression; raise ``ValueError`` for an unsupported part."""
    match tree:
        case ast.Name(id=name):
            return {name}
        case ast.Constant(value=int(value) | float(value)) if (
            not isinstance(value, bool) and value < _MAX_VALUE
        ):
            return set()
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _symbols(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _symbols(left) | _symbols(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return set().union(*map(_symbols, args))
        case _:
            raise ValueError(f"{type(tree).__name__} in it")


def _evaluate(tree: ast.expr, values: _Values) -> _Number:
    match tree:
        case ast.Name(id=name):
            result: _Number = values[name]
        case ast.Constant(value=int(value) | float(value)):
            result = value if isinstance(value, int) else Fraction(value)
        case ast.UnaryOp(op=operator, operand=operand):
            inner = _evaluate(operand, values)
            result = -inner if isinstance(operator, ast.USub) else inner
        case ast.BinOp(left=left, op=operator, right=right):
            operate = _OPERATORS[type(operator)]
            result = operate(_evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=name), args=args):
            try:
                result = _FUNCTIONS[name](*(_evaluate(arg, values) for arg in args))
            except TypeError as error:
                raise ValueError(f"{name} of {len(args)} arguments") from error
        case _:
            raise ValueError(type(tree).__name__)
    if abs(result) > _MAX_VALUE:
        raise ValueError("a number beyond 64 bits")
    return result


def _affine(tree: ast.expr) -> tuple[Fraction, Fraction] | None:
    """Return factor and constant of a tree, None if it is not linear."""
    match tree:
        case ast.Name():
            return Fraction(1), Fraction(0)
        case ast.Constant(value=int(value) | float(value)):
            return Fraction(0), Fraction(value)
        case ast.UnaryOp(op=operator, operand=operand):
            linear = _affine(operand)
            sign = -1 if isinstance(operator, ast.USub) else 1
            return None if linear is None else (sign * linear[0], sign * linear[1])
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _affine(left), _affine(right)
            return None if a is None or b is None else _combine(operator, a, b)
        case _:
            return None


def _combine(
    operator: ast.operator, a: tuple[Fraction, Fraction], b: tuple[Fraction, Fraction]
) -> tuple[Fraction, Fraction] | None:
    match operator:
        case ast.Add():
            return a[0] + b[0], a[1] + b[1]
        case ast.Sub():
            return a[0] - b[0], a[1] - b[1]
        case ast.Mult() if not (a[0] and b[0]):
            return a[0] * b[1] + b[0] * a[1], a[1] * b[1]
        case ast.Div() if not b[0] and b[1]:
            return a[0] / b[1], a[1] / b[1]
        case _:
            return None

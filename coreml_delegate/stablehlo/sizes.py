"""Symbolic sizes, which are known only at run time: their relations, and arithmetic with them.

An argument's type has ``?`` for each symbolic size. At the start of ``main``, ``jax.export`` writes
assertions about them, such as ``n == 3 * m`` or ``n <= 8``. ``declared_shapes`` evaluates these, so
that equal sizes get equal symbols. While the program is read, ``note_sizes`` follows sizes through
integer arithmetic to shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import sympy

from coreml_delegate.errors import LoweringError, OptionError, near_matches
from coreml_delegate.graph import Dimension, Value
from coreml_delegate.graph.sizes import FUNCTIONS, MOST_KNOWN
from coreml_delegate.graph.tensor_types import Dim, simplify
from coreml_delegate.stablehlo.attributes import is_tensor, python_value, shape_of, tensor_value
from coreml_delegate.stablehlo.parse import Mlir
from coreml_delegate.stablehlo.source_op import Operand, SourceOp

Sizes = tuple[Dim, ...]
"""Elements of a tensor of rank 0 or 1 whose elements are sizes."""

Range = tuple[int, int] | int | str | Dimension
"""Least and most of a size, the size itself, or the name of an equal size."""

_GLOBAL = "jax.global_constant"
_PREFIX = "stablehlo."


def _divide(x: Dim, y: Dim) -> Dim:
    """Return the quotient of sizes, rounded towards zero; symbolic sizes are not negative."""
    if isinstance(x, int) and isinstance(y, int):
        return int(math.copysign(abs(x) // abs(y), x * y)) if y else -1
    return simplify(sympy.floor(sympy.sympify(x) / y))


def _remainder(x: Dim, y: Dim) -> Dim:
    if isinstance(x, int) and isinstance(y, int):
        return int(math.fmod(x, y)) if y else x
    return simplify(sympy.Mod(x, y))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **FUNCTIONS,
        "divide": _divide,
        "remainder": _remainder,
        "optimization_barrier": lambda x: x,
        "reshape": lambda x: x,
    }
)


def call_function(name: str, operands: Sequence[Dim]) -> list[Dim]:
    """Return the results of JAX's function floor_divide, remainder or divmod."""
    x, y = operands
    if isinstance(x, int) and isinstance(y, int) and y:
        quotient, modulo = divmod(x, y)
    else:
        quotient, modulo = _divide(x, y), _remainder(x, y)
    return {"floor_divide": [quotient], "remainder": [modulo], "divmod": [quotient, modulo]}[name]


def is_of_sizes(function: Mlir) -> bool:
    """Whether JAX made a function to compute sizes."""
    return any(name is not None for name in _global_names(function))


def _global_names(function: Mlir) -> list[str | None]:
    """Return each argument's dimension name: "" for arithmetic of sizes, None for other values."""
    if "arg_attrs" not in function.attributes:
        return [None]
    entries = python_value(function.attributes["arg_attrs"])
    return [entry.get(_GLOBAL) if _GLOBAL in entry else None for entry in entries]


def compute(name: str, operands: Sequence[Sizes]) -> Sizes | None:
    """Return the result of an operation on sizes, or None if it is not arithmetic of sizes.

    The name is without its dialect; an operand of a single element is broadcast.
    """
    if name == "concatenate":
        return tuple(size for operand in operands for size in operand)
    if name not in _FUNCTIONS:
        return None
    count = max(map(len, operands))
    repeated = [operand * count if len(operand) == 1 else operand for operand in operands]
    function = _FUNCTIONS[name]
    return tuple(simplify(function(*sizes)) for sizes in zip(*repeated, strict=True))


def note_sizes(source: SourceOp, results: Sequence[Operand]) -> None:
    """Set the elements of a quotient or remainder of sizes.

    The builder knows them only if the sign of each size is known; in programs of JAX, no size that
    is divided is negative.
    """
    name = source.name.removeprefix(_PREFIX)
    if name not in ("divide", "remainder"):
        return
    (result,) = results
    operands = [o.elements for o in source.operands if isinstance(o, Value) and o.elements]
    if isinstance(result, Value) and result.elements is None and len(operands) == 2:
        result.elements = compute(name, operands)


# Assertions of main about its sizes


@dataclass
class _Relation:
    direction: str
    left: Any
    right: Any


@dataclass
class _Facts:
    """Shapes of the arguments, and the relations and ranges of their symbolic sizes.

    Attributes:
        shapes: Sizes of the arguments.
        replaced: Expressions by the symbols that they replace.
        names: Expressions by JAX's names of dimensions.
        least: Lower bounds by symbol name.
        most: Upper bounds by symbol name.
    """

    shapes: list[list[Any]]
    replaced: dict[Any, Any] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def current(self, size: Any) -> Any:
        """Return a size with all replaced symbols substituted."""
        for _ in range(len(self.replaced) + 1):
            substituted = sympy.sympify(size).subs(self.replaced)
            if substituted == size:
                break
            size = substituted
        return sympy.expand(size)


@dataclass(frozen=True, slots=True)
class Declared:
    """The shapes of a program's arguments.

    Attributes:
        shapes: Shapes for ``Builder.parameter``.
        dimensions: Dimensions of their symbols by name.
    """

    shapes: list[tuple[Any, ...]]
    dimensions: dict[str, Dimension]


def declared_shapes(
    main: Mlir, functions: Mapping[str, Mlir], names: Sequence[str], ranges: Mapping[str, Range]
) -> Declared:
    """Return the shapes of main's arguments.

    Args:
        main: The function.
        functions: Functions of the module by name.
        names: Names of the arguments.
        ranges: Ranges of sizes by name: JAX's name, or ``x_0`` for the first size of argument
            ``x``.

    Raises:
        OptionError: There is no symbolic size of a name in ``ranges``.
        LoweringError: An argument is not a tensor.
    """
    block = main.regions[0].blocks[0]
    facts = _Facts(
        [_fresh_sizes(a.type, name) for a, name in zip(block.arguments, names, strict=True)]
    )
    _evaluate(block, functions, facts)
    renamed = _jax_symbols(facts)
    dimensions = _dimensions(facts, renamed, ranges)
    shapes = [
        tuple(_with_dimensions(facts.current(size).subs(renamed), dimensions) for size in shape)
        for shape in facts.shapes
    ]
    return Declared(shapes, {name: d for name, d in dimensions.items() if isinstance(d, Dimension)})


def _fresh_sizes(type: Mlir, name: str) -> list[Any]:
    if not is_tensor(type):
        is_token = "token" in str(type)
        raise LoweringError(
            f"argument {name!r} is no tensor",
            got=str(type),
            remedy="Leave ordered callbacks out of what is compiled" if is_token else None,
        )
    return [
        _symbol(f"{name}_{axis}") if size is None else size
        for axis, size in enumerate(shape_of(type))
    ]


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def _evaluate(block: Mlir, functions: Mapping[str, Mlir], facts: _Facts) -> None:
    """Evaluate the arithmetic of sizes in a block, and add the facts that it asserts."""
    if all(isinstance(size, int) for shape in facts.shapes for size in shape):
        return
    arguments = {argument: n for n, argument in enumerate(block.arguments)}
    computed: dict[Mlir, Any] = {}
    for view in block.operations:
        op = view.operation
        if op.name == "stablehlo.get_dimension_size" and op.operands[0] in arguments:
            axis = python_value(op.attributes["dimension"])
            computed[op.results[0]] = (facts.shapes[arguments[op.operands[0]]][axis],)
        elif op.name == "stablehlo.constant":
            computed.update(_constant(op))
        elif all(operand in computed for operand in op.operands):
            _learn(op, [computed[operand] for operand in op.operands], computed, facts)
        elif op.name == "func.call":
            _learn_names(op, functions, computed, facts)


def _constant(op: Mlir) -> Iterator[tuple[Mlir, Sizes]]:
    attribute = op.attributes["value"]
    kind = type(attribute).__name__
    if kind == "DenseIntElementsAttr" and attribute.type.rank < 2 and len(attribute) <= MOST_KNOWN:
        yield op.results[0], tuple(int(n) for n in np.ravel(tensor_value(attribute)))


def _learn(op: Mlir, operands: list[Any], computed: dict[Mlir, Any], facts: _Facts) -> None:
    name = op.name.removeprefix(_PREFIX)
    if name == "compare":
        direction = str(python_value(op.attributes["comparison_direction"]))
        computed[op.results[0]] = _Relation(direction, operands[0][0], operands[1][0])
    elif name == "custom_call":
        if isinstance(operands[0], _Relation):
            _assume(operands[0], facts)
    elif name == "func.call":
        callee = str(python_value(op.attributes["callee"])).rstrip("_0123456789")
        if callee in ("floor_divide", "remainder", "divmod"):
            results = call_function(callee, [facts.current(o[0]) for o in operands])
            computed.update((r, (size,)) for r, size in zip(op.results, results, strict=True))
    elif not any(isinstance(operand, _Relation) for operand in operands):
        elements = compute(name, operands)
        if elements is not None:
            computed[op.results[0]] = elements


def _learn_names(
    op: Mlir, functions: Mapping[str, Mlir], computed: Mapping[Mlir, Any], facts: _Facts
) -> None:
    callee = functions.get(python_value(op.attributes["callee"]))
    if callee is None:
        return
    for name, operand in zip(_global_names(callee), op.operands, strict=False):
        if name and operand in computed and not isinstance(computed[operand], _Relation):
            facts.names.setdefault(name, computed[operand][0])


def _assume(relation: _Relation, facts: _Facts) -> None:
    """Add the fact of an asserted relation of sizes."""
    left, right = (facts.current(side) for side in (relation.left, relation.right))
    if relation.direction == "EQ":
        _assume_equal(left, right, facts)
    elif relation.direction in ("GE", "LE"):
        larger, smaller = (left, right) if relation.direction == "GE" else (right, left)
        _assume_bound(sympy.expand(larger - smaller), facts)


def _assume_equal(left: Any, right: Any, facts: _Facts) -> None:
    if isinstance(left, sympy.Mod) and right == 0 and isinstance(left.args[0], sympy.Symbol):
        dividend, divisor = left.args
        facts.replaced[dividend] = divisor * _symbol(f"{dividend}_by_{divisor}")
        return
    for one, other in ((left, right), (right, left)):
        if isinstance(one, sympy.Symbol) and one not in sympy.sympify(other).free_symbols:
            facts.replaced[one] = other
            return


def _assume_bound(difference: Any, facts: _Facts) -> None:
    """Add the bound ``difference >= 0`` if the difference is linear in one symbol."""
    symbols = list(difference.free_symbols)
    if len(symbols) != 1 or not difference.is_polynomial(*symbols):
        return
    (symbol,) = symbols
    if sympy.degree(difference, symbol) != 1:
        return
    slope = difference.coeff(symbol, 1)
    root = -difference.coeff(symbol, 0) / slope
    name = symbol.name
    if slope > 0:
        facts.least[name] = max(facts.least.get(name, 1), int(sympy.ceiling(root)))
    else:
        most = int(sympy.floor(root))
        facts.most[name] = min(facts.most.get(name, most), most)


def _jax_symbols(facts: _Facts) -> dict[Any, Any]:
    """Return new symbols, with JAX's names, by symbol."""
    renamed: dict[Any, Any] = {}
    for name, expression in facts.names.items():
        current = facts.current(expression)
        if isinstance(current, sympy.Symbol) and current not in renamed:
            renamed[current] = _symbol(name)
    return renamed


def _dimensions(
    facts: _Facts, renamed: Mapping[Any, Any], ranges: Mapping[str, Range]
) -> dict[str, Any]:
    """Return a dimension, a fixed size, or the name of an equal dimension for each symbol."""
    symbols = {
        symbol
        for shape in facts.shapes
        for size in shape
        for symbol in sympy.sympify(facts.current(size)).free_symbols
    }
    dimensions: dict[str, Any] = {}
    for symbol in symbols:
        name = renamed.get(symbol, symbol).name
        least, most = facts.least.get(symbol.name, 1), facts.most.get(symbol.name)
        dimensions[name] = Dimension(name, max(1, least), *([] if most is None else [most]))
    for name, bounds in ranges.items():
        if name not in dimensions or (isinstance(bounds, str) and bounds not in dimensions):
            raise OptionError(
                "the program has no symbolic size of this name",
                got=repr(name),
                expected=near_matches(name, dimensions) or "no size is symbolic",
            )
        is_range = isinstance(bounds, tuple | list)
        dimensions[name] = Dimension(name, *bounds) if is_range else bounds
    return dimensions


def _with_dimensions(size: Any, dimensions: Mapping[str, Any]) -> Any:
    """Return a size with dimensions in place of symbols."""
    if not getattr(size, "free_symbols", None):
        return int(size)
    values: dict[Any, Any] = {}
    for symbol in size.free_symbols:
        dimension = dimensions[symbol.name]
        while isinstance(dimension, str):
            dimension = dimensions[dimension]
        values[symbol] = dimension.symbol if isinstance(dimension, Dimension) else dimension
        if size == symbol and isinstance(dimension, Dimension):
            return dimension
    declared = sympy.expand(size.subs(values))
    return declared if declared.free_symbols else int(declared)

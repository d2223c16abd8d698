"""``Reader``: makes a graph from a StableHLO module.

Functions are inlined where they are called; regions become Python functions that the builder calls.
"""

from __future__ import annotations

import copy
import re
from collections import ChainMap
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from coreml_delegate.errors import (
    CoreMLDelegateError,
    GraphError,
    LoweringError,
    UnsupportedOperatorError,
)
from coreml_delegate.graph import Builder, DType, Value
from coreml_delegate.graph.builder import is_feature_name
from coreml_delegate.stablehlo import sizes
from coreml_delegate.stablehlo.attributes import (
    argument_name,
    describe_location,
    element_type,
    is_tensor,
    python_value,
    resources,
)
from coreml_delegate.stablehlo.operations import REFUSED, RULES, refusal_reason
from coreml_delegate.stablehlo.parse import Mlir, decompose
from coreml_delegate.stablehlo.source_op import (
    Context,
    Operand,
    SourceOp,
    WideConstant,
    beyond_32_bits,
)

_RETURNS = ("func.return", "stablehlo.return")
_DEEPEST_CALLS = 200
# Inlining doubles the program with each function that calls the next function twice.
_MOST_OPERATIONS = 250_000
_ENTRY = "main"
_LINE = re.compile(r":\d+\Z|line \d+\Z")
_WIDE = frozenset({DType.INT64, DType.UINT64, DType.FLOAT64})
# Operations that may introduce values of 64 bits.
_WIDENS = ("stablehlo.constant", "stablehlo.convert", "stablehlo.iota", "stablehlo.dynamic_iota")
# Functions of sizes that JAX adds to a program; see ``sizes``.
_SIZE_FUNCTION = re.compile(r"(floor_divide|remainder|divmod)(_\d+)?\Z")


Frame = ChainMap[Mlir, Operand]
"""Operands by the values of a function, or of a region, then of the regions around it."""


def _operands(frame: Frame, values: Iterable[Mlir]) -> list[Operand]:
    try:
        return [frame[value] for value in values]
    except KeyError:
        raise LoweringError("a value is used before it is computed") from None


class Reader:
    """Makes a graph from a module.

    Args:
        module: MLIR's module.
        builder: Makes the graph.
        bfloat16_as_float32: Whether bf16 is read as float32, rather than refused.

    Attributes:
        functions: Functions of the module by name.
        narrowed: Descriptions of values of 64 bits in the source that have 32 in the graph.
    """

    def __init__(self, module: Mlir, builder: Builder, *, bfloat16_as_float32: bool) -> None:
        self.builder = builder
        self.narrowed: dict[str, None] = {}
        self._context = Context(builder, self.dtype, self.resource, self.call)
        self._module = module
        self._bfloat16_as_float32 = bfloat16_as_float32
        self.functions = functions_of(module)
        self._calls: list[str] = []
        self._count = 0
        self._resources: Mapping[str, bytes] | None = None

    @property
    def main(self) -> Mlir:
        """The program's entry function: ``main``, or the only public function."""
        return main_of(self.functions)

    def read(self, arguments: Sequence[Value]) -> list[Value]:
        """Read the program with these arguments of ``main``; return its results, flattened.

        Raises:
            LoweringError: Something cannot be expressed; names the operation, and its location.
        """
        main = self.main
        try:
            results = self.call(_symbol(main), list(arguments))
        except RecursionError:
            raise LoweringError("the program is nested too deeply") from None
        values = list(_flat(results))
        for value in values:
            if isinstance(value, WideConstant):
                raise beyond_32_bits("a result of main", value)
            if not isinstance(value, Value):
                raise LoweringError("a result of main is no tensor", got=type(value).__name__)
        return [value for value in values if isinstance(value, Value)]

    def call(self, name: str, operands: Sequence[Operand]) -> list[Operand]:
        """Read a function of the module inline, and return its results.

        Raises:
            LoweringError: There is no such function, or it calls itself.
        """
        function = self.functions.get(name)
        if function is None or not function.regions[0].blocks:
            raise LoweringError("a function is called that the module does not have", got=name)
        if name in self._calls:
            raise LoweringError("a function calls itself", got=" > ".join([*self._calls, name]))
        if len(self._calls) >= _DEEPEST_CALLS:
            raise LoweringError("calls are nested too deeply", expected=f"{_DEEPEST_CALLS} at most")
        computed = self._computed_sizes(name, function, operands)
        if computed is not None:
            return computed
        self._calls.append(name)
        try:
            return self._read_body(function.regions[0], operands, Frame())
        finally:
            self._calls.pop()

    def dtype(self, type: Mlir) -> DType:
        """Return the element type of a tensor type.

        Raises:
            UnsupportedOperatorError: It is not a tensor, or Core ML cannot store its elements.
        """
        if not is_tensor(type):
            raise UnsupportedOperatorError(f"{type} is no tensor")
        return element_type(str(type.element_type), bfloat16_as_float32=self._bfloat16_as_float32)

    def resource(self, key: str) -> bytes:
        """Return the content of a resource of the module.

        Raises:
            LoweringError: There is no such resource.
        """
        if self._resources is None:
            self._resources = resources(str(self._module.operation))
        if key not in self._resources:
            raise LoweringError("a constant refers to data that the module does not have", got=key)
        return self._resources[key]

    def narrow(self, what: str, dtype: DType) -> None:
        """Record a value that has 64 bits in the source and 32 in the graph."""
        if dtype in _WIDE:
            storage = np.dtype(dtype.storage_numpy).name
            self.narrowed[f"{what}: {dtype.label} computed in {storage}"] = None

    def _computed_sizes(
        self, name: str, function: Mlir, operands: Sequence[Operand]
    ) -> list[Operand] | None:
        """Return the results of a function of sizes; None for other functions."""
        match = _SIZE_FUNCTION.match(name)
        known_sizes = [
            o.elements for o in operands if isinstance(o, Value) and o.elements is not None
        ]
        if match is None or len(known_sizes) != len(operands) or not sizes.is_of_sizes(function):
            return None
        expressions = sizes.call_function(match.group(1), [elements[0] for elements in known_sizes])
        return [self.builder.size(expression) for expression in expressions]

    def _read_body(self, region: Mlir, arguments: Sequence[Operand], frame: Frame) -> list[Operand]:
        blocks = list(region.blocks)
        if len(blocks) != 1:
            raise LoweringError(
                "a region has several blocks, or none", got=str(len(blocks)), expected="one"
            )
        (block,) = blocks
        for argument, operand in zip(block.arguments, arguments, strict=True):
            frame[argument] = operand
        for view in block.operations:
            op = view.operation
            if op.name in _RETURNS:
                return _operands(frame, op.operands)
            self._read_op(op, frame)
        raise LoweringError("a region does not return")

    def _read_op(self, op: Mlir, frame: Frame) -> None:
        self._count += 1
        if self._count > _MOST_OPERATIONS:
            raise LoweringError(
                "the program is too large when its functions are inlined",
                expected=f"{_MOST_OPERATIONS} operations at most",
            )
        first = len(self.builder.scope.nodes)
        with self._locating(op):
            rule = RULES.get(op.name)
            source = SourceOp(
                op,
                _operands(frame, op.operands),
                self._context,
                lambda region, arguments: self._read_body(region, arguments, frame.new_child()),
            )
            results = self._decompose(op, source) if rule is None else _results(rule(source))
            if len(results) != len(op.results):
                raise source.refusal(f"it has {len(op.results)} results, not {len(results)}")
            sizes.note_sizes(source, results)
        for value, result in zip(op.results, results, strict=True):
            frame[value] = result
        self._note(op, first, results)

    def _decompose(self, op: Mlir, source: SourceOp) -> list[Operand]:
        """Decompose an operation without a rule, if it is of CHLO and MLIR can decompose it."""
        is_candidate = op.name.startswith("chlo.") and op.name not in REFUSED and not op.regions
        module = decompose(op) if is_candidate else None
        if module is None:
            raise source.refusal(refusal_reason(op.name))
        (function,) = functions_of(module).values()
        return self._read_body(function.regions[0], source.operands, Frame())

    def _note(self, op: Mlir, first: int, results: Sequence[Operand]) -> None:
        nodes = self.builder.scope.nodes[first:]
        if nodes:
            location = describe_location(op.location)
            for node in nodes:
                node.source = f"{location} ({op.name})" if location else op.name
        if op.name in _WIDENS:
            for result in results:
                if isinstance(result, Value) and result.dtype in _WIDE:
                    where = describe_location(op.location)
                    self.narrow(f"{op.name}{f' at {where}' if where else ''}", result.dtype)

    @contextmanager
    def _locating(self, op: Mlir) -> Generator[None]:
        """Add the operation and its location to errors, once."""
        try:
            yield
        except (UnsupportedOperatorError, GraphError) as error:
            location = describe_location(op.location)
            inner: str | None = getattr(error, "source_location", None)
            if inner is None:
                raise with_location(error, op.name, location) from error
            # JAX's own functions, such as jax.numpy's, have no line numbers; their calls have.
            if _LINE.search(inner) or not _LINE.search(location):
                raise
            raise with_location(error, "", f"called at {location}") from error


def with_location(error: CoreMLDelegateError, name: str, location: str) -> CoreMLDelegateError:
    """Return an error of the same class that names an operation and its location."""
    what = error.what if error.what.startswith(name) else f"{name}: {error.what}"
    if location:
        what = f"{what} (at {location})"
    copied = copy.copy(error)
    CoreMLDelegateError.__init__(
        copied, what, got=error.got, expected=error.expected, remedy=error.remedy
    )
    copied.__dict__["source_location"] = location
    return copied


def functions_of(module: Mlir) -> dict[str, Mlir]:
    """Return the functions of a module by name.

    Raises:
        LoweringError: There are no functions.
    """
    operations = [view.operation for view in module.body.operations]
    functions = {_symbol(op): op for op in operations if op.name == "func.func"}
    if not functions:
        raise LoweringError("the module has no functions", expected="func.func @main")
    return functions


def main_of(functions: Mapping[str, Mlir]) -> Mlir:
    """Return the program's entry function: ``main``, or the only public function.

    Raises:
        LoweringError: There is no such function.
    """
    if _ENTRY in functions:
        return functions[_ENTRY]
    public = [
        function
        for function in functions.values()
        if "sym_visibility" not in function.attributes
        or python_value(function.attributes["sym_visibility"]) == "public"
    ]
    if len(public) != 1:
        raise LoweringError(
            "the module has no function main", got=", ".join(functions), expected="@main"
        )
    return public[0]


def argument_names(main: Mlir, functions: Mapping[str, Mlir]) -> list[str]:
    """Return unique names for the arguments of ``main``, which are Core ML identifiers.

    They come from attributes or locations of the arguments, or from the arguments of a function
    that ``main`` passes them to.
    """
    names: dict[str, None] = {}
    for index, argument in enumerate(main.regions[0].blocks[0].arguments):
        source_name = _source_name(argument, index, main, functions)
        names[_unique(_identifier(source_name or f"arg{index}"), names)] = None
    return list(names)


def result_names(main: Mlir, count: int, used_names: Sequence[str]) -> list[str]:
    """Return names for the results of ``main``: their paths in the result of JAX's function."""
    names = dict.fromkeys(used_names)
    infos = _argument_dictionaries(main, "res_attrs", count)
    for index, info in enumerate(infos):
        path = str(info.get("jax.result_info") or "") or f"result[{index}]"
        names[_unique(_identifier(path), names)] = None
    return list(names)[len(used_names) :]


def _source_name(
    argument: Mlir, index: int, main: Mlir, functions: Mapping[str, Mlir]
) -> str | None:
    count = len(main.regions[0].blocks[0].arguments)
    info = _argument_dictionaries(main, "arg_attrs", count)[index]
    name = info.get("jax.arg_info") or argument_name(argument.location)
    if name:
        return str(name)
    for use in argument.uses:
        caller = use.owner.operation
        if caller.name != "func.call":
            continue
        callee = functions.get(python_value(caller.attributes["callee"]))
        if callee is not None and callee.regions[0].blocks:
            inner = callee.regions[0].blocks[0].arguments[use.operand_number]
            return argument_name(inner.location)
    return None


def _argument_dictionaries(main: Mlir, name: str, count: int) -> list[dict[str, Any]]:
    if name not in main.attributes:
        return [{}] * count
    dictionaries: list[dict[str, Any]] = python_value(main.attributes[name])
    return dictionaries if len(dictionaries) == count else [{}] * count


def _identifier(text: str) -> str:
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return name if is_feature_name(name) else f"x_{name}"


def _unique(name: str, used: Mapping[str, None]) -> str:
    if name not in used:
        return name
    return next(f"{name}_{n}" for n in range(1, len(used) + 2) if f"{name}_{n}" not in used)


def _symbol(function: Mlir) -> str:
    return python_value(function.attributes["sym_name"])


def _results(returned: Operand | Sequence[Operand] | None) -> list[Operand]:
    if returned is None:
        return []
    return list(returned) if isinstance(returned, list) else [returned]  # type: ignore[list-item]


def _flat(operands: Sequence[Any]) -> Generator[Any]:
    for operand in operands:
        if isinstance(operand, tuple):
            yield from _flat(operand)
        else:
            yield operand

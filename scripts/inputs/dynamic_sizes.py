"""Export with dynamic sizes: the program has exactly the requested ranges, or an error is raised.

``torch.export`` fixes a size that is 1 in the example. It begins a range at 2 unless the dimension
is named, and may silently narrow the range to the sizes for which the model takes the same branch.
Where it does not narrow the range, other sizes get the results of the wrong branch. So the example
gets sizes of 2 or more; torch finds which sizes depend on each other, and then gets ranges from 1
as named dimensions; and program and model are compared at the sizes whose results may differ.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind

from coreml_delegate.dynamic_shapes.symbols import bounds_of, expression_of, hint_of
from coreml_delegate.errors import OptionError
from coreml_delegate.exported.source_model import (
    SMALLEST_TRACED,
    Outcome,
    SourceModel,
    by_parameter,
    dynamic_shapes_of,
    dynamic_sizes,
)
from coreml_delegate.patches.torch_ranges import ValueRanges, bound_sympy
from coreml_delegate.runtime.diagnosis import energy, ratio_db, signal_and_error
from coreml_delegate.scripts import console

InputDim: TypeAlias = tuple[str, int]
"""Name of an input, and the number of a dimension."""

_SIZES_TRIED = 64  # sizes of a range for which guards are evaluated, from the smallest on
_SAME_DB = 60.0  # model and program run the same kernels


@dataclass(frozen=True, slots=True)
class Span:
    """The range of sizes of a dimension.

    Attributes:
        traced: The size to trace it with, if the sizes are enumerated; None for a range.
    """

    low: int
    high: int
    traced: int | None = None

    @property
    def hint(self) -> Any:
        """The hint for ``torch.export``."""
        kind = Dim.DYNAMIC if self.traced is None else Dim.AUTO
        return kind(min=self.low, max=self.high)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


def export_with_spans(source: SourceModel, spans: Mapping[InputDim, Span]) -> ExportedProgram:
    """Export a model with dimensions that may have several sizes.

    Raises:
        OptionError: ``torch.export`` fails; or the model does not accept a whole range, or the
            program would compute other results for a size in it.
    """
    traced = _with_traceable_example(source, spans)
    by_leaf = [
        {dim: span.hint for (of, dim), span in spans.items() if of == name} or None
        for name in source.input_names
    ]
    shapes = by_parameter(source.module, source.args, source.kwargs, by_leaf)
    with _add_remedy():
        program = traced.export(shapes)
        forgotten = _forgotten_minimums(program, source, spans)
        program.range_constraints.update(forgotten)
        _check_ranges(program, source, spans)
        _Comparison(traced, program, spans).check()
        if forgotten:
            shapes = dynamic_shapes_of(program, traced.module, traced.args, traced.kwargs)
            program = traced.export(shapes)
    return program


# --- the example ----------------------------------------------------------------------------------


def _with_traceable_example(source: SourceModel, spans: Mapping[InputDim, Span]) -> SourceModel:
    """Return the source with an example whose sizes are within the spans and not 1.

    If the example of one range is 1, the sizes of all ranges are doubled to keep proportions.
    """
    examples = dict(zip(source.input_names, source.leaves, strict=True))
    ranged = [input_dim for input_dim, span in spans.items() if span.traced is None]
    factor = 2 if any(examples[name].shape[dim] == 1 for name, dim in ranged) else 1
    for (name, dim), span in spans.items():
        size = span.traced or factor * examples[name].shape[dim]
        size = min(max(size, span.low, SMALLEST_TRACED), span.high)
        examples[name] = _resize(examples[name], {dim: size})
    args, kwargs = source.unflatten([*examples.values()])
    return replace(source, args=args, kwargs=kwargs)


def _resize(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Cut a tensor, or repeat it from its beginning, to sizes by dimension."""
    for dim, size in sizes.items():
        present = tensor.shape[dim]
        if not present:
            tensor = tensor.new_zeros((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
        elif present != size:
            tensor = tensor.index_select(dim, torch.arange(size) % present)
    return tensor


# --- the ranges -----------------------------------------------------------------------------------


@contextmanager
def _add_remedy() -> Generator[None]:
    """Add a remedy to an error of ``torch.export``, which names only the cause."""
    try:
        yield
    except OptionError as error:
        if error.remedy is not None:
            raise
        raise OptionError(
            error.what,
            got=error.got,
            expected=error.expected,
            remedy="The model must take every size; inputs that share a size each need --dynamic",
        ) from error


def _dynamic_dims(
    program: ExportedProgram, source: SourceModel
) -> Iterator[tuple[InputDim, torch.SymInt]]:
    for name, sizes in zip(source.input_names, dynamic_sizes(program), strict=True):
        yield from (((name, dim), size) for dim, size in (sizes or {}).items())


def _forgotten_minimums(
    program: ExportedProgram, source: SourceModel, spans: Mapping[InputDim, Span]
) -> dict[Any, ValueRanges[Any]]:
    """Return the ranges below 2 that torch drops from hints, by symbol and by expression."""
    ranges = program.range_constraints
    minimums = {
        expression_of(size): ValueRanges(spans[input_dim].low, ranges[expression_of(size)].upper)
        for input_dim, size in _dynamic_dims(program, source)
        if expression_of(size).is_Symbol
        and spans[input_dim].traced is None
        and spans[input_dim].low < ranges[expression_of(size)].lower == SMALLEST_TRACED
    }
    all_ranges = {**ranges, **minimums}
    return minimums | {
        expression: bound_sympy(expression, all_ranges)
        for expression in ranges
        if not expression.is_Symbol and expression.free_symbols & minimums.keys()
    }


def _check_ranges(
    program: ExportedProgram, source: SourceModel, spans: Mapping[InputDim, Span]
) -> None:
    exported = {
        input_dim: Span(*bounds_of(size, program.range_constraints))
        for input_dim, size in _dynamic_dims(program, source)
    }
    for input_dim, span in spans.items():
        if span.traced is None and exported.get(input_dim) != span:
            raise OptionError(
                "the model does not compute the same way in the whole range of --dynamic",
                got=_option(input_dim, span),
                expected=_option(input_dim, exported.get(input_dim, "one size")),
                remedy="Give the range that it accepts, or export several programs",
            )


def _option(input_dim: InputDim, value: object) -> str:
    name, dim = input_dim
    return f"{name}:{dim}={value}"


# --- the values -----------------------------------------------------------------------------------


class _Comparison:
    """Compares a program with its model at sizes for which the model may take another branch.

    Args:
        source: The model, with the example that the program was traced with.
    """

    def __init__(
        self, source: SourceModel, program: ExportedProgram, spans: Mapping[InputDim, Span]
    ) -> None:
        self._source = source
        self._program = program
        self._sizes = dynamic_sizes(program)
        symbols = {
            input_dim: size
            for input_dim, size in _dynamic_dims(program, source)
            if expression_of(size).is_Symbol
        }
        self._traced = {expression_of(size): hint_of(size) for size in symbols.values()}
        self._input_dims = {
            expression_of(size): input_dim
            for input_dim, size in symbols.items()
            if spans[input_dim].traced is None
        }

    def check(self) -> None:
        """Compare at the sizes where results may differ.

        Raises:
            OptionError: The results differ, or the model fails at a bound of a range.
        """
        suspects = [{symbol: 1 for symbol in self._input_dims if self._range(symbol)[0] == 1}]
        for symbol in self._input_dims:
            suspects += [{symbol: size} for size in sorted(self._outside_of_guards(symbol))]
        refused = [sizes for sizes in suspects if sizes and not self._is_taken(sizes)]
        if refused:
            console.warn(f"the model fails at some sizes of --dynamic: {self._text(refused[0])}")

    def _range(self, symbol: Any) -> tuple[int, int]:
        bounds = self._program.range_constraints[symbol]
        return int(bounds.lower), int(bounds.upper)

    def _outside_of_guards(self, symbol: Any) -> set[int]:
        """Return the first size that breaks a guard of torch, and bounds that break one."""
        low, high = self._range(symbol)
        candidates = [*range(low, min(low + _SIZES_TRIED, high)), high]
        sizes: set[int] = set()
        for guard in self._guards():
            if guard.free_symbols == {symbol}:
                broken = [size for size in candidates if not _holds(guard, symbol, size)]
                sizes.update(broken[:1], {low, high}.intersection(broken))
        return sizes

    def _guards(self) -> list[Any]:
        sizes = [size for sizes in self._sizes for size in (sizes or {}).values()]
        return [guard.expr for guard in sizes[0].node.shape_env.guards]

    def _text(self, chosen: Mapping[Any, int]) -> str:
        return ", ".join(_option(self._input_dims[symbol], size) for symbol, size in chosen.items())

    def _is_taken(self, chosen: Mapping[Any, int]) -> bool:
        """Whether the model accepts these sizes; raises if the program computes other results."""
        where = self._text(chosen)
        leaves = self._inputs_of(chosen)
        try:
            expected = _outcome(self._source, leaves)
        except OptionError as error:
            if any(size in self._range(symbol) for symbol, size in chosen.items()):
                raise OptionError(
                    f"the model fails at a bound of --dynamic, {where}",
                    got=error.got,
                    remedy="Begin and end the range with sizes that it takes",
                ) from error
            return False
        program = self._program.module(check_guards=False)
        try:
            actual = _outcome(replace(self._source, module=program), leaves)
            differs = not _equal(expected, actual, self._program)
        except OptionError:
            differs = True
        if differs:
            raise OptionError(
                "torch.export does not capture what the model computes for every size of --dynamic",
                got=f"other results at {where}",
                expected="one computation for the whole range",
                remedy="Give a range without this size, and export another program for it",
            )
        return True

    def _inputs_of(self, chosen: Mapping[Any, int]) -> list[Any]:
        sizes = {**self._traced, **chosen}
        return [
            _resize(leaf, {n: int(expression_of(s).xreplace(sizes)) for n, s in dims.items()})
            if dims
            else leaf
            for leaf, dims in zip(self._source.leaves, self._sizes, strict=True)
        ]


def _holds(guard: Any, symbol: Any, size: int) -> bool:
    try:
        return guard.xreplace({symbol: sympy.Integer(size)}) != sympy.false
    except ZeroDivisionError:  # a size of 0, where the example has 1 or more
        return False


def _outcome(source: SourceModel, leaves: Sequence[Any]) -> Outcome:
    """Run without changing buffers, with the same random numbers each time."""
    module = cast("nn.Module", source.module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, buffers, args, kwargs)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return replace(source, module=call).execute(leaves)


def _equal(expected: Outcome, actual: Outcome, program: ExportedProgram) -> bool:
    """Whether two runs have equal results, of the ranks that the program declares."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    declared = [
        values.get(spec.arg.name)
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    ranked = all(
        want.ndim == value.ndim
        for want, value in zip(expected.results, declared, strict=True)
        if isinstance(want, torch.Tensor) and isinstance(value, torch.Tensor)
    )
    want, got = (*expected.results, *expected.inputs), (*actual.results, *actual.inputs)
    return ranked and all(map(_is_equal, want, got))


def _is_equal(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(expected == actual)
    if expected.shape != actual.shape:
        return False
    signal, error = signal_and_error(expected.double(), actual.double())
    return ratio_db(signal, energy(error)) >= _SAME_DB

"""A PyTorch model with example inputs: eager runs, export, and repeated export."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from coreml_delegate.dynamic_shapes.symbols import expression_of
from coreml_delegate.errors import OptionError
from coreml_delegate.exported.containers import name_return_types, paths_of, register_containers
from coreml_delegate.exported.value_names import input_name
from coreml_delegate.patches.third_party import wrap_errors
from coreml_delegate.patches.torch import pytree
from coreml_delegate.patches.torch_ranges import ValueRanges, bound_sympy

_CAPTURE_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "DynamicOutputShapeException": "The size of its result depends on values: write the model "
        "without it, or keep it out of the model",
        "DataDependentOutputException": "It gives Python what depends on values: write the model "
        "without it, or keep it out of the model",
        "GuardOnDataDependentSymNode": "Use torch.cond or torch.where for what depends on values; "
        "torch.export.draft_export(model, inputs) names the line",
    }
)
SMALLEST_TRACED = 2
"""Smallest example size that ``torch.export`` keeps dynamic; 0 and 1 become constants."""

_UNBOUNDED = 2**31  # torch.export writes larger sizes for an open range


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of an eager run, and the inputs after it.

    Attributes:
        results: The flattened results, tensors and other values.
        inputs: The flattened inputs after the run: the model may have written to them.
    """

    results: tuple[Any, ...]
    inputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A PyTorch model with example inputs.

    Attributes:
        module: The model, which computes the expected outputs.
        args: Example positional inputs.
        kwargs: Example keyword inputs.
        exported: The exported program; None to export ``module``.
    """

    module: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    exported: ExportedProgram | None

    @property
    def leaves(self) -> list[Any]:
        """The example inputs, flattened in the order of the program's inputs."""
        return pytree.tree_leaves((self.args, dict(self.kwargs)))

    @property
    def input_names(self) -> list[str]:
        """Names of ``leaves``; see ``value_names``."""
        with wrap_errors("the example inputs do not fit the model's forward"):
            arguments = inspect.signature(_forward_of(self.module)).bind_partial(*self.args)
        names = [*_parameters(arguments), *self.kwargs]
        return [
            input_name((name, *path))
            for name, value in zip(names, (*self.args, *self.kwargs.values()), strict=True)
            for path in paths_of(pytree.tree_structure(value))
        ]

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword inputs of flattened inputs; see ``leaves``."""
        _, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return pytree.tree_unflatten(list(leaves), structure)

    def execute(self, leaves: Sequence[Any]) -> Outcome:
        """Run eagerly, on copies of the inputs.

        Args:
            leaves: Inputs, flattened like ``leaves``.

        Raises:
            OptionError: The model refuses the inputs.
        """
        copies = copy_inputs(leaves)
        args, kwargs = self.unflatten(copies)
        with torch.no_grad(), wrap_errors("the model fails on these inputs"):
            results = self.module(*args, **kwargs)
            register_containers(results)
        return Outcome(tuple(pytree.tree_leaves(results)), tuple(copies))

    def run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run eagerly; see ``execute``.

        Returns:
            The tensors among the outputs, flattened.
        """
        return [leaf for leaf in self.execute(leaves).results if isinstance(leaf, torch.Tensor)]

    def export(self, dynamic_shapes: Any = None) -> ExportedProgram:
        """Return ``exported``, or trace the module with the example inputs.

        Args:
            dynamic_shapes: For ``torch.export.export``; None for fixed shapes.

        Raises:
            OptionError: ``torch.export`` cannot capture the model.
        """
        name_return_types()
        if self.exported is not None:
            return self.exported
        with torch.no_grad(), wrap_errors("torch.export cannot capture the model", _capture_remedy):
            try:
                return self._trace(dynamic_shapes)
            except Exception:
                if not self._register_result():
                    raise
                return self._trace(dynamic_shapes)

    def _trace(self, dynamic_shapes: Any) -> ExportedProgram:
        # Running a program does not need what lowers one.
        from coreml_delegate.opaque_ops.recurrent_layers import dynamic_steps

        with dynamic_steps():
            return torch.export.export(
                cast("nn.Module", self.module),
                self.args,
                dict(self.kwargs),
                dynamic_shapes=dynamic_shapes,
            )

    def _register_result(self) -> bool:
        """Register the containers in the model's result; return whether torch lacked any."""
        try:
            return register_containers(self.module(*self.args, **self.kwargs))
        except Exception:  # noqa: BLE001 - torch.export's error is reported: it has the line
            return False


def copy_inputs(leaves: Sequence[Any]) -> list[Any]:
    """Return inputs with copied tensors, for a model that may write to them."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def by_parameter(
    module: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shapes: Sequence[Any],
) -> dict[str, Any]:
    """Return the shapes of inputs by parameter, the form of ``torch.export``'s dynamic shapes.

    Args:
        module: The model.
        args: Positional example inputs.
        kwargs: Keyword example inputs, in the order of the program's inputs.
        shapes: Shapes of the flattened inputs.
    """
    structure = pytree.tree_structure((tuple(args), dict(kwargs)))
    shaped, by_keyword = pytree.tree_unflatten(list(shapes), _with_lists(structure))
    signature = inspect.signature(_forward_of(module))
    return dict(signature.bind(*shaped, **by_keyword).arguments)


def _with_lists(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """Replace dataclasses and other registered containers by lists, as in dynamic shapes."""
    if spec.is_leaf():
        return spec
    children = [_with_lists(child) for child in spec.children()]
    if spec.type in pytree.BUILTIN_TYPES:
        return pytree.TreeSpec(spec.type, spec.context, children)
    return pytree.TreeSpec(list, None, children)


def dynamic_shapes_of(
    program: ExportedProgram,
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the dynamic shapes of ``program``, to export another model with them.

    Args:
        program: An exported program.
        module: The model to export, which takes the same inputs.
        args: Positional example inputs.
        kwargs: Keyword example inputs.

    Returns:
        For ``torch.export.export``; None if all sizes are fixed.

    Raises:
        OptionError: A size depends on others by an expression that torch does not accept.
    """
    ranges = program.range_constraints
    if not ranges:
        return None
    shapes = [
        sizes and {n: _dimension(expression_of(size), ranges) for n, size in sizes.items()}
        for sizes in dynamic_sizes(program)
    ]
    return by_parameter(module, args, kwargs, shapes)


def _dimension(expression: Any, ranges: Mapping[Any, ValueRanges[Any]]) -> Any:
    """Return a named ``Dim`` for a range that starts below 2, otherwise ``Dim.DYNAMIC``."""
    named = [symbol for symbol in expression.free_symbols if ranges[symbol].lower < SMALLEST_TRACED]
    if not named:
        return Dim.DYNAMIC(**_limits(bound_sympy(expression, dict(ranges))))
    (symbol, *more) = named
    factor, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    if more or not (factor.is_Integer and offset.is_Integer):
        raise OptionError(
            "an input size depends on another in a form that torch.export does not support",
            got=str(expression),
            expected="an integer multiple of it, plus an integer",
        )
    root = Dim(str(symbol), **_limits(ranges[symbol]))
    scaled = root if factor == 1 else int(factor) * root
    return scaled + int(offset) if offset else scaled


def _limits(bounds: ValueRanges[Any]) -> dict[str, int | None]:
    high = None if bounds.upper > _UNBOUNDED else int(bounds.upper)
    return {"min": int(bounds.lower), "max": high}


def dynamic_sizes(program: ExportedProgram) -> list[dict[int, torch.SymInt] | None]:
    """Return the dynamic sizes by dimension of each flattened input; None if it is not a tensor."""
    values = {n.name: n.meta["val"] for n in program.graph.find_nodes(op="placeholder")}
    inputs = [
        values[spec.arg.name]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    return [
        {n: size for n, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
        if isinstance(value, torch.Tensor)
        else None
        for value in inputs
    ]


def _forward_of(module: Callable[..., Any]) -> Callable[..., Any]:
    return module.forward if isinstance(module, nn.Module) else module


def _parameters(arguments: inspect.BoundArguments) -> Iterator[str]:
    """Yield the names of positional inputs; ``*args`` are numbered as in ``torch.export``."""
    for name, value in arguments.arguments.items():
        if arguments.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            yield from (f"{name}_{number}" for number in range(len(value)))
        else:
            yield name


def _capture_remedy(error: Exception) -> str:
    otherwise = "With -v the traceback names the line of the model"
    return _CAPTURE_REMEDIES.get(type(error).__name__, otherwise)

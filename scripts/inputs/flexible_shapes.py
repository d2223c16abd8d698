"""The options ``--dynamic`` and ``--enumerated-shapes``, and their effect on a model."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.scripts import arguments

if TYPE_CHECKING:
    from coreml_delegate.exported.source_model import SourceModel

Range = tuple[str, int, int, int]
"""Input, dimension, smallest and largest size."""

Choices = tuple[str, list[list[int]]]
"""Input, and its shapes."""


def add_flexible_shapes(parser: argparse.ArgumentParser) -> None:
    """Declare ``--dynamic`` and ``--enumerated-shapes``."""
    group = parser.add_argument_group("shapes at run time")
    group.add_argument(
        "--dynamic",
        type=dynamic_range,
        action="append",
        default=[],
        metavar="INPUT:DIM=LOW..HIGH",
        help="a dimension, counted from 0, that may have any size of a range, like x:0=1..8; "
        "repeatable",
    )
    group.add_argument(
        "--enumerated-shapes",
        type=shape_choices,
        action="append",
        default=[],
        metavar="INPUT=SHAPE/SHAPE",
        help="shapes that an input may have, like x=1,3,224,224/1,3,448,448; repeatable: the n-th "
        "shapes of all inputs go together",
    )


def dynamic_range(text: str) -> Range:
    """Parse ``x:0=1..8``."""
    match = re.fullmatch(r"(.+):(\d+)=(\d+)\.\.(\d+)", text)
    if match is not None:
        with suppress(argparse.ArgumentTypeError):
            dim, low, high = map(arguments.natural, match.groups()[1:])
            if 1 <= low < high:
                return match[1], dim, low, high
    raise argparse.ArgumentTypeError(f"{text!r} is not a range such as x:0=1..8")


def shape_choices(text: str) -> Choices:
    """Parse ``x=1,3,224,224/1,3,448,448``."""
    name, separator, shapes = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not shapes such as x=1,8/1,16")
    return name, [list(arguments.shape(shape)) for shape in shapes.split("/")]


def with_dynamic_shapes(
    source: SourceModel, ranges: Sequence[Range], choices: Sequence[Choices]
) -> SourceModel:
    """Return the source, exported with dynamic dimensions.

    Args:
        source: A module; an exported program has its dynamic dimensions already.
        ranges: Dimensions that may have any size of a range.
        choices: Shapes by input; dimensions in which they differ become dynamic.

    Raises:
        OptionError: No such input or dimension, an option given twice, or ``torch.export`` finds
            that a size is fixed.
    """
    if not ranges and not choices:
        return source
    if source.exported is not None:
        if ranges:
            raise OptionError(
                "--dynamic is for a model",
                remedy="A .pt2 has the dimensions it was exported with",
            )
        return source
    from coreml_delegate.scripts.inputs.dynamic_sizes import InputDim, Span, export_with_spans

    spans: dict[InputDim, Span] = {}
    for name, dim, low, high in ranges:
        if (name, dim) in spans:
            raise OptionError("--dynamic is given twice for a dimension", got=f"{name}:{dim}")
        spans[name, dim] = Span(low, high)
    traced = _traced_choice(choices)
    for name, shapes in choices:
        for dim, sizes in enumerate(zip(*shapes, strict=False)):
            if len(set(sizes)) > 1 and (name, dim) not in spans:
                spans[name, dim] = Span(min(sizes), max(sizes), traced=sizes[traced])
    _check_inputs(source, spans)
    return replace(source, exported=export_with_spans(source, spans))


def _traced_choice(choices: Sequence[Choices]) -> int:
    """Return the index of the shapes to trace the model with: the largest."""
    elements = [
        sum(map(math.prod, together))
        for together in zip(*(shapes for _, shapes in choices), strict=False)
    ]
    return elements.index(max(elements)) if elements else 0


def enumerated(choices: Sequence[Choices]) -> dict[str, list[list[int]]]:
    """Return the enumerated shapes by input.

    Raises:
        OptionError: An input is given twice.
    """
    shapes_by_input: dict[str, list[list[int]]] = {}
    for name, shapes in choices:
        if name in shapes_by_input:
            raise OptionError("--enumerated-shapes is given twice for an input", got=repr(name))
        shapes_by_input[name] = shapes
    return shapes_by_input


def samples_of_shapes(
    source: SourceModel, choices: Sequence[Choices], seed: int
) -> list[list[Any]]:
    """Return inputs to measure a program with: of each combination of enumerated shapes.

    Args:
        source: The model, whose example inputs are used where they have the shapes.
        choices: Shapes by input; without any, the example inputs are the only sample.
        seed: Of the random inputs of other shapes.
    """
    shapes = enumerated(choices)
    if not shapes:
        return [source.leaves]
    from coreml_delegate.scripts.inputs.random_tensors import generator, resample

    random = generator(seed)
    samples: list[list[Any]] = []
    for index in range(len(next(iter(shapes.values())))):
        sample: list[Any] = []
        for name, leaf in zip(source.input_names, source.leaves, strict=True):
            shape = tuple(shapes[name][index]) if name in shapes else None
            is_example = shape is None or tuple(leaf.shape) == shape
            sample.append(leaf if is_example else resample(_spread(leaf, shape), random))
        samples.append(sample)
    return samples


def _spread(leaf: Any, shape: Sequence[int] | None) -> Any:
    """Return the values of a tensor, repeated or cut, in another shape."""
    count = math.prod(shape or ())
    flat = leaf.reshape(-1)
    return flat.repeat(-(-count // max(flat.numel(), 1)))[:count].reshape(shape)


def _check_inputs(source: SourceModel, input_dims: Iterable[tuple[str, int]]) -> None:
    ranks = {
        name: getattr(leaf, "ndim", 0)
        for name, leaf in zip(source.input_names, source.leaves, strict=True)
    }
    for name, dim in input_dims:
        if name not in ranks:
            raise OptionError(
                "the model has no such input",
                got=repr(name),
                expected=near_matches(name, ranks),
            )
        if dim >= ranks[name]:
            raise OptionError(
                f"input {name!r} has no such dimension",
                got=str(dim),
                expected=f"0 to {ranks[name] - 1}" if ranks[name] else "none",
            )

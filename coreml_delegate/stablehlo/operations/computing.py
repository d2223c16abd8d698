"""Contractions, reductions, windows, gathers, scatters, sorts and random bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from coreml_delegate.graph import TensorType, Value
from coreml_delegate.stablehlo.parse import dialect
from coreml_delegate.stablehlo.source_op import (
    Operand,
    Rule,
    SourceOp,
    WideConstant,
    Words,
    beyond_32_bits,
    calling,
)

_ALGORITHMS = {"THREE_FRY": "threefry"}
_GATHER_LISTS = (
    *("offset_dims", "collapsed_slice_dims", "operand_batching_dims"),
    *("start_indices_batching_dims", "start_index_map"),
)
_SCATTER_LISTS = (
    *("update_window_dims", "inserted_window_dims", "input_batching_dims"),
    "scatter_indices_batching_dims",
)


def _numbers(source: SourceOp, kind: str, attribute: str = "dimension_numbers") -> Any:
    """Return an attribute of dimension numbers as an instance of its class in the dialect."""
    return getattr(dialect("stablehlo"), kind)(source.raw_attribute(attribute))


# Contractions


def _dot_general(source: SourceOp) -> list[Operand]:
    numbers = _numbers(source, "DotDimensionNumbers", "dot_dimension_numbers")
    contracting, batching = (
        (tuple(getattr(numbers, f"lhs_{role}")), tuple(getattr(numbers, f"rhs_{role}")))
        for role in ("contracting_dimensions", "batching_dimensions")
    )
    return source.build(
        "dot_general",
        *source.values,
        contracting=contracting,
        batching=batching,
        preferred_dtype=source.dtype(),
    )


def _dot(source: SourceOp) -> list[Operand]:
    return source.build("dot", *source.values, preferred_dtype=source.dtype())


def _einsum(source: SourceOp) -> Value:
    """Read an einsum as ``dot_general`` and ``transpose``; no letter may repeat in an operand."""
    x, y = source.values
    inputs, _, output = str(source.attribute("einsum_config")).replace(" ", "").partition("->")
    lhs, rhs = inputs.split(",")
    shared = [letter for letter in lhs if letter in rhs]
    batch = [letter for letter in shared if letter in output]
    summed = [letter for letter in shared if letter not in output]
    result = source.builder.dot_general(
        x,
        y,
        contracting=(tuple(map(lhs.index, summed)), tuple(map(rhs.index, summed))),
        batching=(tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch))),
        preferred_dtype=source.dtype(),
    )
    order = [*batch, *(c for c in lhs if c not in shared), *(c for c in rhs if c not in shared)]
    if sorted(order) != sorted(output):
        raise source.refusal("a letter repeats, or is summed over in one operand")
    return source.builder.transpose(result, [order.index(letter) for letter in output])


def _dynamic_conv(source: SourceOp) -> Value:
    padding = source.value(2)
    is_constant = padding.node.name == "constant"
    amounts = padding.node["array"].reshape(-1) if is_constant else padding.elements
    if amounts is None or not all(isinstance(size, int | np.integer) for size in amounts):
        raise source.refusal("the padding has to be fixed")
    low, high = amounts[::2], amounts[1::2]
    return _convolve(source, [(int(a), int(b)) for a, b in zip(low, high, strict=True)])


def _convolve(source: SourceOp, padding: Sequence[tuple[int, int]] | None) -> Value:
    reversal = source.attribute("window_reversal", None)
    return source.builder.convolution(
        source.value(0),
        source.value(1),
        strides=source.argument("window_strides"),
        padding=padding,
        input_dilation=source.argument("lhs_dilation"),
        kernel_dilation=source.argument("rhs_dilation"),
        reversal=None if reversal is None else tuple(map(bool, reversal)),
        layout=_layout(_numbers(source, "ConvDimensionNumbers")),
        feature_groups=source.attribute("feature_group_count", 1),
        batch_groups=source.attribute("batch_group_count", 1),
        preferred_dtype=source.dtype(),
    )


def _layout(numbers: Any) -> str:
    """Return a convolution's dimension numbers as text, like ``NHWC,HWIO->NHWC``."""
    texts: list[str] = []
    for tensor, letters in (
        ("input", {"batch": "N", "feature": "C"}),
        ("kernel", {"output_feature": "O", "input_feature": "I"}),
        ("output", {"batch": "N", "feature": "C"}),
    ):
        by_axis = {
            getattr(numbers, f"{tensor}_{role}_dimension"): letter
            for role, letter in letters.items()
        }
        spatial = getattr(numbers, f"{tensor}_spatial_dimensions")
        by_axis.update({axis: str(n) for n, axis in enumerate(spatial)})
        texts.append("".join(by_axis[axis] for axis in range(len(by_axis))))
    return "{},{}->{}".format(*texts)


# Reductions and windows


def _reduce(source: SourceOp) -> list[Operand]:
    values, initial = _reduction_operands(source)
    dimensions = source.integers("dimensions")
    results = source.build("reduce", values, initial, dimensions, *source.regions)
    has_elements = all(values[0].shape[axis] != 0 for axis in dimensions)
    _check_starts(source, results, ("reduce_max", "reduce_min"), has_elements)
    return results


def _reduce_window(source: SourceOp) -> list[Operand]:
    values, initial = _reduction_operands(source)
    window, padding = source.integers("window_dimensions"), source.pairs("padding")
    dilations = {name: source.argument(f"{name}s") for name in ("base_dilation", "window_dilation")}
    results = source.build(
        "reduce_window",
        values,
        initial,
        *source.regions,
        window=window,
        strides=source.argument("window_strides"),
        padding=padding,
        **dilations,
    )
    has_elements = all(n == 1 for steps in dilations.values() for n in steps or ()) and all(
        max(pair) < size for pair, size in zip(padding or (), window, strict=False)
    )
    _check_starts(source, results, ("maximum", "minimum"), has_elements)
    return results


def _reduction_operands(source: SourceOp) -> tuple[list[Value], list[Value]]:
    """Return tensors and initial values of a reduction; initial values are clipped to 32 bits."""
    half = len(source.operands) // 2
    starts = [
        source.builder.constant(operand.clipped)
        if isinstance(operand, WideConstant)
        else source.value(half + n)
        for n, operand in enumerate(source.operands[half:])
    ]
    return [source.value(n) for n in range(half)], starts


def _check_starts(
    source: SourceOp, results: Sequence[Operand], extrema: tuple[str, str], has_elements: bool
) -> None:
    """Refuse initial values beyond 32 bits, except of extrema, where an element replaces them.

    ``extrema`` are the names of the nodes of a maximum and a minimum; ``has_elements`` is whether
    each result is known to be the reduction of at least one element.
    """
    for result, start in zip(results, source.operands[len(results) :], strict=True):
        if not isinstance(start, WideConstant) or not isinstance(result, Value):
            continue
        node = result.node
        kind = extrema[0] if start.is_below.all() else extrema[1]
        if not has_elements or kind not in (node.name, node.attributes.get("kind")):
            raise beyond_32_bits(source.name, start)


def _select_and_scatter(source: SourceOp) -> list[Operand]:
    return source.build(
        "select_and_scatter",
        *source.values,
        *source.regions,
        window=source.integers("window_dimensions"),
        strides=source.argument("window_strides"),
        padding=source.pairs("padding"),
    )


# Indexing


def _gather(source: SourceOp) -> list[Operand]:
    return _gather_slices(source, source.integers("slice_sizes"))


def _dynamic_gather(source: SourceOp) -> list[Operand]:
    sizes = source.value(2).elements
    if sizes is None:
        raise source.refusal("the sizes of slices have to be known")
    return _gather_slices(source, sizes)


def _gather_slices(source: SourceOp, sizes: Sequence[Any]) -> list[Operand]:
    numbers = _numbers(source, "GatherDimensionNumbers")
    return source.build(
        "gather",
        source.value(0),
        source.value(1),
        **{name: tuple(getattr(numbers, name)) for name in _GATHER_LISTS},
        index_vector_dim=numbers.index_vector_dim,
        slice_sizes=tuple(sizes),
    )


def _scatter(source: SourceOp) -> list[Operand]:
    values, count = source.values, len(source.operands) // 2
    tensors, indices, updates = values[:count], values[count], values[count + 1 :]
    numbers = _numbers(source, "ScatterDimensionNumbers", "scatter_dimension_numbers")
    scalars = [TensorType(x.dtype, ()) for x in tensors]
    (region,) = source.regions
    body = source.builder.trace("body", region, scalars * 2)
    body.check(scalars * 2, scalars)
    lists: dict[str, Any] = {name: tuple(getattr(numbers, name)) for name in _SCATTER_LISTS}
    results: list[Operand] = [
        source.builder.scatter(
            x,
            indices,
            update,
            # The builder refuses a body that reads another tensor's element.
            replace(
                body,
                parameters=(body.parameters[n], body.parameters[count + n]),
                results=(body.results[n],),
            ),
            **lists,
            scatter_dims_to_operand_dims=tuple(numbers.scattered_dims_to_operand_dims),
            index_vector_dim=numbers.index_vector_dim,
        )
        for n, (x, update) in enumerate(zip(tensors, updates, strict=True))
    ]
    return results


# Sorts and random bits


def _sort(source: SourceOp) -> list[Operand]:
    values = source.values
    return source.build(
        "sort", values, source.attribute("dimension", values[0].rank - 1), *source.regions
    )


def _rng_bit_generator(source: SourceOp) -> list[Operand]:
    algorithm = source.attribute("rng_algorithm")
    if algorithm not in _ALGORITHMS:
        raise source.refusal(f"its algorithm {algorithm} is left to the implementation")
    state = source.operands[0]
    pairs = state.pairs if isinstance(state, Words) else None
    if pairs is None or pairs.rank != 2:
        raise source.refusal("the state has to be two integers of 64 bits, made of pairs of ui32")
    new, bits = source.builder.rng_bit_generator(
        source.builder.reshape(pairs, (4,)),
        source.dtype(1),
        source.shape(1),
        algorithm=_ALGORITHMS[algorithm],
    )
    return [Words(source.builder.reshape(new, pairs.shape)), bits]


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "chlo.top_k": calling("top_k", "k"),
        "stablehlo.batch_norm_inference": calling(
            "batch_norm_inference", "epsilon", "feature_index"
        ),
        "stablehlo.convolution": lambda source: _convolve(source, source.pairs("padding")),
        "stablehlo.dot": _dot,
        "stablehlo.dot_general": _dot_general,
        "stablehlo.dynamic_conv": _dynamic_conv,
        "stablehlo.dynamic_gather": _dynamic_gather,
        "stablehlo.einsum": _einsum,
        "stablehlo.gather": _gather,
        "stablehlo.reduce": _reduce,
        "stablehlo.reduce_window": _reduce_window,
        "stablehlo.rng_bit_generator": _rng_bit_generator,
        "stablehlo.scatter": _scatter,
        "stablehlo.select_and_scatter": _select_and_scatter,
        "stablehlo.sort": _sort,
    }
)

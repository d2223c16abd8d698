"""Rewrites around quantized ops that OpenVINO 2026.4's CPU plugin evaluates wrongly.

The plugin propagates the integer codes of a fake-quantize through as many ops as it can, and
dequantizes after them. Some of these ops give results between two codes, which the plugin rounds
wherever it needs integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    constant_ints,
    ints,
    scalar,
)

_FAKE_QUANTIZE = "FakeQuantize"

# Ops that only move or select elements of their first operand, so that codes stay codes.
_CODE_PRESERVING = frozenset(
    {
        *("BatchToSpace", "Broadcast", "DepthToSpace", "Gather", "MaxPool", "Pad", "ReduceMax"),
        *("ReduceMin", "Relu", "Reshape", "ShuffleChannels", "Slice", "SpaceToBatch"),
        *("SpaceToDepth", "Split", "Squeeze", "StridedSlice", "Transpose", "Unsqueeze"),
        *("VariadicSplit",),
    }
)

REDUCTIONS = frozenset(
    f"Reduce{name}" for name in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum")
)

FUSED_WITH_REDUCTIONS = frozenset(
    {
        *("Abs", "Add", "Clamp", "Divide", "Elu", "Exp", "Gelu", "HSigmoid", "HSwish", "Maximum"),
        *("Minimum", "Mish", "Multiply", "Negative", "PRelu", "Power", "Relu", "Sigmoid"),
        *("SoftPlus", "Sqrt", "Subtract", "Swish", "Tanh"),
    }
)
"""Elementwise ops that the plugin fuses with a reduction before them."""

# Ops between two matrix products that the plugin fuses with both into one loop.
_IN_ONE_LOOP = (
    FUSED_WITH_REDUCTIONS
    | {_FAKE_QUANTIZE, "Ceiling", "Convert", "Erf", "Floor", "FloorMod", "Mod", "Round", "Select"}
    | {"Softmax", "SquaredDifference"}
)


def mend_quantized_ops(model: Any) -> None:
    """Rewrite quantized ops of ``model`` that the plugin would evaluate wrongly, in place."""
    nodes = list(model.get_ops())
    if any(node.get_type_name() == _FAKE_QUANTIZE for node in nodes):
        for node in nodes:
            mend = _MENDS.get(node.get_type_name())
            if mend is not None:
                mend(node)


def _mend_concat(join: Any) -> None:
    """Mend a concatenation of values with different scales: the plugin takes the largest one."""
    grids = _find_fake_quantizes(join.output(0))
    bounds = [tuple(constant_data(grid.input_value(end)) for end in (3, 4)) for grid in grids]
    if any(not _equal(pair, bounds[0]) for pair in bounds):
        for grid in grids:
            if _is_fed_by(grid, FUSED_WITH_REDUCTIONS | _CODE_PRESERVING, (_FAKE_QUANTIZE,)):
                _stop_code_propagation(grid, 0)
            # The plugin would fuse a fake-quantize with a convolution before it.
            grid.output(0).replace(_decompose_fake_quantize(grid))


def _mend_average_pool(pool: Any) -> None:
    """Mend averages, which lie between codes, and padding with code 0, which may not mean 0.0.

    If only fake-quantizes follow, the plugin rounds directly to their codes, which is right.
    """
    if not _feeds_fake_quantizes_only(pool) and _find_fake_quantizes(pool.input_value(0)):
        _stop_code_propagation(pool, 0)
        return
    attributes = pool.get_attributes()
    begin, end = attributes["pads_begin"], attributes["pads_end"]
    is_fixed = attributes["auto_pad"] == "explicit"
    if attributes["exclude-pad"] or (is_fixed and not any([*begin, *end])):
        return
    if not is_fixed and pool.get_input_partial_shape(0).is_dynamic:
        _stop_code_propagation(pool, 0)
        return
    x = pool.input_value(0)
    before, after = (ints([0, 0, *sizes]) for sizes in (begin, end))
    padded = ops.pad(x, before, after, "constant", scalar(0, x))
    pool.input(0).replace_source_output(padded.output(0))
    for name, value in (("pads_begin", [0] * len(begin)), ("pads_end", [0] * len(end))):
        pool.set_attribute(name, value)
    pool.set_attribute("auto_pad", "explicit")


def _mend_pad(pad: Any) -> None:
    """Mend padding of batch or channels, and padding with a value other than zero."""
    sizes = [constant_ints(pad.input_value(port)) for port in (1, 2)]
    values = [constant_data(pad.input_value(port)) for port in range(3, pad.get_input_size())]
    is_plain = all(size is not None and not any(size[:2]) for size in sizes) and all(
        value is not None and not value.any() for value in values
    )
    if not is_plain and _find_fake_quantizes(pad.input_value(0)):
        _stop_code_propagation(pad, 0)


def _mend_norm(norm: Any) -> None:
    """Mend a norm: the plugin adds the epsilon to the variance of the codes, not of the values."""
    if _find_fake_quantizes(norm.input_value(0)):
        _stop_code_propagation(norm, 0)


def _mend_add(add: Any) -> None:
    """Mend sums of quantized values, with constants or with each other.

    The plugin adds a constant to the zero point, an integer. It fuses a sum with a convolution
    before it, and then does not round the convolution's own result if the fused kernel returns
    integers.
    """
    ports = range(add.get_input_size())
    if any(constant_data(add.input_value(port)) is not None for port in ports):
        if not _feeds_fake_quantizes_only(add):
            _mend_bounds(add)
    elif all(_find_fake_quantizes(add.input_value(port)) for port in ports):
        for port in ports:
            _stop_code_propagation(add, port)


def _mend_bounds(node: Any) -> None:
    """Mend bounds (of Clamp, Maximum and Minimum) that lie between two codes."""
    ports = range(node.get_input_size())
    constants = [constant_data(node.input_value(port)) is not None for port in ports]
    if len(constants) == 1 or any(constants):
        for port in ports:
            if not constants[port] and _find_fake_quantizes(node.input_value(port)):
                _stop_code_propagation(node, port)


def _mend_fake_quantize(grid: Any) -> None:
    """Mend a fake-quantize that the plugin fuses with a reduction before it.

    The plugin rounds before it looks for extrema. It reads bounds along an axis as though the
    reduced tensor had another layout, beyond their end too. No issue is known.
    """
    bounds = _fixed_bounds(grid)
    if bounds is None:
        return
    is_per_axis = max(bound.size for bound in bounds) > 1
    misread = REDUCTIONS if is_per_axis else ("ReduceMax", "ReduceMin")
    if _is_fed_by(grid, FUSED_WITH_REDUCTIONS, misread):
        _stop_code_propagation(grid, 0)
        grid.output(0).replace(_decompose_fake_quantize(grid))


def _mend_matrix_product(product: Any) -> None:
    """Mend consecutive matrix products, which the plugin fuses wrongly if they have integers.

    It fuses products of rank 2 only, so the operand becomes [1, M, K].
    """
    x, y = product.input_values()
    are_matrices = all(side.get_partial_shape().rank == 2 for side in (x, y))
    if are_matrices and _find_fake_quantizes(x) and _is_fed_by(product, _IN_ONE_LOOP, ("MatMul",)):
        product.input(0).replace_source_output(ops.unsqueeze(x, ints(0)).output(0))
        readers = product.output(0).get_target_inputs()
        product.validate_and_infer_types()
        matrix = ops.squeeze(product, ints(0)).output(0)
        for reader in readers:
            reader.replace_source_output(matrix)


_MENDS: dict[str, Callable[[Any], None]] = {
    "Add": _mend_add,
    "AvgPool": _mend_average_pool,
    "Clamp": _mend_bounds,
    "Concat": _mend_concat,
    _FAKE_QUANTIZE: _mend_fake_quantize,
    "MVN": _mend_norm,
    "MatMul": _mend_matrix_product,
    "Maximum": _mend_bounds,
    "Minimum": _mend_bounds,
    "NormalizeL2": _mend_norm,
    "Pad": _mend_pad,
    "Subtract": _mend_add,
}


def _stop_code_propagation(node: Any, port: int) -> None:
    """Insert an op before input ``port`` that keeps values but ends the propagation of codes."""
    x, bound = node.input_value(port), float(np.finfo(np.float32).max)
    # With a bound on the other side, the plugin would fuse the two to a clamp.
    if node.get_type_name() == "Minimum":
        same = ops.minimum(x, scalar(bound, x))
    else:
        same = ops.maximum(x, scalar(-bound, x))
    node.input(port).replace_source_output(same.output(0))


def _decompose_fake_quantize(grid: Any) -> Any:
    """Return a fake-quantize with constant bounds as elementary arithmetic."""
    x, *ends = (grid.input_value(port) for port in range(5))
    first, last, low, high = (np.asarray(constant_data(end)) for end in ends)
    steps = grid.get_attributes()["levels"] - 1
    within = ops.minimum(ops.maximum(x, ops.constant(first)), ops.constant(last))
    scaled = ops.divide(
        ops.subtract(within, ops.constant(first)), ops.constant((last - first) / steps)
    )
    codes = ops.round(scaled, "half_to_even")
    spread = ops.multiply(codes, ops.constant((high - low) / steps))
    return ops.add(spread, ops.constant(low)).output(0)


def _is_fed_by(node: Any, kinds: Collection[str], sources: Collection[str]) -> bool:
    """Whether a node of a type in ``sources`` feeds ``node`` through nodes of ``kinds`` only."""
    pending, seen = [node.input_value(0).get_node()], set[str]()
    while pending:
        before = pending.pop()
        if before.get_type_name() in sources:
            return True
        if before.get_type_name() in kinds and before.get_name() not in seen:
            seen.add(before.get_name())
            pending += [operand.get_node() for operand in before.input_values()]
    return False


def _feeds_fake_quantizes_only(node: Any) -> bool:
    readers = node.output(0).get_target_inputs()
    return all(reader.get_node().get_type_name() == _FAKE_QUANTIZE for reader in readers)


def _find_fake_quantizes(value: Any) -> list[Any]:
    """Return the fake-quantizes whose codes reach a value through code-preserving ops."""
    node = value.get_node()
    kind = node.get_type_name()
    if kind == _FAKE_QUANTIZE:
        return [] if _fixed_bounds(node) is None else [node]
    if kind != "Concat" and kind not in _CODE_PRESERVING:
        return []
    operands = node.input_values() if kind == "Concat" else [node.input_value(0)]
    grids = [grid for operand in operands for grid in _find_fake_quantizes(operand)]
    return list({grid.get_name(): grid for grid in grids}.values())


def _fixed_bounds(grid: Any) -> list[NDArray[Any]] | None:
    """Return the four bounds if all are constants; the plugin makes no integers with others."""
    data = [constant_data(grid.input_value(end)) for end in range(1, 5)]
    bounds = [bound for bound in data if bound is not None]
    return bounds if len(bounds) == len(data) else None


def _equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

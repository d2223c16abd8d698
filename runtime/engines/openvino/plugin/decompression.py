"""Expand compressed weights that OpenVINO 2026.4's CPU plugin cannot multiply by to floats.

Its matrix product takes integers with a scale, and perhaps a zero point, per row of results, per
group of a row, or per tensor. It mistakes any other arrangement for one of these, and computes
wrong values or fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import output
from coreml_delegate.runtime.engines.openvino.values import Tensor

_MATRIX = 2  # dimensions


@dataclass(frozen=True, slots=True)
class _Compressed:
    """A compressed weight: ``scale * (data - offset)``, reshaped and transposed.

    Attributes:
        data: Constant of the integers. A blocked dimension is split into (blocks, block size).
        offset: Constant of the zero points, broadcast along blocks, or None.
        scale: Constant of the scales, broadcast along blocks.
        shape: Shape of the weight before it is transposed.
        order: Permutation of its dimensions.
    """

    data: Any
    offset: Any
    scale: Any
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def counts(self) -> tuple[int, ...]:
        """Return the number of scales along each dimension of the transposed weight."""
        split, scales = tuple(self.data.get_output_shape(0)), self.scale.get_output_shape(0)
        counts: list[int] = []
        axis = 0
        for size in self.shape:
            counts.append(scales[axis])
            axis += 1 if split[axis] == size else 2
        return tuple(counts[dimension] for dimension in self.order)

    def dense(self) -> NDArray[np.float32]:
        """Return the transposed weight as floats."""
        values = _floats(self.data)
        if self.offset is not None:
            values = values - _floats(self.offset)
        return (values * _floats(self.scale)).reshape(self.shape).transpose(self.order)


def expand_unsupported_weight(weight: Tensor, *, transposed: bool) -> Tensor:
    """Return the second operand of a matrix product, expanded where the plugin needs floats.

    ``weight`` is [*, K, N], or [*, N, K] if the product transposes it.
    """
    compressed = _find_compressed(weight)
    if compressed is None:
        return weight
    if len(compressed.shape) == _MATRIX and _can_multiply(compressed, transposed=transposed):
        return weight
    return ops.constant(np.ascontiguousarray(compressed.dense()))


def expand_weight(value: Tensor) -> Tensor:
    """Return a compressed weight as floats; any other value is returned unchanged."""
    compressed = _find_compressed(value)
    return value if compressed is None else ops.constant(np.ascontiguousarray(compressed.dense()))


def _can_multiply(weight: _Compressed, *, transposed: bool) -> bool:
    """Whether the plugin's matrix product takes the weight's arrangement of scales."""
    sizes, counts = [weight.shape[axis] for axis in weight.order], weight.counts()
    (depth, results), (groups, rows) = (
        (reversed(pair) if transposed else pair) for pair in (sizes, counts)
    )
    if groups == 1:
        return rows in (1, results)
    return 1 < rows == results and groups < depth


def _find_compressed(value: Tensor) -> _Compressed | None:
    """Return the compressed weight that ``value`` expands; None if it is something else."""
    node: Any = output(value).get_node()
    shape = tuple(output(value).get_partial_shape().get_max_shape())
    order = tuple(range(len(shape)))
    if _is_kind(node, "Transpose"):
        source = node.input_value(1).get_node()
        if not _is_kind(source, "Constant"):
            return None
        order = tuple(int(axis) for axis in source.get_data())
        node = node.input_value(0).get_node()
        shape = tuple(node.get_output_partial_shape(0).get_max_shape())
    if _is_kind(node, "Reshape"):
        node = node.input_value(0).get_node()
    if not _is_kind(node, "Multiply"):
        return None
    values, scale = (node.input_value(side).get_node() for side in (0, 1))
    offset = None
    if _is_kind(values, "Subtract"):
        values, offset = (values.input_value(side).get_node() for side in (0, 1))
    if not _is_kind(values, "Convert"):
        return None
    data = values.input_value(0).get_node()
    if offset is not None and _is_kind(offset, "Convert"):
        offset = offset.input_value(0).get_node()
    parts = [part for part in (data, scale, offset) if part is not None]
    if not all(_is_kind(part, "Constant") for part in parts):
        return None
    return _Compressed(data, offset, scale, shape, order)


def _is_kind(node: Any, kind: str) -> bool:
    return node.get_type_name() == kind


def _floats(node: Any) -> NDArray[np.float32]:
    return node.get_data(dtype=np.float32)

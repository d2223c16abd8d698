"""Which compressed weights the plugin multiplies by as they are, and the others as floats.

Its matrix product takes integers with a scale, and perhaps a zero point, for each row of results,
each group of a row, or all of them. Any other arrangement it takes for one of these, and computes
wrongly or not at all; such weights are expanded before it sees them.
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
    """Integers, what is subtracted from them, and what they are multiplied by.

    Attributes:
        data: Their node, a constant in blocks: a dimension each for blocks and inside of blocks.
        offset: Node of the zero points, broadcast along blocks, or None.
        scale: Node of the scales, likewise.
        shape: Of the weight.
        order: How its dimensions are permuted.
    """

    data: Any
    offset: Any
    scale: Any
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def counts(self) -> tuple[int, ...]:
        """How many scales each dimension of the permuted weight has."""
        split, scales = tuple(self.data.get_output_shape(0)), self.scale.get_output_shape(0)
        found: list[int] = []
        place = 0
        for size in self.shape:
            found.append(scales[place])
            place += 1 if split[place] == size else 2
        return tuple(found[axis] for axis in self.order)

    def dense(self) -> NDArray[np.float32]:
        """The permuted weight."""
        values = _floats(self.data)
        if self.offset is not None:
            values = values - _floats(self.offset)
        return (values * _floats(self.scale)).reshape(self.shape).transpose(self.order)


def keep_multipliable(weight: Tensor, *, transposed: bool) -> Tensor:
    """The second operand of a matrix product, expanded unless the plugin takes it as it is.

    Args:
        weight: [*, K, N], or [*, N, K] if transposed.
        transposed: Whether it is.
    """
    found = _find_compressed(weight)
    if found is None:
        return weight
    if len(found.shape) == _MATRIX and _can_multiply(found, transposed=transposed):
        return weight
    return ops.constant(np.ascontiguousarray(found.dense()))


def expand_weight(value: Tensor) -> Tensor:
    """A compressed weight as floats; other values as they are."""
    found = _find_compressed(value)
    return value if found is None else ops.constant(np.ascontiguousarray(found.dense()))


def _can_multiply(found: _Compressed, *, transposed: bool) -> bool:
    sizes, counts = [found.shape[axis] for axis in found.order], found.counts()
    (depth, results), (groups, rows) = (
        (reversed(pair) if transposed else pair) for pair in (sizes, counts)
    )
    if groups == 1:
        return rows in (1, results)
    return 1 < rows == results and groups < depth


def _find_compressed(value: Tensor) -> _Compressed | None:
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
    offset = None if offset is None else _skip_conversion(offset)
    parts = [part for part in (data, scale, offset) if part is not None]
    if not all(_is_kind(part, "Constant") for part in parts):
        return None
    return _Compressed(data, offset, scale, shape, order)


def _skip_conversion(node: Any) -> Any:
    """The constant behind a conversion."""
    return node.input_value(0).get_node() if _is_kind(node, "Convert") else node


def _is_kind(node: Any, kind: str) -> bool:
    return node.get_type_name() == kind


def _floats(node: Any) -> NDArray[np.float32]:
    return node.get_data(dtype=np.float32)

"""Constants that MIL ops decompress when a program is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.mil.compose import mb
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset

_Array = NDArray[Any]
INDEX_BITS = (1, 2, 3, 4, 6, 8)
"""Bits of indices into a lookup table."""


def index_bits(entries: int) -> int:
    """Return the bits of indices into a lookup table with ``entries`` entries, at most 256."""
    return next(bits for bits in INDEX_BITS if 2**bits >= entries)


def emit_look_up(
    indices: _Array, tables: _Array, vector_axis: int | None, name: str, **keywords: Any
) -> Any:
    """Emit the lookup of constants, with indices in the fewest bits of MIL.

    Args:
        indices: Integers [*shape].
        tables: [*blocks, entries, length]; before iOS18 only one table of numbers.
        vector_axis: Dimension of the result along which vectors lie; None if length is 1.
        name: Of the result.
        keywords: ``before_op``: where to insert the op.
    """
    tables, dtype = pad_tables(tables)
    if is_blockwise():
        axis = {} if vector_axis is None else {"vector_axis": np.int32(vector_axis)}
        return mb.constexpr_lut_to_dense(
            indices=indices.astype(dtype), lut=tables, name=name, **axis, **keywords
        )
    width = np.arange(index_bits(tables.size), dtype=np.uint8)
    bits = (indices.astype(np.uint8).reshape(-1, 1) >> width) & 1
    return mb.constexpr_lut_to_dense(
        indices=np.packbits(bits, bitorder="little"),
        lut=tables.reshape(-1),
        shape=np.array(indices.shape, np.uint32),
        name=name,
        **keywords,
    )


def pad_tables(tables: _Array) -> tuple[_Array, Any]:
    """Return lookup tables with as many entries as indices have values, and the indices' dtype."""
    bits = index_bits(tables.shape[-2])
    padding = [(0, 0)] * (tables.ndim - 2) + [(0, 2**bits - tables.shape[-2]), (0, 0)]
    return np.pad(tables, padding), numpy_type(f"uint{bits}")


def is_blockwise() -> bool:
    """Return whether the opset that is converted to has compression by blocks."""
    return is_converted_to(Opset.iOS18)


def is_converted_to(oldest: Opset) -> bool:
    """Return whether the opset that is converted to is ``oldest`` or a later one."""
    from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

    return is_current_opset_version_compatible_with(coremltools().target(int(oldest)))


def numpy_type(label: str) -> Any:
    """Return coremltools' NumPy type of a MIL type, as ``uint4``."""
    from coremltools.converters.mil.mil import types

    return types.nptype_from_builtin(types.string_to_builtin(label))

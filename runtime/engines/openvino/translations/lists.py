"""Lists of tensors, each represented as one tensor with the elements along its first axis.

A list that grows is padded with zeros up to the last index written; so is the shape of an element,
which may be unknown until the first write. Writing beyond the end of a list of fixed length fails
when the program runs. Elements that were never written read as zeros.

Source: coremltools' MIL op reference, ``control_flow``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.limits import MAX_LIST, require_memory
from coreml_delegate.runtime.engines.openvino.graph import (
    GRAPH_TYPE,
    constant_ints,
    dim_of,
    dims,
    ints,
    replace_slices,
    reshape,
    scalar,
    shape_of,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import (
    List,
    Result,
    Sizes,
    Tensor,
    TensorList,
    refusal,
)
from coreml_delegate.runtime.mil.dtypes import DType


@translation("make_list")
def make_list(
    elem_shape: Sizes,
    init_length: Tensor | None = None,
    dynamic_length: bool = True,
    dtype: str = "fp32",
) -> Result:
    """A list of zeros."""
    type_ = GRAPH_TYPE.get(DType.from_label(dtype))
    if type_ is None:
        raise refusal("list of an unsupported type", dtype)
    length = (1,) if init_length is None else constant_ints(init_length)
    # Unknown sizes are 0: the list is empty until the first write.
    sizes = [size or 0 for size in elem_shape]
    if length is not None:
        shape_, numpy_dtype = (*length, *sizes), np.dtype(type_.to_dtype())
        require_memory(math.prod(shape_) * numpy_dtype.itemsize, f"a list of shape {list(shape_)}")
        zeros = ops.constant(np.zeros(shape_, numpy_dtype))
    else:
        shape = ops.concat([reshape(init_length, (1,)), ints(sizes)], 0)
        zeros = ops.broadcast(ops.constant(np.zeros((), type_.to_dtype())), shape)
    return TensorList(zeros.output(0), dynamic_length)


@translation("list_length")
def list_length(ls: List) -> Result:
    """The number of elements."""
    return dim_of(ls.elements, 0)


@translation("list_read")
def list_read(ls: List, index: Tensor) -> Result:
    """One element."""
    return ops.gather(ls.elements, reshape(index, ()), ints(0))


@translation("list_gather")
def list_gather(ls: List, indices: Tensor) -> Result:
    """Several elements along a new first dimension."""
    return ops.gather(ls.elements, indices, ints(0))


@translation("list_write")
def list_write(ls: List, index: Tensor, value: Tensor) -> Result:
    """The list with the element at ``index`` replaced by ``value``."""
    return list_scatter(ls, reshape(index, (1,)), ops.unsqueeze(value, ints(0)))


@translation("list_scatter")
def list_scatter(ls: List, indices: Tensor, value: Tensor) -> Result:
    """The list with the elements at ``indices`` replaced by ``value`` [indices, *element]."""
    elements = _grow(ls, indices, value)
    return TensorList(replace_slices(elements, indices, value, 0).output(0), ls.grows)


def _grow(ls: TensorList, indices: Tensor, value: Tensor) -> Any:
    """Return the elements, zero-padded to the largest index and to the sizes of ``value``."""
    old, new = dims(ls.elements)[1:], dims(value)[1:]
    if not ls.grows and None not in old and old == new:
        return ls.elements
    have = shape_of(ls.elements)
    length = dim_of(ls.elements, 0)
    if ls.grows:
        # Bounded far below the range of int32; indices beyond the bound are refused by the write.
        last = ops.minimum(ops.reduce_max(indices, ints(0), False), ints(MAX_LIST - 1))
        length = ops.maximum(length, ops.add(last, ints(1)))
    element = ops.gather(shape_of(value), ints(list(range(1, len(new) + 1))), ints(0))
    missing = ops.subtract(ops.concat([reshape(length, (1,)), element], 0), have)
    zero = scalar(0, ls.elements)
    return ops.pad(ls.elements, ints([0] * len(dims(value))), missing, "constant", zero)

"""Building blocks of OpenVINO graphs that translations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset15 as ops

from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.openvino.values import Tensor, refusal
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Packed, writable_alias

INTERFACE_TYPE: dict[DType, ov.Type] = {
    dtype: ov.Type(dtype.numpy)
    for dtype in (
        *(DType.FP16, DType.FP32, DType.BOOL, DType.INT8, DType.UINT8),
        *(DType.INT16, DType.UINT16, DType.INT32),
    )
}
"""Element type of a MIL type at a function's inputs, outputs and states."""

GRAPH_TYPE: dict[DType, ov.Type] = {
    **INTERFACE_TYPE,
    # fp16 values are computed in f32: with the program's weights, but without its rounding.
    DType.FP16: ov.Type.f32,
    # The CPU plugin has no 16-bit integer kernels.
    DType.INT16: ov.Type.i32,
    DType.UINT16: ov.Type.i32,
    DType.UINT32: ov.Type.i32,
    DType.INT64: ov.Type.i64,
    **{dtype: ov.Type(dtype.numpy) for dtype in DType if dtype.is_packed},
}
"""Element type of a MIL type inside a graph."""

# Name of the runtime attribute by which OpenVINO's own importers mark the conversion of a constant.
_DECOMPRESSION = "decompression_0"

INT_MAX = int(np.iinfo(np.int32).max)
INT_MIN = int(np.iinfo(np.int32).min)


make_model: Any = ov.Model
"""Builds a model of results, parameters and a name. The type stub declares the base class's
constructor."""


def output(value: Any) -> Any:
    """Return the first output of a node, or an output itself."""
    return value.output(0) if isinstance(value, ov.Node) else value


def element_type(value: Tensor) -> ov.Type:
    """Return the element type of a value."""
    return output(value).get_element_type()


def is_float(value: Tensor) -> bool:
    """Whether a value holds floating-point numbers."""
    return element_type(value).is_real()


def rank(value: Tensor) -> int:
    """Return the rank of a value.

    Raises:
        UnsupportedOpError: The rank is known only at run time.
    """
    shape = output(value).get_partial_shape()
    if shape.rank.is_dynamic:
        raise refusal("the rank of a tensor is known only at run time", shape)
    return shape.rank.get_length()


def dims(value: Tensor) -> tuple[int | None, ...]:
    """Return the shape of a value, with None for a dimension known only at run time."""
    rank(value)
    return tuple(
        dim.get_length() if dim.is_static else None for dim in output(value).get_partial_shape()
    )


def static_dims(value: Tensor, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a value along ``axes``.

    Raises:
        UnsupportedOpError: A size is known only at run time.
    """
    shape = dims(value)
    sizes = tuple(size for axis in axes if (size := shape[axis]) is not None)
    if len(sizes) != len(axes):
        raise refusal("a dimension is known only at run time", shape, "a fixed size")
    return sizes


def normalize_axis(axis: int, rank_: int) -> int:
    """Return ``axis``, which may be negative, counted from the front."""
    return axis + rank_ if axis < 0 else axis


def ints(values: Sequence[int] | int) -> Any:
    """Return an i32 constant: a vector, or a scalar for a single int."""
    return ops.constant(np.asarray(values, dtype=np.int32))


def scalar(number: float, like: Tensor) -> Any:
    """Return a rank-0 constant with the element type of ``like``."""
    return ops.constant(np.asarray(number), dtype=element_type(like))


def constant_data(value: Tensor) -> NDArray[np.generic] | None:
    """Return the content of a constant of the graph, None for any other value."""
    node = output(value).get_node()
    return np.asarray(node.data) if isinstance(node, ov.op.Constant) else None


def constant_ints(value: Tensor) -> tuple[int, ...] | None:
    """Return the elements of a constant integer vector or scalar, None for any other value."""
    data = constant_data(value)
    return None if data is None else tuple(int(item) for item in data.reshape(-1))


def shape_of(value: Tensor) -> Any:
    """Return the run-time shape of a value, an i32 vector; a constant if the shape is fixed."""
    shape = dims(value)
    if None in shape:
        return ops.shape_of(value, output_type="i32")
    return ops.constant(np.asarray(shape, dtype=np.int32))


def dim_of(value: Tensor, axis: int) -> Any:
    """Return the run-time size of one axis, an i32 scalar."""
    return ops.gather(shape_of(value), ints(normalize_axis(axis, rank(value))), ints(0))


def reshape(value: Tensor, shape: Sequence[int]) -> Any:
    """Reshape ``value`` to fixed sizes, at most one of them -1."""
    return ops.reshape(value, ints(list(shape)), special_zero=False)


def make_negative_invalid(indices: Tensor) -> Any:
    """Replace negative indices by an index beyond the end, which OpenVINO refuses.

    In OpenVINO 2026.4, ScatterElementsUpdate writes outside of its memory at a negative index.
    """
    data = constant_data(indices)
    if data is not None and int(data.min(initial=0)) >= 0:
        return indices
    return ops.select(ops.less(indices, ints(0)), ints(INT_MAX), indices)


def fit_slices(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands of a scatter of slices; computing them fails unless their sizes fit.

    ``indices`` [C] are indices of C slices of ``data`` along ``axis``, counted from the front.

    Raises:
        UnsupportedOpError: Ranks do not fit, so that OpenVINO would have to compare sizes.
    """
    if None not in (*dims(data), *dims(indices), *dims(updates)):
        return data, indices, updates  # OpenVINO's own check
    if rank(indices) != 1 or rank(updates) != rank(data):
        raise refusal("slices of sizes known at run time only", dims(updates), "one per index")
    indices, updates = with_equal_sizes(indices, 0, updates, axis)
    for other in range(rank(data)):
        if other != axis:
            data, updates = with_equal_sizes(data, other, updates, other)
    return data, indices, updates


def replace_slices(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Any:
    """Replace the slices at ``indices`` [C] of ``axis``; an index out of range is refused.

    In OpenVINO 2026.4, ScatterUpdate writes outside of a vector of i32 at such an index. No issue
    is known.
    """
    data, indices, updates = fit_slices(data, indices, updates, axis)
    if rank(data) == 1 and not is_float(data):
        return ops.scatter_elements_update(data, make_negative_invalid(indices), updates, ints(0))
    return ops.scatter_update(data, indices, updates, ints(axis))


FAILURE = "refused because "
"""Prefix of the names of nodes that fail on purpose; the reason follows."""


def fail_if(condition: Any, value: Any, reason: str) -> Any:
    """Return ``value``, whose computation fails if ``condition`` is true.

    OpenVINO has no assertion, but it refuses to write at an index out of range: the value is
    written over itself at index 0, or out of range.
    """
    index = reshape(ops.select(condition, ints(INT_MAX), ints(0)), (1,))
    row = ops.unsqueeze(value, ints((0, 1)))  # not a vector, see replace_slices
    result = ops.scatter_update(row, index, row, ints(0))
    result.set_friendly_name(FAILURE + reason)
    return ops.squeeze(result, ints((0, 1))).output(0)


def with_size(x: Tensor, axis: int, size: int) -> Tensor:
    """Return ``x``, whose computation fails if ``axis`` does not have this size.

    OpenVINO compares sizes that are known at compile time. Other sizes are taken to be right: the
    kernels of 2026.4 then read and write outside of tensors. No issue is known.
    """
    if dims(x)[axis] is not None:
        return x  # OpenVINO's own check
    return _with_size(x, axis, ints(size))


def with_equal_sizes(x: Tensor, x_axis: int, y: Tensor, y_axis: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``y``; computing them fails if the sizes along these axes differ.

    See ``with_size``. Sizes that are always equal, because both are the same size of an input, are
    not compared.
    """
    x_size, y_size = dims(x)[x_axis], dims(y)[y_axis]
    if y_size is not None:
        return with_size(x, x_axis, y_size), y
    if x_size is not None:
        return x, with_size(y, y_axis, x_size)
    if _have_one_symbol(x, x_axis, y, y_axis):
        return x, y
    return x, _with_size(y, y_axis, dim_of(x, x_axis))


def _with_size(x: Tensor, axis: int, size: Tensor) -> Tensor:
    """See ``with_size``.

    ``x`` is reshaped to the expected shape, after a comparison. A reshape compares as well, but
    once it has failed, OpenVINO 2026.4 refuses correct shapes too.
    """
    is_wrong = ops.not_equal(dim_of(x, axis), size)
    sizes = [
        ops.unsqueeze(dim_of(x, index), ints(0)) if dim is None else ints([dim])
        for index, dim in enumerate(dims(x))
    ]
    expected = fail_if(is_wrong, ops.unsqueeze(size, ints(0)), "sizes that do not fit together")
    sizes[axis] = expected
    return ops.reshape(x, ops.concat(sizes, 0), special_zero=False).output(0)


def is_compared(x: Tensor, y: Tensor, axis: int) -> bool:
    """Whether OpenVINO compares the sizes along ``axis``, or they need no comparison."""
    are_static = dims(x)[axis] is not None and dims(y)[axis] is not None
    return are_static or _have_one_symbol(x, axis, y, axis)


def _have_one_symbol(x: Tensor, x_axis: int, y: Tensor, y_axis: int) -> bool:
    """Whether two sizes are the same size of an input."""
    x_symbol, y_symbol = (
        output(value).get_partial_shape()[normalize_axis(axis, rank(value))].get_symbol()
        for value, axis in ((x, x_axis), (y, y_axis))
    )
    return x_symbol is not None and x_symbol == y_symbol


def replace_node(node: Any, replacement: Any) -> None:
    """Replace a node of a model by another, which takes its name."""
    replacement.set_friendly_name(node.get_friendly_name())
    ov.utils.replace_node(node, replacement)


def stable_topk(x: Tensor, count: Any, axis: int, mode: str) -> tuple[Any, Any]:
    """Return the first ``count`` values (``max`` or ``min``) in stable order, and indices, i32."""
    best = ops.topk(x, count, axis, mode, "value", index_element_type="i32", stable=True)
    return best.output(0), best.output(1)


def per_channel(vector: Tensor, rank_: int, axis: int = 1) -> Any:
    """Return a vector [C] shaped to broadcast along ``axis`` of a tensor of rank ``rank_``."""
    if rank(vector) != 1:
        return vector
    shape = [1] * rank_
    shape[axis] = -1
    return reshape(vector, shape)


def f32(value: Tensor) -> Any:
    """Return a value as f32."""
    return value if element_type(value) == ov.Type.f32 else ops.convert(value, "f32")


def magnitude(value: Tensor) -> Any:
    """Return absolute values.

    OpenVINO 2026.4 removes the ``Abs`` of a value that is computed from constants and shapes,
    although the value may be negative: OpenVINO derives wrong bounds for it.
    """
    return ops.abs(value) if is_computed(value) else ops.maximum(value, ops.negative(value))


def is_computed(value: Tensor) -> bool:
    """Whether a value depends on the content of an input or state, not only on shapes."""
    pending, seen = [output(value).get_node()], set[str]()
    while pending:
        node = pending.pop()
        if node.get_type_name() in ("Parameter", "ReadValue"):
            return True
        if node.get_name() not in seen and node.get_type_name() != "ShapeOf":
            seen.add(node.get_name())
            pending += [source.get_node() for source in node.input_values()]
    return False


def convert_to(value: Tensor, destination: ov.Type) -> Any:
    """Return a value as element type ``destination``; as boolean, ``value != 0``."""
    source = element_type(value)
    if source == destination:
        return output(value)
    if destination == ov.Type.boolean:
        return ops.not_equal(value, scalar(0, value)).output(0)
    return ops.convert(value, destination).output(0)


def array_constant(array: NDArray[np.generic]) -> Any:
    """Return a constant that shares the memory of ``array`` and keeps it alive."""
    if array.nbytes == 0 or array.ndim == 0:
        return ops.constant(array)
    return ops.constant(writable_alias(np.ascontiguousarray(array)), shared_memory=True)


def widen_constant(constant: Any, destination: ov.Type) -> Any:
    """Return a floating-point constant that is converted to ``destination`` when it is used.

    The plugin folds a conversion to a second copy of the constant, unless the conversion is marked
    as decompression: then it converts while it rearranges the weights.
    Measured on 53 MB of fp16 linear weights: 160 MB of memory instead of 260.
    """
    node = ops.convert(constant, destination)
    node.get_rt_info()[_DECOMPRESSION] = ""
    return node


# Both have the lower nibble first.
_STORED_NIBBLES: dict[DType, ov.Type] = {DType.INT4: ov.Type.i4, DType.UINT4: ov.Type.u4}
_FOUR_BITS: dict[np.dtype[Any], tuple[ov.Type, int, int]] = {
    np.dtype(np.int8): (ov.Type.i4, -8, 7),
    np.dtype(np.uint8): (ov.Type.u4, 0, 15),
}


def integer_constant(integers: NDArray[np.generic] | Packed, shape: Sequence[int]) -> Any:
    """Return a constant of integer weights, packed to four bits per element if all of them fit.

    Kernels then read half the memory; a row times 1024 x 1024 weights takes 0.8 of the time. The
    constant shares the memory of packed weights without keeping it alive.
    """
    if isinstance(integers, Packed):
        if integers.dtype in _STORED_NIBBLES and integers.stored.nbytes:
            stored = writable_alias(integers.stored)
            type_ = _STORED_NIBBLES[integers.dtype]
            return ov.op.Constant(ov.Tensor(stored, ov.Shape(list(shape)), type_))
        integers = integers.unpack()
    array = integers.reshape(shape)
    narrow = _FOUR_BITS.get(array.dtype)
    if narrow is None or array.size == 0 or array.size % 2:
        return array_constant(array)
    type_, least, most = narrow
    if int(array.min()) < least or int(array.max()) > most:
        return array_constant(array)
    nibbles = np.bitwise_and(array.reshape(-1).astype(np.uint8), 0x0F)
    tensor = ov.Tensor(type_, ov.Shape(list(shape)))
    tensor.data.reshape(-1)[:] = nibbles[0::2] | (nibbles[1::2] << 4)
    return ov.op.Constant(tensor)


# --- tensors whose sizes a program computes from values -------------------------------------------
#
# A few bytes of a program, or of an input, can ask for more memory than the machine has, which on
# many systems ends the process. Sizes that follow from the shapes of inputs are known, or bounded
# by the declared input shapes, and need no check.

# Node type -> indices of the inputs whose values determine the sizes of the output.
_SIZED_BY: Final[Mapping[str, tuple[int, ...]]] = {
    "Broadcast": (1,),
    "Interpolate": (1, 2),
    "NonZero": (0,),
    "OneHot": (1,),
    "Pad": (1, 2),
    "RandomUniform": (0,),
    "Range": (0, 1, 2),
    "Tile": (1,),
}


def require_room(
    control: Tensor, sizes: Tensor, like: Tensor | None = None, repeats_for: Tensor | None = None
) -> Tensor:
    """Return ``control``, whose computation fails if a tensor would be too large.

    Args:
        control: The value that determines the tensor's sizes; returned unchanged if it depends only
            on shapes.
        sizes: Numbers whose product is the number of elements, a vector or a scalar.
        like: A tensor with the same element type; None for four bytes per element.
        repeats_for: A tensor whose number of elements is another factor.
    """
    factors = () if repeats_for is None else (shape_of(repeats_for),)
    if not any(map(_depends_on_values, (control, *factors))):
        return control
    nbytes = 4 if like is None else max(element_type(like).bitwidth // 8, 1)
    elements = ops.absolute(f32(sizes))
    if rank(sizes):
        elements = ops.reduce_prod(elements, ints(0))
    if repeats_for is not None:
        elements = ops.multiply(elements, ops.reduce_prod(f32(shape_of(repeats_for)), ints(0)))
    most = ops.constant(np.float32(limits.MAX_COMPUTED // nbytes))
    # Not ``greater``: it is false for NaN, the count of a range with a step of zero.
    too_large = ops.logical_not(ops.less_equal(elements, most))
    reason = f"a tensor of a computed size takes more than {limits.MAX_COMPUTED} bytes"
    return fail_if(too_large, control, reason)


def _depends_on_values(value: Tensor) -> bool:
    """Whether a value depends on the values of inputs, not only on their shapes."""
    if constant_data(value) is not None:
        return False
    pending: list[tuple[Any, bool]] = [(output(value), False)]
    seen: set[tuple[str, int, bool]] = set()
    while pending:
        source, is_shape = pending.pop()
        node = source.get_node()
        key = node.get_name(), source.get_index(), is_shape
        if key in seen:
            continue
        seen.add(key)
        kind = node.get_type_name()
        if kind == "Parameter" and not is_shape:
            return True
        if is_shape and not source.get_partial_shape().is_dynamic:
            continue
        inputs = [port.get_source_output() for port in node.inputs()]
        if is_shape:
            pending += [(inputs[n], False) for n in _SIZED_BY.get(kind, ()) if n < len(inputs)]
        pending += [(port_value, is_shape or kind == "ShapeOf") for port_value in inputs]
    return False

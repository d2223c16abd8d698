"""Layers whose weights are stored as integers of 8 or 4 bits, with scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError, UnsupportedOperatorError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var
from coreml_delegate.graph.emitter import operation, same_size
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.fused import Fused, linear
from coreml_delegate.graph.tensor_types import FLOATS, INTEGERS, DType, TensorType
from coreml_delegate.mil.compose import mb
from coreml_delegate.targets import Opset

_BITS = (4, 8)


def _compose_quantized_dense(c: Composer, node: Node, x: Var, *bias: Var) -> Var:
    weight = _weight(c, node, node.type.dtype)
    return linear(c, node.types[0].shape, x, weight, bias[0] if bias else None)


def _compose_quantized_embedding(c: Composer, node: Node, indices: Var) -> Var:
    last = np.int32(node["weight"].shape[0] - 1)
    clamped = mb.minimum(x=mb.maximum(x=indices, y=np.int32(0)), y=last)
    if node.types[0].dtype is DType.UINT32:  # indices from 2**31 on are stored as negative
        clamped = mb.select(cond=mb.less(x=indices, y=np.int32(0)), a=last, b=clamped)
    weight = _weight(c, node, node.type.dtype)
    if node.type.rank <= MOST_AXES:
        return mb.gather(x=weight, indices=clamped, axis=0)
    rows = mb.gather(x=weight, indices=c.reshape(clamped, (-1,)), axis=0)
    return c.reshape(rows, node.type.shape)


def _weight(c: Composer, node: Node, dtype: DType) -> Var:
    """Return the weight as a constexpr op, which Core ML decompresses at load time or later."""
    weight, zero_points = node["weight"], node["zero_points"]
    scales = node["scales"].astype(dtype.storage_numpy)
    if c.opset >= Opset.iOS18:
        from coremltools.converters.mil.mil import types

        int4_dtypes = {("i", 4): types.np_int4_dtype, ("u", 4): types.np_uint4_dtype}
        storage_dtype = int4_dtypes.get((weight.dtype.kind, node["bits"]), weight.dtype)
        keywords = {} if zero_points is None else {"offset": zero_points.astype(storage_dtype)}
        return mb.constexpr_blockwise_shift_scale(
            data=weight.astype(storage_dtype), scale=scales, **keywords
        )
    if node["bits"] != 8 or scales.shape[1] != 1 or c.opset < Opset.iOS16:
        raise UnsupportedOperatorError(
            "weights of 4 bits and scales of blocks need iOS18, weights of 8 bits iOS16",
            got=c.opset.name,
        )
    zeros = np.zeros_like(scales, weight.dtype) if zero_points is None else zero_points
    return mb.constexpr_affine_dequantize(
        quantized_data=weight,
        zero_point=np.ascontiguousarray(zeros[:, 0]),
        scale=np.ascontiguousarray(scales[:, 0]),
        axis=np.int32(0),
    )


class Quantized(Fused):
    """Layers whose weights are stored as integers of 8 or 4 bits, with scales.

    The real weight is ``scale * (weight - zero_point)``. There is a scale for each row, [rows], or
    for each block of a row, [rows, blocks]. Zero points have the shape of the scales.
    """

    @operation(FLOATS, _compose_quantized_dense)
    def quantized_dense(
        self,
        x: Value,
        weight: Any,
        scales: Any,
        zero_points: Any = None,
        bias: Value | None = None,
        activation: str | None = None,
        *,
        bits: int = 8,
    ) -> Value:
        """Return ``activation(x @ weight.T + bias)``.

        Args:
            x: [..., size].
            weight: Array of int8 or uint8 [outputs, size], or a constant.
            scales: Array of floats.
            zero_points: Array of the weight's dtype, or None for 0.
            bias: [outputs], or None.
            activation: See ``dense``.
            bits: 8, or 4 if the values fit.

        Raises:
            GraphError: Shapes, element types or values that do not fit.
        """
        attributes = _check_weight("quantized_dense", weight, scales, zero_points, bits)
        rows, size = attributes["weight"].shape
        if not x.rank or not same_size(x.shape[-1], size):
            raise GraphError(
                "quantized_dense: shapes do not fit", got=str(x.type), expected=f"[..., {size}]"
            )
        if bias is not None and bias.type != TensorType(x.dtype, (rows,)):
            raise GraphError(
                "quantized_dense: wrong bias",
                got=str(bias.type),
                expected=str(TensorType(x.dtype, (rows,))),
            )
        type = x.type.with_shape((*x.shape[:-1], rows))
        operands = (x,) if bias is None else (x, bias)
        y = self.emit("quantized_dense", operands, type, **attributes)
        return self._activate(y, activation)

    @operation(INTEGERS, _compose_quantized_embedding)
    def quantized_embedding(
        self,
        table: Any,
        scales: Any,
        indices: Value,
        zero_points: Any = None,
        *,
        dtype: Any = DType.FLOAT32,
        bits: int = 8,
    ) -> Value:
        """Return rows of a table; indices out of range are clamped.

        Args:
            table: Array of int8 or uint8 [rows, size], or a constant.
            scales: Array of floats.
            indices: Indices of rows, of any shape.
            zero_points: Array of the table's dtype, or None for 0.
            dtype: Floating-point element type of the result.
            bits: 8, or 4 if the values fit.

        Returns:
            [*shape of the indices, size]

        Raises:
            GraphError: Shapes, element types or values that do not fit.
        """
        attributes = _check_weight("quantized_embedding", table, scales, zero_points, bits)
        element = DType.of(dtype)
        if element not in FLOATS:
            raise GraphError(
                "quantized_embedding returns floating-point numbers", got=element.label
            )
        type = TensorType(element, (*indices.shape, attributes["weight"].shape[1]))
        return self.emit("quantized_embedding", (indices,), type, **attributes)


def _check_weight(
    name: str, weight: Any, scales: Any, zero_points: Any, bits: int
) -> dict[str, Any]:
    """Return weight, scales and zero points as arrays of rank 2, with checked shapes."""
    array = _array(weight)
    if array.dtype not in (np.int8, np.uint8) or array.ndim != 2 or not array.size:
        raise GraphError(
            f"{name}: wrong weight",
            got=f"{array.dtype}{list(array.shape)}",
            expected="int8 or uint8 [rows, size]",
        )
    if bits not in _BITS:
        raise GraphError(f"{name}: wrong number of bits", got=str(bits), expected="4 or 8")
    half = 1 << (bits - 1)
    low, high = (-half, half - 1) if array.dtype == np.int8 else (0, 2 * half - 1)
    if array.min() < low or array.max() > high:
        raise GraphError(
            f"{name}: values beyond {bits} bits",
            got=f"{array.min()} to {array.max()}",
            expected=f"{low} to {high}",
        )
    factors = _per_block(name, "scales", np.asarray(_array(scales), np.float32), array)
    zeros = None
    if zero_points is not None:
        zeros = _per_block(name, "zero points", _array(zero_points).astype(array.dtype), array)
        if zeros.shape != factors.shape:
            raise GraphError(
                f"{name}: zero points and scales differ in shape",
                got=f"{list(zeros.shape)} and {list(factors.shape)}",
            )
    return {"weight": array, "scales": factors, "zero_points": zeros, "bits": bits}


def _per_block(name: str, what: str, values: Any, weight: Any) -> Any:
    array = values.reshape(-1, 1) if values.ndim < 2 else values
    if array.shape == (1, 1):
        array = np.repeat(array, weight.shape[0], axis=0)
    rows, blocks = array.shape if array.ndim == 2 else (0, 0)
    if rows != weight.shape[0] or not blocks or weight.shape[1] % blocks:
        raise GraphError(
            f"{name}: wrong {what}",
            got=str(list(values.shape)),
            expected=f"[{weight.shape[0]}], or [{weight.shape[0]}, a divisor of {weight.shape[1]}]",
        )
    return np.ascontiguousarray(array)


def _array(weight: Any) -> Any:
    """Return an array or the array of a constant, in its element type."""
    if not isinstance(weight, Value):
        return np.asarray(weight)
    if weight.node.name != "constant":
        raise GraphError("the weight has to be a constant", got=repr(weight))
    return weight.node["array"].astype(weight.dtype.numpy)

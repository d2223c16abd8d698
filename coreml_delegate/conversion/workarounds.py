"""Workarounds for errors of coremltools 9.0, active during a conversion.

Without them, some graph passes change the results of a program without a warning.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

# Ops that the pass over transposes takes for unary; it would not transpose their other operands.
_WITH_OPERANDS = frozenset({"pow", "softplus_parametric"})

_EVALUATED_WRONGLY = frozenset({"argsort", "scatter_along_axis", "topk"})

# Relative error of an inverse in fp16.
_FP16_TOLERANCE = 1e-3


@contextmanager
def coremltools_workarounds() -> Generator[None]:
    """Work around these errors of coremltools 9.0.

    - ``fuse_conv_bias`` negates the constant subtracted from a convolution in place, in the memory
      of the model that is lowered.
    - ``fuse_conv_scale`` takes a constant divided by a convolution for the divisor:
      apple/coremltools#2776.
    - ``fuse_matmul_weight_bias`` turns differences into linear layers for either operand order, and
      products with the constant first, with the bias along the wrong dimension:
      apple/coremltools#2801.
    - ``reduce_transposes`` moves a transpose past ``pow`` without its exponents:
      apple/coremltools#2784. It fails at a reduction over all dimensions, without axes.
    - ``fuse_reduce_mean`` turns a sum into a mean if its factor is within 1e-6 of the inverse of
      the count, or has more dimensions: apple/coremltools#2792.
    - A flipped constant is folded to a view with negative strides, which cannot be cast.
    - Below iOS18, int8 weights are dequantized wrongly on GPU and neural engine:
      apple/coremltools#2675. They and their zero points are stored as uint8, plus 128.
    - A function of a constant scalar is evaluated to a Python number, which has no element type:
      the next function fails, or returns another type.
    - ``scatter_along_axis`` of constants is evaluated as an update for any mode
      (apple/coremltools#2802), ``topk`` and ``argsort`` order equal elements at random and take the
      smallest integer for the largest. They are not evaluated.
    """
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.mil.passes import defs

    mb: Any = Builder
    passes: Any = defs
    conv_bias, conv_scale = (
        passes.optimize_conv.fuse_conv_bias,
        passes.optimize_conv.fuse_conv_scale,
    )
    mean = passes.cleanup.fuse_reduce_mean
    product_bias = passes.optimize_linear.fuse_matmul_weight_bias
    transposes = passes.optimize_repeat_ops._TransposeOptimization
    reduction = passes.optimize_repeat_ops._TransformReduceMean
    fuse_bias = conv_bias._try_to_transform
    fuse_scale, fuse_mean = conv_scale._try_to_transform, mean._try_to_transform
    find_bias, visit = product_bias._find_candidate_op, transposes._visit_op
    dequantize = mb.constexpr_affine_dequantize

    def fuse_difference(conv: Any, total: Any) -> bool:
        if total.op_type == "sub" and isinstance(total.y.val, np.ndarray):
            block, (difference,) = total.enclosing_block, total.outputs
            addition = mb.add(x=total.x, y=-total.y.val, before_op=total, name=difference.name)
            is_replaced = block.try_replace_uses_of_var_after_op(
                anchor_op=total, old_var=difference, new_var=addition
            )
            block.remove_ops([total if is_replaced else addition.op])
            return is_replaced and fuse_bias(conv, addition.op)
        return fuse_bias(conv, total)

    def fuse_divisor(conv: Any, scale: Any) -> bool:
        is_dividend = scale.op_type == "real_div" and scale.x.val is not None
        return not is_dividend and fuse_scale(conv, scale)

    def fuse_true_mean(total: Any, block: Any) -> bool:
        return _is_mean(total) and fuse_mean(total, block)

    def find_added_bias(product: Any) -> Any:
        addition = find_bias(product)
        if addition is None or product.x.val is not None:
            return None
        is_subtracted = addition.op_type == "sub" and addition.x.val is not None
        return None if is_subtracted else addition

    def visit_operands(self: Any, op: Any) -> None:
        operands = [v for k, v in op.inputs.items() if k != "x"]
        depends = op.op_type in _WITH_OPERANDS and any(
            v.val is None or v.rank > 0 for v in operands
        )
        is_reduction = self._AXIS_UPDATE_OPS.get(op.op_type) is reduction
        if depends or (is_reduction and "axes" not in op.inputs):
            self._visit_materialize_op(op)
        else:
            visit(self, op)

    def dequantize_unsigned(quantized_data: Any, zero_point: Any, **keywords: Any) -> Any:
        data, zero = _as_unsigned(quantized_data), _as_unsigned(zero_point)
        return dequantize(quantized_data=data, zero_point=zero, **keywords)

    with (
        mock.patch.object(conv_bias, "_try_to_transform", staticmethod(fuse_difference)),
        mock.patch.object(conv_scale, "_try_to_transform", staticmethod(fuse_divisor)),
        mock.patch.object(mean, "_try_to_transform", staticmethod(fuse_true_mean)),
        mock.patch.object(product_bias, "_find_candidate_op", staticmethod(find_added_bias)),
        mock.patch.object(transposes, "_visit_op", visit_operands),
        mock.patch.object(mb, "constexpr_affine_dequantize", dequantize_unsigned),
        _evaluate_constants_by_type(),
    ):
        yield


def _is_mean(total: Any) -> bool:
    """Return whether the only user of a sum computes its mean."""
    result = total.outputs[0]
    if len(result.child_ops) != 1 or total.axes is None or total.axes.val is None:
        return False
    (user,) = result.child_ops
    if user.op_type not in ("mul", "real_div") or user.outputs[0].shape != result.shape:
        return False
    other = (user.y if user.x is result else user.x).val
    if other is None or np.size(other) != 1:
        return False
    from coremltools.converters.mil.mil.types.symbolic import is_symbolic

    reduced_sizes = [total.x.shape[axis] for axis in total.axes.val]
    if any(is_symbolic(size) for size in reduced_sizes):
        return False
    factor = np.asarray(other, np.float64).item()
    count = float(math.prod(reduced_sizes))
    ratio = factor * count if user.op_type == "mul" else factor / count
    return abs(ratio - 1) < _FP16_TOLERANCE


def _as_unsigned(value: Any) -> Any:
    """Return int8 as uint8, plus 128; other values unchanged."""
    array = np.asarray(getattr(value, "val", value))
    return (array.view(np.uint8) ^ np.uint8(128))[()] if array.dtype == np.int8 else value


@contextmanager
def _evaluate_constants_by_type() -> Generator[None]:
    from coremltools.converters.mil.mil import Operation

    operation: Any = Operation
    evaluate = operation._auto_val

    def evaluate_typed(self: Any, output_types: Any) -> Any:
        if self.op_type in _EVALUATED_WRONGLY:
            return (None,) * len(output_types)
        infer = self.value_inference
        self.value_inference = lambda: _typed_values(infer(), output_types)
        try:
            return evaluate(self, output_types)
        finally:
            del self.value_inference

    with mock.patch.object(operation, "_auto_val", evaluate_typed):
        yield


def _typed_values(values: Any, output_types: Any) -> list[Any]:
    """Return an op's results: numbers in the result's type, arrays row-major."""
    listed = values if isinstance(values, tuple | list) else (values,)
    return [_typed_value(*pair) for pair in zip(listed, output_types, strict=False)]


def _typed_value(value: Any, kind: Any) -> Any:
    from coremltools.converters.mil.mil.types import is_float, is_int, nptype_from_builtin

    if isinstance(value, int | float | np.number | np.ndarray) and (is_float(kind) or is_int(kind)):
        return np.asarray(value).astype(nptype_from_builtin(kind))[()]
    return np.asarray(value, order="C") if isinstance(value, np.ndarray) else value

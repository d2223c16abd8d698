"""Workarounds of errors of coremltools 9.0 that change the results of a program without a warning.

``WORKAROUNDS`` hold while we convert, with the other patches in ``patches.coremltools``.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from coreml_delegate.patches.coremltools import BUILDER, MIL, PASSES, coremltools_row, instead

# Ops that the pass over transposes takes for unary; it would not transpose their other operands.
_WITH_OPERANDS = frozenset({"pow", "softplus_parametric"})
_EVALUATED_WRONGLY = frozenset({"argsort", "scatter_along_axis", "topk"})
_FP16_TOLERANCE = 1e-3  # relative error of an inverse


def _fuse_difference(fuse: Callable[..., bool]) -> Callable[..., bool]:
    def try_to_transform(conv: Any, total: Any) -> bool:
        if total.outputs[0].shape != conv.outputs[0].shape:
            return False
        if total.op_type == "sub" and isinstance(total.y.val, np.ndarray):
            mb = pkgutil.resolve_name(BUILDER)
            block, (difference,) = total.enclosing_block, total.outputs
            addition = mb.add(x=total.x, y=-total.y.val, before_op=total, name=difference.name)
            is_replaced = block.try_replace_uses_of_var_after_op(
                anchor_op=total, old_var=difference, new_var=addition
            )
            block.remove_ops([total if is_replaced else addition.op])
            return is_replaced and fuse(conv, addition.op)
        return fuse(conv, total)

    return try_to_transform


def _fuse_divisor(fuse: Callable[..., bool]) -> Callable[..., bool]:
    def is_dividend(scale: Any) -> bool:
        return scale.op_type == "real_div" and scale.x.val is not None

    return lambda conv, scale: not is_dividend(scale) and fuse(conv, scale)


def _fuse_channels(fuse: Callable[..., bool]) -> Callable[..., bool]:
    def try_to_transform(product: Any, total: Any, block: Any) -> bool:
        x = product.x if product.x.val is None else product.y
        return total.outputs[0].shape == x.shape and fuse(product, total, block)

    return try_to_transform


def _fuse_to_magnitude(first: Any, second: Any, block: Any) -> bool:
    """Replace ``sqrt(pow(x, 2))`` by ``abs(x)``; leave ``pow(sqrt(x), 2)``."""
    x, result = first.x, second.outputs[0]
    if first.op_type != "pow" or x.shape != result.shape:
        return False
    mb = pkgutil.resolve_name(BUILDER)
    magnitude = mb.abs(x=x, name=result.name, before_op=first)
    block.replace_uses_of_var_after_op(anchor_op=second, old_var=result, new_var=magnitude)
    block.remove_ops([first, second])
    return True


def _crosses_blocks(var: Any, reader: Any) -> bool:
    """Whether a reader is in a block inside the variable's; casts are fused across blocks well."""
    if var.op is None or reader.op_type == "cast":
        return False
    return var.op.enclosing_block is not reader.enclosing_block


def _add_reader_twice(add: Callable[..., None]) -> Callable[..., None]:
    def add_child_op(self: Any, new_op: Any) -> None:
        for _ in range(2 if _crosses_blocks(self, new_op) else 1):
            add(self, new_op)

    return add_child_op


def _remove_both_readers(remove: Callable[..., None]) -> Callable[..., None]:
    def remove_child_op(self: Any, target_op: Any, no_check: bool = False) -> None:
        if _crosses_blocks(self, target_op):
            remove(self, target_op, True)
            no_check = True
        remove(self, target_op, no_check)

    return remove_child_op


def _flatten_as_counted(flatten: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def get_flattened_inputs(self: Any) -> list[Any]:
        inputs = flatten(self)
        return inputs + [var for var in inputs if _crosses_blocks(var, self)]

    return get_flattened_inputs


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


def _find_added_bias(find: Callable[..., Any]) -> Callable[..., Any]:
    def find_candidate(product: Any) -> Any:
        addition = find(product)
        if addition is None or product.x.val is not None:
            return None
        is_subtracted = addition.op_type == "sub" and addition.x.val is not None
        return None if is_subtracted else addition

    return find_candidate


def _visit_operands(visit: Callable[..., None]) -> Callable[..., None]:
    reduction = pkgutil.resolve_name(f"{PASSES}.optimize_repeat_ops:_TransformReduceMean")

    def visit_op(self: Any, op: Any) -> None:
        operands = [v for k, v in op.inputs.items() if k != "x"]
        depends = op.op_type in _WITH_OPERANDS and any(
            v.val is None or v.rank > 0 for v in operands
        )
        is_reduction = self._AXIS_UPDATE_OPS.get(op.op_type) is reduction
        if depends or (is_reduction and "axes" not in op.inputs):
            self._visit_materialize_op(op)
        else:
            visit(self, op)

    return visit_op


def _move_updates(move: Callable[..., None]) -> Callable[..., None]:
    def move_updates(self: Any, op: Any, block: Any, _: Any) -> None:
        if self._try_find_child_coreml_update_state_ops(op):
            move(self, op, block, list(block.operations))

    return move_updates


def _dequantize_unsigned(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    def constexpr_affine_dequantize(quantized_data: Any, zero_point: Any, **keywords: Any) -> Any:
        data, zero = _as_unsigned(quantized_data), _as_unsigned(zero_point)
        return dequantize(quantized_data=data, zero_point=zero, **keywords)

    return constexpr_affine_dequantize


def _as_unsigned(value: Any) -> Any:
    """Return int8 as uint8, plus 128; other values unchanged."""
    array = np.asarray(getattr(value, "val", value))
    return (array.view(np.uint8) ^ np.uint8(128))[()] if array.dtype == np.int8 else value


def _evaluate_typed(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def auto_val(self: Any, output_types: Any) -> Any:
        if self.op_type in _EVALUATED_WRONGLY:
            return (None,) * len(output_types)
        infer = self.value_inference
        self.value_inference = lambda: _typed_values(infer(), output_types)
        try:
            return evaluate(self, output_types)
        finally:
            del self.value_inference

    return auto_val


def _typed_values(values: Any, output_types: Any) -> list[Any]:
    """Return an op's results: numbers in the result's type, arrays row-major."""
    listed = values if isinstance(values, tuple | list) else (values,)
    return [_typed_value(*pair) for pair in zip(listed, output_types, strict=False)]


def _typed_value(value: Any, kind: Any) -> Any:
    from coremltools.converters.mil.mil.types import is_float, is_int, nptype_from_builtin

    if isinstance(value, int | float | np.number | np.ndarray) and (is_float(kind) or is_int(kind)):
        return np.asarray(value).astype(nptype_from_builtin(kind))[()]
    return np.asarray(value, order="C") if isinstance(value, np.ndarray) else value


WORKAROUNDS = (
    coremltools_row(
        f"{PASSES}.optimize_conv:fuse_conv_bias._try_to_transform",
        _fuse_difference,
        "It negates the constant subtracted from a convolution in place, in the lowered model, and"
        " takes summands with more channels than the convolution for a bias.",
    ),
    coremltools_row(
        f"{PASSES}.optimize_conv:fuse_conv_scale._try_to_transform",
        _fuse_divisor,
        "It takes a constant divided by a convolution for the divisor.",
        2776,
    ),
    coremltools_row(
        f"{PASSES}.optimize_elementwise_binary:fuse_elementwise_to_batchnorm._try_to_transform",
        _fuse_channels,
        "It makes a batch norm of a product and a sum that repeat the only channel of an image.",
    ),
    coremltools_row(
        "coremltools.converters.mil.backend.mil.passes.fuse_pow2_sqrt:_try_to_transform",
        partial(instead, _fuse_to_magnitude),
        "It takes the root of a square for the number itself, which may be negative, and the square"
        " of a root of a negative number for the number.",
    ),
    *(
        coremltools_row(
            f"{MIL}:{name}",
            replacement,
            "Passes fuse an op of a loop or branch with the only op before it, outside, and fail. A"
            " reader in another block counts as two, as that of ``x * x`` does.",
        )
        for name, replacement in (
            ("Var.add_child_op", _add_reader_twice),
            ("Var.remove_child_op", _remove_both_readers),
            ("Operation.get_flattened_inputs", _flatten_as_counted),
        )
    ),
    coremltools_row(
        f"{PASSES}.cleanup:fuse_reduce_mean._try_to_transform",
        lambda fuse: lambda total, block: _is_mean(total) and fuse(total, block),
        "It turns a sum into a mean if its factor is within 1e-6 of the inverse of the count, or"
        " has more dimensions.",
        2792,
    ),
    coremltools_row(
        f"{PASSES}.optimize_linear:fuse_matmul_weight_bias._find_candidate_op",
        _find_added_bias,
        "It makes linear layers of differences in either operand order, and of products with the"
        " constant first, whose bias is along the wrong dimension.",
        2801,
    ),
    coremltools_row(
        f"{PASSES}.optimize_repeat_ops:_TransposeOptimization._visit_op",
        _visit_operands,
        "It moves a transpose past pow without its exponents, and fails at a reduction over all"
        " dimensions, without axes.",
        2784,
    ),
    coremltools_row(
        f"{PASSES}.optimize_state:canonicalize_inplace_pattern._try_match_and_transform_pattern",
        _move_updates,
        "It fails on two states whose new values come one after the other: it inserts an op before"
        " one that it has removed.",
    ),
    coremltools_row(
        f"{BUILDER}.constexpr_affine_dequantize",
        _dequantize_unsigned,
        "Below iOS18, GPU and neural engine dequantize int8 weights wrongly: they and their zero"
        " points are stored as uint8, plus 128.",
        2675,
    ),
    coremltools_row(
        f"{MIL}:Operation._auto_val",
        _evaluate_typed,
        "A function of a constant scalar becomes a number without element type, a flipped constant"
        " a view that cannot be cast; scatter_along_axis of constants becomes an update for any"
        " mode, and topk and argsort order equal elements at random and take the smallest integer"
        " for the largest: these three are not evaluated.",
        2802,
    ),
)
"""Errors of graph passes and builders."""

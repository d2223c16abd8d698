"""Rewrites of a translated model to the forms that OpenVINO 2026.4's CPU plugin has kernels for."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from openvino import opset15 as ops
from openvino.passes import AnyInput, Manager, Matcher, MatcherPass, WrapType

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    constant_ints,
    dims,
    ints,
    normalize_axis,
    rank,
    replace_node,
    scalar,
)
from coreml_delegate.runtime.engines.openvino.plugin.misfusions import (
    keep_quotients,
    separate_products,
    separate_transposes,
)
from coreml_delegate.runtime.engines.openvino.plugin.quantized import mend_quantized_ops
from coreml_delegate.runtime.engines.openvino.plugin.reductions import mend_reductions
from coreml_delegate.runtime.engines.openvino.plugin.rotation import fuse_rotary_embeddings

# Type of an op with bodies -> the methods that return them.
_BODIES: Final = {"If": ("get_then_body", "get_else_body"), "Loop": ("get_function",)}


def rewrite_for_plugin(model: Any) -> None:
    """Apply every rewrite to ``model`` and to the bodies of its branches and loops, in place."""
    for node in model.get_ops():
        for body in _BODIES.get(node.get_type_name(), ()):
            rewrite_for_plugin(getattr(node, body)())
    manager = Manager()
    for rewrite in _REWRITES:
        matcher = Matcher(rewrite.root, type(rewrite).__name__)
        manager.register_pass(MatcherPass(matcher, rewrite.rewrite))
    manager.run_passes(model)
    fuse_rotary_embeddings(model)
    keep_quotients(model)
    mend_quantized_ops(model)
    mend_reductions(model)
    separate_transposes(model)
    separate_products(model)


class _NormOfPairs:
    """Replace the layer norm of ``[k x, -k x]`` by the root mean square norm that it computes.

    Programs in fp16 have it, because squares overflow there: see ``mil.compose.norms``. Its first
    half is ``x / sqrt(mean(x ** 2) + epsilon / k ** 2)``, for which the plugin has a kernel.

    Args:
        is_scaled: Whether the norm is multiplied by a constant.
    """

    def __init__(self, *, is_scaled: bool) -> None:
        self._x: Any = AnyInput()
        self._factors: Any = AnyInput()
        self._axes: Any = AnyInput()
        self._scale: Any = AnyInput()
        self._ends: Any = [AnyInput() for _ in range(3)]
        self._pair: Any = WrapType("opset1.Concat", [self._x, self._x])
        scaled = WrapType("opset1.Multiply", [self._pair, self._factors])
        self._norm: Any = WrapType("opset6.MVN", [scaled, self._axes])
        pairs = WrapType("opset1.Multiply", [self._norm, self._scale]) if is_scaled else self._norm
        self.root: Any = WrapType("opset1.StridedSlice", [pairs, *self._ends])

    def rewrite(self, matcher: Any) -> bool:
        """Replace the norm that ``matcher`` matched; return whether it was replaced."""
        values, half = matcher.get_pattern_value_map(), matcher.get_match_root()
        x, norm = values[self._x], values[self._norm].get_node().get_attributes()
        axes, factors = constant_ints(values[self._axes]), constant_data(values[self._factors])
        width, last = dims(x)[-1], rank(x) - 1
        if (
            axes is None
            or factors is None
            or width in (None, 1)  # a norm of single elements is fused with any product after it
            or not self._is_first_half(values, half)
        ):
            return False
        k = float(factors.flat[0])
        is_mirrored = (
            factors.shape[-1:] == (2 * width,)
            and np.array_equal(factors.ravel(), np.repeat(np.array([k, -k], np.float32), width))
            and k > 0
        )
        is_last = values[self._pair].get_node().get_attributes()["axis"] % (last + 1) == last
        covers_last = last in {normalize_axis(axis, last + 1) for axis in axes}
        is_plain = norm["normalize_variance"] and norm["eps_mode"] == "INSIDE_SQRT"
        if not (is_mirrored and is_last and covers_last and is_plain):
            return False
        mean = ops.reduce_mean(ops.multiply(x, x), ints(axes), True)
        deviation = ops.sqrt(ops.add(mean, scalar(norm["eps"] / k**2, x)))
        result = ops.multiply(x, ops.divide(scalar(1.0, x), deviation))
        if self._scale in values:
            scale = constant_data(values[self._scale])
            if scale is None or scale.shape[-1:] != (2 * width,):
                return False
            result = ops.multiply(result, ops.constant(np.ascontiguousarray(scale[..., :width])))
        replace_node(half, result)
        return True

    def _is_first_half(self, values: Any, half: Any) -> bool:
        """Whether a slice is the first half of its operand along the last axis."""
        begin, end, steps = (constant_ints(values[value]) for value in self._ends)
        attributes = half.get_attributes()
        masks = [*attributes["new_axis_mask"], *attributes["shrink_axis_mask"]]
        if begin is None or end is None or any(masks) or any(attributes["ellipsis_mask"]):
            return False
        is_whole = all(attributes["end_mask"][:-1]) and not attributes["end_mask"][-1]
        return (
            is_whole
            and not any(begin)
            and set(steps or ()) == {1}
            and end[-1] == dims(values[self._x])[-1]
        )


class _MultipliedSoftmax:
    """Remove ops that spread NaN over the rows of a softmax, if a matrix product sums over rows.

    The product spreads NaN as well, and the plugin has a fused kernel for softmax and product.
    """

    def __init__(self) -> None:
        self._shares: Any = WrapType("opset8.Softmax", [AnyInput()])
        self._axis: Any = AnyInput()
        total = WrapType("opset1.ReduceSum", [self._shares, self._axis])
        is_nan = WrapType("opset1.NotEqual", [total, total])
        self.root: Any = WrapType("opset1.Select", [is_nan, total, self._shares])

    def rewrite(self, matcher: Any) -> bool:
        """Let the products read the softmax directly; return whether there are any."""
        values = matcher.get_pattern_value_map()
        axes, shares = constant_ints(values[self._axis]), values[self._shares]
        if axes is None:
            return False
        axis = normalize_axis(axes[0], rank(shares)) - rank(shares)
        readers = matcher.get_match_root().output(0).get_target_inputs()
        products = [reader for reader in readers if _sums_over(reader, axis)]
        for product in products:
            product.replace_source_output(shares)
        return bool(products)


def _sums_over(reader: Any, axis: int) -> bool:
    """Whether the reader of a value is a product that sums over an axis < 0 of the value."""
    node = reader.get_node()
    if node.get_type_name() == "MatMul":
        attributes, side = node.get_attributes(), reader.get_index()
        is_transposed = attributes[("transpose_a", "transpose_b")[side]]
        return axis == (-1 if bool(side) is is_transposed else -2)
    if node.get_type_name() == "VariadicSplit":
        return _sum_over_parts(node, axis)
    if node.get_type_name() != "Reshape" or axis != -1:
        return False
    width = dims(node.input_value(0))[-1]
    readers = node.output(0).get_target_inputs()
    return (
        width is not None
        and dims(node.output(0))[-1:] == (width,)
        and all(_sums_over(reader, axis) for reader in readers)
    )


def _sum_over_parts(split: Any, axis: int) -> bool:
    """Whether a split along ``axis`` feeds two matrix products that sum over it and are added.

    Attention to a cache and to the new tokens has this form.
    """
    parts, along = split.outputs(), constant_ints(split.input_value(1))
    if len(parts) != 2 or along is None:
        return False
    if normalize_axis(along[0], rank(parts[0])) - rank(parts[0]) != axis:
        return False
    factors = [port for part in parts if (port := _only_reader(part, "MatMul")) is not None]
    if len(factors) != 2 or not all(_sums_over(factor, axis) for factor in factors):
        return False
    products = [factor.get_node().output(0) for factor in factors]
    terms = [port for product in products if (port := _only_reader(product, "Add")) is not None]
    if len(terms) != 2 or terms[0].get_node().get_name() != terms[1].get_node().get_name():
        return False
    # One product of both parts would be one term.
    return terms[0].get_index() != terms[1].get_index()


def _only_reader(value: Any, kind: str) -> Any | None:
    """Return the input that reads ``value``, if it is the only one and its node is a ``kind``."""
    readers = list(value.get_target_inputs())
    if len(readers) != 1 or readers[0].get_node().get_type_name() != kind:
        return None
    return readers[0]


# These classes do not derive from MatcherPass: OpenVINO never frees a pass that its own callback
# refers to. Nor does it free the nodes of a pattern, so the process has one instance of each.
_REWRITES: Final = (
    _NormOfPairs(is_scaled=False),
    _NormOfPairs(is_scaled=True),
    _MultipliedSoftmax(),
)

"""Rewrites of a translated model to the forms that OpenVINO 2026.4's CPU plugin has kernels for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import openvino as ov
from openvino import opset15 as ops
from openvino.passes import AnyInput, Manager, Matcher, MatcherPass, WrapType

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_data,
    constant_ints,
    dims,
    ints,
    normalize_axis,
    rank,
    scalar,
)
from coreml_delegate.runtime.engines.openvino.plugin.misfusions import (
    separate_products,
    separate_transposes,
)
from coreml_delegate.runtime.engines.openvino.plugin.quantized import mend_quantized_ops
from coreml_delegate.runtime.engines.openvino.plugin.reductions import mend_reductions
from coreml_delegate.runtime.engines.openvino.plugin.rotation import fuse_rotary_embeddings

# The epsilon of a MIL ``rsqrt`` that only guards against zero: 1e-12, which is 2**-24 in fp16.
_LARGEST_GUARD = 2.0**-24
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
    mend_quantized_ops(model)
    mend_reductions(model)
    separate_transposes(model)
    separate_products(model)


class _ScaledRmsNorm:
    """Replace a root-mean-square norm that is scaled for fp16 by the plain norm.

    Lowering divides by the largest magnitude ``s`` before it squares, and scales the epsilon too:
    ``(x / s) / sqrt(mean((x / s) ** 2) + (root / s) ** 2 + guard)``. In f32 the squares of fp16
    numbers are far from overflowing, and ``x / sqrt(mean(x ** 2) + root ** 2)`` is the same except
    for the guard inside MIL's ``rsqrt``, which is negligible beside a mean of at least one over the
    number of elements. The plugin has a kernel for the plain norm: one pass over memory, not five.
    If ``x`` is ``source - mean(source)``, the result is a layer norm of ``source``.

    Args:
        inverts: Whether ``root / s`` is lowered as ``1 / s * root``, as ExecuTorch does with a
            number that a tensor divides.
    """

    def __init__(self, *, inverts: bool) -> None:
        self._x: Any = AnyInput()
        self._reduced: Any = AnyInput()
        self._averaged: Any = AnyInput()
        self._root: Any = AnyInput()
        self._guard: Any = AnyInput()
        self._one: Any = AnyInput()
        magnitude = WrapType("opset1.Abs", [self._x])
        largest = WrapType("opset1.ReduceMax", [magnitude, self._reduced])
        scale = WrapType("opset1.Clamp", [largest])
        scaled = WrapType("opset1.Divide", [self._x, scale])
        square = WrapType("opset1.Multiply", [scaled, scaled])
        self._mean: Any = WrapType("opset1.ReduceMean", [square, self._averaged])
        self._unit: Any = AnyInput()
        if inverts:
            unit = WrapType("opset1.Divide", [self._unit, scale])
            ratio = WrapType("opset1.Multiply", [unit, self._root])
        else:
            ratio = WrapType("opset1.Divide", [self._root, scale])
        total = WrapType("opset1.Add", [self._mean, WrapType("opset1.Multiply", [ratio, ratio])])
        deviation = WrapType("opset1.Sqrt", [WrapType("opset1.Add", [total, self._guard])])
        inverse = WrapType("opset1.Divide", [self._one, deviation])
        self.root: Any = WrapType("opset1.Multiply", [scaled, inverse])

    def rewrite(self, matcher: Any) -> bool:
        """Replace the norm that ``matcher`` matched; return whether it was replaced."""
        values = matcher.get_pattern_value_map()
        root, guard, one = (_number(values[p]) for p in (self._root, self._guard, self._one))
        axes = constant_ints(values[self._averaged])
        if root is None or guard is None or axes is None or one != 1.0:
            return False
        if self._unit in values and _number(values[self._unit]) != 1.0:
            return False
        if axes != constant_ints(values[self._reduced]) or abs(guard) > _LARGEST_GUARD:
            return False
        if not values[self._mean].get_node().get_keep_dims():
            return False
        x = values[self._x]
        source = _source_of_deviations(x, axes)
        if source is None:
            mean = ops.reduce_mean(ops.multiply(x, x), ints(axes), True)
            deviation = ops.sqrt(ops.add(mean, scalar(root * root, x)))
            norm = ops.multiply(x, ops.divide(scalar(1.0, x), deviation))
        else:
            norm = ops.mvn(source, ints(axes), True, root * root, "inside_sqrt")
        replaced = matcher.get_match_root()
        norm.set_friendly_name(replaced.get_friendly_name())
        ov.utils.replace_node(replaced, norm)
        return True


def _source_of_deviations(x: Any, axes: Sequence[int]) -> Any:
    """Match ``x = source - mean(source, axes)``, where ``axes`` are the last; return ``source``.

    Return None for any other ``x``. Along other axes the plugin has no kernel for a layer norm.
    """
    node = x.get_node()
    if node.get_type_name() != "Subtract":
        return None
    source, mean = node.input_value(0), node.input_value(1).get_node()
    if mean.get_type_name() != "ReduceMean" or not mean.get_keep_dims():
        return None
    mean_axes = constant_ints(mean.input_value(1))
    if mean_axes is None or mean.input_value(0) != source:
        return None
    norm_dims, mean_dims = (
        {normalize_axis(a, rank(source)) for a in group} for group in (axes, mean_axes)
    )
    last = set(range(rank(source) - len(norm_dims), rank(source)))
    return source if norm_dims == mean_dims == last else None


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
    """Whether the reader of a value is a product that sums over an axis of the value.

    Args:
        reader: An input of a node.
        axis: Counted from the end, so negative.
    """
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
    _ScaledRmsNorm(inverts=False),
    _ScaledRmsNorm(inverts=True),
    _MultipliedSoftmax(),
)


def _number(value: Any) -> float | None:
    """Return the number that all elements of a constant equal; None for any other value."""
    node = value.get_node()
    data = constant_data(node.input_value(0) if node.get_type_name() == "Broadcast" else value)
    if data is None or data.size == 0 or (data != data.flat[0]).any():
        return None
    return float(data.flat[0])

"""Keep OpenVINO 2026.4's CPU plugin from fusing ops to kernels that compute something else.

No issue is known. An op on tensors with one dimension more is not fused.

Quotients: OpenVINO multiplies by the inverse of the divisor, so that ``x / x`` may be less than 1.
A mark on a quotient that is rounded or compared afterwards prevents it.

Products: OpenVINO multiplies the weights of a convolution instead of its input wherever a constant
factor broadcasts to the shape of the weights. If the constant varies along height or width, that is
right only for an unpadded kernel as large as the input: a padded kernel reads each pixel with
several weights.

Transposes: the plugin fuses attention and a transpose of the queries or of the result to one
kernel. If queries and result have the same shape, the kernel writes the result over the queries,
although heads that it computes later still read queries at those addresses: in
``reshape(b, n, 3, h, d)`` permuted to ``(3, b, h, n, d)``, then ``transpose(1, 2)`` of the result,
when there are as many heads as tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    constant_ints,
    dims,
    ints,
    is_computed,
    replace_node,
    reshape,
)

_CONVOLUTIONS = frozenset({"Convolution", "GroupConvolution"})
_PRODUCTS = frozenset({"Divide", "Multiply"})
_PASSED = frozenset({"Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_TRANSPOSE = "Transpose"


_COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"}
_ROUNDING = frozenset(_COMPARISONS | {"Ceiling", "Floor", "Round"})
_BEFORE_ROUNDING = _PASSED | {"Abs", "Add", "Clamp", "Maximum", "Minimum", "Multiply", "Subtract"}
_MOST_STEPS = 4
_NOT_INVERTED = "nonconvertable_divide_0"


def keep_quotients(model: Any) -> None:
    """Mark quotients that ``model`` rounds or compares, in place."""
    for node in model.get_ops():
        if node.get_type_name() in _ROUNDING or _is_truncation(node):
            _mark_quotients(node, _MOST_STEPS)


def _is_truncation(node: Any) -> bool:
    kinds = node.get_type_name() == "Convert" and (node.input_value(0), node.output(0))
    return bool(kinds) and [kind.get_element_type().is_real() for kind in kinds] == [True, False]


def _mark_quotients(node: Any, steps: int) -> None:
    """Mark the quotients among the operands of a node, and of the operands' operands."""
    for operand in (value.get_node() for value in node.input_values()):
        if operand.get_type_name() == "Divide":
            operand.get_rt_info()[_NOT_INVERTED] = ""
        elif steps and operand.get_type_name() in _BEFORE_ROUNDING:
            _mark_quotients(operand, steps - 1)


def separate_products(model: Any) -> None:
    """Rewrite products of ``model`` that could be folded into a convolution wrongly, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() in _CONVOLUTIONS and _reads_pixels_repeatedly(node):
            product = node.input_value(0).get_node()
            while product.get_type_name() in _PASSED:
                product = product.input_value(0).get_node()
            if _multiplies_by_constants(product):
                _separate_product(product)


def _reads_pixels_repeatedly(convolution: Any) -> bool:
    """Whether the input is padded, and no larger than the kernel along a dimension."""
    attributes = convolution.get_attributes()
    if attributes["auto_pad"] == "explicit" and not any(
        attributes["pads_begin"] + attributes["pads_end"]
    ):
        return False
    sizes = dims(convolution.input_value(0))[2:]
    kernel = dims(convolution.input_value(1))[-len(sizes) :]
    return any(size == width != 1 for size, width in zip(sizes, kernel, strict=True))


def _multiplies_by_constants(node: Any) -> bool:
    return node.get_type_name() in _PRODUCTS and any(
        not is_computed(value) and not set(dims(value)) <= {1} for value in node.input_values()
    )


def _separate_product(product: Any) -> None:
    """Replace ``x * y`` by ``x[..., None] * y[..., None]``, squeezed."""
    build = ops.multiply if product.get_type_name() == "Multiply" else ops.divide
    operands = [ops.unsqueeze(value, ints(-1)) for value in product.input_values()]
    replace_node(product, ops.squeeze(build(*operands), ints(-1)))


def separate_transposes(model: Any) -> None:
    """Rewrite the transposes of ``model`` that fused attention could overwrite, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == _TRANSPOSE and _may_be_overwritten(node):
            _separate_transpose(node)


def _may_be_overwritten(transpose: Any) -> bool:
    """Whether a product on one side of ``transpose`` has the shape of the tensor on the other."""
    if transpose.get_output_partial_shape(0).is_dynamic:
        return False
    before, after = dims(transpose.input_value(0)), dims(transpose.output(0))
    sizes = [size for size in before if size != 1]
    if len(set(sizes)) == len(sizes):
        return False
    is_read = (dims(value) == before for value in _products_after(transpose))
    is_made = (dims(value) == after for value in _products_before(transpose))
    return any(is_read) or any(is_made)


def _products_after(node: Any) -> Iterator[Any]:
    """Yield the first operands of matrix products that read ``node`` element by element."""
    pending, seen = [node], set[str]()
    while pending:
        for reader in pending.pop().output(0).get_target_inputs():
            after = reader.get_node()
            if after.get_type_name() == "MatMul":
                if reader.get_index() == 0:
                    yield reader.get_source_output()
            elif _keeps_elements(after, reader.get_index()) and after.get_name() not in seen:
                seen.add(after.get_name())
                pending.append(after)


def _products_before(node: Any) -> Iterator[Any]:
    """Yield the matrix products that ``node`` reads element by element."""
    pending, seen = [node], set[str]()
    while pending:
        reader = pending.pop()
        for port in range(reader.get_input_size()):
            before = reader.input_value(port).get_node()
            if not _keeps_elements(reader, port):
                continue
            if before.get_type_name() == "MatMul":
                yield before.output(0)
            elif before.get_name() not in seen:
                seen.add(before.get_name())
                pending.append(before)


def _keeps_elements(node: Any, port: int) -> bool:
    """Whether a node transposes an operand, or returns as many elements in the same order."""
    if node.get_type_name() == _TRANSPOSE:
        return port == 0
    shapes = node.get_input_partial_shape(port), *(o.get_partial_shape() for o in node.outputs())
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _separate_transpose(transpose: Any) -> None:
    """Replace ``transpose`` by a transpose of ``x[..., None]``, reshaped."""
    x, shape = transpose.input_value(0), [size or 0 for size in dims(transpose.output(0))]
    order = constant_ints(transpose.input_value(1)) or ()
    moved = ops.transpose(ops.unsqueeze(x, ints(-1)), ints([*order, len(order)]))
    replace_node(transpose, reshape(moved, shape))

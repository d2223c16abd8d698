"""Keep OpenVINO 2026.4 from folding certain constant factors into the weights of a convolution.

OpenVINO multiplies the weights instead of the input wherever the constant broadcasts to the shape
of the weights. If the constant varies along height or width, that is right only for an unpadded
kernel as large as the input: a padded kernel reads each pixel with several weights. No issue is
known. A product of tensors with one dimension more is not folded.
"""

from __future__ import annotations

from typing import Any

import openvino as ov
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import dims, ints, is_computed

_CONVOLUTIONS = frozenset({"Convolution", "GroupConvolution"})
_PRODUCTS = frozenset({"Divide", "Multiply"})
_PASSED = frozenset({"Convert", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def separate_products(model: Any) -> None:
    """Rewrite products of ``model`` that could be folded into a convolution wrongly, in place."""
    for node in model.get_ordered_ops():
        if node.get_type_name() in _CONVOLUTIONS and _reads_pixels_repeatedly(node):
            product = node.input_value(0).get_node()
            while product.get_type_name() in _PASSED:
                product = product.input_value(0).get_node()
            if _multiplies_by_constants(product):
                _separate(product)


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


def _separate(product: Any) -> None:
    """Replace ``x * y`` by ``x[..., None] * y[..., None]``, squeezed."""
    build = ops.multiply if product.get_type_name() == "Multiply" else ops.divide
    operands = [ops.unsqueeze(value, ints(-1)) for value in product.input_values()]
    separate = ops.squeeze(build(*operands), ints(-1))
    separate.set_friendly_name(product.get_friendly_name())
    ov.utils.replace_node(product, separate)

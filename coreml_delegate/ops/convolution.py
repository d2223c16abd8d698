"""Convolutions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.fx import Node

from coreml_delegate.ops.call import OpCall, ReasonCode, target_name
from coreml_delegate.ops.constraints import IsConstant, holds
from coreml_delegate.ops.edits import ATEN, arguments_of, become, insert, set_arguments, value_of
from coreml_delegate.ops.flops import elements, extent, result_elements, tensors_of
from coreml_delegate.ops.quantization import CompositeOp, Pattern, Quantization, Tail
from coreml_delegate.ops.record import OpRecord


def _batched(call: OpCall) -> bool:
    tensor, weight = call.tensor("input"), call.tensor("weight")
    return tensor is None or weight is None or tensor.dim() == weight.dim()


def _transposed(node: Node) -> None:
    """Crop the output here, where coremltools cannot: it takes output padding off the padding.

    Zeros after the input make the output longer by a stride each, with the bias where nothing else
    contributes; of that, PyTorch's output is a slice.
    """
    arguments = arguments_of(node)
    x: Node = arguments["input"]
    if not arguments.get("transposed", True):
        return
    dims = value_of(x).dim() - 2
    stride, padding, extra = (
        _spread(arguments[n], dims) for n in ("stride", "padding", "output_padding")
    )
    if all(e <= p for e, p in zip(extra, padding, strict=True)):
        return
    rows = list(zip(stride, padding, extra, strict=True))
    zeros = [max(0, -(-(e - p) // s)) for s, p, e in rows]
    sides = [side for count in reversed(zeros) for side in (0, count)]
    padded = insert(node, ATEN.constant_pad_nd.default, x, sides, 0.0)
    call = {"input": padded, "padding": [0] * dims, "output_padding": [0] * dims}
    set_arguments(node, **call)
    whole = insert(node, node.target, *node.args, **node.kwargs)
    for d, ((s, p, e), count) in enumerate(zip(rows, zeros, strict=True), start=2):
        cut = count * s + p - e
        end = -cut if cut else _END
        if p or cut:
            whole = insert(node, ATEN.slice_copy.Tensor, whole, d, p, end, 1)
    become(node, ATEN.clone.default, whole)


def _spread(values: Any, dims: int) -> list[int]:
    listed = [values] if isinstance(values, int) else list(values)
    return listed * dims if len(listed) == 1 else listed


def _flops(call: OpCall) -> int:
    """Every weight is used once per position and sample: of the result, or transposed, of input."""
    weight, image = call.tensor("weight"), call.tensor("input")
    if weight is None or image is None:
        return 0
    transposed = call.arguments.get("transposed") or "transpose" in target_name(call.node.target)
    swept = image if transposed else next(tensors_of(call.node.meta.get("val")))
    spatial = weight.dim() - 2
    sizes = [extent(size) for size in swept.shape]
    batch = sizes[0] if swept.dim() == weight.dim() else 1
    multiplications = elements(weight) * batch * math.prod(sizes[-spatial:])
    has_bias = call.tensor("bias") is not None
    return 2 * multiplications + has_bias * result_elements(call)


_END = (1 << 63) - 1
_CONSTANTS = (IsConstant("weight"), IsConstant("bias"))
_BATCHED = holds(_batched, ReasonCode.RANK, "the input has no batch dimension")
_FUSED = (Tail.NORM, Tail.ACTIVATION)
_CONV = Quantization((Pattern("conv", weight="weight", tail=_FUSED),))
_CONV_TRANSPOSE = Quantization(
    (Pattern("conv_transpose", weight="weight", channel_axis=1, tail=_FUSED),)
)

_op = partial(OpRecord, constraints=(*_CONSTANTS, _BATCHED), flops=_flops)

RECORDS = (
    *(
        _op(f"aten.{name}", quantization=_CONV)
        for name in (
            "conv1d.default",
            "conv1d.padding",
            "conv2d.default",
            "conv2d.padding",
            "conv3d.default",
        )
    ),
    *(
        _op(f"aten.{name}", rewrite=_transposed, quantization=_CONV_TRANSPOSE)
        for name in (
            "conv_transpose1d.default",
            "conv_transpose2d.input",
            "conv_transpose3d.input",
        )
    ),
    _op("aten.convolution.default", constraints=_CONSTANTS, rewrite=_transposed),
)

# Core ML has no kernel for it; its calls are quantized all the same and stay where they are.
COMPOSITES = (CompositeOp("aten.conv3d.padding", _CONV),)

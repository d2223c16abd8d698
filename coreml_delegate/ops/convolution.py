"""Convolutions."""

from __future__ import annotations

import math
from functools import partial

from torch.fx import Node

from coreml_delegate.ops.call import OpCall, ReasonCode, per_dim, target_name, tensors_of
from coreml_delegate.ops.constraints import IsConstant, holds
from coreml_delegate.ops.edits import ATEN, arguments_of, become, insert, set_arguments, value_of
from coreml_delegate.ops.flops import elements, extent, result_elements
from coreml_delegate.ops.quantization import CompositeOp, Pattern, Quantization, Tail
from coreml_delegate.ops.record import OpRecord


def _has_batch(call: OpCall) -> bool:
    tensor, weight = call.tensor("input"), call.tensor("weight")
    return tensor is None or weight is None or tensor.dim() == weight.dim()


def _crop_transposed(node: Node) -> None:
    """Crop the output if ``output_padding > padding``: coremltools subtracts one from the other.

    Each zero appended to the input makes the output longer by a stride; PyTorch's output is a slice
    of that output.
    """
    arguments = arguments_of(node)
    x: Node = arguments["input"]
    if not arguments.get("transposed", True):
        return
    dims = value_of(x).dim() - 2
    stride, padding, output_padding = (
        per_dim(arguments[n], dims) for n in ("stride", "padding", "output_padding")
    )
    if all(o <= p for o, p in zip(output_padding, padding, strict=True)):
        return
    rows = list(zip(stride, padding, output_padding, strict=True))
    zeros = [max(0, -(-(o - p) // s)) for s, p, o in rows]
    sides = [side for count in reversed(zeros) for side in (0, count)]
    padded = insert(node, ATEN.constant_pad_nd.default, x, sides, 0.0)
    call = {"input": padded, "padding": [0] * dims, "output_padding": [0] * dims}
    set_arguments(node, **call)
    output = insert(node, node.target, *node.args, **node.kwargs)
    for d, ((s, p, o), count) in enumerate(zip(rows, zeros, strict=True), start=2):
        surplus = count * s + p - o
        end = -surplus if surplus else _END
        if p or surplus:
            output = insert(node, ATEN.slice_copy.Tensor, output, d, p, end, 1)
    become(node, ATEN.clone.default, output)


def _flops(call: OpCall) -> int:
    """Each weight counts per sample and position: of the result, or of the input if transposed."""
    weight, x = call.tensor("weight"), call.tensor("input")
    if weight is None or x is None:
        return 0
    transposed = call.arguments.get("transposed") or "transpose" in target_name(call.node.target)
    positions = x if transposed else next(tensors_of(call.node.meta.get("val")))
    spatial = weight.dim() - 2
    sizes = [extent(size) for size in positions.shape]
    batch = sizes[0] if positions.dim() == weight.dim() else 1
    multiplications = elements(weight) * batch * math.prod(sizes[-spatial:])
    has_bias = call.tensor("bias") is not None
    return 2 * multiplications + has_bias * result_elements(call)


_END = (1 << 63) - 1
_CONSTANTS = (IsConstant("weight"), IsConstant("bias"))
_HAS_BATCH = holds(_has_batch, ReasonCode.RANK, "the input has no batch dimension")
_FUSED = (Tail.NORM, Tail.ACTIVATION)
_CONV = Quantization((Pattern("conv", weight="weight", tail=_FUSED),))
_CONV_TRANSPOSE = Quantization(
    (Pattern("conv_transpose", weight="weight", channel_axis=1, tail=_FUSED),)
)

_op = partial(OpRecord, constraints=(*_CONSTANTS, _HAS_BATCH), flops=_flops)

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
        _op(f"aten.{name}", rewrite=_crop_transposed, quantization=_CONV_TRANSPOSE)
        for name in (
            "conv_transpose1d.default",
            "conv_transpose2d.input",
            "conv_transpose3d.input",
        )
    ),
    _op("aten.convolution.default", constraints=_CONSTANTS, rewrite=_crop_transposed),
)

# Core ML has no kernel for it; its calls are quantized, but not delegated.
COMPOSITES = (CompositeOp("aten.conv3d.padding", _CONV),)

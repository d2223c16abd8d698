"""Matrix products and attention.

If the mask hides all keys of a query, as of a padded token, PyTorch's attention gives zeros. Core
ML's op divides zero by zero, and coremltools' decomposition takes a mean; a nan in one token makes
all following tokens nan.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.fx import Node

from coreml_delegate.ops.call import BOOL, FLOAT, OpCall, ReasonCode
from coreml_delegate.ops.constants import stored_value
from coreml_delegate.ops.constraints import argument_is, holds, rank_between
from coreml_delegate.ops.edits import ATEN, arguments_of, become, insert, shape_of, value_of
from coreml_delegate.ops.flops import SOFTMAX_FLOPS, contraction, elements, extent
from coreml_delegate.ops.merging import leading, matrices
from coreml_delegate.ops.quantization import Pattern, Quantization, Tail
from coreml_delegate.ops.record import OpRecord


def _has_two_operands(call: OpCall) -> bool:
    return sum(1 for _ in call.tensors("tensors")) == 2


def _is_explicit(call: OpCall) -> bool:
    equation = call.arguments["equation"]
    return "->" in equation and "..." not in equation


def _multiplies_matrices(call: OpCall) -> bool:
    other = call.tensor("other")
    return other is not None and other.dim() > 1


def _rewrite_attention(node: Node) -> None:
    mask = arguments_of(node)["attn_mask"]
    if not isinstance(mask, Node) or not value_of(mask).dim() or _leaves_keys(mask):
        return
    result = insert(node, node.target, *node.args, **node.kwargs)
    become(node, ATEN.masked_fill.Scalar, result, _is_fully_masked(node, mask), 0.0)


def _rewrite_core_ml_attention(node: Node) -> None:
    become(node, ATEN.scaled_dot_product_attention.default, *arguments_of(node).values())
    _rewrite_attention(node)


def _rewrite_hadamard(node: Node) -> None:
    """Walsh-Hadamard transform: log2(n) butterflies of sums and differences of halves."""
    shape = shape_of(node)
    count = shape[-1]
    value = insert(node, ATEN.mul.Scalar, node.args[0], count**-0.5)  # first, against overflow
    for _ in range(count.bit_length() - 1):
        halves = insert(node, ATEN.view_copy.default, value, [-1, 2, count // 2])
        first, second = (insert(node, ATEN.select_copy.int, halves, 1, half) for half in (0, 1))
        butterfly = [insert(node, op.Tensor, first, second) for op in (ATEN.add, ATEN.sub)]
        value = insert(node, ATEN.stack.default, butterfly, -1)
    become(node, ATEN.view_copy.default, value, shape)


def _is_power_of_2(call: OpCall) -> bool:
    matrix = call.tensor("mat")
    count = matrix.shape[-1] if matrix is not None and matrix.dim() else None
    return isinstance(count, int) and count > 1 and count.bit_count() == 1


def _hadamard_flops(call: OpCall) -> int:
    matrix = call.tensor("mat")
    return 0 if matrix is None else elements(matrix) * extent(matrix.shape[-1]).bit_length()


def _is_fully_masked(node: Node, mask: Node) -> Node:
    """Return true for each query whose keys are all masked."""
    is_bool = value_of(mask).dtype is torch.bool
    visible = mask if is_bool else insert(node, ATEN.gt.Scalar, mask, -math.inf)
    number = insert(node, ATEN._to_copy.default, visible, dtype=value_of(node).dtype)
    return insert(node, ATEN.le.Scalar, insert(node, ATEN.amax.default, number, [-1], True), 0.0)


def _leaves_keys(mask: Node) -> bool:
    """Whether the mask is stored and leaves a key to every query."""
    value = stored_value(mask)
    if value is None or not value.numel():
        return False
    visible = value if value.dtype is torch.bool else value > -math.inf
    return bool(visible.any(-1).all())


def _einsum_flops(call: OpCall) -> int:
    """Two operations per combination of all indices (one for a single operand)."""
    equation = str(call.arguments.get("equation", "")).replace(" ", "")
    operands = [term for term in equation.partition("->")[0].split(",") if "." not in term]
    tensors = [tensor for _, tensor in call.tensors("tensors")]
    extents: dict[str, int] = {}
    for term, tensor in zip(operands, tensors, strict=False):
        extents.update(zip(term, map(extent, tensor.shape), strict=False))
    return max(len(tensors), 1) * math.prod(extents.values())


def _attention_flops(call: OpCall, names: tuple[str, str, str] = ("query", "key", "value")) -> int:
    """``q @ k.T``, a softmax, and ``weights @ v``."""
    query, key, value = map(call.tensor, names)
    if query is None or key is None or value is None:
        return 0
    rows = elements(query) // max(extent(query.shape[-1]), 1)
    weights = rows * extent(key.shape[-2])
    return weights * (2 * extent(query.shape[-1]) + 2 * extent(value.shape[-1]) + SOFTMAX_FLOPS)


_TAIL = (Tail.ACTIVATION,)
_MATMUL = Pattern("matmul", tail=_TAIL)


def _linear_pattern(weight: str, data: str) -> Pattern:
    """Pattern of a product with a weight matrix [in, out]."""
    return Pattern("linear", weight=weight, channel_axis=1, data=(data,), tail=_TAIL)


def _one_trailing_dim(_: OpCall) -> int:
    return 1


_op = partial(OpRecord, flops=contraction("self", -1))

RECORDS = (
    _op("aten.mm.default", quantization=Quantization((_linear_pattern("mat2", "self"), _MATMUL))),
    _op(
        "aten.bmm.default",
        quantization=Quantization((_MATMUL,)),
    ),
    _op(
        "aten.matmul.default",
        constraints=(holds(_multiplies_matrices, ReasonCode.RANK, "'other' is a vector"),),
        merge=matrices,
        quantization=Quantization((_linear_pattern("other", "self"), _MATMUL)),
    ),
    _op(
        "aten.addmm.default",
        constraints=(argument_is("alpha", 1), argument_is("beta", 1)),
        flops=contraction("mat1", -1, bias="self"),
        quantization=Quantization((_linear_pattern("mat2", "mat1"),)),
    ),
    _op(
        "aten.linear.default",
        constraints=(rank_between("weight", 2, 2),),
        merge=leading("input", _one_trailing_dim),
        flops=contraction("input", -1, bias="bias"),
        quantization=Quantization(
            (Pattern("linear", weight="weight", tail=(Tail.NORM, Tail.ACTIVATION)),)
        ),
    ),
    _op(
        "aten.einsum.default",
        constraints=(
            holds(_has_two_operands, ReasonCode.ARGUMENT, "einsum takes two operands in Core ML"),
            holds(_is_explicit, ReasonCode.ARGUMENT, "the equation has an ellipsis or no result"),
            argument_is("path", None),
        ),
        flops=_einsum_flops,
    ),
    _op(
        "aten.scaled_dot_product_attention.default",
        dtypes={"": FLOAT, "attn_mask": FLOAT | BOOL},
        constraints=(argument_is("dropout_p", 0.0), argument_is("enable_gqa", False)),
        merge=matrices,
        rewrite=_rewrite_attention,
        flops=_attention_flops,
    ),
    # Ops of ExecuTorch's packages: see also ``refused`` and ``transforms.executorch_gaps``.
    _op(
        "coreml.sdpa.default",
        dtypes={"": FLOAT, "attn_mask": FLOAT | BOOL},
        merge=matrices,
        preserve=False,
        standalone=False,
        rewrite=_rewrite_core_ml_attention,
        flops=partial(_attention_flops, names=("q", "k", "v")),
    ),
    _op(
        "llama.fast_hadamard_transform.default",
        constraints=(holds(_is_power_of_2, ReasonCode.SHAPE, "a row is no power of 2"),),
        preserve=False,
        standalone=False,
        rewrite=_rewrite_hadamard,
        flops=_hadamard_flops,
    ),
)

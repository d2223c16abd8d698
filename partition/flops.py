"""Estimated floating-point operations of a call, to weigh nodes against each other.

One multiplication with its addition counts as two. Numbers are of the arithmetic that the op
defines, whatever a device makes of it: moving data costs nothing, any function of one element costs
one operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.fx import Node

from coreml_delegate.op_rules import rule_of
from coreml_delegate.op_rules.rule import OpCall, overload_of, target_name
from coreml_delegate.partition.sizes import elements, extent, tensors_of

Estimator = Callable[[OpCall], int]


def flops_of(node: Node) -> int:
    """Estimated operations of one node; 0 for all that is no call of an operator.

    Args:
        node: Of a graph in ATen or edge dialect, with fake tensors in ``meta["val"]``.
    """
    if node.op != "call_function":
        return 0
    name = target_name(node.target)
    namespace, _, rest = name.partition(".")
    if namespace not in _NAMESPACES:
        return 0
    op = rest.partition(".")[0].removesuffix("_copy")
    rule = rule_of(name)
    family = _FAMILIES.get(rule.family) if rule is not None else None
    return (_OPS.get(op) or family or _unknown)(OpCall.of(node))


def _elements_of(call: OpCall, *names: str) -> int:
    found = (call.tensor(name) for name in names)
    return next((elements(tensor) for tensor in found if tensor is not None), 0)


def _results(call: OpCall) -> int:
    """Elements of the first result; the others of an op are by-products."""
    return next((elements(t) for t in tensors_of(call.node.meta.get("val"))), 0)


def _nothing(_: OpCall) -> int:
    return 0


def _unknown(call: OpCall) -> int:
    """An op without a rule: nothing for a view of its argument, else one operation per result."""
    schema = getattr(overload_of(call.node.target), "_schema", None)
    is_view = any(r.alias_info is not None for r in (() if schema is None else schema.returns))
    return 0 if is_view else _results(call)


def _per_result(operations: int) -> Estimator:
    return lambda call: operations * _results(call)


def _per_input(operations: int) -> Estimator:
    return lambda call: operations * _elements_of(call, "self", "input", "x")


def _contraction(operand: str, dimension: int, bias: str | None = None) -> Estimator:
    """Two operations per result and element of the dimension that is summed over."""

    def estimate(call: OpCall) -> int:
        tensor = call.tensor(operand)
        if tensor is None:
            return 0
        has_bias = bias is not None and call.tensor(bias) is not None
        return _results(call) * (2 * extent(tensor.shape[dimension]) + has_bias)

    return estimate


def _convolution(call: OpCall) -> int:
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
    return 2 * multiplications + has_bias * _results(call)


def _einsum(call: OpCall) -> int:
    """Two operations per combination of all the indices (one where there is a single operand)."""
    equation = str(call.arguments.get("equation", "")).replace(" ", "")
    operands = [term for term in equation.partition("->")[0].split(",") if "." not in term]
    tensors = [tensor for _, tensor in call.tensors("tensors")]
    extents: dict[str, int] = {}
    for term, tensor in zip(operands, tensors, strict=False):
        extents.update(zip(term, map(extent, tensor.shape), strict=False))
    return max(len(tensors), 1) * math.prod(extents.values())


def _attention(call: OpCall) -> int:
    """Queries by keys, a softmax, weights by values."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None:
        return 0
    rows = elements(query) // max(extent(query.shape[-1]), 1)
    weights = rows * extent(key.shape[-2])
    return weights * (2 * extent(query.shape[-1]) + 2 * extent(value.shape[-1]) + _SOFTMAX)


def _pooling(call: OpCall) -> int:
    kernel = call.arguments.get("kernel_size")
    sizes = kernel if isinstance(kernel, list | tuple) else [kernel]
    if not sizes or not all(isinstance(size, int | torch.SymInt) for size in sizes):
        return _per_input(1)(call)
    window = math.prod(extent(size) for size in sizes)
    # One size stands for all dimensions; their number is in the op's name.
    dimensions = int(_POOLED.sub(r"\1", target_name(call.node.target))) if len(sizes) == 1 else 1
    return _results(call) * window**dimensions


_POOLED = re.compile(r".*_pool(\d)d.*")
_SOFTMAX = 5  # maximum, subtraction, exponential, sum, division
_NAMESPACES = frozenset({"aten", "dim_order_ops", "quantized_decomposed", "torchao"})


def _each(names: Iterable[str], estimator: Estimator) -> dict[str, Estimator]:
    return dict.fromkeys(names, estimator)


_OPS: Mapping[str, Estimator] = {
    **_each(("mm", "bmm", "matmul"), _contraction("self", -1)),
    **_each(("addmm",), _contraction("mat1", -1, bias="self")),
    **_each(("baddbmm", "addbmm"), _contraction("batch1", -1, bias="self")),
    **_each(("linear",), _contraction("input", -1, bias="bias")),
    **_each(("dot", "mv"), _contraction("self", -1)),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **_each(("convolution", "conv1d", "conv2d", "conv3d"), _convolution),
    **_each(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolution),
    **_each(("_softmax", "softmax", "_log_softmax", "log_softmax"), _per_result(_SOFTMAX)),
    # Folded to one multiplication and one addition.
    **_each(("_native_batch_norm_legit_no_training", "batch_norm"), _per_result(2)),
    **_each(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _per_input(1)),
    **_each(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), _per_input(1)),
    **_each(("upsample_bilinear2d",), _per_result(8)),
    **_each(("var", "std", "linalg_vector_norm", "logsumexp"), _per_input(3)),
    **_each(("copy", "fill", "lift_fresh", "contiguous", "detach"), _nothing),
    **_each(("sym_size", "sym_numel", "sym_stride", "_local_scalar_dense", "item"), _nothing),
    **_each(("masked_select", "nonzero", "as_strided", "unfold"), _nothing),
    **_each(("empty", "eye", "new_full", "ones", "rand", "randn", "zeros"), _nothing),
    **_each(("scatter_add", "index_add"), _per_input(1)),
}
"""By the name of the op without namespace, overload and ``_copy``."""

_FAMILIES: Mapping[str, Estimator] = {
    "activation": _per_result(1),
    "creation": _nothing,
    "elementwise": _per_result(1),
    "indexing": _nothing,
    "normalization": _per_result(7),  # two passes for the moments, then scale and shift
    "pooling": _pooling,
    "reduction": _per_input(1),
    "shape": _nothing,
}
"""By family of the op's rule, for the ops without an entry of their own."""

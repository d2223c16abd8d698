"""Rewrites of a subgraph that make it palatable to coremltools, before it converts.

Each is an op that Core ML has and coremltools translates wrongly, or not in the form it comes in.
A node keeps its identity, because the signature names the outputs: what has to be computed first is
inserted before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from coreml_delegate.op_rules import rule_of
from coreml_delegate.op_rules.rule import OpCall, overload_of, target_name

_ATEN: Any = exir_ops.edge.aten


def prepare(program: ExportedProgram) -> None:
    """Rewrite ``program`` in place; its signature and results do not change."""
    for node in list(program.graph.nodes):
        rewrite = _REWRITES.get(_rule_name(node)) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(node)
    for output in {n for node in program.graph.find_nodes(op="output") for n in node.args[0]}:
        if isinstance(output, Node) and _may_vanish(output):
            _keep(output)
    program.graph_module.recompile()


def _rule_name(node: Node) -> str:
    """The name under which the op's rule is kept, a copying variant's being its view's."""
    name = target_name(node.target)
    rule = rule_of(name)
    return name if rule is None else rule.target


def _may_vanish(node: Node) -> bool:
    """Whether the node may return its argument as it is.

    Coremltools then gives the argument's name to the output, and two features bear one name.
    """
    rule = rule_of(target_name(node.target)) if node.op == "call_function" else None
    if (
        rule is None
        or rule.family != "shape"
        or not node.args
        or not isinstance(node.args[0], Node)
    ):
        return False
    result, source = node.meta.get("val"), node.args[0].meta.get("val")
    return (
        isinstance(result, torch.Tensor)
        and isinstance(source, torch.Tensor)
        and result.shape == source.shape
    )


def _keep(node: Node) -> None:
    """Put an identity after the node that coremltools does not take for its argument."""
    value = node.meta["val"]
    before = _insert(node, node.target, *node.args, **node.kwargs)
    if value.dim():
        _become(node, _ATEN.permute_copy.default, before, list(range(value.dim())))
    else:
        _become(node, _ATEN.view_copy.default, before, [])


def _insert(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new call before ``node``."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    operands = map_arg((args, kwargs), lambda n: n.meta["val"])
    new.meta["val"] = overload_of(target)(*operands[0], **operands[1])
    return new


def _become(node: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    """Turn ``node`` into another call with the same result."""
    node.target, node.args, node.kwargs = target, args, kwargs


def _clone(node: Node) -> None:
    # The rules have refused every memory format but row-major, so the dim order says nothing.
    _become(node, _ATEN.clone.default, node.args[0])


def _to_copy(node: Node) -> None:
    kept = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    _become(node, _ATEN._to_copy.default, node.args[0], **kept)


def _broadcast(source: str) -> Callable[[Node], None]:
    """The named argument, expanded to the shape of the first, which lends nothing but its shape."""

    def rewrite(node: Node) -> None:
        value = OpCall.of(node).arguments[source]
        _become(node, _ATEN.expand_copy.default, value, list(node.meta["val"].shape))

    return rewrite


def _positional(*names: str) -> Callable[[Node], None]:
    """All of the named arguments in place, and numbers in the dtype of the tensor.

    Coremltools overlooks some keywords and defaults, and does not promote numbers.
    """

    def rewrite(node: Node) -> None:
        call = OpCall.of(node)
        floating = node.meta["val"].dtype.is_floating_point
        _become(node, node.target, *(_number(call.arguments[n], floating) for n in names))

    return rewrite


def _view(node: Node) -> None:
    # Coremltools drops one dimension on the way to a scalar.
    source = node.args[0]
    if node.meta["val"].dim() == 0 and isinstance(source, Node) and source.meta["val"].dim() > 1:
        node.args = (_insert(node, _ATEN.view_copy.default, source, [1]), [])


def _where(node: Node) -> None:
    # Coremltools broadcasts the operands and cannot do it to scalars.
    if node.meta["val"].dim() == 0:
        condition = _insert(node, _ATEN.view_copy.default, node.args[0], [1])
        chosen = _insert(node, node.target, condition, *node.args[1:])
        _become(node, _ATEN.view_copy.default, chosen, [])


def _number(value: Any, floating: bool) -> Any:
    return float(value) if floating and type(value) is int else value


def _pool(*more: str) -> Callable[[Node], None]:
    """The arguments in place, a size per dimension, a stride left out as long as the kernel."""

    def rewrite(node: Node) -> None:
        arguments = OpCall.of(node).arguments
        source, kernel = arguments["self"], arguments["kernel_size"]
        dims = source.meta["val"].dim() - 2
        sizes = (kernel, arguments["stride"] or kernel, *(arguments[n] for n in more))
        spread = (v * dims if isinstance(v, list) and len(v) == 1 else v for v in sizes)
        _become(node, node.target, source, *spread)

    return rewrite


def _cast_after(node: Node) -> None:
    """Cast the result to the dtype it has in PyTorch, where coremltools may choose another."""
    before = _insert(node, node.target, *node.args, **node.kwargs)
    _become(node, _ATEN._to_copy.default, before, dtype=node.meta["val"].dtype)


def _full(node: Node) -> None:
    # Without a dtype coremltools makes fp32, which has not every int32.
    node.kwargs = {"dtype": node.meta["val"].dtype}
    _cast_after(node)


def _gelu(node: Node) -> None:
    """Spell the tanh approximation out, which coremltools fuses; it overlooks the argument."""
    arguments = OpCall.of(node).arguments
    x = arguments["self"]
    if arguments["approximate"] != "tanh":
        _become(node, node.target, x)
        return
    cube = _insert(node, _ATEN.pow.Tensor_Scalar, x, 3.0)
    scaled = _insert(node, _ATEN.mul.Scalar, cube, 0.044715)
    total = _insert(node, _ATEN.add.Tensor, x, scaled)
    angle = _insert(node, _ATEN.mul.Scalar, total, math.sqrt(2 / math.pi))
    tanh = _insert(node, _ATEN.tanh.default, angle)
    half = _insert(node, _ATEN.mul.Scalar, _insert(node, _ATEN.add.Scalar, tanh, 1.0), 0.5)
    _become(node, _ATEN.mul.Tensor, half, x)


def _reciprocal(node: Node) -> None:
    # MIL's inverse adds an epsilon of 1e-4, which is wrong by a tenth of a percent at 0.1.
    _become(node, _ATEN.div.Tensor, 1.0, node.args[0])


def _variance(node: Node) -> None:
    arguments = OpCall.of(node).arguments
    correction = arguments["correction"]
    _become(
        node,
        node.target,
        arguments["self"],
        arguments["dim"],
        correction=1 if correction is None else correction,
        keepdim=arguments["keepdim"],
    )


def _rms_norm(node: Node) -> None:
    """Divide by the root mean square, scaled so that nothing overflows in fp16.

    Coremltools scales as well, but not the epsilon: apple/coremltools#2821.
    """
    arguments = OpCall.of(node).arguments
    x, weight, eps = (arguments[n] for n in ("input", "weight", "eps"))
    dims = list(range(-len(arguments["normalized_shape"]), 0))
    epsilon = torch.finfo(node.meta["val"].dtype).eps if eps is None else eps
    largest = _insert(node, _ATEN.amax.default, _insert(node, _ATEN.abs.default, x), dims, True)
    # At least the root of epsilon, so that their ratio is at most one.
    scale = _insert(node, _ATEN.clamp.default, largest, math.sqrt(epsilon))
    scaled = _insert(node, _ATEN.div.Tensor, x, scale)
    square = _insert(node, _ATEN.mul.Tensor, scaled, scaled)
    mean = _insert(node, _ATEN.mean.dim, square, dims, True)
    # (sqrt(eps) / scale) ** 2 is eps / scale ** 2 without its overflow.
    floor = _insert(node, _ATEN.full_like.default, scale, math.sqrt(epsilon))
    ratio = _insert(node, _ATEN.div.Tensor, floor, scale)
    total = _insert(node, _ATEN.add.Tensor, mean, _insert(node, _ATEN.mul.Tensor, ratio, ratio))
    root = _insert(node, _ATEN.rsqrt.default, total)
    if weight is None:
        _become(node, _ATEN.mul.Tensor, scaled, root)
    else:
        _become(node, _ATEN.mul.Tensor, _insert(node, _ATEN.mul.Tensor, scaled, root), weight)


def _index_put(node: Node) -> None:
    """Write along one dimension other than the first, which coremltools does not index."""
    arguments = OpCall.of(node).arguments
    indices, values = arguments["indices"], arguments["values"]
    dim = len(indices) - 1
    if dim == 0:
        return
    index = indices[dim]
    shape = list(node.meta["val"].shape)
    shape[dim] = index.meta["val"].shape[0]
    aligned = [-1 if d == dim else 1 for d in range(len(shape))]
    index = _insert(node, _ATEN.view_copy.default, index, aligned)
    index = _insert(node, _ATEN.expand_copy.default, index, shape)
    values = _insert(node, _ATEN.expand_copy.default, values, shape)
    target = _ATEN.scatter_add.default if arguments["accumulate"] else _ATEN.scatter.src
    _become(node, target, arguments["self"], dim, index, values)


_MAX_POOL = _pool("padding", "dilation", "ceil_mode")
_AVG_POOL = _pool("padding", "ceil_mode", "count_include_pad")

_REWRITES: Mapping[str, Callable[[Node], None]] = {
    "aten._to_copy.default": _to_copy,
    "aten.alias.default": _clone,
    "aten.arange.start_step": _cast_after,
    "aten.avg_pool1d.default": _AVG_POOL,
    "aten.avg_pool2d.default": _AVG_POOL,
    "aten.avg_pool3d.default": _AVG_POOL,
    "aten.clamp_max.default": _positional("self", "max"),
    "aten.clamp_min.default": _positional("self", "min"),
    "aten.copy.default": _broadcast("src"),
    "aten.cumsum.default": _cast_after,
    "aten.elu.default": _positional("self", "alpha"),
    "aten.fill.Scalar": _cast_after,
    "aten.fill.Tensor": _broadcast("value"),
    "aten.full.default": _full,
    "aten.full_like.default": _cast_after,
    "aten.gelu.default": _gelu,
    "aten.hardtanh.default": _positional("self", "min_val", "max_val"),
    "aten.index_put.default": _index_put,
    "aten.linalg_vector_norm.default": _cast_after,
    "aten.max_pool1d.default": _MAX_POOL,
    "aten.max_pool2d.default": _MAX_POOL,
    "aten.max_pool2d_with_indices.default": _MAX_POOL,
    "aten.max_pool3d.default": _MAX_POOL,
    "aten.max_pool3d_with_indices.default": _MAX_POOL,
    "aten.new_zeros.default": _cast_after,
    "aten.ones_like.default": _cast_after,
    "aten.reciprocal.default": _reciprocal,
    "aten.rms_norm.default": _rms_norm,
    "aten.scalar_tensor.default": _cast_after,
    "aten.sum.default": _cast_after,
    "aten.sum.dim_IntList": _cast_after,
    "aten.var.correction": _variance,
    "aten.view.default": _view,
    "aten.where.self": _where,
    "aten.zeros_like.default": _cast_after,
    "dim_order_ops._clone_dim_order.default": _clone,
    "dim_order_ops._to_dim_order_copy.default": _to_copy,
}

"""Reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.mil.compose import mb, movement
from coreml_delegate.ops.call import ANY, NUMERIC, OpCall, ReasonCode
from coreml_delegate.ops.constraints import holds
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    cast_after,
    insert,
    set_arguments,
    shape_of,
    truth,
    value_of,
)
from coreml_delegate.ops.flops import per_input
from coreml_delegate.ops.merging import along, leading, over
from coreml_delegate.ops.quantization import AVERAGE_POOL, MOVE
from coreml_delegate.ops.record import OpRecord, Rewrite


def _sum(node: Node) -> None:
    """Cast to the result's dtype before the sum, as PyTorch does, and after it."""
    source, dtype = arguments_of(node)["self"], value_of(node).dtype
    source_dtype = value_of(source).dtype
    if source_dtype is torch.bool or source_dtype.is_floating_point != dtype.is_floating_point:
        set_arguments(node, self=cast(node, source, dtype))
    cast_after(node)


def _cumsum(node: Node) -> None:
    """Make ``dim`` non-negative: coremltools takes no negative dimension but -1."""
    dim = arguments_of(node)["dim"]
    if dim < -1:
        set_arguments(node, dim=dim % value_of(node).dim())
    _sum(node)


def _product(node: Node) -> None:
    """Cast before the product, as PyTorch does."""
    arguments = arguments_of(node)
    factors = cast(node, arguments["self"], value_of(node).dtype)
    if "dim" in arguments:
        become(node, ATEN.prod.dim_int, factors, arguments["dim"], arguments["keepdim"])
        return
    flat = insert(node, ATEN.view_copy.default, factors, [-1])
    become(node, ATEN.prod.dim_int, flat, 0, False)


def _product_along(x: Any, axis: int, keep: bool) -> Any:
    return mb.reduce_prod(x=x, axes=[axis], keep_dims=bool(keep))


def _cumprod(node: Node) -> None:
    """Cast before the products, as PyTorch does."""
    arguments = arguments_of(node)
    factors = cast(node, arguments["self"], value_of(node).dtype)
    become(node, node.target, factors, arguments["dim"])


def _has_static_length(call: OpCall) -> bool:
    """The size of the dimension is static."""
    (result,) = call.outputs()
    return not result.dim() or isinstance(result.shape[call.arguments["dim"]], int)


def _any(node: Node) -> None:
    arguments = arguments_of(node)
    x = truth(node, arguments["self"])
    if arguments.get("dim") == []:  # reduces nothing
        become(node, ATEN.clone.default, x)
    else:
        set_arguments(node, self=x)


def _flat_extremum(node: Node) -> None:
    """Flatten the tensor if ``dim`` is None: MIL's op needs an axis.

    Source: pytorch/executorch#11715, which recommends this rewrite of the model.
    """
    arguments = arguments_of(node)
    if arguments["dim"] is not None:
        return
    flat = insert(node, ATEN.view_copy.default, arguments["self"], [-1])
    if not value_of(node).dim():
        become(node, node.target, flat, 0, False)
        return
    position = insert(node, node.target, flat, 0, True)
    become(node, ATEN.view_copy.default, position, shape_of(node))


def _variance(node: Node) -> None:
    """Scale the uncorrected variance for a correction other than 0 and 1, which MIL has."""
    arguments = arguments_of(node)
    x, dims, keep = (arguments[n] for n in ("self", "dim", "keepdim"))
    correction = 1 if arguments["correction"] is None else arguments["correction"]
    if correction in (0, 1):
        become(node, node.target, x, dims, correction=int(correction), keepdim=keep)
        return
    shape = shape_of(x)
    count = math.prod(shape[d] for d in (dims or range(len(shape))))
    variance = insert(node, node.target, x, dims, correction=0, keepdim=keep)
    freedom = count - correction
    become(node, ATEN.mul.Scalar, variance, count / freedom if freedom > 0 else math.inf)


def _rewrite_results(*rewrites: Callable[[Node, dict[str, Any]], None]) -> Rewrite:
    """Return a rewrite of each used result of a call to a call of its own."""

    def rewrite(node: Node) -> None:
        arguments = arguments_of(node)
        for part in list(node.users):
            if part.users:
                rewrites[int(str(part.args[1]))](part, arguments)

    return rewrite


def _extremum(extremum: Any, position: Any) -> Rewrite:
    """Return a rewrite of extrema of integers and their positions to two ops; floats need none."""

    def rewrite_part(reduction: Any, part: Node, arguments: dict[str, Any]) -> None:
        x, dim, keep = (arguments[n] for n in ("self", "dim", "keepdim"))
        become(part, reduction.default, x, [dim] if reduction is extremum else dim, keep)

    split = _rewrite_results(partial(rewrite_part, extremum), partial(rewrite_part, position))

    def rewrite(node: Node) -> None:
        if not value_of(arguments_of(node)["self"]).dtype.is_floating_point:
            split(node)

    return rewrite


def _variance_part(part: Node, arguments: dict[str, Any]) -> None:
    x, dims, keep = (arguments[n] for n in ("self", "dim", "keepdim"))
    become(part, ATEN.var.correction, x, dims, correction=arguments["correction"], keepdim=keep)
    _variance(part)


def _mean_part(part: Node, arguments: dict[str, Any]) -> None:
    x, keep = arguments["self"], arguments["keepdim"]
    dims = arguments["dim"] or list(range(value_of(x).dim()))
    become(part, ATEN.mean.dim, x, dims, keep)


def _logsumexp(node: Node) -> None:
    """``max + log(sum(exp(x - max)))``: the Neural Engine's op overflows in fp16.

    Source: apple/coremltools#2690.
    """
    arguments = arguments_of(node)
    x = arguments["self"]
    if not value_of(x).dim():
        return
    dims = list(arguments["dim"]) or list(range(value_of(x).dim()))
    maximum = insert(node, ATEN.amax.default, x, dims, True)
    magnitude = insert(node, ATEN.abs.default, maximum)
    is_infinite = insert(node, ATEN.eq.Scalar, magnitude, math.inf)
    maximum = insert(node, ATEN.masked_fill.Scalar, maximum, is_infinite, 0.0)
    powers = insert(node, ATEN.exp.default, insert(node, ATEN.sub.Tensor, x, maximum))
    total = insert(node, ATEN.sum.dim_IntList, powers, dims, arguments["keepdim"])
    if not arguments["keepdim"]:
        maximum = insert(node, ATEN.squeeze_copy.dims, maximum, dims)
    become(node, ATEN.add.Tensor, insert(node, ATEN.log.default, total), maximum)


def _no_trailing_dims(_: OpCall) -> int:
    return 0


_op = partial(OpRecord, flops=per_input(1), merge=over("dim"))
_along = partial(_op, merge=along("dim"))
_of_all = partial(_op, merge=leading("self", _no_trailing_dims))
# Squares or exponentials, their sum, and a function of it.
_of_powers = partial(_op, flops=per_input(3))

RECORDS = (
    _op("aten.mean.dim", quantization=AVERAGE_POOL),
    _of_all("aten.mean.default"),
    _op("aten.sum.dim_IntList", dtypes={"": ANY}, rewrite=_sum),
    _of_all("aten.sum.default", dtypes={"": ANY}, rewrite=_sum),
    _along("aten.cumsum.default", dtypes={"": ANY}, rewrite=_cumsum),
    _along(
        "aten.cumprod.default",
        dtypes={"": ANY},
        constraints=(
            holds(
                _has_static_length,
                ReasonCode.SYMBOLIC,
                "the number of factors is known at run time",
            ),
        ),
        rewrite=_cumprod,
        translation=movement.cumulative_product,
    ),
    _of_all("aten.prod.default", dtypes={"": ANY}, rewrite=_product),
    _along("aten.prod.dim_int", dtypes={"": ANY}, rewrite=_product, translation=_product_along),
    _op("aten.amax.default", dtypes={"": NUMERIC}, quantization=MOVE),
    _op("aten.amin.default", dtypes={"": NUMERIC}),
    *(_of_all(f"aten.{name}.default", dtypes={"": NUMERIC}) for name in ("max", "min")),
    _along("aten.max.dim", dtypes={"": NUMERIC}, rewrite=_extremum(ATEN.amax, ATEN.argmax)),
    _along("aten.min.dim", dtypes={"": NUMERIC}, rewrite=_extremum(ATEN.amin, ATEN.argmin)),
    _of_powers("aten.logsumexp.default", rewrite=_logsumexp),
    _of_powers("aten.linalg_vector_norm.default", rewrite=cast_after),
    _of_powers("aten.var.correction", rewrite=_variance),
    _of_powers("aten.var_mean.correction", rewrite=_rewrite_results(_variance_part, _mean_part)),
    _of_all("aten.any.default", dtypes={"": ANY}, rewrite=_any),
    _along("aten.any.dim", dtypes={"": ANY}, rewrite=_any),
    _op("aten.any.dims", dtypes={"": ANY}, rewrite=_any),
    *(
        _along(f"aten.{name}.default", dtypes={"": NUMERIC}, rewrite=_flat_extremum)
        for name in ("argmax", "argmin")
    ),
)

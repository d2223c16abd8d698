"""Layers that Core ML has an op for: activations, normalizations, dense layers, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import MOST_AXES, Composer, Var, const
from coreml_delegate.graph.emitter import (
    Emitter,
    mil_op,
    normalize_axes,
    normalize_axis,
    operation,
    require_same_dtype,
    same_shape,
    same_size,
    unary,
)
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.axes import around_axis, require_few_axes
from coreml_delegate.graph.tensor_types import BOOLEANS, FLOATS, Dim, DType, TensorType
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.norms import SMALLEST_EPSILON, Norm, rms_norm
from coreml_delegate.targets import Opset

_GELU = {"none": "EXACT", "tanh": "TANH_APPROXIMATION"}
_LINEAR_RANK = 3  # the highest that ``linear`` takes
# Ranks of MIL's ``batch_norm``, whose features are along axis 1.
_BATCH_NORM_RANKS = (3, 4, 5)


def _along_axis(function: Callable[[Var, int], Var]) -> Callable[[Composer, Node, Var], Var]:
    """Return a compose function: a function of a tensor and an axis, for tensors of any rank."""

    def compose(c: Composer, node: Node, x: Var) -> Var:
        if node.type.rank <= MOST_AXES:
            return function(x, node["axis"])
        shape, axis = around_axis(node.type, node["axis"])
        return c.reshape(function(c.reshape(x, shape), axis), node.type.shape)

    return compose


def _log_softmax(x: Var, axis: int) -> Var:
    # x - max - log(sum(exp(x - max))): large elements would cost digits of the sum.
    shifted = mb.sub(x=x, y=mb.reduce_max(x=x, axes=[axis], keep_dims=True))
    total = mb.reduce_log_sum_exp(x=shifted, axes=[axis], keep_dims=True)
    return mb.sub(x=shifted, y=total)


def _compose_gelu(_: Composer, node: Node, x: Var) -> Var:
    return mb.gelu(x=x, mode=_GELU[node["approximate"]])


def _compose_layer_norm(c: Composer, node: Node, x: Var, *parameters: Var) -> Var:
    """Compose with constant parameters as arguments of the op; apply the others after it."""
    axes, shape = node["axes"], node.types[0].shape
    number = node.type.dtype.storage_numpy.type
    remaining = dict(zip(node["parameters"], parameters, strict=True))
    arguments: dict[str, Var] = {}
    if "scale" in remaining and remaining["scale"].val is not None:
        arguments["gamma"] = remaining.pop("scale")
    if "scale" not in remaining and "offset" in remaining and remaining["offset"].val is not None:
        sizes = remaining["offset"].shape
        arguments = {
            "gamma": const(np.ones(sizes, number)),
            **arguments,
            "beta": remaining.pop("offset"),
        }
    y = mb.layer_norm(x=x, axes=list(axes), epsilon=number(node["epsilon"]), **arguments)
    parameter_shape = [size if n in axes else 1 for n, size in enumerate(shape)]
    for name, op in (("scale", mb.mul), ("offset", mb.add)):
        if name in remaining:
            y = op(x=y, y=c.reshape(remaining[name], parameter_shape))
    return y


def _compose_batch_norm_inference(_: Composer, node: Node, x: Var, *statistics: Var) -> Var:
    epsilon = node.type.dtype.storage_numpy.type(node["epsilon"])
    rank, axis = node.type.rank, node["feature_index"]
    scale, offset, mean, variance = statistics
    is_constant = all(var.val is not None for var in statistics)
    if is_constant and axis == 1 and rank in _BATCH_NORM_RANKS:
        return mb.batch_norm(
            x=x, mean=mean, variance=variance, gamma=scale, beta=offset, epsilon=epsilon
        )
    deviation = mb.sqrt(x=mb.add(x=variance, y=epsilon))
    factor = mb.real_div(x=scale, y=deviation)
    shift = mb.sub(x=offset, y=mb.mul(x=mean, y=factor))
    sizes = [1] * rank
    sizes[axis] = -1
    factor, shift = (mb.reshape(x=var, shape=sizes) for var in (factor, shift))
    return mb.add(x=mb.mul(x=x, y=factor), y=shift)


def _compose_rms_norm(c: Composer, node: Node, x: Var, *scale: Var) -> Var:
    axes, shape = node["axes"], node.types[0].shape
    scale_shape = [size if n in axes else 1 for n, size in enumerate(shape)]
    is_fixed = all(isinstance(shape[axis], int) for axis in axes)
    is_half = node.type.dtype.storage_dtype == "fp16"
    if is_half and is_fixed and node["epsilon"] >= SMALLEST_EPSILON:
        y = Norm(x, axes, is_centred=False, epsilon=node["epsilon"]).compose({})
    else:
        # In fp16, squares of numbers above 255 are infinite.
        floats = mb.cast(x=x, dtype="fp32") if is_half else x
        y = rms_norm(floats, axes, node["epsilon"])
        y = mb.cast(x=y, dtype="fp16") if is_half else y
    return mb.mul(x=y, y=c.reshape(scale[0], scale_shape)) if scale else y


def _compose_dense(c: Composer, node: Node, x: Var, weight: Var, *bias: Var) -> Var:
    return linear(c, node.types[0].shape, x, weight, bias[0] if bias else None)


def linear(c: Composer, shape: Sequence[Dim], x: Var, weight: Var, bias: Var | None) -> Var:
    """Return ``x @ weight.T + bias``: ``x`` of shape [..., size], [outputs, size], [outputs]."""
    is_constant = all(v is None or _is_constant(v) for v in (weight, bias))
    if not is_constant and len(shape) > MOST_AXES:
        y = linear(c, (1, shape[-1]), c.reshape(x, (-1, shape[-1])), weight, bias)
        return c.reshape(y, (-1,))
    if not is_constant:
        is_vector = len(shape) == 1
        y = mb.matmul(x=c.reshape(x, (1, *shape)) if is_vector else x, y=weight, transpose_y=True)
        y = mb.squeeze(x=y, axes=[0]) if is_vector else y
        return y if bias is None else mb.add(x=y, y=bias)
    keywords = {} if bias is None else {"bias": bias}
    if len(shape) <= _LINEAR_RANK:
        return mb.linear(x=x, weight=weight, **keywords)
    flat = c.reshape(x, (-1, int(weight.shape[1])))
    y = mb.linear(x=flat, weight=weight, **keywords)
    return c.reshape(y, (*shape[:-1], int(weight.shape[0])))


def _is_constant(var: Var) -> bool:
    return var.val is not None or (var.op is not None and var.op.op_type.startswith("constexpr_"))


def _compose_attention(
    c: Composer, node: Node, query: Var, key: Var, value: Var, *mask: Var
) -> Var:
    shape, keys = node.types[0].shape, node.types[1].shape[-2]
    masks = list(mask)
    if node["is_causal"]:
        causal = _causal_mask(c, shape[-2], keys)
        is_flag = masks and node.types[3].dtype is DType.BOOL
        if is_flag:
            masks = [mb.logical_and(x=masks[0], y=causal)]
        elif masks:
            masks = [hide(node.type.dtype, causal, masks[0], -math.inf)]
        else:
            masks = [causal]
    return attention(c, node.type.dtype, query, key, value, masks, node["scale"])


def attention(
    c: Composer, dtype: DType, query: Var, key: Var, value: Var, masks: Sequence[Var], scale: float
) -> Var:
    """Return ``softmax(query @ key.T * scale + mask) @ value``, of the last two dimensions.

    Shapes are [..., L, E], [..., S, E] and [..., S, EV]. There is at most one mask, [..., L, S], or
    sizes of 1 instead: bool, true where a key takes part, or a summand.
    """
    number = dtype.storage_numpy.type
    op_scale = 1 / math.sqrt(query.shape[-1])
    # MIL's op repeats no mask along the keys.
    is_repeated = any(mask.shape[-1] != key.shape[-2] for mask in masks)
    is_op = c.opset >= Opset.iOS18 and query.rank >= 3 and not is_repeated
    query_factor = scale / op_scale if is_op else scale
    if not math.isclose(query_factor, 1, rel_tol=1e-6):
        query = mb.mul(x=query, y=number(query_factor))
    if is_op:
        keywords = {"attn_mask": masks[0]} if masks else {}
        return mb.scaled_dot_product_attention(query=query, key=key, value=value, **keywords)
    scores = mb.matmul(x=query, y=key, transpose_y=True)
    for mask in masks:
        if mask.dtype == query.dtype:
            scores = mb.add(x=scores, y=mask)
        else:
            scores = mb.select(cond=mask, a=scores, b=number(-np.inf))
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=value)


def hide(dtype: DType, flag: Var, added: Var | None, score: float) -> Var:
    """Return a mask to add to scores: ``added``, or 0, where a flag is true, else ``score``.

    The shapes of ``added`` and of the flag may broadcast. The score is -infinity, or so low that it
    replaces the scores that it is added to.
    """
    number = dtype.storage_numpy.type
    # coremltools infers a scalar for ``select`` of two scalars, whatever the condition's shape.
    zeros = mb.mul(x=mb.cast(x=flag, dtype=dtype.storage_dtype), y=number(0))
    visible = zeros if added is None else mb.add(x=zeros, y=added)
    return mb.select(cond=flag, a=visible, b=number(score))


def _causal_mask(c: Composer, queries: Dim, keys: Dim) -> Var:
    """Return [queries, keys], true where key position <= query position."""
    if isinstance(queries, int) and isinstance(keys, int):
        return const(np.tri(queries, keys, dtype=bool))
    positions = [
        mb.range_1d(start=np.int32(0), end=c.size(size), step=np.int32(1))
        for size in (queries, keys)
    ]
    rows = mb.expand_dims(x=positions[0], axes=[1])
    return mb.greater_equal(x=rows, y=mb.expand_dims(x=positions[1], axes=[0]))


def _compose_qkv(c: Composer, node: Node, x: Var, weight: Var, *bias: Var) -> tuple[Var, ...]:
    y = _compose_dense(c, node, x, weight, *bias)
    return tuple(mb.split(x=y, split_sizes=list(node["sizes"]), axis=-1))


class Fused(Emitter):
    """Layers that Core ML has an op for: activations, normalizations, dense layers, attention."""

    @operation(FLOATS, _along_axis(lambda x, axis: mb.softmax(x=x, axis=axis)))
    def softmax(self, x: Value, axis: int = -1) -> Value:
        """Return ``exp(x) / sum(exp(x))`` along an axis.

        Raises:
            GraphError: There is no such axis.
        """
        return self.emit("softmax", (x,), x.type, axis=normalize_axis(axis, x.rank))

    @operation(FLOATS, _along_axis(_log_softmax))
    def log_softmax(self, x: Value, axis: int = -1) -> Value:
        """Return ``log(softmax(x))``.

        Raises:
            GraphError: There is no such axis.
        """
        return self.emit("log_softmax", (x,), x.type, axis=normalize_axis(axis, x.rank))

    @operation(FLOATS, _compose_gelu)
    def gelu(self, x: Value, approximate: str = "none") -> Value:
        """Return ``x * (1 + erf(x / sqrt(2))) / 2``.

        Args:
            x: The tensor.
            approximate: ``none``, or ``tanh`` for the approximation by tanh.

        Raises:
            GraphError: Another approximation.
        """
        if approximate not in _GELU:
            raise GraphError(
                "unknown approximation of gelu", got=repr(approximate), expected=" | ".join(_GELU)
            )
        return self.emit("gelu", (x,), x.type, approximate=approximate)

    relu = unary("relu", mil_op("relu"), "``max(x, 0)``")
    silu = unary("silu", mil_op("silu"), "``x / (1 + exp(-x))``")

    @operation(FLOATS, _compose_layer_norm)
    def layer_norm(
        self,
        x: Value,
        axes: int | Sequence[int] = -1,
        scale: Value | None = None,
        offset: Value | None = None,
        epsilon: float = 1e-5,
    ) -> Value:
        """Return ``(x - mean) / sqrt(variance + epsilon) * scale + offset`` over axes.

        Args:
            x: The tensor.
            axes: Axes of the mean and the variance.
            scale: Has the sizes of those axes, in their order in ``x``; None for 1.
            offset: Has the same shape; None for 0.
            epsilon: Keeps the divisor above 0.

        Raises:
            GraphError: No such axes, or parameters of another shape or element type.
        """
        require_few_axes("layer_norm", x.type)
        norm_axes = _norm_axes("layer_norm", x, axes, scale, offset)
        optional_parameters = {"scale": scale, "offset": offset}
        parameters = {
            name: value for name, value in optional_parameters.items() if value is not None
        }
        return self.emit(
            "layer_norm",
            (x, *parameters.values()),
            x.type,
            axes=norm_axes,
            parameters=tuple(parameters),
            epsilon=float(epsilon),
        )

    @operation(FLOATS, _compose_batch_norm_inference)
    def batch_norm_inference(
        self,
        x: Value,
        scale: Value,
        offset: Value,
        mean: Value,
        variance: Value,
        epsilon: float = 1e-5,
        feature_index: int = 1,
    ) -> Value:
        """Return ``(x - mean) / sqrt(variance + epsilon) * scale + offset``.

        Args:
            x: Tensor of rank 1 or more.
            scale: [features], as ``offset``, ``mean`` and ``variance``.
            offset: See ``scale``.
            mean: See ``scale``.
            variance: See ``scale``.
            epsilon: Added to the variance.
            feature_index: Axis of the features.
        """
        operands = (x, scale, offset, mean, variance)
        require_same_dtype("batch_norm_inference", *operands)
        axis = normalize_axis(feature_index, x.rank, "feature axis")
        for operand in operands[1:]:
            if not same_shape(operand.shape, (x.shape[axis],)):
                raise GraphError(
                    "batch_norm_inference: wrong shape of a statistic",
                    got=str(operand.type),
                    expected=f"[{x.shape[axis]}], one element per feature",
                )
        return self.emit(
            "batch_norm_inference", operands, x.type, epsilon=epsilon, feature_index=axis
        )

    @operation(FLOATS, _compose_rms_norm)
    def rms_norm(
        self,
        x: Value,
        axes: int | Sequence[int] = -1,
        scale: Value | None = None,
        epsilon: float = 1e-6,
    ) -> Value:
        """Return ``x / sqrt(mean(x ** 2) + epsilon) * scale`` over axes.

        Args:
            x: The tensor.
            axes: Axes of the mean.
            scale: Has the sizes of those axes, in their order in ``x``; None for 1.
            epsilon: Keeps the divisor above 0.

        Raises:
            GraphError: No such axes, or a scale of another shape or element type.
        """
        require_few_axes("rms_norm", x.type)
        norm_axes = _norm_axes("rms_norm", x, axes, scale)
        operands = (x,) if scale is None else (x, scale)
        return self.emit("rms_norm", operands, x.type, axes=norm_axes, epsilon=float(epsilon))

    @operation(FLOATS, _compose_dense)
    def dense(
        self, x: Value, weight: Value, bias: Value | None = None, activation: str | None = None
    ) -> Value:
        """Return ``activation(x @ weight.T + bias)``.

        Args:
            x: [..., size].
            weight: [outputs, size].
            bias: [outputs], or None.
            activation: ``relu``, ``gelu``, ``gelu_tanh``, ``silu``, ``tanh`` or None.

        Raises:
            GraphError: Shapes or element types that do not fit, or no such activation.
        """
        type = _dense_type("dense", x, weight, bias)
        operands = (x, weight) if bias is None else (x, weight, bias)
        return self._activate(self.emit("dense", operands, type), activation)

    @operation(FLOATS, _compose_attention)
    def scaled_dot_product_attention(
        self,
        query: Value,
        key: Value,
        value: Value,
        mask: Value | None = None,
        scale: float | None = None,
        is_causal: bool = False,
    ) -> Value:
        """Return ``softmax(query @ key.T * scale + mask) @ value``, of the last two dimensions.

        Args:
            query: [..., L, E].
            key: [..., S, E].
            value: [..., S, EV].
            mask: [..., L, S], or sizes of 1 instead, or fewer dimensions: a summand, or bool, true
                where a key takes part. The result is NaN for a query without keys.
            scale: None for ``1 / sqrt(E)``.
            is_causal: Whether keys at positions after the query take no part.

        Raises:
            GraphError: Shapes or element types that do not fit.
        """
        name = "scaled_dot_product_attention"
        require_few_axes(name, query.type)
        require_same_dtype(name, query, key, value)
        _check_attention(name, query, key, value)
        size = query.shape[-1]
        if not isinstance(size, int):
            raise GraphError(f"{name}: the last size has to be fixed", got=str(query.type))
        type = query.type.with_shape((*query.shape[:-1], value.shape[-1]))
        operands = (query, key, value)
        if mask is not None:
            _check_mask(name, mask, query, key)
            operands = (*operands, mask)
        scale_factor = 1 / math.sqrt(max(1, size)) if scale is None else float(scale)
        return self.emit(name, operands, type, scale=scale_factor, is_causal=bool(is_causal))

    @operation(FLOATS, _compose_qkv)
    def qkv_projection(
        self, x: Value, weight: Value, bias: Value | None, query_size: int, key_value_size: int
    ) -> tuple[Value, Value, Value]:
        """Return queries, keys and values, which are parts of ``x @ weight.T + bias``.

        Args:
            x: [..., size].
            weight: [query_size + 2 * key_value_size, size].
            bias: [query_size + 2 * key_value_size], or None.
            query_size: Last size of the queries.
            key_value_size: Last size of the keys, and of the values.

        Raises:
            GraphError: Shapes or element types that do not fit.
        """
        require_few_axes("qkv_projection", x.type)
        type = _dense_type("qkv_projection", x, weight, bias)
        sizes = (query_size, key_value_size, key_value_size)
        if type.shape[-1] != sum(sizes) or min(sizes) < 1:
            raise GraphError(
                "qkv_projection: the weight has another size than its parts",
                got=str(weight.type),
                expected=f"{query_size} + 2 * {key_value_size} rows",
            )
        types = [type.with_shape((*type.shape[:-1], size)) for size in sizes]
        operands = (x, weight) if bias is None else (x, weight, bias)
        return self.emit("qkv_projection", operands, types, sizes=sizes)

    def _activate(self, x: Value, activation: str | None) -> Value:
        builder: Any = self
        activations: dict[str | None, Callable[[Value], Value]] = {
            None: lambda x: x,
            "relu": self.relu,
            "gelu": self.gelu,
            "gelu_tanh": lambda x: self.gelu(x, "tanh"),
            "silu": self.silu,
            "tanh": lambda x: builder.tanh(x),
        }
        if activation not in activations:
            raise GraphError(
                "unknown activation",
                got=repr(activation),
                expected=" | ".join(name for name in activations if name),
            )
        return activations[activation](x)


def _norm_axes(
    name: str, x: Value, axes: int | Sequence[int], *parameters: Value | None
) -> tuple[int, ...]:
    """Return sorted axes; refuse parameters whose shape is not the axes' sizes."""
    norm_axes = tuple(sorted(normalize_axes(axes, x.rank)))
    if not norm_axes:
        raise GraphError(f"{name} has no axes", expected="at least one")
    present = [value for value in parameters if value is not None]
    require_same_dtype(name, x, *present)
    sizes = tuple(x.shape[axis] for axis in norm_axes)
    for value in present:
        if not same_shape(value.shape, sizes):
            raise GraphError(
                f"{name}: a parameter has another shape than the axes",
                got=str(value.type),
                expected=str(TensorType(x.dtype, sizes)),
            )
    return norm_axes


def _dense_type(name: str, x: Value, weight: Value, bias: Value | None) -> TensorType:
    values = [x, weight] if bias is None else [x, weight, bias]
    require_same_dtype(name, *values)
    fits = x.rank > 0 and weight.rank == 2 and same_size(weight.shape[1], x.shape[-1])
    fits = fits and (bias is None or same_shape(bias.shape, weight.shape[:1]))
    if not fits:
        raise GraphError(
            f"{name}: shapes do not fit",
            got=", ".join(str(value.type) for value in values),
            expected="[..., size], [outputs, size] and [outputs]",
        )
    if x.shape[-1] == 0:
        raise GraphError(f"{name}: there are no features", got=str(x.type))
    return x.type.with_shape((*x.shape[:-1], weight.shape[0]))


def _check_attention(name: str, query: Value, key: Value, value: Value) -> None:
    q, k, v = query.shape, key.shape, value.shape
    fits = len(q) == len(k) == len(v) >= 2
    fits = fits and same_shape(q[:-2], k[:-2]) and same_shape(q[:-2], v[:-2])
    fits = fits and same_size(q[-1], k[-1]) and same_size(k[-2], v[-2])
    if not fits or 0 in (k[-2], q[-1]):
        raise GraphError(
            f"{name}: shapes do not fit",
            got=", ".join(str(operand.type) for operand in (query, key, value)),
            expected="[..., L, E], [..., S, E] and [..., S, EV], where E and S are not 0",
        )


def _check_mask(name: str, mask: Value, query: Value, key: Value) -> None:
    if mask.dtype not in (query.dtype, *BOOLEANS):
        raise GraphError(
            f"{name}: wrong element type of the mask",
            got=mask.dtype.label,
            expected=f"bool or {query.dtype.label}",
        )
    full = (*query.shape[:-1], key.shape[-2])
    sizes = zip(mask.shape[::-1], full[::-1], strict=False)
    if mask.rank > len(full) or not all(one == 1 or same_size(one, size) for one, size in sizes):
        raise GraphError(
            f"{name}: the mask does not fit",
            got=str(mask.type),
            expected=f"{TensorType(query.dtype, full)}, or sizes of 1 instead",
        )

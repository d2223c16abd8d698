"""Rewrites of a program for the processor that it is meant for; numbers stay as they were.

``device_check`` has the rule that each rewrite answers, with its sources. They run last, on a
program that may be in fp16 already, so that no pass of coremltools undoes them; attention is
decomposed before a program is cast to fp16, whose guards it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.mil.compose import mb, number
from coreml_delegate.mil.compose.compressed import (
    emit_look_up,
    index_bits,
    is_blockwise,
    is_converted_to,
)
from coreml_delegate.mil.passes.matching import (
    MOVES,
    Rewrite,
    constants,
    is_output,
    is_tested_for_nan,
    made_by,
    number_in,
    replace,
    replace_operand,
    variables,
    zeroed_rows,
)
from coreml_delegate.targets import LARGEST_DIMENSION, Device, Opset

HIDDEN = -40000.0
"""Score of a hidden position in place of minus infinity: fp16 has it, and its softmax is 0."""

LARGE_BATCH = 10
"""Batch from which Core ML's attention on the GPU was seen to be wrong."""

BATCHED_RANK = 4
"""Rank of the scores of that attention."""

_SDPA = "scaled_dot_product_attention"

FAST_POOL_STRIDES = frozenset({1, 2, 4})
"""Strides of pooling that are efficient on the neural engine."""


def _name(op: Any) -> str:
    return str(op.outputs[0].name)


# Attention


def visible_rows_as_factor(op: Any) -> None:
    """Multiply an attention by 0 or 1, in place of a selection that makes hidden rows 0.

    The neural engine has no booleans.
    """
    rows = zeroed_rows(op)
    if rows is None or made_by(op.b, *ATTENTIONS) is None:
        return
    largest, mask = rows.largest, rows.mask
    keywords: Any = {"before_op": largest}
    factor = largest.outputs[0]
    if mask is not None:
        for reader in list(mask.child_ops):
            if reader.op_type != _SDPA and not (
                reader.op_type == "add" and _leads_only_to_softmax(reader)
            ):
                continue
            bounded = mb.maximum(x=mask, y=number(HIDDEN, mask), before_op=reader)
            replace_operand(reader, mask, bounded)
        best = mb.reduce_max(x=mask, axes=largest.axes, keep_dims=largest.keep_dims, **keywords)
        shifted = mb.add(x=best, y=number(-HIDDEN, mask), **keywords)
        factor = mb.clip(x=shifted, alpha=number(0, mask), beta=number(1, mask), **keywords)
    if factor.dtype is op.b.dtype:
        replace(op, mb.mul(x=op.b, y=factor, name=_name(op), before_op=op))


ATTENTIONS = ("matmul", _SDPA)
"""Ops whose result may be an attention."""


def decompose_attention(op: Any) -> None:
    """Write ``scaled_dot_product_attention`` as ``softmax(Q K^T / sqrt(width) + mask) V``."""
    if op.op_type != _SDPA:
        return
    keywords: Any = {"before_op": op}
    scale = number(1 / math.sqrt(op.query.shape[-1]), op.query)
    query = mb.mul(x=op.query, y=scale, **keywords)
    scores = mb.matmul(x=query, y=op.key, transpose_y=True, **keywords)
    mask = op.attn_mask
    if mask is not None:
        hidden = number(HIDDEN, op.query)
        if mask.val is not None and mask.val.dtype == bool:
            mask = np.where(mask.val, 0, hidden).astype(hidden.dtype)
        elif mask.dtype.__name__ == "bool":
            mask = mb.select(cond=mask, a=number(0, op.query), b=hidden, **keywords)
        scores = mb.add(x=scores, y=mask, **keywords)
    weights = mb.softmax(x=scores, axis=-1, **keywords)
    replace(op, mb.matmul(x=weights, y=op.value, name=_name(op), **keywords))


_MASK_OPS = MOVES | {"add", "cast", "maximum", "minimum", "mul", "real_div", "select", "sub"}


def bound_masks(op: Any) -> None:
    """Replace minus infinity in the constants that reach only a softmax by ``HIDDEN``."""
    if op.op_type != "softmax" or is_tested_for_nan(op):
        return
    pending, seen = [op], set[Any]()
    while pending:
        reader = pending.pop()
        for var in constants(reader):
            value = np.asarray(var.val)
            if value.dtype.kind == "f" and np.isneginf(value).any():
                finite = np.where(np.isneginf(value), HIDDEN, value).astype(value.dtype)
                replace_operand(reader, var, mb.const(val=finite[()], before_op=reader))
        for source in (made_by(var, *_MASK_OPS) for var in variables(reader)):
            if source is not None and source not in seen and _leads_only_to_softmax(source):
                seen.add(source)
                pending.append(source)


def _leads_only_to_softmax(op: Any) -> bool:
    """Return whether all that reads a result, through ops of masks, is a softmax."""
    pending, seen = [op], {op}
    while pending:
        for var in pending.pop().outputs:
            readers = {reader for reader in var.child_ops if reader.op_type != "softmax"}
            if is_output(var) or any(reader.op_type not in _MASK_OPS for reader in readers):
                return False
            pending += readers - seen
            seen |= readers
    return True


def separate_scores(op: Any) -> None:
    """Split and join the biased scores of a large batch in fp32, so that the GPU fuses nothing."""
    if op.op_type != "softmax" or op.x.dtype.__name__ != "fp32" or op.x.rank != BATCHED_RANK:
        return
    bias, batch = made_by(op.x, "add"), op.x.shape[0]
    is_biased = bias is not None and any(made_by(term, "matmul") for term in (bias.x, bias.y))
    is_fused = any(user.op_type == "matmul" for user in op.outputs[0].child_ops)
    if not (is_biased and is_fused and isinstance(batch, int | np.integer)) or batch < LARGE_BATCH:
        return
    sizes = [int(batch) // 2, int(batch) - int(batch) // 2]
    parts = mb.split(x=op.x, split_sizes=sizes, axis=0, before_op=op)
    replace_operand(op, op.x, mb.concat(values=list(parts), axis=0, before_op=op))


# Large dimensions


def flattened_as_convolution(op: Any) -> None:
    """Write a linear layer of a flattened image as a convolution over the whole image.

    The image is [N, C, H, W] with C H W above ``LARGEST_DIMENSION``, the result [N, outputs].
    """
    if op.op_type != "linear" or op.x.rank != 2:
        return
    width = op.x.shape[-1]
    if not isinstance(width, int | np.integer) or width <= LARGEST_DIMENSION:
        return
    flattening = made_by(op.x, "reshape")
    image = None if flattening is None else flattening.x
    if image is None or image.rank != 4 or image.shape[0] != op.x.shape[0]:
        return
    if made_by(op.weight, "const") is None:
        return
    keywords: Any = {"before_op": op}
    weight = np.asarray(op.weight.val)
    kernel = weight.reshape(len(weight), *map(int, image.shape[1:]))
    bias = {} if op.bias is None else {"bias": op.bias}
    result = mb.conv(x=image, weight=kernel, pad_type="valid", **bias, **keywords)
    replace(op, mb.squeeze(x=result, axes=[2, 3], name=_name(op), **keywords))


# Strides

_IMAGE_RANK = 4


def is_smooth(stride: int) -> bool:
    """Return whether a number is 2^a 3^b; 0 is not."""
    for factor in (2, 3):
        while stride and stride % factor == 0:
            stride //= factor
    return stride == 1


def strides_to_channels(op: Any) -> None:
    """Move the steps of a stride with other factors than 2 and 3 into channels.

    A convolution of stride s over x [N, C, L] is one of stride 1 over x as [N, C s, L / s], with
    its kernel in the same order.
    """
    if op.op_type != "conv" or made_by(op.weight, "const") is None or op.x.rank > _IMAGE_RANK:
        return  # the steps of a volume would be a sixth dimension
    strides = [int(stride) for stride in op.strides.val]
    if all(map(is_smooth, strides)) or any(int(rate) != 1 for rate in op.dilations.val):
        return
    spatial = op.x.shape[2:]
    if not all(isinstance(size, int | np.integer) for size in (*op.x.shape[:2], *spatial)):
        return
    if op.x.shape[1] * math.prod(strides) > LARGEST_DIMENSION:
        return
    kernel = np.asarray(op.weight.val)
    lengths = [int(size) for size in op.outputs[0].shape[2:]]
    before = _leading_pads(op, lengths)
    # Sizes of the input for a kernel that is filled up to a multiple of the stride.
    input_sizes = [
        stride * (length - 1 + math.ceil(size / stride))
        for stride, length, size in zip(strides, lengths, kernel.shape[2:], strict=True)
    ]
    keywords: Any = {"before_op": op}
    x = _fitted(op.x, before, input_sizes, keywords)
    for axis, stride in enumerate(strides, 2):
        kernel = _fill(kernel, axis, stride)
        if stride > 1:
            kernel = _steps_of_array(kernel, axis, stride)
            x = _steps(x, axis, stride, keywords)
    bias = {} if op.bias is None else {"bias": op.bias}
    result = mb.conv(
        x=x,
        weight=kernel,
        pad_type="valid",
        groups=int(op.groups.val),
        **bias,
        name=_name(op),
        **keywords,
    )
    replace(op, result)


def _leading_pads(op: Any, lengths: list[int]) -> list[int]:
    """Return the zeros before each spatial axis."""
    kind, count = op.pad_type.val, len(lengths)
    if kind == "custom":
        return [int(op.pad.val[2 * axis]) for axis in range(count)]
    if kind == "valid":
        return [0] * count
    total = [
        max((length - 1) * int(stride) + int(size) - int(full), 0)
        for length, stride, size, full in zip(
            lengths, op.strides.val, op.weight.shape[2:], op.x.shape[2:], strict=True
        )
    ]
    return [pad - pad // 2 if kind == "same_lower" else pad // 2 for pad in total]


def _fitted(x: Any, before: list[int], sizes: list[int], keywords: Any) -> Any:
    """Return x with zeros before its spatial axes, cut or filled up to ``sizes``."""
    after = [
        size - start - int(full)
        for size, start, full in zip(sizes, before, x.shape[2:], strict=True)
    ]
    if any(pad < 0 for pad in after):
        ends = [int(full) + min(pad, 0) for full, pad in zip(x.shape[2:], after, strict=True)]
        leading = [int(size) for size in x.shape[:2]]
        x = mb.slice_by_size(x=x, begin=[0] * x.rank, size=[*leading, *ends], **keywords)
    pads = [pad for pair in zip(before, after, strict=True) for pad in (pair[0], max(pair[1], 0))]
    if not any(pads):
        return x
    return mb.pad(x=x, pad=[0] * 4 + pads, mode="constant", constant_val=number(0, x), **keywords)


def _fill(kernel: NDArray[Any], axis: int, stride: int) -> NDArray[Any]:
    """Return a kernel with zeros at the end of an axis, to a multiple of the stride."""
    missing = -kernel.shape[axis] % stride
    return np.pad(kernel, [(0, missing if n == axis else 0) for n in range(kernel.ndim)])


def _split_shape(shape: Any, axis: int, stride: int) -> tuple[list[int], list[int], list[int]]:
    """Return how a stride becomes channels: a shape, an order and the shape after it.

    The first shape has the axis as [steps, stride]; the order has the stride after the channels.
    """
    sizes = [int(size) for size in shape]
    split = [*sizes[:axis], sizes[axis] // stride, stride, *sizes[axis + 1 :]]
    order = [0, 1, axis + 1, *range(2, axis + 1), *range(axis + 2, len(split))]
    merged = [sizes[0], sizes[1] * stride, *sizes[2:]]
    merged[axis] //= stride
    return split, order, merged


def _steps(x: Any, axis: int, stride: int, keywords: Any) -> Any:
    split, order, merged = _split_shape(x.shape, axis, stride)
    x = mb.transpose(x=mb.reshape(x=x, shape=split, **keywords), perm=order, **keywords)
    return mb.reshape(x=x, shape=merged, **keywords)


def _steps_of_array(kernel: NDArray[Any], axis: int, stride: int) -> NDArray[Any]:
    split, order, merged = _split_shape(kernel.shape, axis, stride)
    return np.ascontiguousarray(kernel.reshape(split).transpose(order).reshape(merged))


_POOLS = frozenset({"avg_pool", "l2_pool", "max_pool"})


def fast_pool_strides(op: Any) -> None:
    """Pool in steps of 4 and 2, or with stride 1 if a single window covers the tensor.

    Windows may not overlap, and nothing is padded.
    """
    if op.op_type not in _POOLS or op.ceil_mode.val:
        return
    sizes, strides = ([int(n) for n in var.val] for var in (op.kernel_sizes, op.strides))
    kind = op.pad_type.val
    is_padded = kind != "valid" and (kind != "custom" or np.any(op.pad.val))
    if FAST_POOL_STRIDES.issuperset(strides) or is_padded:
        return
    spatial = op.x.shape[2:]
    if not all(isinstance(n, int | np.integer) for n in spatial):
        return
    # Along an axis with one window of the whole size, any stride has the same result.
    strides = [
        1 if size == full else stride
        for size, stride, full in zip(sizes, strides, spatial, strict=True)
    ]
    stages = [(sizes, strides)]
    while not FAST_POOL_STRIDES.issuperset(stages[-1][1]):
        last_sizes, last_strides = stages.pop()
        factors = [
            (4 if stride % 4 == 0 else 2) if stride not in FAST_POOL_STRIDES else stride
            for stride in last_strides
        ]
        divides = all(
            stride % factor == 0
            and (factor == stride or size == stride)
            and op.op_type != "l2_pool"
            for size, stride, factor in zip(last_sizes, last_strides, factors, strict=True)
        )
        if not divides:
            return
        first = [
            factor if factor != stride else size
            for size, stride, factor in zip(last_sizes, last_strides, factors, strict=True)
        ]
        remaining = [stride // factor for stride, factor in zip(last_strides, factors, strict=True)]
        stages += [(first, factors), (remaining, remaining)]
    x, keywords = op.x, {"before_op": op}
    emit = getattr(mb, op.op_type)
    for index, (size, stride) in enumerate(stages):
        named = {"name": _name(op)} if index == len(stages) - 1 else {}
        x = emit(x=x, kernel_sizes=size, strides=stride, pad_type="valid", **named, **keywords)
    replace(op, x)


# Size of the file

SMALLEST = 4096
"""Size of the smallest constant that is stored differently, in bytes."""

MOST_COLOURS = 256
"""Entries of the largest lookup table."""

_ELEMENTWISE = frozenset({"add", "mul", "sub", "real_div", "maximum", "minimum"})
# coremltools stores a bias of zeros for a linear layer that has none.
_BIASED = frozenset({"conv", "conv_transpose"})
# Of other ops, Core ML may demand constants that are not decompressed.
_TABLE_READERS = _ELEMENTWISE | _BIASED | {"gather", "linear", "matmul"}


def numbers_for_equal_values(op: Any) -> None:
    """Store a constant of one value as a number, where the op that reads it broadcasts it.

    A bias of zeros is left out.
    """
    for var in _large_constants(op):
        value = number_in(var)
        if value is None:
            continue
        if op.op_type in _BIASED and var is op.bias and value == 0:
            arguments = {k: v for k, v in op.inputs.items() if k != "bias" and v is not None}
            replace(op, getattr(mb, op.op_type)(**arguments, name=_name(op), before_op=op))
            return
        if op.op_type not in _ELEMENTWISE:
            continue
        other = op.y if op.x is var else op.x
        if other is not var and other.shape == op.outputs[0].shape:
            scalar = number(value, var)
            x, y = (scalar, op.y) if op.x is var else (op.x, scalar)
            replace(op, getattr(mb, op.op_type)(x=x, y=y, name=_name(op), before_op=op))
            return


def tables_of_few_values(op: Any) -> None:
    """Store a constant of few values as indices into a table of them, without loss.

    All ops that read the constant read one table; none does if one of them needs the numbers.
    """
    if op.op_type not in _TABLE_READERS or not is_converted_to(Opset.iOS16):
        return
    for var in _large_constants(op):
        if is_output(var) or any(r.op_type not in _TABLE_READERS for r in var.child_ops):
            continue
        values = np.asarray(var.val)
        table = distinct_values(values)
        if table is None or table_bytes(values, len(table)) >= values.nbytes:
            continue
        indices = np.searchsorted(table, values)
        if not is_blockwise() and index_bits(len(table)) == 3:  # which iOS18 was the first to have
            table = np.pad(table, (0, 2**4 - len(table)))
        shape = (*(1,) * values.ndim, len(table), 1)
        name = f"{var.name}_table"
        look_up = emit_look_up(indices, table.reshape(shape), None, name, before_op=op)
        op.enclosing_block.replace_uses_of_var_after_op(
            anchor_op=look_up.op, old_var=var, new_var=look_up
        )


def distinct_values(values: NDArray[Any]) -> NDArray[Any] | None:
    """Return the values of a float array in ascending order; None for one, or for too many."""
    flat = values.reshape(-1)
    # First a sample: most weights have too many values, and are large.
    if (
        values.dtype.kind != "f"
        or len(np.unique(flat[:: flat.size // SMALLEST or 1])) > MOST_COLOURS
    ):
        return None
    table = np.unique(flat)
    return table if 1 < len(table) <= MOST_COLOURS else None


def table_bytes(values: NDArray[Any], entries: int) -> int:
    """Return the size of an array as indices into a table."""
    bits = index_bits(entries)
    return math.ceil(values.size * bits / 8) + 2**bits * values.itemsize


def _large_constants(op: Any) -> list[Any]:
    return [var for var in constants(op) if getattr(var.val, "nbytes", 0) >= SMALLEST]


_SMALLER = (numbers_for_equal_values, tables_of_few_values)

REWRITES: Mapping[Device, tuple[Rewrite, ...]] = MappingProxyType(
    {
        Device.NEURAL_ENGINE: (
            bound_masks,
            flattened_as_convolution,
            strides_to_channels,
            fast_pool_strides,
            *_SMALLER,
        ),
        Device.GPU: (separate_scores, *_SMALLER),
        Device.CPU: _SMALLER,
    }
)
"""The last rewrites for each device, in the order in which they run."""

REWRITES_IN_FP32: Mapping[Device, tuple[Rewrite, ...]] = MappingProxyType(
    {
        Device.NEURAL_ENGINE: (visible_rows_as_factor, decompose_attention),
        Device.GPU: (),
        Device.CPU: (),
    }
)
"""The rewrites for each device that run before a program is cast to fp16."""

"""Ops that move data without computing: views, permutations, slices, concatenation, padding."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.call import (
    ANY,
    BOUNDARY,
    FLOAT,
    MAX_RANK,
    NARROW,
    OpCall,
    Reason,
    ReasonCode,
)
from coreml_delegate.ops.constraints import holds, static_argument, static_result
from coreml_delegate.ops.edits import (
    ATEN,
    arguments_of,
    become,
    cast,
    insert,
    number,
    shape_of,
    value_of,
)
from coreml_delegate.ops.flops import nothing
from coreml_delegate.ops.merging import (
    along,
    expansion,
    leading,
    permutation,
    pointwise,
    stacking,
    view,
)
from coreml_delegate.ops.quantization import MOVE, CompositeOp, Output, Pattern, Quantization, Tail
from coreml_delegate.ops.record import OpRecord, ScoreRole
from coreml_delegate.targets import Opset


def _dynamic_where_broadcast(call: OpCall) -> Reason | None:
    """A tensor of high rank is not broadcast to a size that is computed."""
    if max(t.dim() for t in call.outputs()) <= MAX_RANK:
        return None
    return static_result(call)


def _padded_dims(call: OpCall) -> Reason | None:
    """Reflection and replication pad one or two dimensions, of a tensor with at most two more."""
    mode, pads = call.arguments.get("mode", "constant"), call.arguments["pad"]
    if mode not in ("constant", "reflect", "replicate"):
        return Reason(ReasonCode.ARGUMENT, f"mode={mode!r}, Core ML has none such")
    if mode == "constant" or len(pads) <= _PADS_OF_TWO_DIMS:
        return None
    return Reason(ReasonCode.ARGUMENT, f"mode={mode!r} with {len(pads) // 2} padded dimensions")


def _padded(call: OpCall) -> int:
    return len(call.arguments["pad"]) // 2


def _crops(call: OpCall) -> bool:
    return any(pad < 0 for pad in call.arguments["pad"])


def _crops_constant(call: OpCall) -> bool:
    return call.arguments["mode"] == "constant" or not _crops(call)


def _rolled_sizes(call: OpCall) -> Reason | None:
    """The sizes of rolled dimensions are known.

    Of others coremltools computes a remainder, which below zero is the device's own, and a range
    that the device fails to make: apple/coremltools#2778, apple/coremltools#2838.
    """
    (_, tensor), dims = next(call.tensors()), call.arguments["dims"]
    sizes = [tensor.shape[d] for d in dims] if dims else list(tensor.shape)
    if all(isinstance(size, int) for size in sizes):
        return None
    return Reason(ReasonCode.SYMBOLIC, f"rolls a dynamic dimension of {tuple(tensor.shape)}")


def _by_way_of_fp32(call: OpCall) -> Reason | None:
    """The device runtime casts fp16 and fp64 at the boundary, to and from fp32."""
    (source,) = (tensor.dtype for _, tensor in call.tensors())
    for result in call.outputs():
        dtypes = {source, result.dtype}
        if dtypes & BOUNDARY and not dtypes & FLOAT:
            return Reason(
                ReasonCode.DTYPE,
                f"a cast from {source} to {result.dtype} would pass through float32".replace(
                    "torch.", ""
                ),
                remedy="Cast it to float32 first, if that is meant",
            )
    return None


def _clone(node: Node) -> None:
    # Inside a partition the layout says nothing.
    become(node, ATEN.clone.default, node.args[0])


def _to_copy(node: Node) -> None:
    kept = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    become(node, ATEN._to_copy.default, node.args[0], **kept)


def _view(node: Node) -> None:
    # Coremltools drops one dimension on the way to a scalar.
    source = node.args[0]
    if value_of(node).dim() == 0 and isinstance(source, Node) and value_of(source).dim() > 1:
        node.args = (insert(node, ATEN.view_copy.default, source, [1]), [])


def _join(node: Node) -> None:
    """Tensors of several dtypes have that of the result when they are joined."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    tensors = [cast(node, tensor, dtype) for tensor in arguments["tensors"]]
    become(node, node.target, tensors, arguments["dim"])


def _diagonal(node: Node) -> None:
    """Every (columns + 1)th element of a flattened matrix.

    Coremltools mistranslates the op: apple/coremltools#2565.
    """
    arguments = arguments_of(node)
    x, offset = arguments["self"], arguments["offset"]
    rank = value_of(x).dim()
    rows, columns = (arguments[n] % rank for n in ("dim1", "dim2"))
    others = [d for d in range(rank) if d not in (rows, columns)]
    sizes = shape_of(x)
    matrix = insert(node, ATEN.permute_copy.default, x, [*others, rows, columns])
    flat_shape = [*(sizes[d] for d in others), sizes[rows] * sizes[columns]]
    flat = insert(node, ATEN.view_copy.default, matrix, flat_shape)
    step = sizes[columns] + 1
    start = offset if offset >= 0 else -offset * sizes[columns]
    end = start + (shape_of(node)[-1] - 1) * step + 1
    become(node, ATEN.slice_copy.Tensor, flat, len(others), start, end, step)


def _crop(node: Node) -> None:
    """Negative padding as a slice: MIL's does not crop."""
    arguments = arguments_of(node)
    x, pads = arguments["self"], list(arguments["pad"])
    rank = value_of(x).dim()
    for n in range(len(pads) // 2):
        dim, start, end = rank - 1 - n, pads[2 * n], pads[2 * n + 1]
        if start < 0 or end < 0:
            stop = shape_of(x)[dim] + end if end < 0 else _END
            x = insert(node, ATEN.slice_copy.Tensor, x, dim, max(0, -start), stop, 1)
    value = arguments.get("value")
    fill = number(0 if value is None else value, value_of(node).dtype)
    widening = [max(0, pad) for pad in pads]
    if not any(widening):
        become(node, ATEN.clone.default, x)
    elif value_of(node).dtype.is_floating_point:
        become(node, ATEN.constant_pad_nd.default, x, widening, fill)
    else:
        _join_filled(node, x, widening, fill)


def _join_filled(node: Node, x: Node, pads: list[int], fill: Any) -> None:
    """Integers and truths padded by concatenation: MIL pads floats alone."""
    number_of = bool if value_of(node).dtype is torch.bool else int
    for n in range(len(pads) // 2):
        dim, widths = value_of(x).dim() - 1 - n, pads[2 * n : 2 * n + 2]
        row = insert(node, ATEN.slice_copy.Tensor, x, dim, 0, 1, 1)
        # Coremltools takes the dtype from the number; ``F.pad`` makes a float of it.
        row = insert(node, ATEN.full_like.default, row, number_of(fill))
        before, after = (_repeated(node, row, dim, width) for width in widths)
        x = insert(node, ATEN.cat.default, [*before, x, *after], dim)
    become(node, ATEN.clone.default, x)


def _repeated(node: Node, row: Node, dim: int, width: int) -> list[Node]:
    """Return ``width`` rows side by side as one node; an empty list for a width of 0."""
    repeats = [width if d == dim else 1 for d in range(value_of(row).dim())]
    return [insert(node, ATEN.repeat.default, row, repeats)] if width else []


def _pad(node: Node) -> None:
    if arguments_of(node)["mode"] == "constant":
        _crop(node)


def _slice(node: Node) -> None:
    """Between bounds that are computed, a slice whose size is known says so.

    It also fails at run time where the bounds lead out of the tensor, and Core ML's would be short.
    """
    sizes = shape_of(node)
    if not any(isinstance(a, Node) for a in (*node.args[1:], *node.kwargs.values())):
        return
    if all(isinstance(size, int) for size in sizes):
        with node.graph.inserting_before(node):
            part = node.graph.create_node("call_function", node.target, node.args, node.kwargs)
        part.meta = dict(node.meta)
        become(node, ATEN.view_copy.default, part, sizes)


def _roll_flat(node: Node) -> None:
    """Without dimensions, the flattened tensor is rolled."""
    arguments = arguments_of(node)
    if arguments["dims"]:
        return
    x = arguments["self"]
    count = math.prod(shape_of(x))
    flat = insert(node, ATEN.view_copy.default, x, [count])
    rolled = insert(node, ATEN.roll.default, flat, arguments["shifts"], [0])
    become(node, ATEN.view_copy.default, rolled, shape_of(x))


def _expand(node: Node) -> None:
    """Repetitions by numbers, where the dimensions that grow have known sizes.

    Coremltools computes them from shapes, and the result has sizes that depend on values: GPU and
    neural engine do not load such programs, or end the process: apple/coremltools#2825.
    """
    x, sizes = arguments_of(node)["self"], shape_of(node)
    given = shape_of(x)
    if all(isinstance(size, int) for size in sizes):
        return
    before = [1] * (len(sizes) - len(given)) + given
    # Symbols are compared as text: as numbers, they would become equal.
    grown = [str(size) != str(old) for size, old in zip(sizes, before, strict=True)]
    if all(isinstance(size, int) for size, grows in zip(sizes, grown, strict=True) if grows):
        repeats = [size if grows else 1 for size, grows in zip(sizes, grown, strict=True)]
        become(node, ATEN.repeat.default, x, repeats)


def _pads_with_zero(call: OpCall) -> str | None:
    """Zero is on every grid of quantized values; other constants are not."""
    constant = call.arguments.get("mode", "constant") == "constant"
    value = call.arguments.get("value")
    if constant and value not in (None, 0, 0.0):
        return f"it pads with {value}, which may be beyond the range of its input"
    return None


_END = (1 << 63) - 1
_CARRIED = ANY | NARROW
_PADS_OF_TWO_DIMS = 4
_CROPS_CONSTANT = holds(
    _crops_constant, ReasonCode.ARGUMENT, "negative padding crops what is reflected"
)
_PAD = Quantization((Pattern("pad", output=Output.OF_INPUT, condition=_pads_with_zero),))
_JOIN = Quantization((Pattern("cat", tail=(Tail.ACTIVATION,), keeps_sign=True),))

_op = partial(OpRecord, moves_data=True, score_role=ScoreRole.CARRIES, flops=nothing)
# Any dtype; decomposed or not, coremltools has it as one.
_moves = partial(_op, dtypes={"": _CARRIED}, results=_CARRIED, preserve=False)
_views = partial(_moves, merge=view)
_permutes = partial(_moves, merge=permutation)

RECORDS = (
    _views("aten.view.default", symbolic=frozenset({"size"}), rewrite=_view, quantization=MOVE),
    _views("aten.reshape.default", symbolic=frozenset({"shape"}), quantization=MOVE),
    *(
        _views(f"aten.{name}", quantization=MOVE)
        for name in ("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default")
    ),
    _views("aten.clone.default", rewrite=_clone, quantization=MOVE),
    _views("dim_order_ops._clone_dim_order.default", rewrite=_clone),
    _views("aten.alias.default", rewrite=_clone, quantization=MOVE),
    _views("aten.lift_fresh_copy.default", rewrite=_clone),
    _permutes("aten.permute.default", quantization=MOVE),
    _permutes("aten.transpose.int", quantization=MOVE),
    _moves(
        "aten.expand.default",
        constraints=(_dynamic_where_broadcast,),
        symbolic=frozenset({"size"}),
        merge=expansion,
        rewrite=_expand,
        quantization=MOVE,
    ),
    _moves("aten.repeat.default", symbolic=frozenset({"repeats"}), quantization=MOVE),
    _moves("aten.select.int", symbolic=frozenset({"index"}), merge=along("dim"), quantization=MOVE),
    _moves(
        "aten.slice.Tensor",
        symbolic=frozenset({"start", "end"}),
        merge=along("dim"),
        rewrite=_slice,
        quantization=MOVE,
    ),
    _moves("aten.flip.default", merge=along("dims"), quantization=MOVE),
    *(
        _moves(f"aten.{name}", merge=along("dim"), quantization=MOVE)
        for name in ("split_with_sizes.default", "split.Tensor", "unbind.int")
    ),
    _op(
        "aten.cat.default",
        dtypes={"": _CARRIED},
        results=_CARRIED,
        merge=along("dim", tensors="tensors"),
        rewrite=_join,
        quantization=_JOIN,
    ),
    _op(
        "aten.stack.default",
        dtypes={"": _CARRIED},
        results=_CARRIED,
        merge=stacking,
        rewrite=_join,
        quantization=_JOIN,
    ),
    _op(
        "aten.roll.default",
        constraints=(_rolled_sizes,),
        merge=along("dims"),
        rewrite=_roll_flat,
        quantization=MOVE,
    ),
    _op(
        "aten.pad.default",
        dtypes={"": ANY},
        constraints=(_padded_dims, _CROPS_CONSTANT, static_argument("self", when=_crops)),
        rewrite=_pad,
        quantization=_PAD,
    ),
    _op(
        "aten.constant_pad_nd.default",
        dtypes={"": ANY},
        constraints=(static_argument("self", when=_crops),),
        merge=leading("self", _padded),
        rewrite=_crop,
        quantization=_PAD,
    ),
    _op("aten.diagonal.default", constraints=(static_argument("self"),), rewrite=_diagonal),
    _op("aten.pixel_shuffle.default", quantization=MOVE),
    _op("aten.pixel_unshuffle.default", since=Opset.iOS16, quantization=MOVE),
    *(
        _op(
            target,
            dtypes={"": _CARRIED | BOUNDARY},
            results=_CARRIED | BOUNDARY,
            constraints=(_by_way_of_fp32,),
            preserve=False,
            merge=pointwise,
            rewrite=_to_copy,
        )
        for target in ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default")
    ),
)

COMPOSITES = tuple(
    CompositeOp(f"aten.{name}", MOVE)
    for name in (
        *("flatten.using_ints", "unflatten.int", "t.default", "movedim.int", "movedim.intlist"),
        *("swapaxes.default", "numpy_T.default", "narrow.default", "split.sizes"),
        *("chunk.default", "tensor_split.sections", "contiguous.default", "detach.default"),
        *("dropout.default", "feature_dropout.default", "channel_shuffle.default"),
    )
)

"""Ops that move data without computing: views, permutations, slices, concatenation, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.fx import Node

from coreml_delegate.mil.compose import movement
from coreml_delegate.ops.call import (
    ANY,
    BOUNDARY,
    FLOAT,
    INTEGER,
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
from coreml_delegate.ops.record import OpRecord
from coreml_delegate.targets import Opset


def _broadcasts_to_dynamic_size(call: OpCall) -> Reason | None:
    """A tensor of more than five dimensions is not broadcast to a dynamic size."""
    if max(t.dim() for t in call.outputs()) <= MAX_RANK:
        return None
    return static_result(call)


def _has_supported_padding(call: OpCall) -> Reason | None:
    """Reflection and replication pad one or two dimensions, of a tensor with at most two more."""
    mode, pads = call.arguments.get("mode", "constant"), call.arguments["pad"]
    if mode not in ("constant", "reflect", "replicate"):
        return Reason(ReasonCode.ARGUMENT, f"mode={mode!r}, Core ML has no such mode")
    if mode == "constant" or len(pads) <= _PADS_OF_TWO_DIMS:
        return None
    return Reason(ReasonCode.ARGUMENT, f"mode={mode!r} with {len(pads) // 2} padded dimensions")


def _count_padded_dims(call: OpCall) -> int:
    return len(call.arguments["pad"]) // 2


def _crops(call: OpCall) -> bool:
    return any(pad < 0 for pad in call.arguments["pad"])


def _crops_only_constant(call: OpCall) -> bool:
    return call.arguments["mode"] == "constant" or not _crops(call)


def _rolls_static_dims(call: OpCall) -> Reason | None:
    """The sizes of rolled dimensions are static.

    For dynamic sizes coremltools computes a remainder, whose sign depends on the device, and a
    range that the device fails to make: apple/coremltools#2778, apple/coremltools#2838.
    """
    (_, tensor), dims = next(call.tensors()), call.arguments["dims"]
    sizes = [tensor.shape[d] for d in dims] if dims else list(tensor.shape)
    if all(isinstance(size, int) for size in sizes):
        return None
    return Reason(ReasonCode.SYMBOLIC, f"rolls a dynamic dimension of {tuple(tensor.shape)}")


def _casts_through_fp32(call: OpCall) -> Reason | None:
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
    # The memory format has no meaning inside a partition.
    become(node, ATEN.clone.default, node.args[0])


def _to_copy(node: Node) -> None:
    dtype = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    become(node, ATEN._to_copy.default, node.args[0], **dtype)


def _view(node: Node) -> None:
    # Coremltools drops one dimension on the way to a scalar.
    source = node.args[0]
    if value_of(node).dim() == 0 and isinstance(source, Node) and value_of(source).dim() > 1:
        node.args = (insert(node, ATEN.view_copy.default, source, [1]), [])


def _join(node: Node) -> None:
    """Cast the joined tensors to the dtype of the result."""
    arguments, dtype = arguments_of(node), value_of(node).dtype
    tensors = [cast(node, tensor, dtype) for tensor in arguments["tensors"]]
    become(node, node.target, tensors, arguments["dim"])


def _diagonal(node: Node) -> None:
    """Read the diagonal, or write it.

    It is every (columns + 1)th element of a flattened matrix. Coremltools mistranslates the op:
    apple/coremltools#2565.
    """
    arguments = arguments_of(node)
    x, offset = arguments["self"], arguments["offset"]
    rank = value_of(x).dim()
    rows, columns = (arguments[n] % rank for n in ("dim1", "dim2"))
    order = [*(d for d in range(rank) if d not in (rows, columns)), rows, columns]
    matrix = insert(node, ATEN.permute_copy.default, x, order)
    *batch, height, width = shape_of(matrix)
    flat = insert(node, ATEN.view_copy.default, matrix, [*batch, height * width])
    start = offset if offset >= 0 else -offset * width
    length = shape_of(arguments.get("src", node))[-1]
    slice_args = len(batch), start, start + (length - 1) * (width + 1) + 1, width + 1
    if "src" not in arguments:
        become(node, ATEN.slice_copy.Tensor, flat, *slice_args)
        return
    flat = insert(node, ATEN.slice_scatter.default, flat, arguments["src"], *slice_args)
    matrix = insert(node, ATEN.view_copy.default, flat, shape_of(matrix))
    become(node, ATEN.permute_copy.default, matrix, [order.index(d) for d in range(rank)])


def _pad(node: Node) -> None:
    """Name the mode by the op; the number may be omitted, and is a float for integers."""
    arguments = arguments_of(node)
    if arguments.get("mode", "constant") == "constant":
        value = arguments["value"] or 0
        value = value if value_of(node).is_floating_point() else int(value)
        become(node, ATEN.constant_pad_nd.default, arguments["self"], arguments["pad"], value)


def _pad_last_dims(x: Any, pads: Sequence[int], value: float) -> Any:
    """Compose padding of the last dimensions; ``pads`` has them in reverse order."""
    amounts = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    return movement.pad(x, [(0, 0)] * (x.rank - len(amounts)) + amounts, value)


def _slice(node: Node) -> None:
    """Add a view that fixes the static shape of a slice between computed bounds.

    The view fails at run time if the bounds are outside the tensor: Core ML's slice would be short.
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
    """Rewrite to ``repeat`` by numbers if the expanded dimensions have static sizes.

    Coremltools computes the repetitions from shapes, so that sizes of the result depend on values:
    GPU and neural engine do not load such programs, or end the process: apple/coremltools#2825.
    """
    x, sizes = arguments_of(node)["self"], shape_of(node)
    old_sizes = shape_of(x)
    if all(isinstance(size, int) for size in sizes):
        return
    aligned = [1] * (len(sizes) - len(old_sizes)) + old_sizes
    # Symbols are compared as text: as numbers, they would become equal.
    grown = [str(size) != str(old) for size, old in zip(sizes, aligned, strict=True)]
    if all(isinstance(size, int) for size, grows in zip(sizes, grown, strict=True) if grows):
        repeats = [size if grows else 1 for size, grows in zip(sizes, grown, strict=True)]
        become(node, ATEN.repeat.default, x, repeats)


def _pads_with_zero(call: OpCall) -> str | None:
    """Why a padding constant is not quantized, or None: only zero is on every quantization grid."""
    constant = call.arguments.get("mode", "constant") == "constant"
    value = call.arguments.get("value")
    if constant and value not in (None, 0, 0.0):
        return f"it pads with {value}, which may be beyond the range of its input"
    return None


_MOVABLE_DTYPES = ANY | NARROW
_PADS_OF_TWO_DIMS = 4
_CROPS_CONSTANT = holds(
    _crops_only_constant, ReasonCode.ARGUMENT, "negative padding with a mode other than 'constant'"
)
_PAD = Quantization((Pattern("pad", output=Output.OF_INPUT, condition=_pads_with_zero),))
_JOIN = Quantization((Pattern("cat", tail=(Tail.ACTIVATION,), keeps_sign=True),))

_op = partial(OpRecord, moves_data=True, flops=nothing)
# Any dtype; coremltools translates the op to one MIL op, decomposed or not.
_moves = partial(_op, dtypes={"": _MOVABLE_DTYPES}, results=_MOVABLE_DTYPES, preserve=False)
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
        constraints=(_broadcasts_to_dynamic_size,),
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
        dtypes={"": _MOVABLE_DTYPES},
        results=_MOVABLE_DTYPES,
        merge=along("dim", tensors="tensors"),
        rewrite=_join,
        quantization=_JOIN,
    ),
    _op(
        "aten.stack.default",
        dtypes={"": _MOVABLE_DTYPES},
        results=_MOVABLE_DTYPES,
        merge=stacking,
        rewrite=_join,
        quantization=_JOIN,
    ),
    _op(
        "aten.roll.default",
        constraints=(_rolls_static_dims,),
        merge=along("dims"),
        rewrite=_roll_flat,
        quantization=MOVE,
    ),
    _op(
        "aten.pad.default",
        dtypes={"": ANY},
        constraints=(_has_supported_padding, _CROPS_CONSTANT, static_argument("self", when=_crops)),
        rewrite=_pad,
        quantization=_PAD,
    ),
    _op(
        "aten.constant_pad_nd.default",
        dtypes={"": ANY},
        constraints=(static_argument("self", when=_crops),),
        merge=leading("self", _count_padded_dims),
        rewrite=_pad,
        translation=_pad_last_dims,
        quantization=_PAD,
    ),
    _op("aten.diagonal.default", constraints=(static_argument("self"),), rewrite=_diagonal),
    _op(
        "aten.diagonal_scatter.default",
        dtypes={"": FLOAT | INTEGER},
        constraints=(static_argument("self"),),
        rewrite=_diagonal,
    ),
    _op("aten.pixel_shuffle.default", quantization=MOVE),
    _op("aten.pixel_unshuffle.default", since=Opset.iOS16, quantization=MOVE),
    *(
        _op(
            target,
            dtypes={"": _MOVABLE_DTYPES | BOUNDARY},
            results=_MOVABLE_DTYPES | BOUNDARY,
            constraints=(_casts_through_fp32,),
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

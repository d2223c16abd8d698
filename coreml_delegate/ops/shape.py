"""Ops that move data without computing: views, permutations, slices, concatenation, padding."""

from __future__ import annotations

import math
from functools import partial

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
    target_name,
)
from coreml_delegate.ops.constraints import contiguous_result, holds, static_argument
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
from coreml_delegate.ops.quantization import MOVE, CompositeOp, Output, Pattern, Quantization, Tail
from coreml_delegate.ops.record import MaskRole, OpRecord
from coreml_delegate.targets import Opset


def _role(node: object) -> str:
    """``view``, ``permute``, ``clone`` or empty, for the pattern below."""
    if not isinstance(node, Node) or node.op != "call_function":
        return ""
    name = target_name(node.target).split(".")[1]
    return {
        "view_copy": "view",
        "view": "view",
        "reshape": "view",
        "permute_copy": "permute",
        "permute": "permute",
        "transpose_copy": "permute",
        "transpose": "permute",
        "clone": "clone",
        "_clone_dim_order": "clone",
    }.get(name, "")


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _chain(node: Node) -> list[Node]:
    """The maximal chain of single-use nodes of rank above five around ``node``, ends included."""
    chain = [node]
    while _rank(chain[0]) > MAX_RANK and chain[0].args:
        source = chain[0].args[0]
        if not isinstance(source, Node) or _rank(source) <= MAX_RANK:
            break
        chain.insert(0, source)
    while _rank(chain[-1]) > MAX_RANK and len(chain[-1].users) == 1:
        chain.append(next(iter(chain[-1].users)))
    return chain


def _high_rank_in_pattern(call: OpCall) -> Reason | None:
    """Rank above five occurs only inside view -> permute -> view, which coremltools rewrites."""
    ranks = [t.dim() for _, t in call.tensors()] + [t.dim() for t in call.outputs()]
    if max(ranks) <= MAX_RANK:
        return None
    node = call.node
    if _rank(node) <= MAX_RANK and isinstance(node.args[0], Node):
        node = node.args[0]
    chain = _chain(node)
    roles = [role for role in map(_role, chain) if role != "clone"]
    inner = chain[:-1]
    if (
        roles == ["view", "permute", "view"]
        and _rank(chain[-1]) <= MAX_RANK
        and all(len(n.users) == 1 for n in inner)
    ):
        return None
    return Reason(
        ReasonCode.RANK,
        f"rank {max(ranks)} outside of reshape, permute, reshape; Core ML takes at most {MAX_RANK}",
    )


def _padded_dims(call: OpCall) -> Reason | None:
    """Reflection and replication pad one or two dimensions, of a tensor with at most two more."""
    mode, pads = call.arguments.get("mode", "constant"), call.arguments["pad"]
    if mode not in ("constant", "reflect", "replicate"):
        return Reason(ReasonCode.ARGUMENT, f"mode={mode!r}, Core ML has none such")
    if mode == "constant" or len(pads) <= _PADS_OF_TWO_DIMS:
        return None
    return Reason(ReasonCode.ARGUMENT, f"mode={mode!r} with {len(pads) // 2} padded dimensions")


def _crops(call: OpCall) -> bool:
    return any(pad < 0 for pad in call.arguments["pad"])


def _crops_constant(call: OpCall) -> bool:
    return call.arguments["mode"] == "constant" or not _crops(call)


def _rolls_flat(call: OpCall) -> bool:
    return not call.arguments["dims"]


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
    # Constraints leave row-major results alone, so the dim order says nothing.
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
    if any(widening):
        become(node, ATEN.constant_pad_nd.default, x, widening, fill)
    else:
        become(node, ATEN.clone.default, x)


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


def _pads_with_zero(call: OpCall) -> str | None:
    """Zero is on every grid of quantized values; other constants are not."""
    constant = call.arguments.get("mode", "constant") == "constant"
    value = call.arguments.get("value")
    if constant and value not in (None, 0, 0.0):
        return f"it pads with {value}, which may be beyond the range of its input"
    return None


_END = (1 << 63) - 1
_NO_LIMIT = 1 << 30
_CARRIED = ANY | NARROW
_PADS_OF_TWO_DIMS = 4
_CROPS_CONSTANT = holds(
    _crops_constant, ReasonCode.ARGUMENT, "negative padding crops what is reflected"
)
_PAD = Quantization((Pattern("pad", output=Output.OF_INPUT, condition=_pads_with_zero),))
_JOIN = Quantization((Pattern("cat", tail=(Tail.ACTIVATION,), keeps_sign=True),))

_op = partial(OpRecord, moves_data=True, mask_role=MaskRole.CARRIES, flops=nothing)
# Any dtype; decomposed or not, coremltools has it as one.
_moves = partial(_op, dtypes={"": _CARRIED}, results=_CARRIED, preserve=False)
_reshapes = partial(_moves, max_rank=_NO_LIMIT, constraints=(_high_rank_in_pattern,))

RECORDS = (
    _reshapes("aten.view.default", symbolic=frozenset({"size"}), rewrite=_view, quantization=MOVE),
    _reshapes("aten.reshape.default", symbolic=frozenset({"shape"}), quantization=MOVE),
    _reshapes("aten.permute.default", quantization=MOVE),
    _reshapes("aten.transpose.int", quantization=MOVE),
    _reshapes(
        "aten.clone.default",
        constraints=(_high_rank_in_pattern, contiguous_result),
        quantization=MOVE,
    ),
    _reshapes(
        "dim_order_ops._clone_dim_order.default",
        constraints=(_high_rank_in_pattern, contiguous_result),
        rewrite=_clone,
    ),
    _moves("aten.alias.default", rewrite=_clone, quantization=MOVE),
    _moves("aten.lift_fresh_copy.default", rewrite=_clone),
    _moves("aten.expand.default", symbolic=frozenset({"size"}), quantization=MOVE),
    _moves("aten.repeat.default", symbolic=frozenset({"repeats"}), quantization=MOVE),
    _moves("aten.select.int", symbolic=frozenset({"index"}), quantization=MOVE),
    _moves(
        "aten.slice.Tensor",
        symbolic=frozenset({"start", "end"}),
        rewrite=_slice,
        quantization=MOVE,
    ),
    *(
        _moves(f"aten.{name}", quantization=MOVE)
        for name in (
            *("flip.default", "split_with_sizes.default", "split.Tensor", "unbind.int"),
            *("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default"),
        )
    ),
    _op(
        "aten.cat.default",
        dtypes={"": _CARRIED},
        results=_CARRIED,
        rewrite=_join,
        quantization=_JOIN,
    ),
    _op(
        "aten.stack.default",
        dtypes={"": _CARRIED},
        results=_CARRIED,
        rewrite=_join,
        quantization=_JOIN,
    ),
    _op(
        "aten.roll.default",
        constraints=(static_argument("self", when=_rolls_flat),),
        rewrite=_roll_flat,
        quantization=MOVE,
    ),
    _op(
        "aten.pad.default",
        constraints=(_padded_dims, _CROPS_CONSTANT, static_argument("self", when=_crops)),
        rewrite=_pad,
        quantization=_PAD,
    ),
    _op(
        "aten.constant_pad_nd.default",
        constraints=(static_argument("self", when=_crops),),
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
            constraints=(contiguous_result, _by_way_of_fp32),
            preserve=False,
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

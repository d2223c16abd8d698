"""Ops that move data without computing: views, permutations, slices, concatenation, padding."""

import torch
from torch.fx import Node

from coreml_delegate.op_rules.constraints import (
    contiguous_result,
    holds,
    rank_between,
    static_argument,
)
from coreml_delegate.op_rules.rule import (
    ANY,
    BOUNDARY,
    FLOAT,
    MAX_RANK,
    NARROW,
    OpCall,
    OpRule,
    Reason,
    ReasonCode,
    target_name,
)
from coreml_delegate.targets import Opset

_NO_LIMIT = 1 << 30
_CARRIED = ANY | NARROW
_ALL = {"": _CARRIED}


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


def _whole_sizes(call: OpCall) -> bool:
    """The factors give whole output sizes; others coremltools does not convert."""
    tensor, factors = call.tensor("input"), call.arguments["scale_factors"]
    if tensor is None or factors is None or call.arguments.get("align_corners"):
        return True
    spatial = tensor.shape[2:]
    return all(
        isinstance(n, int) and (n * f).is_integer() for n, f in zip(spatial, factors, strict=True)
    )


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


_PADS_OF_TWO_DIMS = 4
_BICUBIC = 2
_INTERPOLATION = holds(
    lambda call: call.arguments["interpolation_mode"] != _BICUBIC,
    ReasonCode.ARGUMENT,
    "Core ML samples a grid bilinear or nearest, not bicubic",
)
_CROPS_CONSTANT = holds(
    _crops_constant, ReasonCode.ARGUMENT, "negative padding crops what is reflected"
)
_RESHAPES = (
    "aten.view.default",
    "aten.reshape.default",
    "aten.permute.default",
    "aten.transpose.int",
)
# What may be computed from shapes.
_SYMBOLIC = {
    "aten.view.default": frozenset({"size"}),
    "aten.reshape.default": frozenset({"shape"}),
    "aten.expand.default": frozenset({"size"}),
    "aten.select.int": frozenset({"index"}),
    "aten.slice.Tensor": frozenset({"start", "end"}),
    "aten.repeat.default": frozenset({"repeats"}),
}
_CLONES = ("aten.clone.default", "dim_order_ops._clone_dim_order.default")
_CASTS = ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default")
_MOVES = (
    "aten.alias.default",
    "aten.expand.default",
    "aten.flip.default",
    "aten.lift_fresh_copy.default",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.split_with_sizes.default",
    "aten.split.Tensor",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
    "aten.unbind.int",
    "aten.unsqueeze.default",
    "aten.repeat.default",
)

RULES = (
    *(
        OpRule(
            target,
            "shape",
            dtypes=_ALL,
            results=_CARRIED,
            max_rank=_NO_LIMIT,
            constraints=(_high_rank_in_pattern,),
            symbolic=_SYMBOLIC.get(target, frozenset()),
            preserve=False,
        )
        for target in _RESHAPES
    ),
    *(
        OpRule(
            target,
            "shape",
            dtypes=_ALL,
            results=_CARRIED,
            symbolic=_SYMBOLIC.get(target, frozenset()),
            preserve=False,
        )
        for target in _MOVES
    ),
    OpRule("aten.cat.default", "shape", dtypes=_ALL, results=_CARRIED),
    OpRule("aten.stack.default", "shape", dtypes=_ALL, results=_CARRIED),
    OpRule("aten.roll.default", "shape", constraints=(static_argument("self", when=_rolls_flat),)),
    OpRule(
        "aten.pad.default",
        "shape",
        constraints=(_padded_dims, _CROPS_CONSTANT, static_argument("self", when=_crops)),
    ),
    OpRule(
        "aten.constant_pad_nd.default",
        "shape",
        constraints=(static_argument("self", when=_crops),),
    ),
    OpRule("aten.diagonal.default", "shape", constraints=(static_argument("self"),)),
    OpRule("aten.upsample_nearest2d.vec", "shape"),
    OpRule(
        "aten.upsample_bilinear2d.vec",
        "shape",
        constraints=(
            holds(_whole_sizes, ReasonCode.ARGUMENT, "scale_factors give a broken output size"),
        ),
    ),
    OpRule(
        "aten.grid_sampler.default",
        "shape",
        constraints=(rank_between("input", 4, 4), _INTERPOLATION),
    ),
    OpRule("aten.grid_sampler_2d.default", "shape", constraints=(_INTERPOLATION,)),
    OpRule("aten.pixel_shuffle.default", "shape"),
    OpRule("aten.pixel_unshuffle.default", "shape", since=Opset.iOS16),
    *(
        OpRule(
            target,
            "shape",
            dtypes=_ALL,
            results=_CARRIED,
            max_rank=_NO_LIMIT,
            constraints=(_high_rank_in_pattern, contiguous_result),
            preserve=False,
        )
        for target in _CLONES
    ),
    *(
        OpRule(
            target,
            "shape",
            dtypes={"": _CARRIED | BOUNDARY},
            results=_CARRIED | BOUNDARY,
            constraints=(contiguous_result, _by_way_of_fp32),
            preserve=False,
        )
        for target in _CASTS
    ),
)

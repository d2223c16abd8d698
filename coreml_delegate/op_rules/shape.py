"""Ops that move data without computing: views, permutations, slices, concatenation, padding."""

from torch.fx import Node

from coreml_delegate.op_rules.constraints import (
    argument_is,
    contiguous_result,
    dtype_argument_in,
    same_dtype,
)
from coreml_delegate.op_rules.rule import (
    ANY,
    MAX_RANK,
    OpCall,
    OpRule,
    Reason,
    ReasonCode,
    target_name,
)

_NO_LIMIT = 1 << 30
_ALL = {"": ANY}


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
    return node.meta["val"].dim()


def _chain(node: Node) -> list[Node]:
    """The maximal chain of single-use nodes of rank above five around ``node``, ends included."""
    chain = [node]
    while _rank(chain[0]) > MAX_RANK:
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


def _no_mode_but_constant_at_high_rank(call: OpCall) -> Reason | None:
    """Reflection and replication pad the last two dimensions only."""
    mode, pads = call.arguments.get("mode", "constant"), call.arguments["pad"]
    if mode == "constant" or (mode in ("reflect", "replicate") and len(pads) <= 4):
        return None
    return Reason(ReasonCode.ARGUMENT, f"mode={mode!r} with {len(pads) // 2} padded dimensions")


_RESHAPES = (
    "aten.view.default",
    "aten.reshape.default",
    "aten.permute.default",
    "aten.transpose.int",
    "aten.clone.default",
    "dim_order_ops._clone_dim_order.default",
)
_MOVES = (
    "aten.alias.default",
    "aten.expand.default",
    "aten.flatten.using_ints",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.split_with_sizes.default",
    "aten.split.Tensor",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
    "aten.unsqueeze.default",
    "aten.repeat.default",
)

RULES = (
    *(
        OpRule(
            target,
            "shape",
            dtypes=_ALL,
            max_rank=_NO_LIMIT,
            constraints=(_high_rank_in_pattern, contiguous_result),
            preserve=False,
        )
        for target in _RESHAPES
    ),
    *(OpRule(target, "shape", dtypes=_ALL, preserve=False) for target in _MOVES),
    OpRule("aten.cat.default", "shape", dtypes=_ALL, constraints=(same_dtype("tensors"),)),
    OpRule("aten.stack.default", "shape", dtypes=_ALL, constraints=(same_dtype("tensors"),)),
    OpRule("aten.roll.default", "shape"),
    OpRule("aten.pad.default", "shape", constraints=(_no_mode_but_constant_at_high_rank,)),
    OpRule("aten.constant_pad_nd.default", "shape"),
    OpRule("aten.pixel_shuffle.default", "shape"),
    OpRule(
        "dim_order_ops._to_dim_order_copy.default",
        "shape",
        dtypes=_ALL,
        constraints=(contiguous_result, dtype_argument_in(ANY)),
        preserve=False,
    ),
    OpRule(
        "aten._to_copy.default",
        "shape",
        dtypes=_ALL,
        constraints=(
            dtype_argument_in(ANY),
            argument_is("memory_format", None),
        ),
        preserve=False,
    ),
)

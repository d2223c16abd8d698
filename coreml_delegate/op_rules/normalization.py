"""Normalizations, as inference computes them."""

from coreml_delegate.op_rules.constraints import (
    IsConstant,
    argument_is,
    only_result_used,
    static_argument,
)
from coreml_delegate.op_rules.rule import OpCall, OpRule

_STATISTICS = tuple(IsConstant(n) for n in ("weight", "bias", "running_mean", "running_var"))
_FOLDED_RANK = 4


def _folded(call: OpCall) -> bool:
    """Spatial dimensions become one."""
    tensor = call.tensor("input")
    return tensor is not None and tensor.dim() > _FOLDED_RANK


RULES = (
    OpRule(
        "aten.batch_norm.default",
        "normalization",
        constraints=(argument_is("training", False), *_STATISTICS),
    ),
    OpRule(
        "aten._native_batch_norm_legit_no_training.default",
        "normalization",
        constraints=_STATISTICS,
    ),
    OpRule(
        "aten._native_batch_norm_legit.no_stats",
        "normalization",
        constraints=(only_result_used(0),),
    ),
    OpRule("aten.layer_norm.default", "normalization"),
    OpRule("aten.native_layer_norm.default", "normalization", constraints=(only_result_used(0),)),
    OpRule(
        "aten.group_norm.default",
        "normalization",
        constraints=(static_argument("input", when=_folded),),
    ),
    # Its sizes are numbers.
    OpRule(
        "aten.native_group_norm.default",
        "normalization",
        constraints=(only_result_used(0),),
    ),
    OpRule("aten.rms_norm.default", "normalization"),
)

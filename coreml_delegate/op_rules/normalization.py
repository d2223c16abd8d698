"""Normalizations, as inference computes them."""

from coreml_delegate.op_rules.constraints import (
    argument_is,
    holds,
    is_constant,
    only_result_used,
    rank_between,
)
from coreml_delegate.op_rules.rule import OpCall, OpRule, ReasonCode

_STATISTICS = tuple(is_constant(n) for n in ("weight", "bias", "running_mean", "running_var"))


def _bias_with_weight(call: OpCall) -> bool:
    return call.arguments["bias"] is None or call.arguments["weight"] is not None


_AFFINE = (
    is_constant("weight"),
    is_constant("bias"),
    holds(_bias_with_weight, ReasonCode.ARGUMENT, "there is a bias and no weight"),
)

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
    OpRule("aten.layer_norm.default", "normalization", constraints=_AFFINE),
    OpRule(
        "aten.native_layer_norm.default",
        "normalization",
        constraints=(only_result_used(0), *_AFFINE),
    ),
    # Split into groups, an input has one dimension more.
    OpRule("aten.group_norm.default", "normalization", constraints=(rank_between("input", 2, 4),)),
    OpRule(
        "aten.native_group_norm.default",
        "normalization",
        constraints=(only_result_used(0), rank_between("input", 2, 4)),
    ),
    OpRule("aten.rms_norm.default", "normalization"),
)

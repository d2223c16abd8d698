"""Normalizations, as inference computes them."""

from coreml_delegate.op_rules.constraints import (
    argument_is,
    is_constant,
    only_result_used,
    rank_between,
)
from coreml_delegate.op_rules.rule import OpRule

_STATISTICS = tuple(is_constant(n) for n in ("weight", "bias", "running_mean", "running_var"))

RULES = (
    OpRule(
        "aten.batch_norm.default",
        "normalization",
        constraints=(argument_is("training", False), *_STATISTICS, rank_between("input", 2, 5)),
    ),
    OpRule(
        "aten._native_batch_norm_legit_no_training.default",
        "normalization",
        constraints=(only_result_used(0), *_STATISTICS, rank_between("input", 2, 5)),
    ),
    OpRule("aten.layer_norm.default", "normalization"),
    OpRule("aten.native_layer_norm.default", "normalization", constraints=(only_result_used(0),)),
    OpRule("aten.group_norm.default", "normalization", constraints=(rank_between("input", 3, 5),)),
    OpRule("aten.rms_norm.default", "normalization", constraints=(is_constant("weight"),)),
)

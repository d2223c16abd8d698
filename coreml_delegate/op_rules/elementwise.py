"""Elementwise arithmetic, comparison and logic."""

from coreml_delegate.op_rules.constraints import argument_is, same_dtype
from coreml_delegate.op_rules.rule import ANY, BOOL, FLOAT, NUMERIC, OpRule

_ALPHA = argument_is("alpha", 1, issue="apple/coremltools#2573")
_SAME = same_dtype("self", "other")
_UNARY = (
    "aten.abs.default",
    "aten.ceil.default",
    "aten.cos.default",
    "aten.erf.default",
    "aten.exp.default",
    "aten.floor.default",
    "aten.log.default",
    "aten.neg.default",
    "aten.reciprocal.default",
    "aten.round.default",
    "aten.rsqrt.default",
    "aten.sin.default",
    "aten.sqrt.default",
)
_BINARY = (
    "aten.div.Tensor",
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.pow.Tensor_Tensor",
)
_SCALAR_FLOAT = (
    "aten.div.Scalar",
    "aten.pow.Tensor_Scalar",
    "aten.clamp_min.default",
    "aten.clamp_max.default",
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

RULES = (
    *(OpRule(target, "elementwise") for target in (*_UNARY, *_SCALAR_FLOAT)),
    *(OpRule(target, "elementwise", constraints=(_SAME,)) for target in _BINARY),
    OpRule("aten.clamp.default", "elementwise"),
    *(
        OpRule(
            f"aten.{op}.Tensor", "elementwise", dtypes={"": NUMERIC}, constraints=(_ALPHA, _SAME)
        )
        for op in ("add", "sub")
    ),
    *(OpRule(f"aten.{op}.Scalar", "elementwise", constraints=(_ALPHA,)) for op in ("add", "sub")),
    OpRule("aten.mul.Tensor", "elementwise", dtypes={"": NUMERIC}, constraints=(_SAME,)),
    OpRule("aten.mul.Scalar", "elementwise"),
    *(
        OpRule(f"aten.{op}.Tensor", "elementwise", dtypes={"": NUMERIC}, constraints=(_SAME,))
        for op in _COMPARISONS
    ),
    *(OpRule(f"aten.{op}.Scalar", "elementwise", dtypes={"": NUMERIC}) for op in _COMPARISONS),
    OpRule("aten.logical_not.default", "elementwise", dtypes={"": BOOL}),
    OpRule("aten.logical_and.default", "elementwise", dtypes={"": BOOL}),
    OpRule("aten.logical_or.default", "elementwise", dtypes={"": BOOL}),
    OpRule(
        "aten.where.self",
        "elementwise",
        dtypes={"": ANY, "condition": BOOL},
        constraints=(_SAME,),
    ),
    OpRule("aten.masked_fill.Scalar", "elementwise", dtypes={"self": FLOAT, "mask": BOOL}),
)

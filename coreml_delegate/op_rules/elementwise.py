"""Elementwise arithmetic, comparison and logic."""

from coreml_delegate.op_rules.constraints import argument_is, same_dtype
from coreml_delegate.op_rules.rule import ANY, BOOL, FLOAT, NUMERIC, OpRule

_ALPHA = argument_is("alpha", 1, issue="apple/coremltools#2573")
_SAME = same_dtype("self", "other")
_UNARY = (
    "aten.acos.default",
    "aten.asin.default",
    "aten.atan.default",
    "aten.atanh.default",
    "aten.ceil.default",
    "aten.cos.default",
    "aten.cosh.default",
    "aten.erf.default",
    "aten.exp.default",
    "aten.expm1.default",
    "aten.floor.default",
    "aten.log.default",
    "aten.log10.default",
    "aten.log1p.default",
    "aten.log2.default",
    "aten.reciprocal.default",
    "aten.round.default",
    "aten.rsqrt.default",
    "aten.sin.default",
    "aten.sinh.default",
    "aten.sqrt.default",
    "aten.square.default",
    "aten.tan.default",
)
_UNARY_NUMERIC = (
    "aten.abs.default",
    "aten.clamp.default",
    "aten.clamp_max.default",
    "aten.clamp_min.default",
    "aten.neg.default",
    "aten.sign.default",
)
_BINARY = (
    "aten.atan2.default",
    "aten.div.Tensor",
    "aten.div.Tensor_mode",
    "aten.floor_divide.default",
    "aten.pow.Tensor_Tensor",
)
_BINARY_NUMERIC = (
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.mul.Tensor",
    "aten.remainder.Tensor",
)
_SCALAR_FLOAT = (
    "aten.div.Scalar",
    "aten.pow.Tensor_Scalar",
    "aten.pow.Scalar",
    "aten.remainder.Scalar",
)
_LOGICAL = (
    "aten.bitwise_and.Tensor",
    "aten.bitwise_not.default",
    "aten.logical_and.default",
    "aten.logical_not.default",
    "aten.logical_or.default",
    "aten.logical_xor.default",
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

RULES = (
    *(OpRule(target, "elementwise") for target in (*_UNARY, *_SCALAR_FLOAT, *_BINARY)),
    *(
        OpRule(target, "elementwise", dtypes={"": NUMERIC}, constraints=(_SAME,))
        for target in _BINARY_NUMERIC
    ),
    *(OpRule(target, "elementwise", dtypes={"": NUMERIC}) for target in _UNARY_NUMERIC),
    OpRule("aten.clamp.Tensor", "elementwise"),
    OpRule("aten.rsub.Scalar", "elementwise", constraints=(_ALPHA,)),
    *(
        OpRule(
            f"aten.{op}.Tensor", "elementwise", dtypes={"": NUMERIC}, constraints=(_ALPHA, _SAME)
        )
        for op in ("add", "sub")
    ),
    *(OpRule(f"aten.{op}.Scalar", "elementwise", constraints=(_ALPHA,)) for op in ("add", "sub")),
    OpRule("aten.mul.Scalar", "elementwise"),
    *(
        OpRule(
            f"aten.{op}.Tensor",
            "elementwise",
            dtypes={"": ANY if op in ("eq", "ne") else NUMERIC},
            constraints=(_SAME,),
        )
        for op in _COMPARISONS
    ),
    *(OpRule(f"aten.{op}.Scalar", "elementwise", dtypes={"": NUMERIC}) for op in _COMPARISONS),
    *(OpRule(target, "elementwise", dtypes={"": BOOL}) for target in _LOGICAL),
    OpRule(
        "aten.where.self",
        "elementwise",
        dtypes={"": ANY, "condition": BOOL},
        constraints=(_SAME,),
    ),
    OpRule("aten.masked_fill.Scalar", "elementwise", dtypes={"self": FLOAT, "mask": BOOL}),
)

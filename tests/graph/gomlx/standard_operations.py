"""GoMLX's operations, and the operations of the graph builder that do the same.

The standard ones are those of the interface ``StandardOps``, which every backend of GoMLX is asked
for; the others are optional: control flow, sizes at run time, and whole layers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StandardOperation:
    """An operation of GoMLX.

    Attributes:
        name: GoMLX's.
        operations: Names in ``capabilities()`` of the graph builder, which together do the same.
        note: What differs, or why there is no such operation; empty if nothing does.
        is_refused: Whether the builder refuses it; ``operations`` then have the reason.
    """

    name: str
    operations: tuple[str, ...]
    note: str = ""
    is_refused: bool = False


def _same(**names: str) -> list[StandardOperation]:
    return [StandardOperation(name, (operation,)) for name, operation in names.items()]


def _composed(name: str, *operations: str, note: str = "") -> list[StandardOperation]:
    return [StandardOperation(name, operations, note)]


def _refused(note: str, **names: str) -> list[StandardOperation]:
    return [StandardOperation(name, (other,), note, True) for name, other in names.items()]


_TOTAL_ORDER = "total_order=True"
_COMPLEX = "Core ML has no complex numbers"
_TRAINING = "for training; made of reductions and arithmetic where it is wanted"

STANDARD_OPERATIONS = sorted(
    [
        *_same(
            Abs="abs",
            Add="add",
            Atan2="atan2",
            BatchNormForInference="batch_norm_inference",
            BitCount="popcnt",
            BitwiseAnd="and",
            BitwiseNot="not",
            BitwiseOr="or",
            BitwiseXor="xor",
            BroadcastInDim="broadcast_in_dim",
            Ceil="ceil",
            Clamp="clamp",
            Clz="count_leading_zeros",
            Concatenate="concatenate",
            ConvGeneral="convolution",
            ConvertDType="convert",
            Cos="cosine",
            Div="divide",
            DotGeneral="dot_general",
            DynamicSlice="dynamic_slice",
            DynamicUpdateSlice="dynamic_update_slice",
            Equal="equal",
            Erf="erf",
            Exp="exponential",
            Expm1="exponential_minus_one",
            Floor="floor",
            Gather="gather",
            GreaterOrEqual="greater_equal",
            GreaterThan="greater",
            Identity="identity",
            Iota="iota",
            IsFinite="is_finite",
            IsNaN="is_nan",
            LessOrEqual="less_equal",
            LessThan="less",
            Log="log",
            Log1p="log_plus_one",
            LogicalAnd="and",
            LogicalNot="not",
            LogicalOr="or",
            LogicalXor="xor",
            Logistic="logistic",
            Max="maximum",
            Min="minimum",
            Mul="multiply",
            Neg="negate",
            NotEqual="not_equal",
            OptimizationBarrier="optimization_barrier",
            Pad="pad",
            Pow="power",
            ReduceBitwiseAnd="reduce_and",
            ReduceBitwiseOr="reduce_or",
            ReduceBitwiseXor="reduce_xor",
            ReduceLogicalAnd="reduce_and",
            ReduceLogicalOr="reduce_or",
            ReduceLogicalXor="reduce_xor",
            ReduceMax="reduce_max",
            ReduceMin="reduce_min",
            ReduceProduct="reduce_product",
            ReduceSum="reduce_sum",
            ReduceWindow="reduce_window",
            Rem="remainder",
            Reshape="reshape",
            Reverse="reverse",
            Round="round_nearest_even",
            Rsqrt="rsqrt",
            ShiftLeft="shift_left",
            ShiftRightArithmetic="shift_right_arithmetic",
            ShiftRightLogical="shift_right_logical",
            Sign="sign",
            Sin="sine",
            Slice="slice",
            Sqrt="sqrt",
            Sub="subtract",
            Tanh="tanh",
            Transpose="transpose",
            Where="select",
        ),
        *_composed("ArgMinMax", "arg_max", "arg_min"),
        *_composed("Bitcast", "bitcast_convert", note="between element types of equal width"),
        *_composed("CumSum", "cumulative_sum", "subtract", note="exclusive sums lack the element"),
        *_composed("DynamicShape", "get_dimension_size", "concatenate"),
        *_composed("EqualTotalOrder", "equal", note=_TOTAL_ORDER),
        *_composed("GreaterOrEqualTotalOrder", "greater_equal", note=_TOTAL_ORDER),
        *_composed("GreaterThanTotalOrder", "greater", note=_TOTAL_ORDER),
        *_composed("LessOrEqualTotalOrder", "less_equal", note=_TOTAL_ORDER),
        *_composed("LessThanTotalOrder", "less", note=_TOTAL_ORDER),
        *_composed("NotEqualTotalOrder", "not_equal", note=_TOTAL_ORDER),
        *_composed("RNGBitGenerator", "rng_bit_generator", note="Threefry, not Philox; 32 bits"),
        *_composed("ScatterMax", "scatter", note='body="max"'),
        *_composed("ScatterMin", "scatter", note='body="min"'),
        *_composed("ScatterSum", "scatter", note='body="add"'),
        *_composed("SchedulingBarrier", "optimization_barrier"),
        *_composed("SelectAndScatterMax", "select_and_scatter", "greater_equal"),
        *_composed("SelectAndScatterMin", "select_and_scatter", "less_equal"),
        *_refused(_COMPLEX, Complex="complex", Conj="conj", Imag="imag", Real="real", FFT="fft"),
        *_refused(
            _TRAINING,
            BatchNormForTraining="batch_norm_training",
            BatchNormGradient="batch_norm_grad",
        ),
    ],
    key=lambda operation: operation.name,
)
"""By name."""

_LAYOUT = "a weight has a row for each output"
_RUN_TIME = "sizes follow from those of the inputs"

OTHER_OPERATIONS = sorted(
    [
        *_same(
            Call="call",
            DynamicDimensionSize="get_dimension_size",
            FusedGelu="gelu",
            FusedLayerNorm="layer_norm",
            FusedScaledDotProductAttention="scaled_dot_product_attention",
            FusedSoftmax="softmax",
            If="if",
            Sort="sort",
            While="while",
        ),
        *_composed("DynamicBroadcastInDim", "dynamic_broadcast_in_dim", note=_RUN_TIME),
        *_composed("DynamicIota", "dynamic_iota", note=_RUN_TIME),
        *_composed("DynamicPad", "dynamic_pad", note=_RUN_TIME),
        *_composed("DynamicReshape", "dynamic_reshape", note=_RUN_TIME),
        *_composed(
            "FusedActivation",
            "relu",
            "silu",
            "gelu",
            "logistic",
            "tanh",
            note="others are made of arithmetic, and so are gradients",
        ),
        *_composed("FusedAttentionQKVProjection", "qkv_projection", note=_LAYOUT),
        *_composed("FusedDense", "dense", note=_LAYOUT),
        *_composed("FusedQuantizedDense", "quantized_dense", note="constant weights; " + _LAYOUT),
        *_composed("QuantizedEmbeddingLookup", "quantized_embedding", note="int8, not GGML"),
    ],
    key=lambda operation: operation.name,
)
"""By name."""

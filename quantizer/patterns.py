"""What is quantized: one table of patterns over the ATen ops of ``torch.export``.

Op names are those of ``functional_name``: in-place variants have the row of their op.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from coreml_delegate.op_rules.rule import OpCall, target_name

DATA_ARGUMENTS = ("input", "self", "tensors", "other", "mat2")
"""Schema names of the arguments that are activations, in ops without a pattern that names them."""

BATCH_NORM = "aten.batch_norm.default"


class Output(enum.Enum):
    """How the range of a pattern's result is found."""

    OBSERVED = "observed"
    OF_INPUT = "of its input"  # the op only moves data
    FLOAT = "none"  # the result is not quantized


Condition = Callable[[OpCall], str | None]


@dataclass(frozen=True, slots=True)
class Pattern:
    """An op, with what may be fused behind it.

    Attributes:
        name: For annotations and reports.
        ops: Functional names of the ops it stands for.
        weight: Schema name of the weight, or None.
        channel_axis: Axis of the weight's output channels.
        data: Schema names of the arguments that are activations.
        tail: What may be fused behind it, in this order, each where it is the only user.
        output: How the range of the result is found.
        keeps_sign: Inputs that are not negative give a result that is not.
        follows: Quantized only where its input already is. What moves data always follows, and what
            has a fixed range never does.
        condition: A further condition on the call: why it does not hold, or None.
    """

    name: str
    ops: tuple[str, ...]
    weight: str | None = None
    channel_axis: int = 0
    data: tuple[str, ...] = DATA_ARGUMENTS
    tail: tuple[str, ...] = ()
    output: Output = Output.OBSERVED
    keeps_sign: bool = False
    follows: bool = False
    condition: Condition | None = None


def functional_name(node: Node) -> str:
    """``aten.relu.default`` for a call of it or of ``aten.relu_.default``."""
    namespace, _, rest = target_name(node.target).partition(".")
    op, _, overload = rest.partition(".")
    return f"{namespace}.{op.rstrip('_') or op}.{overload}"


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name if '.' in name else f'{name}.default'}" for name in names.split())


NORMS = frozenset({BATCH_NORM})

ACTIVATIONS = frozenset(
    _aten(
        "relu relu6 leaky_relu silu elu celu selu mish hardtanh hardswish hardsigmoid gelu sigmoid "
        "log_sigmoid tanh prelu clamp clamp_min softplus"
    )
)

TAILS: Mapping[str, frozenset[str]] = MappingProxyType({"bn": NORMS, "act": ACTIVATIONS})
"""The kinds of op that are fused behind others, by the suffix they give a pattern's name."""

FIXED_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    dict.fromkeys(_aten("sigmoid hardsigmoid softmax.int _softmax"), (0.0, 1.0))
    | dict.fromkeys(_aten("tanh"), (-1.0, 1.0))
)
"""The results whose range follows from what the op computes, so that none is observed."""

_NOT_NEGATIVE = frozenset(_aten("relu relu6"))
# Schema name of the lower bound of those that have one.
_LOWER_BOUNDS = MappingProxyType(
    dict.fromkeys(_aten("hardtanh"), "min_val") | dict.fromkeys(_aten("clamp clamp_min"), "min")
)


def is_not_negative(node: Node) -> bool:
    """Whether the op's result is never negative, whatever it is given."""
    name = functional_name(node)
    if name in _NOT_NEGATIVE:
        return True
    bound = _LOWER_BOUNDS.get(name)
    return bound is not None and _number(OpCall.of(node).arguments.get(bound), -1.0) >= 0.0


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _pads_with_zero(call: OpCall) -> str | None:
    """Zero is on every grid of quantized values; other constants are not."""
    constant = call.arguments.get("mode", "constant") == "constant"
    value = call.arguments.get("value")
    if constant and value not in (None, 0, 0.0):
        return f"it pads with {value}, which may be beyond the range of its input"
    return None


_FUSED = ("bn", "act")

PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "conv",
        _aten("conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding"),
        weight="weight",
        tail=_FUSED,
    ),
    Pattern(
        "conv_transpose",
        _aten("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"),
        weight="weight",
        channel_axis=1,
        tail=_FUSED,
    ),
    Pattern("linear", _aten("linear"), weight="weight", tail=_FUSED),
    # Products by a matrix of parameters, whose columns give the outputs.
    Pattern("linear", _aten("addmm"), weight="mat2", channel_axis=1, data=("mat1",), tail=("act",)),
    Pattern("linear", _aten("mm"), weight="mat2", channel_axis=1, data=("self",), tail=("act",)),
    Pattern(
        "linear", _aten("matmul"), weight="other", channel_axis=1, data=("self",), tail=("act",)
    ),
    Pattern("embedding", _aten("embedding"), weight="weight", output=Output.FLOAT),
    Pattern("matmul", _aten("matmul bmm mm"), tail=("act",)),
    Pattern("add", _aten("add.Tensor"), tail=("act",), keeps_sign=True),
    Pattern("mul", _aten("mul.Tensor"), tail=("act",), keeps_sign=True),
    Pattern("cat", _aten("cat stack"), tail=("act",), keeps_sign=True),
    Pattern(
        "average_pool",
        _aten(
            "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
            "adaptive_avg_pool3d mean.dim"
        ),
        keeps_sign=True,
    ),
    Pattern("softmax", _aten("softmax.int _softmax")),
    # Elsewhere than behind an op, an activation is quantized for the sake of its neighbours.
    Pattern("activation", tuple(sorted(ACTIVATIONS)), follows=True),
    Pattern("pad", _aten("pad constant_pad_nd"), output=Output.OF_INPUT, condition=_pads_with_zero),
    Pattern(
        "move",
        _aten(
            "max_pool1d max_pool2d max_pool3d amax "
            "view reshape flatten.using_ints unflatten.int squeeze squeeze.dim squeeze.dims "
            "unsqueeze permute transpose.int t movedim.int movedim.intlist swapaxes numpy_T "
            "slice.Tensor select.int narrow index_select split.Tensor split.sizes "
            "split_with_sizes chunk unbind.int tensor_split.sections "
            "expand repeat flip roll contiguous clone alias detach dropout feature_dropout "
            "pixel_shuffle pixel_unshuffle channel_shuffle "
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
            "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec"
        ),
        output=Output.OF_INPUT,
    ),
)


def _by_op(patterns: Iterable[Pattern]) -> Mapping[str, tuple[Pattern, ...]]:
    table: dict[str, tuple[Pattern, ...]] = {}
    for pattern in patterns:
        for op in pattern.ops:
            table[op] = (*table.get(op, ()), pattern)
            if any(earlier.weight is None for earlier in table[op][:-1]):
                raise ImportError(f"no call of {op} is left for {pattern.name}")
    return MappingProxyType(table)


BY_OP: Mapping[str, tuple[Pattern, ...]] = _by_op(PATTERNS)
"""The patterns of each op by its functional name: the last takes what those before it do not."""


def pattern_of(call: OpCall, constants: Collection[Node]) -> Pattern | None:
    """The pattern of a call; where there are several, those with a weight take a constant matrix.

    Args:
        call: The call.
        constants: What of the graph is known before it runs.
    """
    patterns = BY_OP.get(functional_name(call.node), ())
    fitting = (p for p in patterns[:-1] if _is_matrix(call.arguments[p.weight or ""], constants))
    return next(fitting, patterns[-1] if patterns else None)


def _is_matrix(value: Any, constants: Collection[Node]) -> bool:
    return value in constants and value.meta["val"].dim() == 2

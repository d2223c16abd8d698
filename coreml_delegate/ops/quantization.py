"""How the quantizer treats an op: part of the op's record.

The quantizer works on the graph of ``torch.export``, before any decomposition. Ops that only it
sees, because ExecuTorch decomposes them before a partitioner is asked, are ``CompositeOp``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coreml_delegate.ops.call import OpCall

DATA_ARGUMENTS = ("input", "self", "tensors", "other", "mat2")
"""Schema names of the arguments that are activations, in ops without a pattern that names them."""


class Output(enum.Enum):
    """How the range of a pattern's result is found."""

    OBSERVED = "observed"
    OF_INPUT = "of its input"  # the op only moves data
    FLOAT = "none"  # the result is not quantized


class Tail(enum.StrEnum):
    """A kind of op that is fused behind others; its value is the suffix of their pattern's name."""

    NORM = "bn"
    ACTIVATION = "act"


Condition = Callable[["OpCall"], str | None]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A quantized op with the ops that may be fused behind it.

    Attributes:
        name: For annotations and reports; several ops may share it.
        weight: Schema name of the weight, or None.
        channel_axis: Axis of the weight's output channels.
        data: Schema names of the arguments that are activations.
        tail: Kinds of ops that may be fused behind it, in this order, each as the only user.
        output: How the range of the result is found.
        keeps_sign: Non-negative inputs give a non-negative result.
        follows: Quantized only if its input is. Ops that move data always follow, ops with a fixed
            range never do.
        condition: A further condition on the call: returns why it does not hold, or None.
    """

    name: str
    weight: str | None = None
    channel_axis: int = 0
    data: tuple[str, ...] = DATA_ARGUMENTS
    tail: tuple[Tail, ...] = ()
    output: Output = Output.OBSERVED
    keeps_sign: bool = False
    follows: bool = False
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How an op is quantized.

    Attributes:
        patterns: Its patterns; all but the last take a constant matrix as weight, the last takes
            the remaining calls. An op without patterns stays in float.
        fixed_range: The range of the result, if the op determines it.
        tail: Its kind when it is fused behind another op, or None.
        lower_bound: A lower bound of the result, or the schema name of the argument that is the
            bound; None if unbounded.
    """

    patterns: tuple[Pattern, ...] = ()
    fixed_range: tuple[float, float] | None = None
    tail: Tail | None = None
    lower_bound: float | str | None = None


@dataclass(frozen=True, slots=True)
class CompositeOp:
    """An op that only the quantizer sees, not the partitioner.

    Attributes:
        target: ``namespace.name.overload``.
        quantization: How the quantizer treats it.
    """

    target: str
    quantization: Quantization


IN_FLOAT = Quantization()
"""An op that is not quantized."""

MOVE = Quantization(patterns=(Pattern("move", output=Output.OF_INPUT),))
"""An op that only moves values of its input."""

AVERAGE_POOL = Quantization(patterns=(Pattern("average_pool", keeps_sign=True),))


def activation(
    *, fixed_range: tuple[float, float] | None = None, lower_bound: float | str | None = None
) -> Quantization:
    """An activation: fused behind other ops; otherwise quantized only if its input is."""
    patterns = (Pattern("activation", follows=True),)
    return Quantization(patterns, fixed_range, Tail.ACTIVATION, lower_bound)

"""Comparisons of elements."""

from __future__ import annotations

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, ordered
from coreml_delegate.graph.emitter import Emitter, elementwise, operation
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.tensor_types import ALL, DType
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.functions import sign_bit

OPS = {
    "EQ": "equal",
    "NE": "not_equal",
    "LT": "less",
    "LE": "less_equal",
    "GT": "greater",
    "GE": "greater_equal",
}
"""MIL's ops by StableHLO's names of directions."""

MIRRORED = {"EQ": "EQ", "NE": "NE", "LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
"""The direction that holds of exchanged operands."""


def _compose_compare(c: Composer, node: Node, x: Var, y: Var) -> Var:
    dtype, direction = node.types[0].dtype, node["direction"]
    if node["total_order"]:
        return _compare_in_total_order(c, direction, dtype, x, y)
    op = getattr(mb, OPS[direction])
    if dtype is DType.BOOL:
        return op(x=mb.cast(x=x, dtype="int32"), y=mb.cast(x=y, dtype="int32"))
    if direction in ("EQ", "NE"):
        return op(x=x, y=y)
    return op(x=ordered(x, dtype), y=ordered(y, dtype))


def _compare_in_total_order(c: Composer, direction: str, dtype: DType, x: Var, y: Var) -> Var:
    """Compare floats in the total order -infinity < ... < -0 < 0 < ... < infinity < NaN."""
    if direction in ("GT", "LE"):
        return _compare_in_total_order(c, {"GT": "LT", "LE": "GE"}[direction], dtype, y, x)
    if direction in ("NE", "GE"):
        opposite = {"NE": "EQ", "GE": "LT"}[direction]
        return mb.logical_not(x=_compare_in_total_order(c, opposite, dtype, x, y))
    x_is_nan, y_is_nan = mb.not_equal(x=x, y=x), mb.not_equal(x=y, y=y)
    x_sign, y_sign = sign_bit(x), sign_bit(y)
    is_equal = mb.equal(x=x, y=y)
    signs_differ = mb.logical_xor(x=x_sign, y=y_sign)
    if direction == "EQ":
        equal_with_sign = mb.logical_and(x=is_equal, y=mb.logical_not(x=signs_differ))
        return mb.logical_or(x=equal_with_sign, y=mb.logical_and(x=x_is_nan, y=y_is_nan))
    # Equal numbers of different signs are zeros.
    is_zero_pair = mb.logical_and(x=is_equal, y=mb.logical_and(x=signs_differ, y=x_sign))
    before_nan = mb.logical_and(x=y_is_nan, y=mb.logical_not(x=x_is_nan))
    is_less = mb.logical_or(x=mb.less(x=x, y=y), y=is_zero_pair)
    return mb.logical_or(x=is_less, y=before_nan)


class Comparison(Emitter):
    """Comparisons of elements; shapes as for ``Elementwise``.

    Comparisons with NaN are false, but for not equal. In the total order, -0 is less than 0, and
    NaN equals itself and is greater than all other floats.
    """

    @elementwise(ALL, _compose_compare)
    def compare(self, x: Value, y: Value, direction: str, total_order: bool = False) -> Value:
        """Return whether a relation holds.

        Args:
            x: Any value.
            y: A value of the same element type.
            direction: ``EQ``, ``NE``, ``LT``, ``LE``, ``GT`` or ``GE``.
            total_order: Whether floats compare in the total order.
        """
        if direction not in OPS:
            raise GraphError(
                "compare: no such direction", got=repr(direction), expected=" | ".join(OPS)
            )
        total_order = total_order and x.dtype.is_float
        return self.emit_elementwise(
            "compare", x, y, dtype=DType.BOOL, direction=direction, total_order=total_order
        )

    @operation(ALL)
    def equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements are equal."""
        return self.compare(x, y, "EQ", total_order)

    @operation(ALL)
    def not_equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements differ."""
        return self.compare(x, y, "NE", total_order)

    @operation(ALL)
    def less(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are less."""
        return self.compare(x, y, "LT", total_order)

    @operation(ALL)
    def less_equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are less or equal."""
        return self.compare(x, y, "LE", total_order)

    @operation(ALL)
    def greater(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are greater."""
        return self.compare(x, y, "GT", total_order)

    @operation(ALL)
    def greater_equal(self, x: Value, y: Value, *, total_order: bool = False) -> Value:
        """Return whether elements of ``x`` are greater or equal."""
        return self.compare(x, y, "GE", total_order)

"""int64 values of a program that exceed int32, the widest integer of Core ML.

Interval arithmetic derives bounds of integers from constants, sizes, positions of elements,
booleans and literal arguments. Integer inputs of the program are unbounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.ops.call import (
    INT32,
    NARROW,
    OpCall,
    Reason,
    ReasonCode,
    target_name,
    tensors_of,
)
from coreml_delegate.ops.constants import stored_constants
from coreml_delegate.ops.intervals import UNKNOWN, Interval, hull, product
from coreml_delegate.ops.record import numbers_fit
from coreml_delegate.patches.torch import FakeTensor
from coreml_delegate.patches.torch_ranges import ValueRanges, bound_sympy

_REMEDY = "Keep its values within int32"
_NARROW_DTYPES = NARROW | {torch.int8}
_TRACED_MINIMUM = 2  # torch assumes it for every size while it traces; sizes may be smaller


class WideIntegers:
    """Finds the int64 values of a program that exceed int32.

    ExecuTorch passes partitioners a program with fake state, without values; so the bounds of
    constants are noted earlier, in ATen dialect, by their names in the state.
    """

    def __init__(self) -> None:
        self._constants: dict[str, Interval] = {}
        self._has_literals = False

    def note(self, program: ExportedProgram) -> None:
        """Note the bounds of a program's constants.

        Args:
            program: In ATen dialect, or edge dialect with its real state.
        """
        for _, key, value in stored_constants(program):
            self._constants[key] = self._constant(key, value)
        calls = (node for node in program.graph.nodes if node.op == "call_function")
        self._has_literals |= any(numbers_fit(OpCall.of(node)) is not None for node in calls)

    def obstacles(
        self, program: ExportedProgram, values: Mapping[str, torch.Tensor] | None = None
    ) -> dict[Node, Reason]:
        """Return the calls with an argument or result beyond int32, with the reason.

        Args:
            program: In ATen or edge dialect.
            values: Real values of its parameters, buffers and constants by name, as far as they are
                at hand.
        """
        values = values or {}
        ranges = self.ranges(program, values)
        wide: dict[Node, Reason] = {}
        for node, key, value in _constants_of(program):
            reason = self._constant_reason(node, key, values.get(key, value), ranges.get(node))
            if reason is not None:
                wide[node] = reason
        reasons: dict[Node, Reason] = {}
        for node in program.graph.nodes:
            if node.op != "call_function":
                continue
            reason = (
                next((wide[source] for source in node.all_input_nodes if source in wide), None)
                or _result_reason(node, ranges[node])
                or numbers_fit(OpCall.of(node))
            )
            if reason is None:
                continue
            reasons[node] = reason
            if _is_int64(node) and not _fits(ranges[node]):
                wide[node] = reason
        return reasons

    def ranges(
        self, program: ExportedProgram, values: Mapping[str, torch.Tensor]
    ) -> dict[Node, Interval]:
        """Return bounds of the integers in every result, and in every constant if at hand.

        Args:
            program: In ATen or edge dialect.
            values: As for ``obstacles``.
        """
        bounds: dict[Node, Interval] = {}
        for node, key, value in _constants_of(program):
            interval = self._constant(key, values.get(key, value))
            if interval.is_known:
                bounds[node] = interval
        sizes = _size_ranges(program)
        for node in program.graph.nodes:
            if node.op == "call_function":
                bounds[node] = _range_of(_Operands(OpCall.of(node), bounds, sizes))
        return bounds

    def _constant(self, key: str, value: torch.Tensor | None) -> Interval:
        interval = _value_range(value)
        return interval if interval.is_known else self._constants.get(key, UNKNOWN)

    def _constant_reason(
        self, node: Node, key: str, value: torch.Tensor | None, interval: Interval | None
    ) -> Reason | None:
        if interval is not None and _is_beyond(interval):
            text = f"constant {node.name!r} has int64 values {interval}"
        elif self._has_literals and key not in self._constants and _is_fake_integer(value):
            # ExecuTorch's lowering to edge dialect makes constants of numbers, perhaps of that one.
            text = f"constant {node.name!r} is a number that may be beyond int32"
        else:
            return None
        return _reason(text)


def _constants_of(program: ExportedProgram) -> Iterator[tuple[Node, str, torch.Tensor | None]]:
    """Yield the stored constants, and constant attributes, as branches have them."""
    yield from stored_constants(program)
    for node in program.graph.find_nodes(op="get_attr"):
        value = getattr(program.graph_module, str(node.target), None)
        if isinstance(value, torch.Tensor):
            yield node, str(node.target), value


def _reason(text: str) -> Reason:
    return Reason(ReasonCode.DTYPE, f"{text}, Core ML has int32", remedy=_REMEDY)


def _result_reason(node: Node, values: Interval) -> Reason | None:
    if not _is_int64(node) or not _is_beyond(values):
        return None
    return _reason(f"{node.name!r} can have int64 values {values}")


def _fits(values: Interval) -> bool:
    return values.is_within(INT32.min, INT32.max)


def _is_beyond(values: Interval) -> bool:
    return values.is_known and not _fits(values)


def _value_range(value: torch.Tensor | None) -> Interval:
    """Return the range of values of an integer tensor; unknown for other tensors."""
    if value is None or isinstance(value, FakeTensor) or not value.numel():
        return UNKNOWN
    if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        return UNKNOWN
    low, high = (int(limit) for limit in torch.aminmax(value))
    return Interval(low, high)


def _is_int64(node: Node) -> bool:
    return any(tensor.dtype is torch.int64 for tensor in tensors_of(node.meta.get("val")))


def _is_fake_integer(value: torch.Tensor | None) -> bool:
    return isinstance(value, FakeTensor) and value.dtype is torch.int64 and value.dim() == 0


# Sizes


_SizeRanges = Mapping[Any, ValueRanges[Any]]


def _size_ranges(program: ExportedProgram) -> _SizeRanges:
    """Return the range of every symbol; it starts at 0 if it starts at 2 because of tracing."""
    return {
        symbol: ValueRanges(0, bounds.upper) if bounds.lower == _TRACED_MINIMUM else bounds
        for symbol, bounds in program.range_constraints.items()
    }


def _size_range(size: Any, ranges: _SizeRanges) -> Interval:
    """Return the bounds of a number, which may be symbolic."""
    if isinstance(size, int):
        return Interval.point(int(size))
    if not isinstance(size, torch.SymInt):
        return UNKNOWN
    bounds: Any = bound_sympy(size.node.expr, dict(ranges))
    limits = (bounds.lower, bounds.upper)
    return Interval(*(int(b) if isinstance(b, sympy.Integer) else None for b in limits))


# Operations


@dataclass(frozen=True, slots=True)
class _Operands:
    """Bounds of the arguments of a call.

    Attributes:
        sizes: Ranges of the symbols in sizes.
    """

    call: OpCall
    ranges: Mapping[Node, Interval]
    sizes: _SizeRanges

    def of(self, name: str) -> Interval:
        """Bounds of an argument; unknown if it is omitted."""
        return self._value(self.call.arguments.get(name))

    def __getitem__(self, name: str) -> Any:
        """An argument itself."""
        return self.call.arguments.get(name)

    def _value(self, value: Any) -> Interval:
        if isinstance(value, list | tuple):
            return hull(self._value(item) for item in value)
        if not isinstance(value, Node):
            return _size_range(value, self.sizes)
        if value in self.ranges:
            return self.ranges[value]
        traced = value.meta.get("val")
        if isinstance(traced, torch.Tensor):
            return _dtype_range(traced.dtype)
        return _size_range(traced, self.sizes)

    def first(self) -> Interval:
        """Bounds of the first argument."""
        return self._value(next(iter(self.call.node.args), None))

    def size(self, dim: Any, name: str = "self") -> Interval:
        """Bounds of an argument's number of elements along dimensions, None for all."""
        tensor = self.call.tensor(name)
        if tensor is None:
            return UNKNOWN
        dims = range(tensor.dim()) if dim is None or dim == [] else dim
        listed = [dims] if isinstance(dims, int) else dims
        if not tensor.dim():
            return Interval.point(1)
        return product(_size_range(tensor.shape[d], self.sizes) for d in listed)


_Transfer = Callable[[_Operands], Interval]


def _position(tensor: str = "self") -> _Transfer:
    """Bounds of a position along ``dim``, or among all elements."""
    return lambda o: Interval(0, (o.size(o["dim"], tensor) - Interval.point(1)).high)


def _values_of(*names: str) -> _Transfer:
    """Bounds of elements of some arguments."""
    return lambda o: hull(o.of(name) for name in names if o[name] is not None)


def _times_alpha(o: _Operands) -> Interval:
    return o.of("other") if o["alpha"] is None else o.of("other") * o.of("alpha")


def _arange(o: _Operands) -> Interval:
    one = Interval.point(1)
    start = Interval.point(0) if o["start"] is None else o.of("start")
    step = one if o["step"] is None else o.of("step")
    if step.low is not None and step.low > 0:
        return Interval(start.low, start.maximum(o.of("end") - one).high)
    if step.high is not None and step.high < 0:
        return Interval(start.minimum(o.of("end") + one).low, start.high)
    return UNKNOWN


def _clamp(o: _Operands) -> Interval:
    bounded = o.of("self")
    if o["min"] is not None:
        bounded = bounded.maximum(o.of("min"))
    return bounded if o["max"] is None else bounded.minimum(o.of("max"))


def _power(o: _Operands) -> Interval:
    exponent = o["exponent"]
    small = isinstance(exponent, int) and 0 <= exponent <= _HIGHEST_POWER
    return o.of("self") ** exponent if small else UNKNOWN


def _quotient(o: _Operands) -> Interval:
    x, y = o.of("self"), o.of("other")
    return x.truncated_divide(y) if o["rounding_mode"] == "trunc" else x // y


def _sum(o: _Operands) -> Interval:
    return o.of("self") * o.size(o["dim"])


def _running_sum(o: _Operands) -> Interval:
    return o.of("self") | _sum(o)


def _product(o: _Operands) -> Interval:
    """Bounds of products of up to as many elements as there are along ``dim``."""
    return _power_of_magnitude(o.of("self"), o.size(o["dim"]).high)


def _power_of_magnitude(values: Interval, count: int | None) -> Interval:
    largest = abs(values).high
    if largest is None or count is None:
        return UNKNOWN
    limit = max(largest, 1) ** min(count, _BITS)  # of 64 factors, only 0 and 1 stay within int64
    return Interval(0 if values.low is not None and values.low >= 0 else -limit, limit)


def _bits(o: _Operands) -> Interval:
    """Bounds of ``a | b`` and ``a ^ b``: as many bits as the wider operand has, and its sign."""
    both = o.of("self") | o.of("other")
    if both.low is None or both.high is None:
        return UNKNOWN
    limit = (1 << max(both.low.bit_length(), both.high.bit_length())) - 1
    return Interval(0 if both.low >= 0 else -limit - 1, limit)


def _index_put(o: _Operands) -> Interval:
    if not o["accumulate"]:
        return o.of("self") | o.of("values")
    return o.of("self") | (o.of("self") + o.of("values") * o.size(None, "values"))


def _sums_of_groups(source: str) -> _Transfer:
    """Bounds of ``self`` with elements of another argument added."""
    return lambda o: o.of("self") | (o.of("self") + o.of(source) * o.size(o["dim"], source))


def _reduced_groups(o: _Operands) -> Interval:
    """A mean is computed from a sum."""
    values = o.of("self") | o.of("src")
    if o["reduce"] in ("amax", "amin"):
        return values
    if o["reduce"] == "prod":
        count = o.size(o["dim"], "src").high
        return _power_of_magnitude(values, None if count is None else count + 1)
    return _sums_of_groups("src")(o)


def _getitem(o: _Operands) -> Interval:
    """Bounds of one of several results."""
    source, number = o["arg0"], o["arg1"]
    name = target_name(source.target) if isinstance(source, Node) else ""
    if not isinstance(source, Node) or name not in _SPLITS | _WITH_POSITIONS:
        return UNKNOWN
    of_source = _Operands(OpCall.of(source), o.ranges, o.sizes)
    return _position()(of_source) if number == 1 and name in _WITH_POSITIONS else of_source.first()


_HIGHEST_POWER = 8
_BITS = 64
_NAMESPACES = ("aten", "dim_order_ops", "operator")
# Ops with several results: all values, or values and their positions.
_SPLITS = frozenset(
    f"aten.{op}"
    for op in (
        "split.Tensor",
        "split_copy.Tensor",
        "split_with_sizes.default",
        "split_with_sizes_copy.default",
        "unbind.int",
        "unbind_copy.int",
    )
)
_WITH_POSITIONS = frozenset(
    f"aten.{op}" for op in ("max.dim", "min.dim", "sort.default", "sort.stable", "topk.default")
)
# Ops whose result has only elements of the first argument.
_MOVES = """
    _clone_dim_order _to _to_dim_order alias amax amin as_strided clone detach diagonal expand flip
    gather index index_select lift_fresh permute repeat reshape roll select slice squeeze t to
    transpose unfold unsqueeze view
"""
_TRANSFERS: Mapping[str, _Transfer] = {
    **dict.fromkeys(_MOVES.split(), _Operands.first),
    "abs": lambda o: abs(o.of("self")),
    "add": lambda o: o.of("self") + _times_alpha(o),
    "arange": _arange,
    "argmax": _position(),
    "argmin": _position(),
    "bitwise_and": lambda o: o.of("self").bitwise_and(o.of("other")),
    "bitwise_not": lambda o: Interval.point(-1) - o.of("self"),
    "bitwise_or": _bits,
    "bitwise_xor": _bits,
    "cat": _values_of("tensors"),
    "clamp": _clamp,
    "clamp_max": _clamp,
    "clamp_min": _clamp,
    "constant_pad_nd": _values_of("self", "value"),
    "copy": _values_of("src"),
    "cumprod": _product,
    "cumsum": _running_sum,
    "diagonal_scatter": _values_of("self", "src"),
    "div": _quotient,
    "fill": _values_of("value"),
    "floor_divide": _quotient,
    "fmod": lambda o: o.of("self").truncated_modulo(o.of("other")),
    "full": _values_of("fill_value"),
    "full_like": _values_of("fill_value"),
    "getitem": _getitem,
    "index_add": _sums_of_groups("source"),
    "index_put": _index_put,
    "masked_fill": _values_of("self", "value"),
    "masked_scatter": _values_of("self", "source"),
    "max": _values_of("self", "other"),
    "maximum": lambda o: o.of("self").maximum(o.of("other")),
    "min": _values_of("self", "other"),
    "minimum": lambda o: o.of("self").minimum(o.of("other")),
    "mul": lambda o: o.of("self") * o.of("other"),
    "neg": lambda o: -o.of("self"),
    "new_zeros": lambda _: Interval.point(0),
    "ones_like": lambda _: Interval.point(1),
    "pad": lambda o: _values_of("self", "value")(o) | Interval.point(0),
    "pow": _power,
    "prod": _product,
    "remainder": lambda o: o.of("self") % o.of("other"),
    "rsub": lambda o: o.of("other") - o.of("self") * o.of("alpha"),
    "scalar_tensor": _values_of("s"),
    "scatter": _values_of("self", "src", "value"),
    "scatter_add": _sums_of_groups("src"),
    "scatter_reduce": _reduced_groups,
    "searchsorted": lambda o: Interval(0, o.size([-1], "sorted_sequence").high),
    "select_scatter": _values_of("self", "src"),
    "sign": lambda o: o.of("self").sign(),
    "slice_scatter": _values_of("self", "src"),
    "square": lambda o: o.of("self") ** 2,
    "stack": _values_of("tensors"),
    "sub": lambda o: o.of("self") - _times_alpha(o),
    "sum": _sum,
    "where": _values_of("self", "other"),
    "zeros_like": lambda _: Interval.point(0),
}
"""Bounds of a call's integers, by the op's name without namespace, overload and ``_copy``."""


def _dtype_range(dtype: torch.dtype) -> Interval:
    """Range of bool and integers of 8 or 16 bits; unknown for wider dtypes."""
    if dtype is torch.bool:
        return Interval(0, 1)
    if dtype not in _NARROW_DTYPES:
        return UNKNOWN
    limits = torch.iinfo(dtype)
    return Interval(limits.min, limits.max)


def _range_of(operands: _Operands) -> Interval:
    """Return the bounds of the integers in all results of a call."""
    node = operands.call.node
    dtypes = {tensor.dtype for tensor in tensors_of(node.meta.get("val"))}
    if not dtypes:
        return _size_range(node.meta.get("val"), operands.sizes)
    dtype = next(iter(dtypes))
    if len(dtypes) > 1 or dtype.is_floating_point or dtype.is_complex:
        return UNKNOWN
    transfer = _transfer_of(node)
    if dtype is torch.bool or transfer is None:
        return _dtype_range(dtype)
    return _cast(transfer(operands), dtype)


def _transfer_of(node: Node) -> _Transfer | None:
    name = target_name(node.target)
    namespace, _, qualified = name.partition(".")
    op, _, overload = qualified.partition(".")
    if namespace not in _NAMESPACES or (op.startswith("view") and overload == "dtype"):
        return None
    return _TRANSFERS.get(op.removesuffix("_copy"))


def _cast(values: Interval, dtype: torch.dtype) -> Interval:
    """Return the bounds of ``values`` cast to a dtype, which may wrap around."""
    limits = torch.iinfo(dtype)
    if values.is_within(limits.min, limits.max):
        return values
    if dtype is torch.int64 and values.is_known:
        return Interval(limits.min, limits.max)
    return values if dtype is torch.int64 else _dtype_range(dtype)

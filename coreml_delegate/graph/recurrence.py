"""LSTM layers written as loops over the steps of a sequence, as by ``lax.scan``.

Core ML has one op for all steps. A loop becomes this op if it counts from 0, takes row after row of
a sequence, and computes an LSTM cell with constant weights from the row x and the states h and c:
``c <- f * c + i * tanh(g)``, ``h <- o * tanh(c)``, where i, f and o are the logistic functions of
``W x + R h + b``, and g is ``W x + R h + b`` with its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.graph.compose import Composer, Var, const
from coreml_delegate.graph.node import Closure, Node, OperationRecord, Value
from coreml_delegate.graph.patterns import Pattern, logistic_of
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.graph.views import View, is_number, number
from coreml_delegate.mil.compose import mb

Array: TypeAlias = NDArray[Any]

_SEQUENCE, _HIDDEN, _CELL, _COUNT = "sequence", "hidden", "cell", "count"


def _compose(
    _: Composer, node: Node, x: Var, hidden: Var, cell: Var, *unchanged: Var | None
) -> tuple[Var | None, ...]:
    weights = {
        name: const(node[name], DType.FLOAT32) for name in ("weight_ih", "weight_hh", "bias")
    }
    steps, last_hidden, last_cell = mb.lstm(
        x=x, initial_h=hidden, initial_c=cell, output_sequence=True, **weights
    )
    by_name: dict[str | int, Var | None] = {
        _SEQUENCE: steps,
        _HIDDEN: last_hidden,
        _CELL: last_cell,
        _COUNT: const(np.int32(node["count"])),
        **dict(enumerate(unchanged)),
    }
    return tuple(by_name[result] for result in node["results"])


_RECORD = OperationRecord(
    "lstm", frozenset({DType.FLOAT32, DType.FLOAT64}), _compose, "An LSTM layer."
)


def lstm_of(node: Node) -> Pattern | None:
    """Return the LSTM layer that a loop computes, or None."""
    loop = _Loop.of(node)
    if loop is None:
        return None
    candidates = (_Lstm(loop, *positions).pattern() for positions in loop.states())
    return next((pattern for pattern in candidates if pattern is not None), None)


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop that counts from 0.

    Attributes:
        node: The loop.
        body: The closure of its body.
        counter: Position of the counter among the loop variables.
        count: Number of iterations.
    """

    node: Node
    body: Closure
    counter: int
    count: int

    @classmethod
    def of(cls, node: Node) -> _Loop | None:
        condition, body = node.closures["condition"], node.closures["body"]
        (flag,) = condition.results
        if flag.node.name != "compare" or flag.node["direction"] != "LT":
            return None
        variable, limit = flag.node.operands
        count = number(limit)
        if variable not in condition.parameters or count is None or count < 1:
            return None
        counter = condition.parameters.index(variable)
        before, after = body.parameters[counter], body.results[counter]
        adds = after.node.name == "add" and any(
            one is before and is_number(other, 1)
            for one, other in (after.node.operands, after.node.operands[::-1])
        )
        if not adds or not is_number(node.operands[counter], 0):
            return None
        return cls(node, body, counter, int(count))

    def states(self) -> Iterator[tuple[int, int]]:
        """Yield positions of a cell state and of the hidden state computed from it."""
        after = self.body.results
        for hidden, value in enumerate(after):
            for _, tanh in self.products(value):
                if tanh.node.name == "tanh" and tanh.node.operands[0] in after:
                    yield after.index(tanh.node.operands[0]), hidden

    def products(self, value: Value) -> Iterator[tuple[Value, Value]]:
        """Yield the factors of a product in both orders, if they have its type."""
        node = value.node
        if node.name == "multiply" and node.scope is self.body.scope:
            one, other = node.operands
            if one.type == other.type == value.type:
                yield one, other
                yield other, one

    def from_outside(self, value: Value) -> Value | None:
        """Return the value outside of the loop that a loop-invariant value is, else None."""
        if value in self.body.parameters:
            position = self.body.parameters.index(value)
            unchanged = self.body.results[position] is value
            return self.node.operands[position] if unchanged else None
        return None if value.node.scope is self.body.scope else value

    def are_row_starts(self, starts: Sequence[Value]) -> bool:
        """Whether start indices are the counter, then 0 for all other dimensions."""
        first, *other_starts = starts
        counter = self.body.parameters[self.counter]
        return first is counter and all(is_number(start, 0) for start in other_starts)

    def sequence_of(self, value: Value) -> Value | None:
        """Return the sequence [steps, batch, width] whose current row a value is, or None."""
        row = View.of(value, self.body.scope).origin()
        node = row.value.node
        if row.name != "dynamic_slice" or not row.keeps_order():
            return None
        rows, *starts = node.operands
        sequence = self.from_outside(rows)
        if sequence is None or sequence.rank != 3 or not self.are_row_starts(starts):
            return None
        fits = sequence.shape == (self.count, *value.shape)
        return sequence if fits and node.type.shape == (1, *value.shape) else None

    def array_of(self, value: Value) -> Array | None:
        """Return the elements of a rearranged constant, in the loop or outside; else None."""
        outside = self.from_outside(value)
        value = value if outside is None else outside
        node = value.node
        if node.name == "constant":
            return np.asarray(node["array"])
        if node.name not in ("broadcast_in_dim", "identity", "reshape", "transpose"):
            return None
        inner = self.array_of(node.operands[0])
        if inner is None or not value.type.is_static:
            return None
        if node.name == "transpose":
            return inner.transpose(node["permutation"])
        if node.name == "broadcast_in_dim":
            sizes = [1] * value.rank
            for axis, outer in enumerate(node["broadcast_dimensions"]):
                sizes[outer] = inner.shape[axis]
            return np.broadcast_to(inner.reshape(sizes), value.type.static_shape)
        return inner.reshape(value.type.static_shape)


@dataclass(slots=True)
class _Gate:
    """The weights of a gate, or of several concatenated gates, before the activation.

    Attributes:
        inputs: Weights of the input: [input size, width].
        hidden: Weights of the last hidden state: [units, width].
        bias: [width].
    """

    inputs: Any = 0
    hidden: Any = 0
    bias: Any = 0

    def part(self, first: int, last: int) -> _Gate:
        """Return the gate of columns ``first`` to ``last``."""
        weights = (self.inputs, self.hidden, self.bias)
        return _Gate(*(w[..., first:last] if np.ndim(w) else w for w in weights))


class _Lstm:
    """An attempt to read the body of a loop as an LSTM cell.

    Args:
        loop: The loop.
        cell: Position of the cell state among the loop variables.
        hidden: Position of the hidden state.
    """

    def __init__(self, loop: _Loop, cell: int, hidden: int) -> None:
        self._loop = loop
        self._scope = loop.body.scope
        self._positions = cell, hidden
        self._cell, self._new_cell = loop.body.parameters[cell], loop.body.results[cell]
        self._hidden, self._new_hidden = loop.body.parameters[hidden], loop.body.results[hidden]
        self._sequence: Value | None = None
        self._parts: dict[Value, _Gate | None] = {}

    def pattern(self) -> Pattern | None:
        """Return the layer, or None if the body computes something else."""
        gates, results = self._gates(), self._results()
        if gates is None or results is None or self._sequence is None:
            return None
        inputs, units = self._sequence.type.static_shape[2], self._hidden.type.static_shape[1]
        weights, recurrent, bias = (
            np.concatenate([np.broadcast_to(part, shape) for part in parts], -1).T
            for parts, shape in (
                ([gate.inputs for gate in gates], (inputs, units)),
                ([gate.hidden for gate in gates], (units, units)),
                ([gate.bias for gate in gates], (units,)),
            )
        )
        operands = self._loop.node.operands
        unchanged = [operands[result] for result in results if isinstance(result, int)]
        unchanged_index = iter(range(len(unchanged)))
        attributes: Mapping[str, Any] = {
            "weight_ih": weights,
            "weight_hh": recurrent,
            "bias": bias,
            "count": self._loop.count,
            "results": [next(unchanged_index) if isinstance(r, int) else r for r in results],
        }
        cell, hidden = (operands[position] for position in self._positions)
        return Pattern("lstm", (self._sequence, hidden, cell, *unchanged), attributes, _RECORD)

    def _gates(self) -> list[_Gate] | None:
        """Return the gates in MIL's order: input, forget, output, cell."""
        state, new = self._hidden, self._new_cell
        if not state.type == self._new_hidden.type == self._cell.type == new.type:
            return None
        if (
            state.rank != 2
            or not state.type.is_static
            or 0 in state.shape
            or state.dtype not in _RECORD.dtypes
        ):
            return None
        if new.node.name != "add" or new.node.scope is not self._scope:
            return None
        output = self._factor(self._new_hidden, lambda v: _tanh_operand(v) is new)
        for scaled_cell, scaled_update in (new.node.operands, new.node.operands[::-1]):
            forget = self._factor(scaled_cell, lambda v: v is self._cell)
            for gate, tanh in self._loop.products(scaled_update):
                tanh_operand = _tanh_operand(tanh)
                if forget is None or output is None or tanh_operand is None:
                    continue
                input_gate, cell_gate = self._gate(gate), self._affine(tanh_operand)
                if input_gate is not None and cell_gate is not None:
                    return [input_gate, forget, output, cell_gate]
        return None

    def _factor(self, product: Value, is_other: Callable[[Value], bool]) -> _Gate | None:
        """Return the gate that a product scales another value by."""
        pairs = self._loop.products(product)
        return next((self._gate(gate) for gate, other in pairs if is_other(other)), None)

    def _gate(self, value: Value) -> _Gate | None:
        """Return the gate g of a value ``logistic(g)``, or None."""
        node = value.node
        if node.scope is not self._scope:
            return None
        if node.name == "logistic":
            return self._affine(node.operands[0])
        logistic = logistic_of(node) if node.name == "divide" else None
        return None if logistic is None else self._affine(logistic.operands[0])

    def _affine(self, value: Value) -> _Gate | None:
        """Return the weights of a value ``W x + R h + b``, or None."""
        if value not in self._parts:
            self._parts[value] = self._read_affine(value)
        return self._parts[value]

    def _read_affine(self, value: Value) -> _Gate | None:
        node = value.node
        if node.scope is not self._scope:
            return self._bias(value)
        if node.name == "slice":
            (source,) = node.operands
            rows, columns = zip(node["start"], node["limit"], node["strides"], strict=True)
            gate = self._affine(source) if rows == (0, source.shape[0], 1) else None
            return None if gate is None or columns[2] != 1 else gate.part(*columns[:2])
        if node.name == "add":
            one, other = (self._affine(operand) for operand in node.operands)
            if one is None or other is None:
                return None
            return _Gate(
                one.inputs + other.inputs, one.hidden + other.hidden, one.bias + other.bias
            )
        return self._product(node) if node.name == "dot_general" else self._bias(value)

    def _bias(self, value: Value) -> _Gate | None:
        array = self._loop.array_of(value)
        if array is None or array.ndim != 2 or not (array == array[:1]).all():
            return None
        return _Gate(bias=array[0])

    def _product(self, node: Node) -> _Gate | None:
        x, weight = node.operands
        array = self._loop.array_of(weight)
        over_x, over_weight = node["contracting"]
        if array is None or array.ndim != 2 or x.rank != 2 or list(over_x) != [1]:
            return None
        (columns,) = over_weight
        array = array if columns == 0 else array.T
        parts = [x]
        if x.node.name == "concatenate" and x.node.scope is self._scope:
            if x.node["dimension"] != 1:
                return None
            parts = list(x.node.operands)
        gate, first = _Gate(), 0
        for part in parts:
            last = first + int(part.shape[1])
            if part is self._hidden:
                gate.hidden = gate.hidden + array[first:last]
            elif self._is_input(part):
                gate.inputs = gate.inputs + array[first:last]
            else:
                return None
            first = last
        return gate

    def _is_input(self, value: Value) -> bool:
        sequence = self._loop.sequence_of(value)
        if sequence is None or self._sequence not in (None, sequence):
            return False
        self._sequence = sequence
        return True

    def _results(self) -> list[str | int] | None:
        """Return each result of the loop: a result of the layer, or the position of an operand."""
        cell, hidden = self._positions
        named = {self._loop.counter: _COUNT, cell: _CELL, hidden: _HIDDEN}
        results: list[str | int] = []
        variables = zip(self._loop.body.parameters, self._loop.body.results, strict=True)
        for n, (before, after) in enumerate(variables):
            if after is before:
                results.append(n)
            elif n in named:
                results.append(named[n])
            elif self._collects(before, after):
                results.append(_SEQUENCE)
            else:
                return None
        return results

    def _collects(self, before: Value, after: Value) -> bool:
        """Whether a result is a sequence into which each iteration writes its hidden state."""
        node, row = after.node, self._new_hidden
        if node.name != "dynamic_update_slice" or node.scope is not self._scope:
            return False
        rows, update, *starts = node.operands
        added = View.of(update, self._scope).origin()
        return (
            rows is before
            and after.shape == (self._loop.count, *row.shape)
            and update.shape == (1, *row.shape)
            and added.value is row
            and added.keeps_order()
            and self._loop.are_row_starts(starts)
        )


def _tanh_operand(value: Value) -> Value | None:
    """Return x of ``tanh(x)``, or None."""
    return value.node.operands[0] if value.node.name == "tanh" else None

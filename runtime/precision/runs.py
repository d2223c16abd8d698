"""Runs of a program with selected operations in fp32, and their accuracy.

Operations that were translated from a common call are chosen together: they are one *unit*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from coreml_delegate.formats.blob import unflatten
from coreml_delegate.formats.blob_layout import DebugInfo, MethodMetadata, debug_info_in
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.runtime.delegate import CoreMLDelegate, blob_files, resolve
from coreml_delegate.runtime.diagnosis import energy, ratio_db, signals_and_errors
from coreml_delegate.runtime.engines.reference import REFERENCE, Listener
from coreml_delegate.runtime.engines.reference.interpreter import TracedValue
from coreml_delegate.runtime.mil.costs import Work
from coreml_delegate.runtime.mil.mixed_precision import (
    MixedPrecision,
    float_casts,
    fp16_ops,
    in_fp16,
    in_fp32,
    original_name,
)
from coreml_delegate.runtime.mil.program import Function, Op, Ref
from coreml_delegate.runtime.mil.widening import widen_function
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.observation import debug_symbols
from coreml_delegate.runtime.program.delegate_interface import DelegatePayload
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.ptd import Sources
from coreml_delegate.runtime.program.pte import Source
from coreml_delegate.runtime.program.signature import output_names

Sample = Sequence[Any]
"""Inputs of one call, flattened."""

Outputs = Sequence[object]
"""Outputs of one call, flattened."""

MIN_RUNS, MAX_RUNS = 24, 120
"""Runs of a search: it then ends with the smallest set that reaches the target so far."""

# Time in units of floating-point operations, at 30 per nanosecond, on one core: an operation is
# lowered in 70 ms, and takes 0.3 ms in a run beside its arithmetic.
_FLOPS_OF_A_LOWERED_OPERATION = 2_000_000_000
_FLOPS_OF_A_STEP = 10_000_000


@dataclass(frozen=True, slots=True)
class Unit:
    """Operations with a call in common; they are chosen together.

    Attributes:
        delegate: Number of the delegate.
        ops: The ops, in order.
        handles: Debug handles of their calls.
        sources: The units that compute operands of these ops.
        flops: Estimated floating-point operations.
    """

    delegate: int
    ops: tuple[Op, ...]
    handles: tuple[int, ...]
    sources: frozenset[int]
    flops: int

    @property
    def names(self) -> list[str]:
        """Names of the first outputs of the ops."""
        return [op.outputs[0].name for op in self.ops]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of the worst value of a unit.

    Attributes:
        op: The op with this value; None without a value in floating point.
        fp16: The element with the largest error, computed in fp16 from rounded operands.
        fp32: The same element, computed in fp32.
        sqnr_db: Ratio of signal to error of the value, in dB.
    """

    op: Op | None = None
    fp16: float = 0.0
    fp32: float = 0.0
    sqnr_db: float = math.inf


class Runs:
    """Runs of a program on samples, each with other units in fp32.

    Attributes:
        units: The units of all delegates.
        flops: Estimated floating-point operations of all delegates.
        known: Accuracy of each output by name, for each set of units that has run.
    """

    def __init__(self, program: MeasuredProgram, samples: Sequence[Sample]) -> None:
        self._program = program
        self._samples = samples
        self.units: list[Unit] = []
        self.flops = 0
        self._estimate([{} for _ in program.delegates])
        self.known: dict[frozenset[int], Mapping[str, float]] = {}

    def _estimate(self, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """Set the units and their work, with the shapes of values of each delegate."""
        self.units, self.flops = [], 0
        for number, delegate in enumerate(self._program.delegates):
            work = Work(delegate.function, shapes[number])
            counts = [work.flops(index) or 0 for index in range(len(delegate.function.block.ops))]
            self.flops += sum(counts)
            self.units += _units(number, delegate, counts, len(self.units))

    @property
    def count(self) -> int:
        """Number of runs so far."""
        return len(self.known)

    @property
    def allowed(self) -> int:
        """Number of runs that take about as long as a lowering, within limits.

        It depends on the program only, so that results are the same on every machine.
        """
        per_run = len(self._samples) * (self.flops + len(self.units) * _FLOPS_OF_A_STEP)
        lowering = len(self.units) * _FLOPS_OF_A_LOWERED_OPERATION
        return min(max(lowering // max(per_run, 1), MIN_RUNS), MAX_RUNS)

    @cached_property
    def _expected(self) -> list[Outputs]:
        """The outputs of every sample, computed in fp32."""
        for delegate in self._program.delegates:
            delegate.use_in_fp32()
        return self._run()

    def _run(self) -> list[Outputs]:
        """Return the outputs of every sample; each run draws the same random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [self._program.run(sample) for sample in self._samples]

    def accuracy(self, chosen: frozenset[int]) -> Mapping[str, float]:
        """Return the ratio of signal to error of each output, with chosen units in fp32."""
        if chosen not in self.known:
            expected = self._expected
            for number, delegate in enumerate(self._program.delegates):
                units = (self.units[unit] for unit in chosen)
                names = [name for unit in units if unit.delegate == number for name in unit.names]
                delegate.use(delegate.mixed.mix(names))
            actual = self._run()
            self.known[chosen] = dict(
                zip(self._program.output_names, _ratios(expected, actual), strict=True)
            )
        return self.known[chosen]

    def losses(self) -> list[Loss]:
        """Return the loss of each unit on operands from fp32.

        Work that depends on the sizes of inputs is known afterwards.
        """
        watches: list[_Watch] = []
        for number, delegate in enumerate(self._program.delegates):
            units = {
                name: index
                for index, unit in enumerate(self.units)
                if unit.delegate == number
                for name in unit.names
            }
            watches.append(_Watch(units))
            delegate.use(delegate.mixed.compare(), watches[-1])
        self._run()
        self._estimate([watch.shapes for watch in watches])
        losses = {unit: loss for watch in watches for unit, loss in watch.losses.items()}
        return [losses.get(unit, Loss()) for unit in range(len(self.units))]


def _units(number: int, delegate: MeasuredDelegate, flops: Sequence[int], first: int) -> list[Unit]:
    """Return the units of a delegate.

    Args:
        number: Number of the delegate.
        delegate: The delegate.
        flops: Of each op of its function.
        first: Number of units of earlier delegates.
    """
    function = delegate.function
    candidates = set(fp16_ops(function))
    indices = [index for index, op in enumerate(function.block.ops) if op in candidates]
    groups = _merge([delegate.handles.get(index, ()) for index in indices])
    unit_of = {
        function.block.ops[indices[position]]: first + group
        for group, positions in enumerate(groups)
        for position in positions
    }
    producers = _producers(function, unit_of)
    own = {h for index in indices for h in delegate.handles.get(index, ())}
    # The handles of casts are those of calls that became part of the ops that read the result.
    of_casts = _handles_of_casts(function, delegate.handles, own)
    units: list[Unit] = []
    for group, positions in enumerate(groups):
        ops = tuple(function.block.ops[indices[position]] for position in positions)
        handles = {h for position in positions for h in delegate.handles.get(indices[position], ())}
        handles |= {h for op in ops for name in op.references() for h in of_casts.get(name, ())}
        sources = frozenset[int]().union(*(producers[op] for op in ops)) - {first + group}
        work = sum(flops[indices[position]] for position in positions)
        units.append(Unit(number, ops, tuple(sorted(handles)), sources, work))
    return units


def _handles_of_casts(
    function: Function, handles: Mapping[int, Sequence[int]], own: Collection[int]
) -> dict[str, list[int]]:
    """Return the handles of casts between floats, by result, without handles of other ops."""
    casts = set(float_casts(function))
    return {
        op.outputs[0].name: [h for h in handles.get(index, ()) if h not in own]
        for index, op in enumerate(function.block.ops)
        if op in casts
    }


def _merge(handles: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return groups of positions, in order, that have handles in common."""
    groups: list[list[int]] = []
    group_of: dict[int, list[int]] = {}
    for position, own in enumerate(handles):
        merged = [position]
        for group in {id(group_of[h]): group_of[h] for h in own if h in group_of}.values():
            groups.remove(group)
            merged = sorted([*group, *merged])
        groups.append(merged)
        for h in {h for p in merged for h in handles[p]}:
            group_of[h] = merged
    return sorted(groups)


def _producers(function: Function, unit_of: Mapping[Op, int]) -> dict[Op, set[int]]:
    """Return the units that compute the operands of each op, through casts and other ops."""
    by_value: dict[str, set[int]] = {}
    producers: dict[Op, set[int]] = {}
    for op in function.block.ops:
        producers[op] = {unit for name in op.references() for unit in by_value.get(name, ())}
        own = {unit_of[op]} if op in unit_of else producers[op]
        by_value.update((output.name, own) for output in op.outputs)
    return producers


class _Watch:
    """Receives the values of ``MixedPrecision.compare``, and keeps the worst loss of each unit.

    Args:
        units: Numbers of units by the names of their values.

    Attributes:
        losses: By number of the unit.
        shapes: Shapes of the function's values, by name.
    """

    def __init__(self, units: Mapping[str, int]) -> None:
        self._units = units
        self._wide: dict[str, TracedValue] = {}
        self._originals = {in_fp16(name): name for name in units}
        self.losses: dict[int, Loss] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, value: TracedValue) -> None:
        """Receive a value; the value in fp32 comes before its counterpart in fp16."""
        self._note_shapes(value)
        name = self._originals.get(value.name)
        if name is None:
            self._wide[value.name] = value
            return
        wide = self._wide.get(in_fp32(name)) or self._wide[name]
        self._wide.clear()
        if wide.tensor is None or value.tensor is None or wide.tensor.shape != value.tensor.shape:
            return
        loss = _loss(value.op, wide.tensor, value.tensor)
        unit = self._units[name]
        if unit not in self.losses or loss.sqnr_db < self.losses[unit].sqnr_db:
            original = replace(value.op.outputs[0], name=name)
            op = replace(value.op, outputs=(original, *value.op.outputs[1:]))
            self.losses[unit] = replace(loss, op=op)

    def _note_shapes(self, value: TracedValue) -> None:
        if value.tensor is not None:
            self.shapes[original_name(value.name)] = tuple(value.tensor.shape)
        for parameter, bindings in value.op.inputs.items():
            for binding, operand in zip(bindings, value.operands.get(parameter, ()), strict=False):
                if isinstance(binding, Ref) and isinstance(operand, Tensor):
                    self.shapes[original_name(binding.name)] = tuple(operand.shape)


def _loss(op: Op, wide: Tensor, narrow: Tensor) -> Loss:
    expected, actual = wide.double(), narrow.double()
    signals, errors = signals_and_errors(expected, actual)
    if not errors.numel():
        return Loss(op)
    worst = int(errors.abs().nan_to_num(math.inf).argmax())
    return Loss(
        op,
        float(actual.reshape(-1)[worst]),
        float(expected.reshape(-1)[worst]),
        ratio_db(energy(signals), energy(errors)),
    )


def _ratios(expected: Sequence[Outputs], actual: Sequence[Outputs]) -> list[float]:
    """Return the ratio of signal to error of each output, over all samples."""
    ratios: list[float] = []
    for wants, gots in zip(zip(*expected, strict=True), zip(*actual, strict=True), strict=True):
        signal, noise, is_equal = 0.0, 0.0, True
        for want, got in zip(map(_tensor, wants), map(_tensor, gots), strict=True):
            if want is None or got is None or want.shape != got.shape:
                is_equal = is_equal and want is got
            elif want.is_floating_point():
                signals, errors = signals_and_errors(want.double(), got.double())
                signal, noise = signal + energy(signals), noise + energy(errors)
            else:
                is_equal = is_equal and bool((want == got).all())
        ratios.append(ratio_db(signal, noise) if is_equal else -math.inf)
    return ratios


def _tensor(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value) if isinstance(value, bool | int | float) else None


def worst(ratios: Mapping[str, float]) -> float:
    """Return the smallest ratio; inf without any."""
    return min(ratios.values(), default=math.inf)


# Programs


class MeasuredDelegate:
    """A Core ML model whose function is replaced between runs.

    Args:
        model: The model, on the reference engine.
        names: Names of the inputs and outputs, in the order of calls.
        handles: Debug handles of the calls of each op, by index of the op.

    Attributes:
        function: The function as the program has it.
        mixed: Its variants with ops in fp32.
        handles: See above.
    """

    native = None

    def __init__(
        self, model: Model, names: MethodMetadata, handles: Mapping[int, Sequence[int]]
    ) -> None:
        self._model = model
        self._names = names
        self._current = CoreMLDelegate(model, names, 0)
        self._listener: Listener | None = None
        self.function = model.function
        self.mixed = MixedPrecision(model.function)
        self.handles = handles

    @property
    def input_count(self) -> int:
        """Number of tensors that the delegate takes."""
        return self._current.input_count

    def use(self, function: Function, listener: Listener | None = None) -> None:
        """Compute a variant of the function from now on, and pass its values to ``listener``."""
        self._current = CoreMLDelegate(self._model.with_variant(function), self._names, 0)
        self._listener = listener

    def use_in_fp32(self) -> None:
        """Compute the function in fp32 from now on, its inputs and states included."""
        model = self._model.with_function(widen_function(self.function))
        self._current = CoreMLDelegate(model, self._names, 0)
        self._listener = None

    def reset(self) -> None:
        """Set the state to its initial value."""
        if self._current.state is not None:
            self._current.state.reset()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run once."""
        if self._listener is not None:
            return self._current.trace(inputs, self._listener)
        return self._current(inputs)


class MeasuredProgram(Protocol):
    """A program whose delegates are measured.

    Attributes:
        delegates: The delegates.
        output_names: Names of the outputs.
    """

    delegates: Sequence[MeasuredDelegate]
    output_names: Sequence[str]

    def run(self, sample: Sample) -> Outputs:
        """Run once, from the initial states."""
        ...


class Method:
    """A method of a ``.pte``.

    Args:
        source: The program.
        data: Its tensors outside of the file.
        method: Name of the method.
        fp32_constants: Constants that fp16 rounds, by identifier of the model; without them, the
            program in fp32 has rounded weights.
    """

    def __init__(
        self,
        source: Source,
        data: Sources | None,
        method: str,
        fp32_constants: Mapping[str, Constants] = MappingProxyType({}),
    ) -> None:
        delegates: list[MeasuredDelegate] = []
        self.delegates: Sequence[MeasuredDelegate] = delegates
        self._name = method

        def load(payload: DelegatePayload) -> MeasuredDelegate:
            blob, function = resolve(payload.processed, payload.named_data)
            files, metadata = blob_files(blob)
            model = Model.from_files(files, function_name=function, engine=REFERENCE.name)
            if constants := fp32_constants.get(metadata.identifier):
                model = _with_constants(model, constants)
            names = metadata.method(payload.method_name)
            info = debug_info_in(unflatten(blob))
            delegates.append(MeasuredDelegate(model, names, _handles(model.function, info)))
            return delegates[-1]

        self._program = PythonProgram(source, load, data=data)
        self._program.load_method(method)
        self.output_names: Sequence[str] = output_names(self._program.program.method(method))

    def run(self, sample: Sample) -> Outputs:
        """Run once, from the initial states."""
        self._program.reset_state()
        for delegate in self.delegates:
            delegate.reset()
        return self._program.run(self._name, list(sample))


def _with_constants(model: Model, constants: Constants | None) -> Model:
    """Return a model of the reference engine that has these constants in fp32, as well."""
    function = model.function
    in_fp32 = {**(function.fp32_constants or {}), **(constants or {})}
    return model.with_function(replace(function, fp32_constants=in_fp32) if constants else function)


def _handles(function: Function, info: DebugInfo | None) -> dict[int, Sequence[int]]:
    """Return the debug handles of each op of a function, by index of the op."""
    if info is None:
        return {}
    symbols = debug_symbols(function, info)
    return {index: info.handles.get(symbol, ()) for index, symbol in symbols.items()}


class SingleModel:
    """A Core ML model without a ``.pte``.

    Args:
        model: The model.
        handles: Debug handles of the calls of each op, by its first output.
        fp32_constants: Constants that fp16 rounds, by name; see ``Method``.
    """

    def __init__(
        self,
        model: Model,
        handles: Mapping[str, Sequence[int]],
        fp32_constants: Constants | None = None,
    ) -> None:
        names = MethodMetadata(model.input_names, model.output_names)
        by_index = {
            index: handles.get(op.outputs[0].name, ())
            for index, op in enumerate(model.function.block.ops)
            if op.outputs
        }
        self.delegates: Sequence[MeasuredDelegate] = [
            MeasuredDelegate(_with_constants(model, fp32_constants), names, by_index)
        ]
        self.output_names: Sequence[str] = model.output_names

    def run(self, sample: Sample) -> Outputs:
        """Run once, from the initial state."""
        (delegate,) = self.delegates
        delegate.reset()
        return delegate([torch.as_tensor(value) for value in sample])

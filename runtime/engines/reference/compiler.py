"""Compile a MIL function to steps: names to slots, constants to arguments, ops to kernels.

All work that does not depend on a call is done here, once: attributes become Python values, weights
become tensors on the mapped file, compressed weights are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coreml_delegate.errors import OptionError, UnsupportedOpError
from coreml_delegate.runtime.engines.reference.interpreter import (
    CompiledBlock,
    CondStep,
    Entry,
    Fetch,
    Frame,
    KernelStep,
    LoopStep,
    ReadStateStep,
    Source,
    Step,
    WriteStateStep,
    as_tuple,
    blame_op,
)
from coreml_delegate.runtime.engines.reference.kernels import KERNELS, Kernel, Passing
from coreml_delegate.runtime.engines.reference.memory_guard import MemoryGuard
from coreml_delegate.runtime.engines.reference.values import (
    Value,
    cast_to_declared,
    constant_to_tensor,
    describe,
    to_literal,
    widen_tensor,
)
from coreml_delegate.runtime.mil.location import located_ops
from coreml_delegate.runtime.mil.program import (
    STATE_OPERAND,
    WRITTEN_OPERAND,
    Binding,
    Block,
    Constant,
    Function,
    Op,
    Ref,
)
from coreml_delegate.targets import Opset

_CONST = "const"
_CONSTEXPR = "constexpr_"
STRUCTURAL = {"cond", "while_loop", *STATE_OPERAND, _CONST}
"""Op types that the interpreter executes without a kernel."""


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A function with its names resolved to slots.

    ``slots`` is the number of slots in the frame; ``params`` has the slot of every parameter by
    name, states included.
    """

    block: CompiledBlock
    slots: int
    params: dict[str, int]


@dataclass(slots=True)
class _Scope:
    """Names of a block; the names of enclosing blocks are visible too."""

    outer: _Scope | None = None
    sources: dict[str, Source] = field(default_factory=dict[str, Source])

    def find(self, name: str) -> Source:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.sources:
                return scope.sources[name]
            scope = scope.outer
        raise UnsupportedOpError("a value is used that is not in scope", got=repr(name))


_PlacedStep: TypeAlias = "tuple[Step, tuple[int, ...], set[int]]"
"""A step, the slots of its outputs, and the slots that it reads."""


@dataclass(slots=True)
class SharedSteps:
    """Slots, steps and constants that variants of a function have in common.

    An op that several variants have, as the same object, has equal operands in all of them.

    Attributes:
        count: Number of slots.
        slots: Slot of each value of an outermost block, by name.
        steps: Step of each op of an outermost block that a kernel computes.
        expanded: Values of compressed weights of an outermost block.
        tensors: One tensor per constant and width. The key has the source's identity, so the value
            keeps the source alive.
        admitted: See ``Frame``.
    """

    count: int = 0
    slots: dict[str, int] = field(default_factory=dict[str, int])
    steps: dict[Op, _PlacedStep] = field(default_factory=dict[Op, "_PlacedStep"])
    expanded: dict[Op, list[Value]] = field(default_factory=dict[Op, "list[Value]"])
    tensors: dict[tuple[int, bool], tuple[Constant | Tensor, Tensor]] = field(
        default_factory=dict[tuple[int, bool], "tuple[Constant | Tensor, Tensor]"]
    )
    admitted: dict[KernelStep, tuple[Any, ...]] = field(
        default_factory=dict[KernelStep, "tuple[Any, ...]"]
    )


def unsupported(function: Function) -> list[str]:
    """Return one reason per op type or parameter of ``function`` that has no kernel."""
    try:
        opset = Opset.from_mil_name(function.opset)
    except OptionError as error:
        return [str(error)]
    reasons: dict[str, str] = {}
    for location, op in located_ops(function):
        if op.type in STRUCTURAL:
            continue
        kernel = KERNELS.find(op.type, opset)
        where = f"(first used by {op.name!r} at {location})"
        if kernel is None:
            missing = KERNELS.missing(op.type, opset)
            reasons.setdefault(op.type, f"{op.type}: {missing} {where}")
            continue
        for name in _arguments(op):
            if name not in kernel.schema.parameters:
                missing = f"no parameter {name!r} in opset {opset.mil_name}"
                reasons.setdefault(f"{op.type}.{name}", f"{op.type}: {missing} {where}")
    return list(reasons.values())


def compile_function(function: Function, shared: SharedSteps) -> CompiledProgram:
    """Resolve the names of ``function``.

    Args:
        function: The function.
        shared: Parts of its variants; the parts of ``function`` are added.

    Raises:
        UnsupportedOpError: An op has no kernel, or a constant is no tensor.
        ExecutionError: A compressed weight cannot be expanded.
    """
    reasons = unsupported(function)
    if reasons:
        raise UnsupportedOpError(
            "the reference engine cannot execute the program", got="; ".join(reasons)
        )
    compiler = _Compiler(function, shared)
    scope = _Scope()
    params = {param.name: compiler.define(scope, param.name) for param in function.params}
    block, _ = compiler.block(function.block, scope)
    return CompiledProgram(block, shared.count, params)


class _Compiler:
    def __init__(self, function: Function, shared: SharedSteps) -> None:
        self._function = function
        self._opset = Opset.from_mil_name(function.opset)
        self._shared = shared

    def define(self, scope: _Scope, name: str) -> int:
        shared = self._shared
        slot = shared.slots.get(name) if scope.outer is None else None
        if slot is None:
            slot = shared.count
            shared.count += 1
        if scope.outer is None:
            shared.slots[name] = slot
        scope.sources[name] = slot
        return slot

    def block(self, block: Block, scope: _Scope) -> tuple[CompiledBlock, set[int]]:
        """Resolve a block; ``scope`` is a new scope for the block's names.

        Returns:
            The compiled block, and the slots of enclosing blocks that it reads.
        """
        first_local = self._shared.count
        inputs = tuple(self.define(scope, named.name) for named in block.inputs)
        steps: list[_PlacedStep] = []
        for op in block.ops:
            if op.type == _CONST:
                scope.sources[op.outputs[0].name] = op.attributes["val"]
            elif op.type.startswith(_CONSTEXPR):
                self._expand(op, scope)
            else:
                steps.append(self._placed_step(op, scope))
        read: set[int] = set()
        fetches = tuple(self._fetch(scope.find(name), read) for name in block.outputs)
        own = {*inputs, *(slot for _, outputs, _ in steps for slot in outputs)}
        entries = _add_frees(steps, own, read)
        outer = set[int]().union(read, *(uses for _, _, uses in steps))
        compiled = CompiledBlock(inputs, entries, fetches, tuple(sorted(read & own)))
        return compiled, {slot for slot in outer if slot < first_local}

    # --- ops --------------------------------------------------------------------------------------

    def _placed_step(self, op: Op, scope: _Scope) -> _PlacedStep:
        uses: set[int] = set()
        placed = self._shared.steps.get(op) if scope.outer is None else None
        step = self._step(op, scope, uses) if placed is None else placed[0]
        outputs = tuple(self.define(scope, output.name) for output in op.outputs)
        if placed is None:
            placed = step, outputs, uses
        # The slots of nested blocks are new in every variant.
        if scope.outer is None and isinstance(step, KernelStep):
            self._shared.steps[op] = placed
        return placed

    def _step(self, op: Op, scope: _Scope, uses: set[int]) -> Step:
        sources = {
            name: tuple(_resolve(binding, scope) for binding in bindings)
            for name, bindings in _arguments(op).items()
        }
        if op.type == "cond":
            branches = [self._nested(block, scope, uses) for block in op.blocks]
            predicate = self._argument(op, "pred", scope, uses)
            return CondStep(op, sources, predicate, (branches[0], branches[1]))
        if op.type == "while_loop":
            initial = tuple(self._fetch(source, uses) for source in sources.get("loop_vars", ()))
            condition, body = (self._nested(block, scope, uses) for block in op.blocks)
            return LoopStep(op, sources, initial, condition, body)
        if op.type == "read_state":
            return ReadStateStep(op, sources, self._state(op, scope))
        if op.type in WRITTEN_OPERAND:
            data = self._argument(op, WRITTEN_OPERAND[op.type], scope, uses)
            return WriteStateStep(op, sources, self._state(op, scope), data)
        return self._kernel_step(op, sources, uses)

    def _kernel_step(
        self, op: Op, sources: dict[str, tuple[Source, ...]], uses: set[int]
    ) -> KernelStep:
        kernel = KERNELS.get(op.type, self._opset)
        fixed: dict[str, Any] = dict(kernel.fixed)
        fetched: list[tuple[str, Fetch]] = []
        for name, argument in sources.items():
            if any(isinstance(source, int) for source in argument):
                uses.update(source for source in argument if isinstance(source, int))
                fetched.append((name, self._fetch_argument(kernel, name, argument)))
            else:
                fixed[name] = self._constant_argument(kernel, name, argument)
        return KernelStep(op, sources, kernel, fixed, tuple(fetched))

    def _nested(self, block: Block, scope: _Scope, uses: set[int]) -> CompiledBlock:
        compiled, outer = self.block(block, _Scope(scope))
        uses |= outer
        return compiled

    def _expand(self, op: Op, scope: _Scope) -> None:
        values = self._shared.expanded.get(op) if scope.outer is None else None
        if values is None:
            values = self._expanded(op, scope)
        if scope.outer is None:
            self._shared.expanded[op] = values
        for output, value in zip(op.outputs, values, strict=True):
            if isinstance(value, Tensor):
                scope.sources[output.name] = value

    def _expanded(self, op: Op, scope: _Scope) -> list[Value]:
        sources = {
            name: tuple(_resolve(binding, scope) for binding in bindings)
            for name, bindings in _arguments(op).items()
        }
        try:
            step = self._kernel_step(op, sources, set())
            with MemoryGuard():
                results = as_tuple(step.kernel.function(**step.fixed))
            return [cast_to_declared(r, o.type) for r, o in zip(results, op.outputs, strict=True)]
        except Exception as error:  # noqa: BLE001 - kernels raise anything
            operands = {
                name: tuple(None if isinstance(source, int) else source for source in argument)
                for name, argument in sources.items()
            }
            blame_op(error, self._function, op, operands)

    # --- arguments --------------------------------------------------------------------------------

    def _constant_argument(self, kernel: Kernel, name: str, sources: tuple[Source, ...]) -> Any:
        passing = kernel.schema.parameters[name].form
        constants = [source for source in sources if not isinstance(source, int)]
        if passing.literal:
            values = tuple(to_literal(source) for source in constants)
        else:
            values = tuple(self._tensor(source, kernel.widen) for source in constants)
        return values if passing.variadic else values[0]

    def _fetch_argument(self, kernel: Kernel, name: str, sources: tuple[Source, ...]) -> Fetch:
        passing = kernel.schema.parameters[name].form
        fetches = [self._fetch_one(kernel, passing, source) for source in sources]
        if passing.variadic:
            return lambda frame: tuple(fetch(frame) for fetch in fetches)
        return fetches[0]

    def _fetch_one(self, kernel: Kernel, passing: Passing, source: Source) -> Fetch:
        if not isinstance(source, int):
            constant = to_literal(source) if passing.literal else self._tensor(source, kernel.widen)
            return lambda _: constant
        if passing.literal:
            return lambda frame: to_literal(_read_tensor(frame, source))
        if kernel.widen and passing is not Passing.LIST:
            return lambda frame: widen_tensor(_read_tensor(frame, source))
        return lambda frame: frame.slots[source]

    def _argument(self, op: Op, name: str, scope: _Scope, uses: set[int]) -> Fetch:
        bindings = op.inputs.get(name, ())
        if len(bindings) != 1:
            raise UnsupportedOpError(f"{op.type} needs one {name!r}", got=f"{len(bindings)}")
        return self._fetch(_resolve(bindings[0], scope), uses)

    def _state(self, op: Op, scope: _Scope) -> int:
        name = STATE_OPERAND[op.type]
        bindings = op.inputs.get(name, ())
        source = _resolve(bindings[0], scope) if bindings else None
        if not isinstance(source, int):
            raise UnsupportedOpError(f"{op.type} needs a state as {name!r}", got=op.name)
        return source

    def _fetch(self, source: Source, uses: set[int]) -> Fetch:
        if isinstance(source, int):
            uses.add(source)
            return lambda frame: frame.read(source)
        constant = self._tensor(source, False)
        return lambda _: constant

    def _tensor(self, source: Constant | Tensor, widen: bool) -> Tensor:
        key, tensors = (id(source), widen), self._shared.tensors
        if key not in tensors:
            tensor = source if isinstance(source, Tensor) else constant_to_tensor(source)
            tensors[key] = (source, widen_tensor(tensor) if widen else tensor)
        return tensors[key][1]


def _arguments(op: Op) -> dict[str, tuple[Binding, ...]]:
    """Return the op's arguments; up to iOS17, attributes of ``constexpr`` ops are arguments."""
    arguments = {name: bindings for name, bindings in op.inputs.items() if bindings}
    if op.type.startswith(_CONSTEXPR):
        arguments |= {name: (value,) for name, value in op.attributes.items() if name != "name"}
    return arguments


def _resolve(binding: Binding, scope: _Scope) -> Source:
    return scope.find(binding.name) if isinstance(binding, Ref) else binding


def _read_tensor(frame: Frame, slot: int) -> Tensor:
    value = frame.read(slot)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{describe(value)} where a tensor is needed")
    return value


def _add_frees(steps: list[_PlacedStep], own: set[int], read_last: set[int]) -> tuple[Entry, ...]:
    """Return the steps with the slots to empty after each; a block empties only its own slots."""
    used_later = set(read_last)
    entries: list[Entry] = []
    for step, outputs, uses in reversed(steps):
        last = {slot for slot in (*uses, *outputs) if slot in own and slot not in used_later}
        used_later |= uses
        declared = tuple(zip(outputs, step.op.outputs, strict=True))
        entries.append(Entry(step, declared, tuple(sorted(last))))
    return tuple(reversed(entries))

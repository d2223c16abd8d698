"""A MIL function with lookups for rules: locations, constants, producers and users of values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from coreml_delegate.partition.grouping.moved_calls import TRIFLE, TRIFLE_BYTES
from coreml_delegate.runtime.engines.base import Array
from coreml_delegate.runtime.mil.costs import Work
from coreml_delegate.runtime.mil.location import Location, located_ops
from coreml_delegate.runtime.mil.program import (
    Binding,
    Constant,
    Function,
    NamedType,
    Op,
    Ref,
    TensorType,
    ValueType,
)

CONST = "const"
DECOMPRESSIONS = "constexpr_"
_ONLY_IN_CORE_ML = frozenset({"non_maximum_suppression"})
"""Ops of calls for which ExecuTorch has no kernel, however little they compute."""


class FunctionView:
    """A function of a model, with lookups for rules.

    Args:
        delegate: Names of the delegates that run it.
        modules: Module paths in the original model, by debug symbol.

    Attributes:
        ops: The ops without constants and their decompression, outer blocks first.
        producers: The producer of each value, including constants, by the value's name.
        users: The users of each value, by the value's name.
    """

    def __init__(self, function: Function, delegate: str, modules: Mapping[str, str]) -> None:
        self.function = function
        self.delegate = delegate
        self._modules = modules
        self.locations = {op: location for location, op in located_ops(function)}
        self.ops = tuple(op for op in self.locations if not is_stored(op))
        self.constants = {
            op.outputs[0].name: op.attributes["val"] for op in self.locations if op.type == CONST
        }
        self.producers = {output.name: op for op in self.locations for output in op.outputs}
        self._types: dict[str, ValueType] = {param.name: param.type for param in function.params}
        for op in self.locations:
            self._types.update((output.name, output.type) for output in op.outputs)
            for block in op.blocks:
                self._types.update((value.name, value.type) for value in block.inputs)
        self.users: dict[str, list[Op]] = {}
        for op in self.locations:
            for binding in operands(op):
                if isinstance(binding, Ref):
                    self.users.setdefault(binding.name, []).append(op)

    @functools.cached_property
    def by_location(self) -> Mapping[Location, Op]:
        """The ops by their locations."""
        return {location: op for op, location in self.locations.items()}

    def module_of(self, op: Op) -> str | None:
        """Return the path of an op's module in the original model; None if unknown."""
        if not op.outputs:
            return None
        symbol = f"{op.outputs[0].name}:{op.type}"
        return self._modules.get(f"{self.function.name}:{symbol}", self._modules.get(symbol))

    def constant(self, op: Op, parameter: str) -> Constant | None:
        """Return the single constant argument of an op's parameter, or None."""
        bindings = op.inputs.get(parameter, ())
        if len(bindings) != 1:
            return op.attributes.get(parameter)
        (binding,) = bindings
        return binding if isinstance(binding, Constant) else self.constants.get(binding.name)

    def array(self, op: Op, parameter: str) -> Array | None:
        """Return the array of a constant argument of an op's parameter, or None."""
        constant = self.constant(op, parameter)
        data = None if constant is None else constant.data
        return data if isinstance(data, np.ndarray) else None

    def is_stored(self, binding: Binding) -> bool:
        """Whether an argument is a constant, or decompressed from constants."""
        if isinstance(binding, Constant):
            return True
        producer = self.producers.get(binding.name)
        return producer is not None and is_stored(producer)

    def tensor_of(self, binding: Binding) -> TensorType | None:
        """Return the type of a tensor argument; None for another type."""
        kind = binding.type if isinstance(binding, Constant) else self._types.get(binding.name)
        return kind if isinstance(kind, TensorType) else None

    @functools.cached_property
    def flops(self) -> Mapping[Op, int | None]:
        """Estimated FLOPs of the ops of the outermost block; None if unknown."""
        work = Work(self.function)
        return {op: work.flops(n) for n, op in enumerate(self.function.block.ops)}

    def is_between(self, op: Op) -> bool:
        """Whether work leads to an op, and from it to other work.

        Without the op there would be two models: one before it and one after it. Work is more than
        a trifle, which the CPU can do as well.
        """
        return all(
            self._has_work(self._reachable(op, step)) for step in (self._before, self._after)
        )

    def _reachable(self, op: Op, step: Callable[[Op], Iterable[Op]]) -> Iterator[Op]:
        """Yield the ops that steps lead to from an op, without the op."""
        pending, seen = [op], {op}
        while pending:
            for neighbour in step(pending.pop()):
                if neighbour not in seen and not is_stored(neighbour):
                    seen.add(neighbour)
                    pending.append(neighbour)
                    yield neighbour

    def _before(self, op: Op) -> Iterator[Op]:
        producers = (self.producers.get(b.name) for b in operands(op) if isinstance(b, Ref))
        return (producer for producer in producers if producer is not None)

    def _after(self, op: Op) -> Iterator[Op]:
        return (user for output in op.outputs for user in self.users.get(output.name, ()))

    def _has_work(self, ops: Iterable[Op]) -> bool:
        """Whether ops compute more than a trifle, have weights, or have no kernel for the CPU."""
        total = 0
        for op in ops:
            flops = self.flops.get(op)
            if flops is None or op.type in _ONLY_IN_CORE_ML or self._has_weights(op):
                return True
            total += flops
            if total > TRIFLE * self._all_flops:
                return True
        return False

    @functools.cached_property
    def _all_flops(self) -> int:
        return sum(flops or 0 for flops in self.flops.values())

    def _has_weights(self, op: Op) -> bool:
        stored = (self.tensor_of(binding) for binding in operands(op) if self.is_stored(binding))
        return any(kind is not None and _nbytes(kind) > TRIFLE_BYTES for kind in stored)

    @property
    def enumerates_shapes(self) -> bool:
        """Whether an input has enumerated shapes."""
        return any(feature.shapes for feature in self.function.inputs)

    @property
    def has_ranges(self) -> bool:
        """Whether an input has a range of sizes."""
        return any(low != high for feature in self.function.inputs for low, high in feature.bounds)


def _nbytes(kind: TensorType) -> float:
    return math.prod(size or 1 for size in kind.shape or ()) * kind.dtype.bits / 8


def is_stored(op: Op) -> bool:
    """Whether an op is a constant, or decompresses constants."""
    return is_stored_type(op.type)


def is_stored_type(op_type: str) -> bool:
    """Whether ops of a type are constants, or decompress constants."""
    return op_type == CONST or op_type.startswith(DECOMPRESSIONS)


def operands(op: Op) -> Iterator[Binding]:
    """Yield the arguments of an op."""
    for bindings in op.inputs.values():
        yield from bindings


def tensors(values: tuple[NamedType, ...]) -> Iterator[tuple[str, TensorType]]:
    """Yield the names and types of the values with a tensor type."""
    for value in values:
        if isinstance(value.type, TensorType):
            yield value.name, value.type

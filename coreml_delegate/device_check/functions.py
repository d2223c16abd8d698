"""A MIL function with lookups for rules: locations, constants, producers and users of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from coreml_delegate.runtime.engines.base import Array
from coreml_delegate.runtime.mil.location import located_ops
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

    @property
    def enumerates_shapes(self) -> bool:
        """Whether an input has enumerated shapes."""
        return any(feature.shapes for feature in self.function.inputs)

    @property
    def has_ranges(self) -> bool:
        """Whether an input has a range of sizes."""
        return any(low != high for feature in self.function.inputs for low, high in feature.bounds)


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

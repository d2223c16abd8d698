"""A MIL function with the look-ups of rules: places, constants, makers and users of values."""

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
    """A function of a model.

    Args:
        function: The function.
        delegate: Names of the delegates that run it.
        modules: Path of the module of the original model, by debug symbol.

    Attributes:
        locations: Place of every op.
        ops: The ops that compute, outer blocks first: neither constants nor their decompression.
        constants: The constants, by name.
        makers: The op that makes a value, constants among them, by the value's name.
        users: The ops that use a value, by its name.
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
        self.makers = {output.name: op for op in self.locations for output in op.outputs}
        self._types: dict[str, ValueType] = {param.name: param.type for param in function.params}
        for op in self.locations:
            self._types.update((output.name, output.type) for output in op.outputs)
            for block in op.blocks:
                self._types.update((each.name, each.type) for each in block.inputs)
        self.users: dict[str, list[Op]] = {}
        for op in self.locations:
            for binding in operands(op):
                if isinstance(binding, Ref):
                    self.users.setdefault(binding.name, []).append(op)

    def module_of(self, op: Op) -> str | None:
        """Return the path of the module that an op comes from; None if unknown."""
        if not op.outputs:
            return None
        symbol = f"{op.outputs[0].name}:{op.type}"
        return self._modules.get(f"{self.function.name}:{symbol}", self._modules.get(symbol))

    def constant(self, op: Op, parameter: str) -> Constant | None:
        """Return the constant that is an op's only argument for a parameter, or None."""
        bindings = op.inputs.get(parameter, ())
        if len(bindings) != 1:
            return op.attributes.get(parameter)
        (binding,) = bindings
        return binding if isinstance(binding, Constant) else self.constants.get(binding.name)

    def array(self, op: Op, parameter: str) -> Array | None:
        """Return the array that is an op's constant argument for a parameter, or None."""
        found = self.constant(op, parameter)
        data = None if found is None else found.data
        return data if isinstance(data, np.ndarray) else None

    def is_stored(self, binding: Binding) -> bool:
        """Whether an argument is a constant, or decompressed from constants."""
        if isinstance(binding, Constant):
            return True
        maker = self.makers.get(binding.name)
        return maker is not None and is_stored(maker)

    def tensor_of(self, binding: Binding) -> TensorType | None:
        """Return the type of an argument; None if it is no tensor."""
        kind = binding.type if isinstance(binding, Constant) else self._types.get(binding.name)
        return kind if isinstance(kind, TensorType) else None

    @property
    def enumerates_shapes(self) -> bool:
        """Whether an input has enumerated shapes."""
        return any(feature.shapes for feature in self.function.inputs)

    @property
    def has_ranges(self) -> bool:
        """Whether an input takes a range of sizes."""
        return any(low != high for feature in self.function.inputs for low, high in feature.bounds)


def is_stored(op: Op) -> bool:
    """Whether an op is a constant, or decompresses constants."""
    return op.type == CONST or op.type.startswith(DECOMPRESSIONS)


def operands(op: Op) -> Iterator[Binding]:
    """Yield the arguments of an op."""
    for bindings in op.inputs.values():
        yield from bindings


def tensors(values: tuple[NamedType, ...]) -> Iterator[tuple[str, TensorType]]:
    """Yield name and type of those values that are tensors."""
    for value in values:
        if isinstance(value.type, TensorType):
            yield value.name, value.type

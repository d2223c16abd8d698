"""Edit a function of an ML Program in its protobuf message: new operations, and new names.

Operations are written as coremltools writes them: a constant is an operation ``const``, and an
operation has its name as an attribute.

Source: coremltools' ``MIL.proto``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.patches.third_party import mil_pb2

Message = Any
"""A protobuf message."""


class MilOp(StrEnum):
    """The operations that a finished model gets."""

    CONST = "const"
    CAST = "cast"
    MUL = "mul"
    ADD = "add"
    IDENTITY = "identity"
    SOFTMAX = "softmax"
    CLASSIFY = "classify"


PROBABILITIES: Final = frozenset({"softmax", "sigmoid"})
"""Operations whose results are probabilities."""

FP32: Final = "FLOAT32"
FP16: Final = "FLOAT16"
INT32: Final = "INT32"

_CAST_NAMES: Final = {FP32: "fp32", FP16: "fp16", INT32: "int32", "BOOL": "bool"}
"""MIL's names of types as arguments of a cast, by the names in ``MIL.proto``."""


@dataclass(slots=True)
class FunctionEditor:
    """A function of an ML Program, edited in place.

    Attributes:
        message: The ``Function`` message.
        names: Names of all values, also in nested blocks.
    """

    message: Message
    names: set[str] = field(init=False)
    _position: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.names = {value.name for value in self.message.inputs}
        for operation in _walk(self.block):
            self.names.update(value.name for value in operation.outputs)
            for block in operation.blocks:
                self.names.update(value.name for value in block.inputs)

    @property
    def block(self) -> Message:
        """The block of the function's opset."""
        return self.message.block_specializations[self.message.opset]

    def types(self) -> dict[str, Message]:
        """Return the type of each parameter and value of the outermost block, by name."""
        declared = {value.name: value.type for value in self.message.inputs}
        for operation in self.block.operations:
            declared.update((value.name, value.type) for value in operation.outputs)
        return declared

    def producer(self, name: str) -> Message | None:
        """Return the operation of the outermost block that computes a value; None for an input."""
        for operation in self.block.operations:
            if any(value.name == name for value in operation.outputs):
                return operation
        return None

    def fresh(self, name: str) -> str:
        """Return a name that no value has: ``name``, or with a number."""
        number, unique = 0, name
        while unique in self.names:
            unique, number = f"{name}_{number}", number + 1
        self.names.add(unique)
        return unique

    def prepend(
        self, kind: MilOp, name: str, type_: Message, **arguments: str | NDArray[Any]
    ) -> str:
        """Insert an operation in front, after operations that were inserted before.

        Args:
            kind: Type of the operation.
            name: Wanted name of its result.
            type_: Type of its result.
            arguments: Names of values; or constants, [...] of fp32, int32 or text.

        Returns:
            The name of its result.
        """
        operations = self._with_constants(kind, name, type_, arguments)
        following = list(self.block.operations[self._position :])
        del self.block.operations[self._position :]
        self.block.operations.extend([*operations, *following])
        self._position += len(operations)
        return operations[-1].outputs[0].name

    def append(
        self, kind: MilOp, name: str, type_: Message, **arguments: str | NDArray[Any]
    ) -> str:
        """Insert an operation at the end; see ``prepend``."""
        operations = self._with_constants(kind, name, type_, arguments)
        self.block.operations.extend(operations)
        return operations[-1].outputs[0].name

    def append_classify(
        self, probabilities: str, labels: Iterable[str], outputs: tuple[str, str]
    ) -> tuple[str, str]:
        """Insert the operation that ends a classifier.

        Args:
            probabilities: Value in fp32 with an element for each label.
            labels: The labels.
            outputs: Wanted names of the label and of the dictionary of probabilities.

        Returns:
            Their names.
        """
        operation = self.block.operations.add(type=str(MilOp.CLASSIFY))
        operation.inputs["probabilities"].arguments.add(name=probabilities)
        classes = operation.inputs["classes"].arguments.add().value
        texts = [_text_value(label) for label in labels]
        classes.type.listType.type.CopyFrom(_text_type())
        classes.type.listType.length.constant.size = len(texts)
        classes.immediateValue.list.values.extend(texts)
        label, by_label = map(self.fresh, outputs)
        operation.outputs.add(name=label, type=_text_type())
        result = operation.outputs.add(name=by_label)
        dictionary = result.type.dictionaryType
        dictionary.keyType.CopyFrom(_text_type())
        dictionary.valueType.tensorType.dataType = mil_pb2().FLOAT64
        operation.attributes["name"].CopyFrom(_text_value(self.fresh(f"{MilOp.CLASSIFY}_0")))
        return label, by_label

    def cast(self, name: str, dtype: str, *, in_front: bool = False) -> str:
        """Return a value in another type, by a cast at the end or in front.

        Args:
            name: The value.
            dtype: Name of the type in ``MIL.proto``.
            in_front: Whether the cast comes first.
        """
        declared = self.types()[name]
        if dtype_of(declared) == dtype:
            return name
        insert = self.prepend if in_front else self.append
        text = _CAST_NAMES[dtype]
        return insert(
            MilOp.CAST,
            f"{name}_cast_to_{text}",
            with_dtype(declared, dtype),
            x=name,
            dtype=np.array(text),
        )

    def without_cast(self, output: str) -> str:
        """Return the value that is cast to an output; the cast is removed if nothing else reads it.

        Returns:
            ``output`` if no cast computes it, or if it has readers.
        """
        producer = self.producer(output)
        if producer is None or producer.type != MilOp.CAST or self._is_read(output):
            return output
        source: str = producer.inputs["x"].arguments[0].name
        self.block.operations.remove(producer)
        return source

    def _is_read(self, name: str) -> bool:
        return any(
            binding.name == name
            for operation in _walk(self.block)
            for argument in operation.inputs.values()
            for binding in argument.arguments
        )

    def redirect(self, old: str, new: str) -> None:
        """Replace the uses of a value, except by operations that were inserted in front."""
        for operation in self.block.operations[self._position :]:
            for nested in (operation, *_walk(operation)):
                _rename_operands(nested, {old: new})
        self.block.outputs[:] = [new if name == old else name for name in self.block.outputs]

    def rename(self, new_names: Mapping[str, str]) -> dict[str, str]:
        """Rename values of the function, by their old names; all change at once.

        A value that has one of the new names, and is not renamed, gets another name.

        Returns:
            All new names, by old names.
        """
        final_names = set(new_names.values())
        clashing = sorted(final_names & (self.names - new_names.keys()))
        self.names |= final_names
        renamed = {**new_names, **{name: self.fresh(name) for name in clashing}}
        for value in self.message.inputs:
            value.name = renamed.get(value.name, value.name)
        for operation in _walk(self.block):
            _rename_operands(operation, renamed)
            _rename_results(operation, renamed)
        self.block.outputs[:] = [renamed.get(name, name) for name in self.block.outputs]
        self.names = {renamed.get(name, name) for name in self.names}
        return renamed

    def _with_constants(
        self,
        kind: MilOp,
        name: str,
        type_: Message,
        arguments: Mapping[str, str | NDArray[Any]],
    ) -> list[Message]:
        """Return an operation, after its constants."""
        result = self.fresh(name)
        operation = _operation(kind, result, type_)
        constants: list[Message] = []
        for key, argument in arguments.items():
            if isinstance(argument, str):
                operation.inputs[key].arguments.add(name=argument)
                continue
            value = _value(argument)
            constant = _operation(MilOp.CONST, self.fresh(f"{result}_{key}_0"), value.type)
            constant.attributes["val"].CopyFrom(value)
            constants.append(constant)
            operation.inputs[key].arguments.add(name=constant.outputs[0].name)
        return [*constants, operation]


def _walk(parent: Message) -> Iterator[Message]:
    """Yield the operations in a block or operation, each before the operations in its blocks."""
    for operation in parent.operations if hasattr(parent, "operations") else ():
        yield operation
        yield from _walk(operation)
    for block in parent.blocks if hasattr(parent, "blocks") else ():
        yield from _walk(block)


def dtype_of(type_: Message) -> str:
    """Return the element type of a tensor's or state's type, by its name in ``MIL.proto``."""
    return mil_pb2().DataType.Name(_tensor(type_).dataType)


def shape_of(type_: Message) -> tuple[int | None, ...]:
    """Return the sizes of a tensor's type; None if a size is unknown."""
    return tuple(
        dimension.constant.size if dimension.WhichOneof("dimension") == "constant" else None
        for dimension in _tensor(type_).dimensions
    )


def with_dtype(type_: Message, dtype: str) -> Message:
    """Return a copy of a tensor's type with another element type."""
    copied = type(type_)()
    copied.CopyFrom(type_)
    copied.tensorType.dataType = mil_pb2().DataType.Value(dtype)
    return copied


def rename_keys(metadata: MutableMapping[str, str], key: str, new_names: Mapping[str, str]) -> None:
    """Rename values in an entry of metadata, a JSON object ``{function: {value: ...}}``."""
    if key in metadata:
        content: dict[str, dict[str, Any]] = json.loads(metadata[key])
        renamed = {
            function: {new_names.get(name, name): item for name, item in values.items()}
            for function, values in content.items()
        }
        metadata[key] = json.dumps(renamed, sort_keys=True)


def _tensor(type_: Message) -> Message:
    if type_.WhichOneof("type") == "stateType":
        return type_.stateType.wrappedType.tensorType
    return type_.tensorType


def _operation(kind: MilOp, result: str, type_: Message) -> Message:
    operation = mil_pb2().Operation(type=str(kind))
    operation.outputs.add(name=result, type=type_)
    operation.attributes["name"].CopyFrom(_text_value(result))
    return operation


def _text_type() -> Message:
    type_ = mil_pb2().ValueType()
    type_.tensorType.dataType = mil_pb2().STRING
    return type_


def _text_value(text: str) -> Message:
    value = mil_pb2().Value(type=_text_type())
    value.immediateValue.tensor.strings.values.append(text)
    return value


def _value(array: NDArray[Any]) -> Message:
    """Return a constant: a text, or fp32 or int32 of any shape."""
    if array.dtype.kind == "U":
        return _text_value(str(array))
    is_float = array.dtype.kind == "f"
    value = mil_pb2().Value()
    tensor = value.type.tensorType
    tensor.dataType = mil_pb2().FLOAT32 if is_float else mil_pb2().INT32
    tensor.rank = array.ndim
    for size in array.shape:
        tensor.dimensions.add().constant.size = size
    stored = value.immediateValue.tensor
    (stored.floats if is_float else stored.ints).values.extend(array.ravel().tolist())
    return value


def _rename_operands(operation: Message, new_names: Mapping[str, str]) -> None:
    """Rename the values that an operation reads, and the inputs and outputs of its blocks."""
    for argument in operation.inputs.values():
        for binding in argument.arguments:
            if binding.WhichOneof("binding") == "name" and binding.name in new_names:
                binding.name = new_names[binding.name]
    for block in operation.blocks:
        for value in block.inputs:
            value.name = new_names.get(value.name, value.name)
        block.outputs[:] = [new_names.get(name, name) for name in block.outputs]


def _rename_results(operation: Message, new_names: Mapping[str, str]) -> None:
    """Rename the results of an operation, and the operation if it has the name of its result."""
    for value in operation.outputs:
        if value.name not in new_names:
            continue
        if "name" in operation.attributes:
            name = operation.attributes["name"].immediateValue.tensor.strings.values
            name[:] = [new_names[value.name] if text == value.name else text for text in name]
        value.name = new_names[value.name]

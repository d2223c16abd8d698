"""A MIL program as frozen records, which the reader creates and the engines compile.

Names follow MIL.proto. Records compare by identity and are never modified after reading; arrays are
read-only, and views of the mapped weight file if they are stored there.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import ProgramError
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.runtime.mil.dtypes import DType, unpack_bits


class _WritableMemory:
    """The memory of a read-only array, declared writable."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def writable_alias(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array on the memory of ``array``, which it keeps alive. It must not be written to.

    torch and OpenVINO have no read-only tensors, and warn about read-only arrays or refuse them.
    Weights mapped from a file can so be shared instead of copied.
    """
    return np.asarray(_WritableMemory(array))


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor; ``shape`` has None for a dimension known only at run time; rank 0 is ``()``.

    ``shape`` is None if the rank is unknown.
    """

    dtype: DType
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        dims = (
            "?"
            if self.shape is None
            else ", ".join("?" if d is None else str(d) for d in self.shape)
        )
        return f"{self.dtype.label}[{dims}]"


@dataclass(frozen=True, slots=True)
class ListType:
    """A list with elements of type ``element``; ``length`` is None if it grows at run time."""

    element: ValueType
    length: int | None


@dataclass(frozen=True, slots=True)
class TupleType:
    """A fixed sequence of types."""

    elements: tuple[ValueType, ...]


@dataclass(frozen=True, slots=True)
class DictType:
    """A dictionary, used only for class labels with probabilities."""

    key: ValueType
    value: ValueType


@dataclass(frozen=True, slots=True)
class StateType:
    """A mutable tensor owned by the model instance (opset CoreML8 and later)."""

    wrapped: TensorType


ValueType: TypeAlias = TensorType | ListType | TupleType | DictType | StateType

Literal: TypeAlias = "NDArray[np.generic] | str | tuple[Literal, ...] | dict[Literal, Literal]"
"""Content of a constant: an array (rank 0 for a scalar), a string, or a tuple or dict of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Integers of fewer than eight bits, in packed storage.

    Attributes:
        stored: [ceil(elements * bits / 8)], uint8, least significant bits first.
    """

    stored: NDArray[np.uint8]
    dtype: DType
    shape: tuple[int, ...]

    def unpack(self) -> NDArray[np.generic]:
        """Return the unpacked tensor, an element per byte, in new memory."""
        data = unpack_bits(self.stored, self.dtype, math.prod(self.shape)).reshape(self.shape)
        data.flags.writeable = False
        return data


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A literal value.

    Attributes:
        type: The type of the value.
        content: The value; ``Packed`` if its type is packed (``type.dtype.is_packed``).
        offset: Byte offset in the weight file, None for an immediate value.
    """

    type: ValueType
    content: Literal | Packed
    offset: int | None = None

    @property
    def data(self) -> Literal:
        """The value. Packed values are unpacked at every access, and the result is not stored."""
        return self.content.unpack() if isinstance(self.content, Packed) else self.content

    @property
    def stored(self) -> Literal:
        """The value in storage; for a packed type, its bytes."""
        return self.content.stored if isinstance(self.content, Packed) else self.content

    @property
    def nbytes(self) -> int:
        """Stored size in bytes (packed size for sub-byte types)."""
        stored = self.stored
        return stored.nbytes if isinstance(stored, np.ndarray) else 0


@dataclass(frozen=True, slots=True)
class Ref:
    """Use of a value by name."""

    name: str


STATE_OPERAND = {"read_state": "input", "write_state": "input", "coreml_update_state": "state"}
"""Type of an op that reads or writes a state -> parameter of the state."""

WRITTEN_OPERAND = {"write_state": "data", "coreml_update_state": "value"}
"""Type of an op that writes a state -> parameter of the value to write."""

Binding: TypeAlias = Ref | Constant
"""One element of an argument: a name in scope, or a literal."""


@dataclass(frozen=True, slots=True)
class NamedType:
    """A name with its type: a function input, a block input or an op's output."""

    name: str
    type: ValueType


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation.

    Attributes:
        type: MIL op type, for example ``conv``.
        inputs: Parameter name -> bindings; several bindings for variadic parameters (``concat``'s
            ``values``).
        attributes: ``name`` and, for ``const`` and the ``constexpr`` ops, the values.
    """

    type: str
    inputs: Mapping[str, tuple[Binding, ...]]
    outputs: tuple[NamedType, ...]
    blocks: tuple[Block, ...] = ()
    attributes: Mapping[str, Constant] = field(default_factory=dict[str, Constant])

    def references(self) -> Iterator[str]:
        """Yield the names among the arguments."""
        for bindings in self.inputs.values():
            yield from (binding.name for binding in bindings if isinstance(binding, Ref))

    def literals(self) -> Iterator[Constant]:
        """Yield the literals among the arguments."""
        for bindings in self.inputs.values():
            yield from (binding for binding in bindings if isinstance(binding, Constant))

    @property
    def name(self) -> str:
        """The op's ``name`` attribute, or the name of its first output."""
        named = self.attributes.get("name")
        if named is not None and isinstance(named.data, str):
            return named.data
        return self.outputs[0].name if self.outputs else self.type


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Operations in execution order; ``outputs`` are names of this or an outer scope."""

    inputs: tuple[NamedType, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]

    def walk(self) -> Iterator[Op]:
        """Yield every op of this block and of nested blocks, outermost first."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


class ColorSpace(enum.Enum):
    """Channels of an image, and their order."""

    GRAYSCALE = "GRAYSCALE"
    RGB = "RGB"
    BGR = "BGR"
    GRAYSCALE_FLOAT16 = "GRAYSCALE_FLOAT16"


@dataclass(frozen=True, slots=True)
class Feature:
    """An input, output or state of the model, as declared in its description.

    Attributes:
        name: Feature name.
        type: Element type and default shape.
        shapes: Enumerated shapes; may be empty.
        bounds: Per dimension (lower, upper), upper None for unbounded; empty for fixed shapes.
        optional: Whether the input may be omitted, in which case it is filled with ``default``.
        default: Value of an omitted input, or None for zeros.
        color_space: Color space of an image, whose pixels are the tensor; None for a multi-array.
    """

    name: str
    type: TensorType
    shapes: tuple[tuple[int, ...], ...] = ()
    bounds: tuple[tuple[int, int | None], ...] = ()
    optional: bool = False
    default: float | None = None
    color_space: ColorSpace | None = None


@dataclass(frozen=True, slots=True)
class Classifier:
    """The labels of a function that is a classifier.

    Attributes:
        label: Name of the output with the label of the most probable class.
        probabilities: Name of the output with a probability for each label.
        labels: The label of each element of the probabilities, in order.
    """

    label: str
    probabilities: str
    labels: tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """One entry point.

    Attributes:
        name: Function name (``main`` in a model with a single function).
        opset: MIL opset, for example ``CoreML7``.
        params: Parameters of the MIL function, states included.
        block: The specialization for ``opset``.
        inputs: Model-level inputs, in declaration order.
        outputs: Model-level outputs, in declaration order.
        states: Model-level states.
        fp32_constants: Original fp32 values of constants that fp16 changes, by name; None if the
            model does not have them.
        classifier: The labels of a classifier, else None. Its probabilities are a tensor among the
            outputs; its label is not among them.
    """

    name: str
    opset: str
    params: tuple[NamedType, ...]
    block: Block
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    states: tuple[Feature, ...] = ()
    fp32_constants: Constants | None = field(default=None, compare=False)
    classifier: Classifier | None = None

    def output_types(self) -> dict[str, TensorType]:
        """Return the types in which the outputs are computed, by name."""
        declared = {named.name: named.type for named in self.params}
        for op in self.block.ops:
            declared.update((output.name, output.type) for output in op.outputs)
        return {
            name: type_
            for name in self.block.outputs
            if isinstance(type_ := declared[name], TensorType)
        }

    def computed_in(self) -> Counter[DType]:
        """Count the results that the function computes in each floating-point type.

        Weights, reads and writes of states, and casts of outputs do not count.
        """
        ops = list(self.block.walk())
        read = {name for op in ops if op.type not in STATE_OPERAND for name in op.references()}
        return Counter(
            output.type.dtype
            for op in ops
            if not op.type.startswith("const") and op.type not in STATE_OPERAND
            for output in op.outputs
            if isinstance(output.type, TensorType) and output.type.dtype.is_float
            if op.type != "cast" or output.name in read
        )


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A model of ML Program type.

    Attributes:
        specification_version: 6 (iOS15) to 10 (iOS26).
        metadata: User-defined metadata strings.
    """

    specification_version: int
    functions: Mapping[str, Function]
    default_function: str
    metadata: Mapping[str, str]

    def function(self, name: str | None = None) -> Function:
        """Return the function called ``name``, or the default function.

        Raises:
            ProgramError: No such function.
        """
        function_name = self.default_function if name is None else name
        try:
            return self.functions[function_name]
        except KeyError:
            raise ProgramError(
                "no such function", got=repr(function_name), expected=", ".join(self.functions)
            ) from None

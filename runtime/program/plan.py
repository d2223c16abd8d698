"""A ``.pte`` program as frozen records, which the decoder creates and the hosts execute.

Names follow ExecuTorch's ``program.fbs``. An execution plan is one method: a table of values, and
instructions that refer to values by index.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch


class Dynamism(enum.Enum):
    """How a tensor's serialized shape determines its shape at run time."""

    STATIC = 0
    """The shape is fixed."""
    BOUNDED = 1
    """The shape is an upper bound; every dimension may be smaller."""
    UNBOUNDED = 2
    """Only the rank is known; memory is allocated at run time."""


def dense_strides(shape: Sequence[int], dim_order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor.

    Args:
        shape: Its shape.
        dim_order: Its dimensions from outermost to innermost in memory.
    """
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(dim_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Planned memory of a tensor: arena ``arena``, from byte ``offset`` on."""

    arena: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor value.

    Attributes:
        shape: Sizes, interpreted by ``dynamism``.
        dim_order: Dimensions from outermost to innermost in memory.
        buffer: Index of the tensor's data among the constants (or, if ``allocation`` is set, among
            the initial values of mutable tensors); 0 for none.
        allocation: Planned memory, None for constants and for tensors allocated at run time.
        mutable_segment: Index of the group of initial values that ``buffer`` refers to.
        external_key: Name of the data if it is stored outside the program, else None.
        is_row_major: Whether the last dimension is the innermost in memory, and so on.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    dynamism: Dynamism = Dynamism.STATIC
    buffer: int = 0
    allocation: Allocation | None = None
    mutable_segment: int = 0
    external_key: str | None = None
    is_row_major: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        in_order = self.dim_order == tuple(range(len(self.dim_order)))
        object.__setattr__(self, "is_row_major", in_order)

    @property
    def is_constant(self) -> bool:
        """Whether the tensor is constant data of the program."""
        return self.allocation is None and (self.buffer > 0 or self.external_key is not None)

    @property
    def numel(self) -> int:
        """Number of elements of ``shape``."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that ``shape`` occupies."""
        return self.numel * self.dtype.itemsize

    def strides_for(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the strides, in elements, of a dense tensor of ``shape`` in this dim order."""
        return dense_strides(shape, self.dim_order)

    def __str__(self) -> str:
        prefix = {Dynamism.STATIC: "", Dynamism.BOUNDED: "<=", Dynamism.UNBOUNDED: "?"}[
            self.dynamism
        ]
        return describe(self.dtype, [f"{prefix}{size}" for size in self.shape])


def describe(dtype: torch.dtype, shape: Iterable[object]) -> str:
    """Return dtype and shape for a message, for example ``float32[2, 3]``."""
    sizes = ", ".join(str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')}[{sizes}]"


class ListKind(enum.Enum):
    """Type of the members of an ``IndexList``."""

    INT = "int"
    TENSOR = "tensor"
    OPTIONAL_TENSOR = "optional tensor"


@dataclass(frozen=True, slots=True)
class IndexList:
    """A list of other values, by index; -1 is None in a list of optional tensors."""

    kind: ListKind
    items: tuple[int, ...]


ValueSpec: TypeAlias = (
    TensorSpec | IndexList | bool | int | float | str | tuple[float, ...] | tuple[bool, ...] | None
)
"""An entry of a method's value table; tuples are lists of floats or booleans."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Call ``operator`` with ``args``: its schema's arguments in order, then its result."""

    operator: str
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DelegateCall:
    """Call delegate number ``delegate`` with the values ``args``: its inputs, then its outputs."""

    delegate: int
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoveCall:
    """Set value ``target`` to value ``source``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class JumpFalseCall:
    """Continue at instruction ``target`` of the chain if value ``condition`` is false."""

    condition: int
    target: int


@dataclass(frozen=True, slots=True)
class FreeCall:
    """Release the memory of the tensor ``value``."""

    value: int


Instruction: TypeAlias = KernelCall | DelegateCall | MoveCall | JumpFalseCall | FreeCall


@dataclass(frozen=True, slots=True, eq=False)
class DelegateInfo:
    """One delegated subgraph.

    Attributes:
        processed: The bytes that the backend's preprocess returned, as a view.
        compile_specs: Keys and values given to the partitioner, in order.
    """

    backend_id: str
    processed: memoryview
    compile_specs: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, eq=False)
class MethodInfo:
    """One method of a program.

    Attributes:
        name: Method name, for example ``forward``.
        inputs: Indices of the method's inputs in the value table.
        outputs: Indices of the method's outputs in the value table.
        chains: Instructions, in chains executed one after another (exporters write one).
        delegates: Delegated subgraphs, by the number that ``DelegateCall`` uses.
        arena_sizes: Bytes of planned memory by arena number; arena 0 is unused.
        input_nesting: ExecuTorch's description of how the inputs are nested, unchecked; see
            ``value_names``.
        output_nesting: The same description of the outputs.
        input_specs: Metadata of the inputs, in order.
    """

    name: str
    values: tuple[ValueSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    chains: tuple[tuple[Instruction, ...], ...]
    delegates: tuple[DelegateInfo, ...]
    arena_sizes: tuple[int, ...]
    input_nesting: str = ""
    output_nesting: str = ""
    input_specs: tuple[ValueSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_specs", tuple(self.values[i] for i in self.inputs))

    @property
    def operators(self) -> Counter[str]:
        """Number of calls of each operator outside of delegates."""
        return Counter(
            call.operator for chain in self.chains for call in chain if isinstance(call, KernelCall)
        )

    @property
    def has_jumps(self) -> bool:
        """Whether the method has loops or branches."""
        return any(isinstance(call, JumpFalseCall) for chain in self.chains for call in chain)

    @property
    def output_specs(self) -> tuple[ValueSpec, ...]:
        """Metadata of the outputs, in order."""
        return tuple(self.values[index] for index in self.outputs)

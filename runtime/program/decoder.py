"""Decode the FlatBuffers tables of a ``.pte`` to the records of ``plan``.

Every index in a plan is checked here, once, so that hosts can use it without checks.

Source: ``program.fbs`` and ``scalar_type.fbs`` of ExecuTorch (``schema/``). Field numbers in this
module are positions in those files; a union counts twice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from coreml_delegate.errors import BlobFormatError
from coreml_delegate.runtime.native import SCALAR_TYPES as NUMBERS
from coreml_delegate.runtime.program.flatbuffer import (
    BOOL,
    F64,
    I8,
    I32,
    I64,
    U8,
    U32,
    U64,
    Table,
    require_index,
)
from coreml_delegate.runtime.program.plan import (
    Allocation,
    DelegateCall,
    DelegateInfo,
    Dynamism,
    FreeCall,
    IndexList,
    Instruction,
    JumpFalseCall,
    KernelCall,
    ListKind,
    MethodInfo,
    MoveCall,
    TensorSpec,
    ValueSpec,
)

DTYPES: Final[Mapping[int, torch.dtype]] = {
    number: getattr(torch, name) for name, number in NUMBERS.items()
}
"""ExecuTorch's ``ScalarType`` number -> torch dtype."""

SCALAR_TYPES: Final[Mapping[torch.dtype, int]] = {dtype: number for number, dtype in DTYPES.items()}
"""torch dtype -> ExecuTorch's ``ScalarType`` number."""

_DYNAMISM: Final = {member.value: member for member in Dynamism}
_MAX_RANK: Final = 16  # kTensorDimensionLimit
_MAX_NBYTES: Final = 1 << 62


Resolver = Callable[[str, int], memoryview]
"""Returns the bytes at a location, by index; raises BlobFormatError if they do not exist."""

SEGMENT: Final = "segment"
# The DataLocation enum.
_LOCATIONS: Final = {0: "inline", 1: SEGMENT}


def _present(table: Table | None, what: str) -> Table:
    if table is None:
        raise BlobFormatError("program data is corrupt", got=f"no {what}")
    return table


def _name(text: str | None, what: str) -> str:
    if not text:
        raise BlobFormatError("program data is corrupt", got=f"{what} without a name")
    return text


# --- values -------------------------------------------------------------------------------------


def _allocation(table: Table | None) -> Allocation | None:
    if table is None:
        return None
    low, high = table.integer(1, U32), table.integer(2, U32)
    return Allocation(arena=table.integer(0, U32), offset=low | high << 32)


def _dtype(number: int) -> torch.dtype:
    try:
        return DTYPES[number]
    except KeyError:
        raise BlobFormatError(
            "tensor has an unknown scalar type", got=str(number), expected=f"one of {[*DTYPES]}"
        ) from None


def _check_layout(shape: tuple[int, ...], dim_order: tuple[int, ...], storage_offset: int) -> None:
    rank = len(shape)
    if rank > _MAX_RANK or min(shape, default=0) < 0 or sorted(dim_order) != [*range(rank)]:
        raise BlobFormatError(
            "tensor has an impossible layout",
            got=f"sizes {list(shape)} and dimension order {list(dim_order)}",
            expected=f"at most {_MAX_RANK} sizes, none negative, and a permutation of them",
        )
    if storage_offset:
        raise BlobFormatError(
            "tensor has a storage offset",
            got=str(storage_offset),
            expected="0, as in every program",
        )


def _tensor(table: Table) -> TensorSpec:
    shape = table.integers(2, I32)
    # Exporters omit the order only for scalars; older exporters also for contiguous tensors.
    dim_order = table.integers(3, U8) or tuple(range(len(shape)))
    _check_layout(shape, dim_order, table.integer(1, I32))
    extra = table.table(9)
    external = extra is not None and extra.integer(2, I8) == 1
    dynamism = table.integer(8, I8)
    if dynamism not in _DYNAMISM:
        raise BlobFormatError("tensor has an unknown dynamism", got=str(dynamism))
    spec = TensorSpec(
        dtype=_dtype(table.integer(0, I8)),
        shape=shape,
        dim_order=dim_order,
        dynamism=_DYNAMISM[dynamism],
        buffer=table.integer(5, U32),
        allocation=_allocation(table.table(6)),
        mutable_segment=extra.integer(0, U64) if extra else 0,
        external_key=_name(extra.text(1), "external tensor") if extra and external else None,
    )
    if spec.nbytes > _MAX_NBYTES:
        raise BlobFormatError("tensor has an impossible size", got=str(spec))
    return spec


def _index_list(kind: ListKind, layout: struct.Struct) -> Callable[[Table], IndexList]:
    return lambda table: IndexList(kind, table.integers(0, layout))


# The KernelTypes union: number of a member -> decoder of its table.
_VALUES: Final[Mapping[int, Callable[[Table], ValueSpec]]] = {
    1: lambda _: None,
    2: lambda table: table.integer(0, I64),
    3: lambda table: bool(table.integer(0, BOOL)),
    4: lambda table: table.real(0, F64),
    5: _tensor,
    6: lambda table: table.text(0) or "",
    7: _index_list(ListKind.INT, I64),
    8: lambda table: tuple(float(item) for item in table.scalars(0, F64)),
    9: lambda table: tuple(bool(item) for item in table.scalars(0, BOOL)),
    10: _index_list(ListKind.TENSOR, I32),
    11: _index_list(ListKind.OPTIONAL_TENSOR, I32),
}


def _value(table: Table) -> ValueSpec:
    kind = table.integer(0, U8)
    if kind not in _VALUES:
        raise BlobFormatError("program holds an unknown kind of value", got=str(kind))
    return _VALUES[kind](_present(table.table(1), "value"))


def _check_lists(values: tuple[ValueSpec, ...]) -> None:
    for value in values:
        if not isinstance(value, IndexList):
            continue
        lowest = -1 if value.kind is ListKind.OPTIONAL_TENSOR else 0
        for item in value.items:
            require_index(item - lowest, len(values) - lowest, "a list member")
            if item >= 0 and isinstance(values[item], IndexList):
                raise BlobFormatError("program holds a list of lists", got=str(value))


# --- instructions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scope:
    """The values, operators and delegates that the instructions of one method may refer to."""

    values: int
    operators: tuple[str, ...]
    delegates: int

    def value(self, table: Table, field: int) -> int:
        return require_index(table.integer(field, I32), self.values, "a value")

    def args(self, indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(require_index(index, self.values, "a value") for index in indices)


def _kernel_call(table: Table, scope: _Scope) -> KernelCall:
    operator = require_index(table.integer(0, I32), len(scope.operators), "an operator")
    return KernelCall(scope.operators[operator], scope.args(table.integers(1, I32)))


def _delegate_call(table: Table, scope: _Scope) -> DelegateCall:
    delegate = require_index(table.integer(0, I32), scope.delegates, "a delegate")
    return DelegateCall(delegate, scope.args(table.integers(1, I32)))


# The InstructionArguments union: number of a member -> decoder of its table.
_INSTRUCTIONS: Final[Mapping[int, Callable[[Table, _Scope], Instruction]]] = {
    1: _kernel_call,
    2: _delegate_call,
    3: lambda table, scope: MoveCall(scope.value(table, 0), scope.value(table, 1)),
    4: lambda table, scope: JumpFalseCall(scope.value(table, 0), table.integer(1, I32)),
    5: lambda table, scope: FreeCall(scope.value(table, 0)),
}


def _instruction(table: Table, scope: _Scope) -> Instruction:
    kind = table.integer(0, U8)
    if kind not in _INSTRUCTIONS:
        raise BlobFormatError("program holds an unknown kind of instruction", got=str(kind))
    return _INSTRUCTIONS[kind](_present(table.table(1), "instruction"), scope)


def _chain(table: Table, scope: _Scope) -> tuple[Instruction, ...]:
    instructions = table.tables(2, lambda item: _instruction(item, scope))
    for instruction in instructions:
        if isinstance(instruction, JumpFalseCall):
            # The index after the last instruction is the end of the chain.
            require_index(instruction.target, len(instructions) + 1, "an instruction")
    return instructions


# --- methods ------------------------------------------------------------------------------------


def _operator(table: Table) -> str:
    name, overload = _name(table.text(0), "operator"), table.text(1)
    return f"{name}.{overload}" if overload else name


def _delegate(table: Table, resolve: Resolver) -> DelegateInfo:
    reference = _present(table.table(1), "delegate data")
    location = reference.integer(0, I8)
    if location not in _LOCATIONS:
        raise BlobFormatError("delegate data has an unknown location", got=str(location))
    return DelegateInfo(
        backend_id=_name(table.text(0), "delegate"),
        processed=resolve(_LOCATIONS[location], reference.integer(1, U32)),
        compile_specs=table.tables(2, lambda spec: (spec.text(0) or "", bytes(spec.raw(1)))),
    )


def _check_arenas(values: tuple[ValueSpec, ...], sizes: tuple[int, ...]) -> None:
    if min(sizes, default=0) < 0:
        raise BlobFormatError("planned memory has a negative size", got=str(list(sizes)))
    for value in values:
        if not isinstance(value, TensorSpec) or value.allocation is None:
            continue
        allocation = value.allocation
        # Arena 0 is reserved for constants: nothing can be planned into it.
        require_index(allocation.arena - 1, len(sizes) - 1, "planned memory")
        if allocation.offset + value.nbytes > sizes[allocation.arena]:
            raise BlobFormatError(
                "tensor lies outside its planned memory",
                got=f"{value} at byte {allocation.offset}",
                expected=f"within {sizes[allocation.arena]} bytes",
            )


def decode_method(table: Table, resolve: Resolver) -> MethodInfo:
    """Decode one ``ExecutionPlan``; ``resolve`` finds the bytes of a delegate.

    Returns:
        The method, with every index in it checked.

    Raises:
        BlobFormatError: The plan is inconsistent, or refers to something that does not exist.
    """
    values = table.tables(2, _value)
    _check_lists(values)
    delegates = table.tables(7, lambda item: _delegate(item, resolve))
    scope = _Scope(len(values), table.tables(6, _operator), len(delegates))
    arena_sizes = table.integers(8, I64)
    _check_arenas(values, arena_sizes)
    nesting = table.table(1)
    return MethodInfo(
        name=_name(table.text(0), "method"),
        values=values,
        inputs=scope.args(table.integers(3, I32)),
        outputs=scope.args(table.integers(4, I32)),
        chains=table.tables(5, lambda item: _chain(item, scope)),
        delegates=delegates,
        arena_sizes=arena_sizes,
        input_nesting=(nesting and nesting.text(0)) or "",
        output_nesting=(nesting and nesting.text(1)) or "",
    )


# --- the rest of a program ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subsegments:
    """Items stored contiguously in one segment, with the offset of each."""

    segment: int
    offsets: tuple[int, ...]


def decode_subsegments(table: Table) -> Subsegments:
    """Decode one ``SubsegmentOffsets``."""
    return Subsegments(table.integer(0, U32), table.integers(1, U64))


def decode_segment(table: Table) -> tuple[int, int]:
    """Return offset from the segment base, and size in bytes, of one ``DataSegment``."""
    return table.integer(0, U64), table.integer(1, U64)


def decode_named_data(table: Table) -> tuple[str, int]:
    """Return key and segment number of one ``NamedData``."""
    return _name(table.text(0), "named data"), table.integer(1, U32)

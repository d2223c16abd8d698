"""Memory of a loaded program: arenas, and tensors on planned or stored bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from coreml_delegate.errors import ProgramError
from coreml_delegate.runtime.mil.program import writable_alias
from coreml_delegate.runtime.program.delegate_interface import NamedData
from coreml_delegate.runtime.program.plan import Allocation, Dynamism, MethodInfo, TensorSpec
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.snapshots import Array, Snapshot, State

# The memory planner puts activations and unshared buffers into arena 1, and buffers shared by
# methods into later arenas. The stock runtime shares every arena, so that one method's activations
# overwrite another's buffers; with a private arena 1 per method they do not.
_PRIVATE_ARENA: Final = 1

# Elements from which torch copies on several threads: ``at::internal::GRAIN_SIZE``.
_GRAIN: Final = 32768

_AS_ARRAYS: Final = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)


class ProgramMemory:
    """The memory that the methods of one loaded program use.

    ``external_data`` finds constants stored outside the program, by name.
    """

    def __init__(self, program: PteProgram, external_data: NamedData) -> None:
        self._program = program
        self._external_data = external_data
        self._shared: dict[int, NDArray[np.uint8]] = {}
        self._shared_sizes = [
            max(sizes)
            for sizes in zip_longest(*(m.arena_sizes for m in program.methods), fillvalue=0)
        ]
        self._initialised: set[Allocation] = set()

    def materialise(self, method: MethodInfo) -> list[Any]:
        """Return the value table of ``method`` as Python objects.

        Returns:
            Tensors, scalars and strings by value index; ``IndexList`` entries are unchanged.

        Raises:
            ProgramError: External data is missing, or there is too little memory.
        """
        private: dict[int, NDArray[np.uint8]] = {}
        if len(method.arena_sizes) > _PRIVATE_ARENA:
            private[_PRIVATE_ARENA] = _arena(method.arena_sizes[_PRIVATE_ARENA])
        return [
            self._tensor(value, private) if isinstance(value, TensorSpec) else _to_python(value)
            for value in method.values
        ]

    def is_shared(self, method: MethodInfo) -> bool:
        """Whether a method shares memory with other methods."""
        return len(method.arena_sizes) > _PRIVATE_ARENA + 1

    def initial_value(self, spec: TensorSpec) -> torch.Tensor | None:
        """Return the initial value of a planned tensor; None for zeros."""
        stored = self._program.tensor_data(spec)
        return None if stored is None else borrow_tensor(stored, spec)

    def _tensor(self, spec: TensorSpec, private: dict[int, NDArray[np.uint8]]) -> torch.Tensor:
        if spec.external_key is not None:
            return borrow_tensor(self._external(spec, spec.external_key), spec)
        stored = self._program.tensor_data(spec)
        if spec.allocation is None:
            return borrow_tensor(stored, spec) if stored is not None else _own_tensor(spec)
        arena = private.get(spec.allocation.arena)
        is_shared = arena is None
        if arena is None:
            arena = self._shared_arena(spec.allocation.arena)
        tensor = _planned_tensor(arena, spec.allocation.offset, spec)
        # A method loaded later must not reset a shared buffer that another method has changed.
        if stored is not None and not (is_shared and spec.allocation in self._initialised):
            tensor.copy_(borrow_tensor(stored, spec))
            if is_shared:
                self._initialised.add(spec.allocation)
        return tensor

    def _shared_arena(self, number: int) -> NDArray[np.uint8]:
        if number not in self._shared:
            self._shared[number] = _arena(self._shared_sizes[number])
        return self._shared[number]

    def _external(self, spec: TensorSpec, key: str) -> memoryview:
        data = self._external_data(key)
        if data is None or data.nbytes < spec.nbytes:
            raise ProgramError(
                "the program keeps a tensor outside the file",
                got="no data" if data is None else f"{data.nbytes} bytes",
                expected=f"{spec.nbytes} bytes under the name {key!r}",
                remedy="Pass its .ptd as external data, or export without external weights.",
            )
        return data[: spec.nbytes]


@dataclass(frozen=True, eq=False)
class BufferState(State):
    """The mutable buffers of a method, as a state; an initial value of None is zeros."""

    tensors: Mapping[str, torch.Tensor]
    initial: Mapping[str, torch.Tensor | None]

    def reset(self) -> None:
        """Set every buffer to its initial value."""
        for name, tensor in self.tensors.items():
            initial = self.initial[name]
            if initial is None:
                tensor.zero_()
            else:
                tensor.copy_(initial)

    def _tensors_like(self) -> Snapshot:
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def _read(self, name: str) -> Array:
        return self.tensors[name].numpy().copy()

    def _write(self, name: str, value: Array) -> None:
        self.tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _to_python(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _arena(size: int) -> NDArray[np.uint8]:
    # Zeroed, because mutable tensors without a stored initial value start at zero.
    try:
        return np.zeros(size, dtype=np.uint8)
    except (MemoryError, ValueError) as error:
        raise ProgramError("cannot allocate the program's memory", got=f"{size} bytes") from error


def _with_layout(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return flat.as_strided(spec.shape, spec.strides_for(spec.shape))


def _planned_tensor(arena: NDArray[np.uint8], offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor on a slice of ``arena``; torch refuses to resize it beyond the slice."""
    if spec.numel == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    flat = torch.frombuffer(arena, dtype=spec.dtype, count=spec.numel, offset=offset)
    return _with_layout(flat, spec)


def _own_tensor(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor with its own memory; kernels resize unbounded tensors."""
    if spec.dynamism is Dynamism.UNBOUNDED:
        return torch.empty((0,) * len(spec.shape), dtype=spec.dtype)
    return _planned_tensor(_arena(spec.nbytes), 0, spec)


def borrow_tensor(data: memoryview, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor on stored bytes, which it keeps alive. It must not be written to.

    ``data`` has at least ``spec.nbytes`` bytes; they are copied if not aligned for the dtype.
    """
    if spec.numel == 0:
        return torch.empty(spec.shape, dtype=spec.dtype)
    flat = np.frombuffer(data, dtype=np.uint8)
    if data.readonly:
        flat = writable_alias(flat)
    if flat.__array_interface__["data"][0] % spec.dtype.itemsize:
        flat = flat.copy()
    return _with_layout(torch.frombuffer(flat, dtype=spec.dtype, count=spec.numel), spec)


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target`` of the same shape, with a cast if needed.

    torch would copy a large tensor on its own threads, which afterwards spin for a while on the
    cores that a delegate needs.
    """
    large = target.numel() >= _GRAIN
    if (
        large
        and target.dtype is source.dtype
        and target.dtype in _AS_ARRAYS
        and target.stride() == source.stride()
    ):
        np.copyto(target.numpy(), source.detach().numpy())
    else:
        target.copy_(source)

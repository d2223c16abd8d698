"""Bind instructions to steps: closures over a method's values, bound once and run many times.

A step returns None to continue with the next step, or the index of the step to jump to. Objects
that never change between runs (constants, planned tensors, numbers) are bound when the method is
loaded; only values that are replaced are looked up at run time.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.runtime.native import NATIVE_RESIZE, NATIVE_RUN, NativeArgument, NativeCall
from coreml_delegate.runtime.program.decoder import SCALAR_TYPES
from coreml_delegate.runtime.program.delegate_interface import (
    DelegateCallable,
    check_output_count,
    fit_output,
)
from coreml_delegate.runtime.program.kernels import Kernel, find_kernel, is_long
from coreml_delegate.runtime.program.memory import fill
from coreml_delegate.runtime.program.plan import (
    DelegateCall,
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
)
from coreml_delegate.runtime.threads import all_torch_threads

Step: TypeAlias = Callable[[], "int | None"]


def bind_method(
    method: MethodInfo,
    values: list[Any],
    delegates: Sequence[DelegateCallable],
    replaced_inputs: Iterable[int],
    delegate_only: DelegateOnlyValues,
) -> tuple[tuple[tuple[Step, ...], ...], frozenset[int]]:
    """Turn the instructions of a method into steps, which read and write the list ``values``.

    Each run replaces the ``replaced_inputs`` by the caller's objects.

    Returns:
        The steps by chain, and the indices of the values that runs replace.

    Raises:
        UnsupportedOpError: An operator has no kernel.
        BlobFormatError: A call does not fit its operator, or would overwrite a constant.
        ProgramError: An argument of a delegate is no tensor.
    """
    instructions = [instruction for chain in method.chains for instruction in chain]
    kernels = {name: find_kernel(name) for name in sorted(method.operators)}
    replaced = {*replaced_inputs, *delegate_only.outputs}
    for instruction in instructions:
        replaced.update(_replaced_values(instruction, method, kernels))
    binder = _Binder(method, values, kernels, delegates, frozenset(replaced), delegate_only)
    chains = tuple(tuple(map(binder.bind, chain)) for chain in method.chains)
    return chains, frozenset(replaced)


@dataclass(frozen=True, slots=True)
class DelegateOnlyValues:
    """Values that need no planned memory, because only delegates use them.

    Attributes:
        inputs: Inputs of the method that only delegates read.
        outputs: Outputs of the method that one delegate returns; each run makes a new tensor.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]


def find_delegate_only_values(
    method: MethodInfo, delegates: Sequence[DelegateCallable]
) -> DelegateOnlyValues:
    """Find the values that only delegates use.

    Raises:
        UnsupportedOpError: An operator has no kernel.
    """
    delegate_inputs: set[int] = set()
    delegate_outputs: Counter[int] = Counter()
    targets: set[int] = {*method.inputs}
    used_elsewhere = {
        index for value in method.values if isinstance(value, IndexList) for index in value.items
    }
    for instruction in (instruction for chain in method.chains for instruction in chain):
        match instruction:
            case DelegateCall():
                count = delegates[instruction.delegate].input_count
                delegate_inputs.update(instruction.args[:count])
                delegate_outputs.update(instruction.args[count:])
            case KernelCall():
                used_elsewhere.update(instruction.args)
                targets.update(_target_values(instruction, method))
            case MoveCall():
                used_elsewhere.update((instruction.source, instruction.target))
                targets.add(instruction.target)
            case JumpFalseCall():
                used_elsewhere.add(instruction.condition)
            case FreeCall():
                used_elsewhere.add(instruction.value)
    views = _views(method, targets | delegate_outputs.keys())
    used_elsewhere |= {
        index
        for index in {*delegate_inputs, *delegate_outputs} - views.keys()
        if any(_overlap(method.values[index], view) for view in views.values())
    }
    inputs = delegate_inputs.intersection(method.inputs) - used_elsewhere - delegate_outputs.keys()
    outputs = {
        index
        for index in delegate_outputs.keys()
        & set(method.outputs) - used_elsewhere - delegate_inputs - set(method.inputs)
        if delegate_outputs[index] == 1
        and isinstance(value := method.values[index], TensorSpec)
        and value.is_row_major
    }
    return DelegateOnlyValues(frozenset(inputs), frozenset(outputs))


def _target_values(call: KernelCall, method: MethodInfo) -> Iterator[int]:
    """Yield the values that a kernel fills or replaces, the members of lists included."""
    kernel = find_kernel(call.operator)
    positions = (*kernel.mutated, *range(len(kernel.parameters), len(call.args)))
    if kernel.result_at is not None:
        positions = (*positions, kernel.result_at)
    for index in (call.args[position] for position in positions if position < len(call.args)):
        value = method.values[index]
        yield from value.items if isinstance(value, IndexList) else (index,)


def _views(method: MethodInfo, targets: Collection[int]) -> dict[int, TensorSpec]:
    """Return planned tensors that nothing writes to.

    ExecuTorch's memory planner places a view of static sizes on the memory of its source, and no
    instruction is left of it.
    """
    return {
        index: value
        for index, value in enumerate(method.values)
        if index not in targets and isinstance(value, TensorSpec) and value.allocation is not None
    }


def _overlap(value: object, view: TensorSpec) -> bool:
    """Whether a value shares bytes of planned memory with a view."""
    if not isinstance(value, TensorSpec) or value.allocation is None or view.allocation is None:
        return False
    start, end = value.allocation.offset, value.allocation.offset + value.nbytes
    view_start, view_end = view.allocation.offset, view.allocation.offset + view.nbytes
    is_same_arena = value.allocation.arena == view.allocation.arena
    return is_same_arena and start < view_end and view_start < end


def _replaced_values(
    instruction: Instruction, method: MethodInfo, kernels: dict[str, Kernel]
) -> tuple[int, ...]:
    """Return the values that an instruction replaces, as opposed to tensors that it fills."""
    if isinstance(instruction, MoveCall):
        return (instruction.target,)
    if isinstance(instruction, KernelCall):
        target = _result_index(instruction, method, kernels[instruction.operator])
        return () if target is None else (target,)
    return ()


def _result_index(call: KernelCall, method: MethodInfo, kernel: Kernel) -> int | None:
    """Return the index of the value that a kernel's result replaces; None if it fills arguments."""
    count = len(kernel.parameters)
    if len(call.args) < count:
        raise BlobFormatError(
            f"call of {call.operator} has too few arguments",
            got=str(len(call.args)),
            expected=f"{count}: {', '.join(kernel.parameters)}",
        )
    if kernel.result_at is not None:
        return call.args[kernel.result_at]
    filled = {call.args[position] for position in kernel.mutated}
    for index in call.args[count:]:
        # Several results are a list of the tensors that the kernel has filled.
        if index not in filled and not isinstance(method.values[index], IndexList):
            return index
    return None


@dataclass(frozen=True, slots=True)
class _Binder:
    """Binds the instructions of one method."""

    method: MethodInfo
    values: list[Any]
    kernels: dict[str, Kernel]
    delegates: Sequence[DelegateCallable]
    replaced: frozenset[int]
    delegate_only: DelegateOnlyValues

    def bind(self, instruction: Instruction) -> Step:
        match instruction:
            case KernelCall():
                return self._kernel(instruction)
            case DelegateCall():
                return self._delegate(instruction)
            case MoveCall():
                return self._move(instruction)
            case JumpFalseCall():
                return self._jump(instruction)
            case FreeCall():
                return self._free(instruction)

    # --- kernels

    def _kernel(self, call: KernelCall) -> Step:
        kernel = self.kernels[call.operator]
        count = len(kernel.parameters)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        patches: list[tuple[Any, int | str, Callable[[], Any]]] = []
        for position, index in enumerate(call.args[:count]):
            read = self._reader(index)
            bound = None if self._is_replaced(index) else read()
            if position < kernel.positional:
                positional.append(bound)
                key: int | str = position
            else:
                key = kernel.parameters[position]
                keywords[key] = bound
            if self._is_replaced(index):
                patches.append((positional if isinstance(key, int) else keywords, key, read))
        result = _result_index(call, self.method, kernel)
        growing = self._growing(call, kernel)
        function = kernel.function
        if self.delegates and is_long(kernel, self._shapes(call, kernel)):
            function = all_torch_threads()(function)
        return self._kernel_step(function, positional, keywords, patches, result, growing)

    def _shapes(self, call: KernelCall, kernel: Kernel) -> dict[str, tuple[int, ...]]:
        specs = zip(kernel.parameters, map(self.method.values.__getitem__, call.args), strict=False)
        return {name: spec.shape for name, spec in specs if isinstance(spec, TensorSpec)}

    def _kernel_step(
        self,
        function: Callable[..., Any],
        positional: list[Any],
        keywords: dict[str, Any],
        patches: list[tuple[Any, int | str, Callable[[], Any]]],
        result: int | None,
        growing: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> Step:
        values = self.values

        def fixed() -> None:
            function(*positional, **keywords)

        def general() -> None:
            for container, key, read in patches:
                container[key] = read()
            for index, empty in growing:
                values[index].resize_(empty)
            outcome = function(*positional, **keywords)
            if result is not None:
                values[result] = outcome

        return general if patches or growing or result is not None else fixed

    def _growing(self, call: KernelCall, kernel: Kernel) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the dynamic tensors that the kernel resizes, each with an empty shape.

        torch warns unless they are resized to this shape first. ExecuTorch's kernels end the
        process when the rank changes.
        """
        outputs = {call.args[position] for position in kernel.outputs}
        read = {
            index
            for position, index in enumerate(call.args[: len(kernel.parameters)])
            if position not in kernel.outputs
        }
        tensors = [index for output in sorted(outputs) for index in self._members(output)]
        for index in tensors:
            self._check_writable(index, call.operator)
        return tuple(
            (index, (0,) * max(1, len(spec.shape)))
            for index in tensors
            if index not in read
            and isinstance(spec := self.method.values[index], TensorSpec)
            and spec.dynamism is not Dynamism.STATIC
        )

    def _members(self, index: int) -> tuple[int, ...]:
        spec = self.method.values[index]
        return tuple(i for i in spec.items if i >= 0) if isinstance(spec, IndexList) else (index,)

    def _dynamism(self, index: int) -> Dynamism | None:
        """Return the dynamism of a tensor; None for a static shape."""
        spec = self.method.values[index]
        if isinstance(spec, TensorSpec) and spec.dynamism is not Dynamism.STATIC:
            return spec.dynamism
        return None

    def _check_writable(self, index: int, what: str) -> None:
        spec = self.method.values[index]
        if not isinstance(spec, TensorSpec) or spec.is_constant:
            raise BlobFormatError(
                f"{what} would write to a value that is not a mutable tensor",
                got=f"value {index}, {spec}",
            )

    def _is_replaced(self, index: int) -> bool:
        """Whether runs replace a value, or a member of a list."""
        return any(member in self.replaced for member in (index, *self._members(index)))

    def _reader(self, index: int) -> Callable[[], Any]:
        """Return a function that returns the current object of a value."""
        values = self.values
        spec = self.method.values[index]
        if not isinstance(spec, IndexList):
            return lambda: values[index]
        items = spec.items
        if spec.kind is ListKind.OPTIONAL_TENSOR:
            return lambda: [None if item < 0 else values[item] for item in items]
        return lambda: [values[item] for item in items]

    # --- other instructions

    def _delegate(self, call: DelegateCall) -> Step:
        delegate = self.delegates[call.delegate]
        values = self.values
        for position, index in enumerate(call.args):
            if not isinstance(self.method.values[index], TensorSpec):
                raise ProgramError(
                    f"argument {position} of delegate {call.delegate} of method "
                    f"{self.method.name!r} is no tensor",
                    got=type(self.method.values[index]).__name__,
                    expected="tensors only, as on a device",
                )
        if delegate.input_count > len(call.args):
            raise ProgramError(
                f"delegate {call.delegate} of method {self.method.name!r} takes more inputs than "
                "the program passes",
                got=f"{len(call.args)} inputs and outputs",
                expected=f"{delegate.input_count} inputs",
            )
        inputs = call.args[: delegate.input_count]
        outputs = call.args[delegate.input_count :]
        for index in outputs:
            self._check_writable(index, f"delegate {call.delegate}")
        dynamic = tuple(self._dynamism(index) is not None for index in outputs)
        is_new = tuple(index in self.delegate_only.outputs for index in outputs)

        def step() -> None:
            results = delegate([values[index] for index in inputs])
            check_output_count(len(results), len(outputs))
            for position, (index, result) in enumerate(zip(outputs, results, strict=True)):
                target: torch.Tensor = values[index]
                source = fit_output(
                    result, target.shape, dynamic=dynamic[position], position=position
                )
                if is_new[position]:
                    # A row-major copy.
                    values[index] = torch.empty(source.shape, dtype=target.dtype).copy_(source)
                    continue
                if source.shape != target.shape:
                    target.resize_(source.shape)
                fill(target, source)

        native_step = self._native_step(delegate.native, call.args, len(inputs), is_new)
        return step if native_step is None else lambda: None if native_step() else step()

    def _native_step(
        self,
        native: NativeCall | None,
        args: Sequence[int],
        input_count: int,
        is_new_output: Sequence[bool],
    ) -> DelegateStep | None:
        """Return a step that runs a delegate without Python; None if that is impossible."""
        specs = [spec for n in args if isinstance(spec := self.method.values[n], TensorSpec)]
        if native is None or not all(spec.is_row_major for spec in specs):
            return None
        is_new = (*(False,) * input_count, *is_new_output)
        arguments = [
            CallValue(index, spec.shape, spec.dtype, self._dynamism(index) is not None, new)
            for index, spec, new in zip(args, specs, is_new, strict=True)
        ]
        return DelegateStep(native, self.values, arguments)

    def _move(self, call: MoveCall) -> Step:
        values, source, target = self.values, call.source, call.target

        def step() -> None:
            values[target] = values[source]

        return step

    def _jump(self, call: JumpFalseCall) -> Step:
        values, condition, target = self.values, call.condition, call.target

        def step() -> int | None:
            value = values[condition]
            truth = bool(value.all()) if isinstance(value, torch.Tensor) else bool(value)
            return None if truth else target

        return step

    def _free(self, call: FreeCall) -> Step:
        tensor: Any = self.values[call.value]
        if not isinstance(tensor, torch.Tensor) or call.value in self.replaced:
            raise BlobFormatError("program frees a value that has no memory of its own")

        def step() -> None:
            # Emptied in place, with its storage, so that steps bound to this tensor still work.
            tensor.set_()  # pyright: ignore[reportCallIssue]  # the stub lacks this overload

        return step


# --- native calls of a delegate, without Python ---------------------------------------------------
#
# ``delegate_calls.h`` does the same with ExecuTorch's tensors.


@dataclass(frozen=True, slots=True)
class CallValue:
    """An argument of a delegate.

    Attributes:
        index: Index in the value table of the method.
        shape: Shape, or the largest shape if it is dynamic.
        is_dynamic: Whether the shape varies between calls.
        is_new: Whether the argument is an output for which each call makes a new tensor.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_dynamic: bool
    is_new: bool


class DelegateStep:
    """A step of a method that runs a delegate without Python; one call at a time.

    Args:
        arguments: Inputs, then outputs, all row-major.
    """

    def __init__(
        self, native: NativeCall, values: list[Any], arguments: Sequence[CallValue]
    ) -> None:
        self._native = native
        self._run = NATIVE_RUN(native.run)
        self._values = values
        self._arguments = arguments
        self._frame = (NativeArgument * len(arguments))()
        for native_argument, argument in zip(self._frame, arguments, strict=True):
            native_argument.rank = len(argument.shape)
            native_argument.type = SCALAR_TYPES[argument.dtype]
            native_argument.sizes = (ctypes.c_int32 * len(argument.shape))(*argument.shape)
        numbered = list(enumerate(arguments))
        self._existing = [(n, value) for n, value in numbered if not value.is_new]
        # New tensors of dynamic shapes are allocated in ``_resized``.
        self._allocated = [
            (n, value) for n, value in numbered if value.is_new and not value.is_dynamic
        ]
        self._new: list[tuple[int, torch.Tensor]] = []
        is_resized = any(value.is_dynamic for value in arguments)
        self._resize = NATIVE_RESIZE(self._resized) if is_resized else None

    def __call__(self) -> bool:
        """Run the delegate.

        Returns:
            Whether the delegate ran. If not, nothing has changed, and Python has to call it.
        """
        values, frame = self._values, self._frame
        self._new.clear()
        for n, value in self._existing:
            tensor = values[value.index]
            shape = tensor.shape
            if not tensor.is_contiguous():
                return False
            frame[n].data = tensor.data_ptr()
            if not value.is_dynamic:
                if shape != value.shape:  # a damaged program may have moved another tensor here
                    return False
            elif len(shape) != len(value.shape):
                return False
            else:
                for axis, size in enumerate(shape):
                    frame[n].sizes[axis] = size
        for n, value in self._allocated:
            self._new.append((value.index, torch.empty(value.shape, dtype=value.dtype)))
            frame[n].data = self._new[-1][1].data_ptr()
        if self._run(self._native.model, frame, len(frame), self._resize, None):
            return False
        for index, tensor in self._new:
            values[index] = tensor
        self._new.clear()
        return True

    def _resized(self, _: object, n: int, sizes: Any, rank: int) -> int | None:
        """Resize an output and return its address; see ``NativeResize``."""
        value, shape = self._arguments[n], tuple(sizes[:rank])
        if not value.is_dynamic or rank != len(value.shape):
            return None
        if value.is_new:
            tensor = torch.empty(shape, dtype=value.dtype)
            self._new.append((value.index, tensor))
        else:
            tensor = self._values[value.index].resize_(shape)
        return tensor.data_ptr()

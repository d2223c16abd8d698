"""The states of a loaded program: everything that persists between calls, as one snapshot.

Names are ``METHOD.DELEGATE.STATE`` for the Core ML states of a method's delegates, which are
numbered as in the ``.pte``, and ``METHOD.buffer.VALUE`` for mutable buffers outside of delegates,
where ``VALUE`` is the index in the method's value table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from coreml_delegate.runtime.program.plan import KernelCall, MethodInfo, TensorSpec
from coreml_delegate.runtime.snapshots import Array, Snapshot, cast_snapshot


class DelegateState(Protocol):
    """The states of one loaded delegate; see ``engines.base.State``."""

    def snapshot(self) -> Snapshot:
        """Return copies of the state tensors, by name."""
        ...

    def restore(self, snapshot: Mapping[str, Array]) -> None:
        """Replace the content of every state tensor."""
        ...

    def reset(self) -> None:
        """Set every state tensor to its initial value."""
        ...


@runtime_checkable
class StatefulDelegate(Protocol):
    """A delegate that may have a state."""

    @property
    def state(self) -> DelegateState | None:
        """The state; None for a stateless delegate."""
        ...


States = Mapping[str, DelegateState]
"""States by ``METHOD.DELEGATE`` or ``METHOD.buffer``."""


def states_of(method: str, delegates: Sequence[Any]) -> Iterator[tuple[str, DelegateState]]:
    """Yield the states of a method's delegates, with their names.

    Args:
        method: Name of the method.
        delegates: Delegates of the method, in the order of the ``.pte``.
    """
    for number, delegate in enumerate(delegates):
        state = delegate.state if isinstance(delegate, StatefulDelegate) else None
        if state is not None:
            yield f"{method}.{number}", state


def snapshot(states: States) -> Snapshot:
    """Return copies of all state tensors, by name."""
    return {
        f"{prefix}.{name}": array
        for prefix, state in states.items()
        for name, array in state.snapshot().items()
    }


def restore(states: States, values: Mapping[str, Array]) -> None:
    """Replace the content of all states.

    Raises:
        InputError: A name, shape or kind of dtype differs; then nothing is replaced.
    """
    checked = cast_snapshot(snapshot(states), values)
    for prefix, state in states.items():
        state.restore(
            {n: checked[f"{prefix}.{n}"] for n in state.snapshot()},
        )


def reset(states: Iterable[DelegateState]) -> None:
    """Set all states to their initial values."""
    for state in states:
        state.reset()


def mutable_buffers(method: MethodInfo) -> dict[int, TensorSpec]:
    """Return the mutable buffers of a method, by index in the value table.

    Exporters update only mutable buffers in place, at the end of a run.
    """
    return {
        index: spec
        for index in sorted(written_in_place(method))
        if isinstance(spec := method.values[index], TensorSpec)
        and spec.allocation is not None
        and index not in method.inputs
    }


def written_in_place(method: MethodInfo) -> set[int]:
    """Return the indices of the values that operators of a method write in place."""
    return {
        call.args[0]
        for chain in method.chains
        for call in chain
        if isinstance(call, KernelCall) and _is_in_place(call.operator)
    }


def _is_in_place(operator: str) -> bool:
    """Whether an operator writes its first argument: ``aten::copy_``, ``aten::index_put_.out``."""
    return operator.partition(".")[0].endswith("_")

"""What a loaded program keeps from one call to the next, as one snapshot.

Names are ``METHOD.DELEGATE.STATE`` for the Core ML states of a method's delegates, which are
numbered as in the ``.pte``, and ``METHOD.buffer.VALUE`` for mutable buffers that no delegate took
over, by their number in the method's table of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from coreml_delegate.runtime.program.plan import KernelCall, MethodInfo, TensorSpec
from coreml_delegate.runtime.snapshots import Array, Snapshot, cast_snapshot


class DelegateState(Protocol):
    """The states of one loaded delegate; see ``engines.base.State``."""

    def snapshot(self) -> Snapshot:
        """Copies of every state tensor, by name."""
        ...

    def restore(self, snapshot: Mapping[str, Array]) -> None:
        """Replace the content of every state tensor."""
        ...

    def reset(self) -> None:
        """Set every state tensor to what it was made with."""
        ...


@runtime_checkable
class StatefulDelegate(Protocol):
    """A delegate that may keep something from one call to the next."""

    @property
    def state(self) -> DelegateState | None:
        """What it keeps; None for nothing."""
        ...


States = Mapping[str, DelegateState]
"""By ``METHOD.DELEGATE``, or ``METHOD.buffer``."""


def states_of(method: str, delegates: Sequence[Any]) -> Iterator[tuple[str, DelegateState]]:
    """The states of a method's delegates, with their names.

    Args:
        method: Its name.
        delegates: In the order of the ``.pte``.
    """
    for number, delegate in enumerate(delegates):
        state = delegate.state if isinstance(delegate, StatefulDelegate) else None
        if state is not None:
            yield f"{method}.{number}", state


def snapshot(states: States) -> Snapshot:
    """Copies of everything, by name."""
    return {
        f"{place}.{name}": array
        for place, state in states.items()
        for name, array in state.snapshot().items()
    }


def restore(states: States, given: Mapping[str, Array]) -> None:
    """Replace everything.

    Raises:
        InputError: A name too many or too few, or another shape or kind of dtype; then nothing is
            replaced.
    """
    checked = cast_snapshot(snapshot(states), given)
    for place, state in states.items():
        state.restore(
            {n: checked[f"{place}.{n}"] for n in state.snapshot()},
        )


def reset(states: Iterable[DelegateState]) -> None:
    """Bring everything back to where it began."""
    for state in states:
        state.reset()


def mutable_buffers(method: MethodInfo) -> dict[int, TensorSpec]:
    """The tensors of a method that keep what a run writes into them, by number.

    Exporters write them back in place, at the end of a run; nothing else is written in place.
    """
    return {
        index: spec
        for index in sorted(_written_in_place(method))
        if isinstance(spec := method.values[index], TensorSpec)
        and spec.allocation is not None
        and index not in method.inputs
    }


def mutated_inputs(method: MethodInfo) -> dict[int, int]:
    """The outputs of a method that are the new value of one of its inputs.

    Returns:
        By the output's position the input's. Exporters put them before what the model returns.
    """
    written = _written_in_place(method)
    return {
        position: method.inputs.index(index)
        for position, index in enumerate(method.outputs)
        if index in written and index in method.inputs
    }


def _written_in_place(method: MethodInfo) -> set[int]:
    return {
        call.args[0]
        for chain in method.chains
        for call in chain
        if isinstance(call, KernelCall) and _is_in_place(call.operator)
    }


def _is_in_place(operator: str) -> bool:
    """Whether an operator, ``aten::copy_`` or ``aten::index_put_.out``, writes its argument."""
    return operator.partition(".")[0].endswith("_")

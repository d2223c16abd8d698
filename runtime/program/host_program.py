"""``HostProgram``: a ``.pte`` loaded on a host, with its states and events.

States are everything that persists between calls. In a snapshot their names are
``METHOD.DELEGATE.STATE`` for the Core ML states of a method's delegates, which are numbered as in
the ``.pte``, and ``METHOD.buffer.VALUE`` for mutable buffers outside of delegates, where ``VALUE``
is the index in the method's value table.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.files import new_file
from coreml_delegate.runtime.program.delegate_interface import DelegateCallable, RejectedHosts
from coreml_delegate.runtime.program.inputs import Value
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.snapshots import Array, Snapshot, State, cast_snapshot


def states_of(method: str, delegates: Sequence[DelegateCallable]) -> dict[str, State]:
    """Return the states of a method's delegates (in the order of the ``.pte``) by name."""
    states = (getattr(delegate, "state", None) for delegate in delegates)
    return {f"{method}.{n}": state for n, state in enumerate(states) if state is not None}


class HostProgram(abc.ABC):
    """A loaded program; its methods are prepared when first run, or by ``load_method``.

    Args:
        program: The program that was read.
        rejected_hosts: Value of the attribute.
        lock: Held while methods are loaded and states are read or written.

    Attributes:
        host_name: Name of the host.
        program: The program that was read: metadata, delegates, named data.
        method_names: Names of the methods, in file order.
        rejected_hosts: If ``auto`` chose the host: by name, why other hosts do not run all methods;
            empty if the first host does.
    """

    host_name: ClassVar[str]

    def __init__(
        self, program: PteProgram, rejected_hosts: RejectedHosts, lock: threading.RLock
    ) -> None:
        self.program = program
        self.method_names = program.method_names
        self._lock = lock
        self.rejected_hosts = rejected_hosts

    def load_method(self, name: str = "forward") -> None:
        """Prepare a method: load its delegates, allocate its memory, find its kernels.

        Raises:
            ProgramError: No such method; a delegate of a backend that the host lacks; missing data.
            UnsupportedOpError: An operator has no kernel.
            BlobFormatError: The method's instructions do not fit its operators.
        """
        self.delegates(name)

    @abc.abstractmethod
    def delegates(self, method: str) -> tuple[DelegateCallable, ...]:
        """Return a method's loaded delegates of our backend; raises as ``load_method`` does."""

    @abc.abstractmethod
    def run(self, method: str, inputs: Sequence[Value]) -> list[Value]:
        """Run a method once.

        Args:
            method: Method name.
            inputs: Inputs in order; tensors of any strides.

        Returns:
            Outputs in order: copies, safe to keep.

        Raises:
            InputError: Wrong count, dtype or shape of an input.
            ExecutionError: A kernel or a delegate failed.
            ProgramError: See ``load_method``, also for other errors of the first run.
        """

    def events(self) -> tuple[bytes, bytes]:
        """Return the ETDump of all calls so far, and their values; see ``runtime.load_program``.

        Raises:
            OptionError: The program was not loaded with ``enable_etdump``.
        """
        events = self._logged_events()
        if events is None:
            raise OptionError("the program has no events", remedy="Load it with enable_etdump=True")
        return events

    def write_etdump_result_to_file(
        self, etdump_path: Path | str, debug_buffer_path: Path | str | None = None
    ) -> None:
        """Write the events of all calls so far; see ``runtime.load_program``.

        Args:
            etdump_path: The file to write.
            debug_buffer_path: The file to write values to, if there are any.

        Raises:
            OptionError: The program was not loaded with ``enable_etdump``.
            OSError: A file cannot be written.
        """
        for path, content in zip((etdump_path, debug_buffer_path), self.events(), strict=True):
            if path is not None:
                with new_file(Path(path)) as file:
                    file.write(content)

    def reset_state(self) -> None:
        """Set all states to their initial values.

        Raises:
            ProgramError: The host is ``stock`` and the program has mutable buffers outside of its
                delegates, or Core ML's own backend runs them: neither is accessible.
        """
        with self._lock:
            for state in self._states(loaded=True).values():
                state.reset()

    def snapshot_state(self) -> Snapshot:
        """Return copies of all state tensors, by name; see the module.

        Loads methods that are not loaded yet, as ``restore_state`` does.

        Raises:
            ProgramError: See ``reset_state``.
        """
        with self._lock:
            return snapshot(self._states())

    def restore_state(self, snapshot: Mapping[str, Array]) -> None:
        """Replace the content of all states.

        Args:
            snapshot: From ``snapshot_state`` of the same program, on any host; or arrays of the
                same names and shapes, with dtypes of the same kind.

        Raises:
            InputError: A name, shape or kind of dtype differs; then nothing is replaced.
            ProgramError: See ``reset_state``.
        """
        with self._lock:
            states = self._states()
            values = {name: state.snapshot() for name, state in states.items()}
            checked = cast_snapshot(_joined(values), snapshot)
            for prefix, state in states.items():
                state.restore({name: checked[f"{prefix}.{name}"] for name in values[prefix]})

    @abc.abstractmethod
    def _states(self, *, loaded: bool = False) -> dict[str, State]:
        """Return the states by name: of all methods, or only of loaded methods."""

    @abc.abstractmethod
    def _logged_events(self) -> tuple[bytes, bytes] | None:
        """Return the ETDump and the values; None if calls are not logged."""


def snapshot(states: Mapping[str, State]) -> Snapshot:
    """Return copies of all state tensors, by name."""
    return _joined({prefix: state.snapshot() for prefix, state in states.items()})


def _joined(snapshots: Mapping[str, Snapshot]) -> Snapshot:
    return {
        f"{prefix}.{name}": array
        for prefix, arrays in snapshots.items()
        for name, array in arrays.items()
    }

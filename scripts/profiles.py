"""Profiles: the time and the work of each operation, read from the events of a method's runs."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coreml_delegate.errors import ProgramError

_DELEGATE: Final = "DELEGATE_CALL"
_FRAMEWORK: Final = ("OPERATOR_CALL", "Method::init")
_EXECUTE: Final = "Method::execute"
_NATIVE: Final = "native_call_"
NO_MODULE: Final = "(no module)"
"""Shown in place of the module of operations whose module is unknown."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: in a delegate, or of the CPU.

    Attributes:
        name: Debug symbol, or name of the operator.
        delegate: Number of its delegate, in order of execution; None on the CPU.
        module: Path of the module that all its calls are in; None if unknown.
        calls: Names of its calls in the model's graph.
        times: Milliseconds in each run, or the mean for each if the engine measures only that; 0 if
            it is fused with another.
        fused: Names of all operations that its kernel computes, itself included.
        flops: Estimated floating-point operations; None if unknown.
        bytes: Bytes that it reads and writes, except values inside its kernel; None if unknown.
    """

    name: str
    delegate: int | None
    module: str | None
    calls: tuple[str, ...]
    kernel: str
    times: tuple[float, ...]
    fused: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None

    @property
    def milliseconds(self) -> float:
        """The median of its times."""
        return statistics.median(self.times)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Operations of a delegate that one kernel computes together.

    Attributes:
        operations: At least one; the first has most of the time.
        flops: Estimated floating-point operations; None if unknown, as ``bytes``.
        bytes: Bytes read and written, in the types of the program.
    """

    name: str
    operations: tuple[Operation, ...]
    milliseconds: float
    flops: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of a method in milliseconds; each tuple has a number for each run.

    Attributes:
        delegates: Times of each delegate, in order of execution.
        operations: The operations, in order of execution.
    """

    total: tuple[float, ...]
    delegates: tuple[tuple[float, ...], ...]
    operations: tuple[Operation, ...] = field(default=())

    @property
    def milliseconds(self) -> float:
        """The median time of the whole method."""
        return statistics.median(self.total)

    @property
    def has_modules(self) -> bool:
        """Whether the modules of the operations are known."""
        return any(operation.module is not None for operation in self.operations)

    def modules(self, depth: int) -> dict[str, float]:
        """Return the median time of each module, sorted as a tree."""
        times: dict[str, list[tuple[float, ...]]] = {}
        for operation in self.operations:
            parts = module_levels(operation.module)
            for level in range(min(depth, len(parts)) + 1):
                times.setdefault(".".join(parts[:level]), []).append(operation.times)
        listed = sorted(times.items(), key=lambda item: tree_sort_key(item[0]))
        return {path: _median_of_sums(operation_times) for path, operation_times in listed}

    def kernels(self) -> list[Kernel]:
        """Return the kernels of all delegates, in order of execution."""
        groups: dict[object, list[Operation]] = {}
        for index, operation in enumerate(self.operations):
            if operation.delegate is not None:
                key = (operation.delegate, operation.fused) if len(operation.fused) > 1 else index
                groups.setdefault(key, []).append(operation)
        return [
            Kernel(
                max(group, key=lambda o: o.milliseconds).kernel,
                tuple(sorted(group, key=lambda o: -o.milliseconds)),
                _median_of_sums(o.times for o in group),
                _sum_or_none([o.flops for o in group]),
                _sum_or_none([o.bytes for o in group]),
            )
            for group in groups.values()
        ]

    def in_kernels(self, delegate: int) -> float:
        """Return the median time of a delegate's operations."""
        return _median_of_sums(o.times for o in self.operations if o.delegate == delegate)

    def on_cpu(self) -> float:
        """Return the median time of the operators outside of delegates."""
        return _median_of_sums(o.times for o in self.operations if o.delegate is None)

    def of_host(self) -> float:
        """Return the time that belongs to no delegate and no operator."""
        delegated = sum(map(statistics.median, self.delegates))
        return self.milliseconds - delegated - self.on_cpu()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; times are medians."""
        return {
            "total_ms": self.milliseconds,
            "runs": len(self.total),
            "delegates": [
                {"ms": statistics.median(times), "in_kernels_ms": self.in_kernels(number)}
                for number, times in enumerate(self.delegates)
            ],
            "cpu_operators_ms": self.on_cpu(),
            "modules_ms": self.modules(1000),
            "operations": [
                {
                    "name": operation.name,
                    "delegate": operation.delegate,
                    "module": operation.module,
                    "calls": list(operation.calls),
                    "kernel": operation.kernel,
                    "ms": operation.milliseconds,
                    "flops": operation.flops,
                    "bytes": operation.bytes,
                }
                for operation in self.operations
            ],
        }


def read_profile(blocks: Iterable[Sequence[Any]]) -> Profile:
    """Read a profile from the events of runs; the first run warms up and does not count.

    Args:
        blocks: Events of ``Inspector``, by block.

    Raises:
        ProgramError: Runs execute different operations, or there is no run.
    """
    method_blocks = [
        events for events in map(list, blocks) if any(e.name == _EXECUTE for e in events)
    ]
    if len(method_blocks) != 1:
        raise ProgramError("runs of the program execute different operations")
    events = method_blocks[0]
    operations: list[Operation] = []
    delegates: list[tuple[float, ...]] = []
    total: tuple[float, ...] = ()
    for event in events:
        times = tuple(event.perf_data.raw[1:]) if event.perf_data is not None else ()
        if event.name == _EXECUTE:
            total = times
        elif event.name == _DELEGATE:
            delegates.append(times)
        elif event.name not in _FRAMEWORK:
            inside = event.delegate_debug_identifier is not None
            operations.append(_operation(event, len(delegates) if inside else None, times))
    return Profile(total, tuple(delegates), tuple(operations))


def module_levels(path: str | None) -> list[str]:
    """Return the names along a module's path, outermost first."""
    return [NO_MODULE] if path is None else path.split(".") if path else []


def tree_sort_key(path: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts module paths as a tree, numbers by value."""
    parts = path.split(".") if path else []
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def _operation(event: Any, delegate: int | None, times: tuple[float, ...]) -> Operation:
    paths = [module_of(stack) for stack in event.module_hierarchy.values() if stack]
    metadata: dict[str, Any] = {}
    if event.raw_delegate_debug_metadatas:
        metadata = json.loads(event.raw_delegate_debug_metadatas[-1])
        if metadata.get("mean"):  # the mean of the runs so far: the last is over all
            times = times[-1:] * len(times)
    return Operation(
        name=event.name.removeprefix(_NATIVE),
        delegate=delegate,
        module=common_module(paths) if paths else None,
        calls=tuple(event.module_hierarchy),
        kernel=str(metadata.get("kernel", "")),
        times=times,
        fused=tuple(metadata.get("ops", ())),
        flops=metadata.get("flops"),
        bytes=metadata.get("bytes"),
    )


def module_of(stack: Mapping[str, Sequence[str]]) -> str:
    """Return the path of the innermost module of a stack, as torch keeps it with a call."""
    return list(stack.values())[-1][0]


def modules_by_handle(etrecord: Any) -> dict[int, str]:
    """Return the module of each call in the result of ``read_etrecord``, by debug handle."""
    program = etrecord.edge_dialect_program
    nodes = () if program is None else program.graph.nodes
    return {
        node.meta["debug_handle"]: module_of(node.meta["nn_module_stack"])
        for node in nodes
        if isinstance(node.meta.get("debug_handle"), int) and node.meta.get("nn_module_stack")
    }


def common_module(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all of ``paths``."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(
        names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels)
    )


def _median_of_sums(listed: Iterable[Sequence[float]]) -> float:
    sums = [sum(times) for times in zip(*listed, strict=True)]
    return statistics.median(sums) if sums else 0.0


def _sum_or_none(numbers: Sequence[int | None]) -> int | None:
    values = [number for number in numbers if number is not None]
    return sum(values) if len(values) == len(numbers) else None

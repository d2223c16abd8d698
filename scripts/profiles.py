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
"""Stands for the module of operations of which none is known."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: in a delegate, or of the CPU.

    Attributes:
        name: Debug symbol, or name of the operator.
        delegate: Number of its delegate, in order of execution; None on the CPU.
        module: Path of the module that all its calls are in; None if unknown.
        calls: Names of its calls in the model's graph.
        kernel: What computes it, as the engine says.
        times: Milliseconds in each run, or their mean for each if the engine knows no more; 0 if it
            is fused with another.
        fused: Names of all operations that its kernel computes, itself included.
        flops: Estimated floating-point operations; None if unknown.
        bytes: Bytes that it has to read and write, values inside its kernel aside; None if unknown.
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
    """Operations of a delegate that are computed together.

    Attributes:
        name: The engine's name of it.
        operations: At least one; the first has most of the time.
        milliseconds: Median time.
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
    """The times of one method, in milliseconds, each list with one number for each run.

    Attributes:
        total: Of the whole method.
        delegates: Of each delegate, in order of execution.
        operations: In order of execution.
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
        """Return the median time of each module, sorted as a tree.

        Args:
            depth: The number of levels.
        """
        times: dict[str, list[tuple[float, ...]]] = {}
        for operation in self.operations:
            parts = module_levels(operation.module)
            for level in range(min(depth, len(parts)) + 1):
                times.setdefault(".".join(parts[:level]), []).append(operation.times)
        listed = sorted(times.items(), key=lambda item: place_in_tree(item[0]))
        return {path: _median_of_sums(each) for path, each in listed}

    def kernels(self) -> list[Kernel]:
        """Return the kernels of all delegates, in order of execution."""
        groups: dict[object, list[Operation]] = {}
        for place, each in enumerate(self.operations):
            if each.delegate is not None:
                key = (each.delegate, each.fused) if len(each.fused) > 1 else place
                groups.setdefault(key, []).append(each)
        return [
            Kernel(
                max(group, key=lambda o: o.milliseconds).kernel,
                tuple(sorted(group, key=lambda o: -o.milliseconds)),
                _median_of_sums(o.times for o in group),
                _sum_of_known([o.flops for o in group]),
                _sum_of_known([o.bytes for o in group]),
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
                    "name": each.name,
                    "delegate": each.delegate,
                    "module": each.module,
                    "calls": list(each.calls),
                    "kernel": each.kernel,
                    "ms": each.milliseconds,
                    "flops": each.flops,
                    "bytes": each.bytes,
                }
                for each in self.operations
            ],
        }


def read_profile(blocks: Iterable[Sequence[Any]]) -> Profile:
    """Read the events of runs, of which the first warms up and does not count.

    Args:
        blocks: Events of ``Inspector``, by block.

    Raises:
        ProgramError: Runs differ in what they execute, or there is none.
    """
    found = [events for events in map(list, blocks) if any(e.name == _EXECUTE for e in events)]
    if len(found) != 1:
        raise ProgramError("runs of the program differ in what they execute")
    events = found[0]
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
    """Return the names of a module and of those that it is in, outermost first."""
    return [NO_MODULE] if path is None else path.split(".") if path else []


def place_in_tree(path: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts module paths as a tree, numbers by value."""
    parts = path.split(".") if path else []
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def _operation(event: Any, delegate: int | None, times: tuple[float, ...]) -> Operation:
    paths = [module_of(stack) for stack in event.module_hierarchy.values() if stack]
    described: dict[str, Any] = {}
    if event.raw_delegate_debug_metadatas:
        described = json.loads(event.raw_delegate_debug_metadatas[-1])
        if described.get("mean"):  # of all runs so far: the last one is of all
            times = times[-1:] * len(times)
    return Operation(
        name=event.name.removeprefix(_NATIVE),
        delegate=delegate,
        module=common_module(paths) if paths else None,
        calls=tuple(event.module_hierarchy),
        kernel=str(described.get("kernel", "")),
        times=times,
        fused=tuple(described.get("ops", ())),
        flops=described.get("flops"),
        bytes=described.get("bytes"),
    )


def module_of(stack: Mapping[str, Sequence[str]]) -> str:
    """Return the path of the innermost module of a stack, as torch keeps it with a call."""
    return list(stack.values())[-1][0]


def common_module(paths: Sequence[str]) -> str:
    """Return the innermost module that has all of these."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(
        names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels)
    )


def _median_of_sums(listed: Iterable[Sequence[float]]) -> float:
    sums = [sum(times) for times in zip(*listed, strict=True)]
    return statistics.median(sums) if sums else 0.0


def _sum_of_known(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None

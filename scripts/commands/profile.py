"""``coreml-delegate profile``: where the time of a program goes, by operation and by module."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command

_DELEGATE: Final = "DELEGATE_CALL"
_FRAMEWORK: Final = ("OPERATOR_CALL", "Method::init")
_EXECUTE: Final = "Method::execute"
_NATIVE: Final = "native_call_"
_NO_MODULE: Final = "(no module)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("program", type=Path, metavar="PROGRAM", help=".pte or .bpte")
    parser.add_argument(
        "--etrecord",
        type=Path,
        metavar="FILE",
        help="ETRecord that export wrote: show the modules and the calls of the model too",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="PROGRAM",
        help="another program of the same model: show what differs, by module or operation",
    )
    parser.add_argument(
        "--compare-etrecord", type=Path, metavar="FILE", help="ETRecord of that program"
    )
    parser.add_argument(
        "--depth",
        type=arguments.positive,
        default=2,
        metavar="N",
        help="show modules down to N levels (default: 2)",
    )
    parser.add_argument(
        "--top",
        type=arguments.positive,
        default=20,
        metavar="N",
        help="show the N operations that take most time (default: 20)",
    )
    parser.add_argument(
        "--repeat", type=arguments.positive, default=10, help="timed runs (default: 10)"
    )
    arguments.add_inputs(parser)
    arguments.add_execution(parser)
    arguments.add_data(parser)
    arguments.add_seed(parser, "random inputs")
    arguments.add_json(parser)
    parser.set_defaults(refuse_usage=parser.error)


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
    """

    name: str
    delegate: int | None
    module: str | None
    calls: tuple[str, ...]
    kernel: str
    times: tuple[float, ...]


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

    def modules(self, depth: int) -> dict[str, float]:
        """Return the median time of each module, sorted as a tree.

        Args:
            depth: The number of levels.
        """
        times: dict[str, list[tuple[float, ...]]] = {}
        for operation in self.operations:
            path = operation.module
            parts = [_NO_MODULE] if path is None else path.split(".") if path else []
            for level in range(min(depth, len(parts)) + 1):
                times.setdefault(".".join(parts[:level]), []).append(operation.times)
        return {path: _median_of_sums(listed) for path, listed in sorted(times.items(), key=_place)}

    def in_kernels(self, delegate: int) -> float:
        """Return the median time of a delegate's operations."""
        return _median_of_sums(o.times for o in self.operations if o.delegate == delegate)

    def on_cpu(self) -> float:
        """Return the median time of the operators outside of delegates."""
        return _median_of_sums(o.times for o in self.operations if o.delegate is None)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; times are medians."""
        return {
            "total_ms": statistics.median(self.total),
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
                    "ms": statistics.median(each.times),
                }
                for each in self.operations
            ],
        }


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.compare_etrecord is not None and args.compare is None:
        args.refuse_usage("--compare-etrecord goes with --compare")
    if args.compare is not None and (args.etrecord is None) != (args.compare_etrecord is None):
        args.refuse_usage("give an ETRecord for both programs, or for none")
    profile = _measure(args, args.program, args.etrecord)
    other = None
    if args.compare is not None:
        other = _measure(args, args.compare, args.compare_etrecord)
    if args.json:
        content = profile.as_dict()
        if other is not None:
            content["compared_with"] = other.as_dict()
        console.write_json(content)
    elif other is None:
        console.write(_described(profile, args.depth, args.top))
    else:
        console.write(_compared(profile, other, args.depth, args.top))
    return 0


def _measure(args: argparse.Namespace, path: Path, etrecord: Path | None) -> Profile:
    """Run a program, and read the times that it logs."""
    from coreml_delegate.runtime.devtools import Inspector, read_etrecord
    from coreml_delegate.scripts.inputs.input_files import random_inputs, read_inputs
    from coreml_delegate.scripts.inputs.sampling import generator
    from coreml_delegate.scripts.programs import engine_options, load_traced
    from coreml_delegate.third_party import wrap_errors

    if args.method not in (None, "forward") and etrecord is not None:
        raise OptionError("ExecuTorch's ETRecords are read for forward only", got=args.method)
    record = None if etrecord is None else read_etrecord(etrecord)
    with console.step(f"Loading {path}"):
        traced = load_traced(
            path,
            method=args.method,
            host=args.host,
            engine=args.engine,
            options=engine_options(args),
            data=args.data,
            debug_buffer_size=0,
        )
        if args.input:
            inputs = read_inputs(args.input, traced.inputs)
        else:
            inputs = random_inputs(traced.inputs, generator(args.seed))
    if traced.has_jumps:
        raise ProgramError("a method with loops or branches is not profiled: its calls vary")
    with console.step("Running"):
        for _ in range(args.repeat + 1):
            traced.run(inputs)
        etdump, _ = traced.events()
    with wrap_errors("ExecuTorch's Inspector fails; is it this program's ETRecord?"):
        inspector = Inspector(etdump_data=etdump, etrecord=record)
    return read_profile(block.events for block in inspector.event_blocks)


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


def _operation(event: Any, delegate: int | None, times: tuple[float, ...]) -> Operation:
    paths = [_module_of(stack) for stack in event.module_hierarchy.values() if stack]
    kernel = ""
    if event.raw_delegate_debug_metadatas:
        described = json.loads(event.raw_delegate_debug_metadatas[-1])
        kernel = str(described.get("kernel", ""))
        if described.get("mean"):  # of all runs so far: the last one is of all
            times = times[-1:] * len(times)
    return Operation(
        event.name.removeprefix(_NATIVE),
        delegate,
        _common(paths) if paths else None,
        tuple(event.module_hierarchy),
        kernel,
        times,
    )


def _module_of(stack: Mapping[str, Sequence[str]]) -> str:
    return list(stack.values())[-1][0]


def _common(paths: Sequence[str]) -> str:
    """Return the innermost module that has all of these."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(
        names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels)
    )


def _median_of_sums(listed: Iterable[Sequence[float]]) -> float:
    sums = [sum(times) for times in zip(*listed, strict=True)]
    return statistics.median(sums) if sums else 0.0


def _place(item: tuple[str, object]) -> list[tuple[int, int, str]]:
    """Return a key that sorts module paths as a tree, numbers by value."""
    parts = item[0].split(".") if item[0] else []
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def _described(profile: Profile, depth: int, top: int) -> str:
    total = statistics.median(profile.total)

    def share(time: float) -> tuple[str, str]:
        return f"{time:.3f}", f"{time / total:6.1%}"

    parts = [("where", "ms", "share"), ("whole method", *share(total))]
    for number, times in enumerate(profile.delegates):
        spent, inside = statistics.median(times), profile.in_kernels(number)
        parts.append((f"delegate {number}", *share(spent)))
        parts.append(("  its operations", *share(inside)))
        parts.append(("  around them", *share(spent - inside)))
    outside = profile.on_cpu()
    if any(operation.delegate is None for operation in profile.operations):
        parts.append(("operators on the CPU", *share(outside)))
    delegated = sum(map(statistics.median, profile.delegates))
    parts.append(("the host", *share(total - delegated - outside)))
    sections = [console.columns(parts)]
    if any(operation.module is not None for operation in profile.operations):
        rows = [("module", "ms", "share")]
        for path, time in profile.modules(depth).items():
            rows.append((_indented(path), *share(time)))
        sections.append(console.columns(rows))
    slowest = sorted(profile.operations, key=lambda o: -statistics.median(o.times))[:top]
    rows = [("operation", "ms", "share", "kernel", "module")]
    for each in slowest:
        times = share(statistics.median(each.times))
        rows.append((each.name, *times, each.kernel or "-", each.module or "-"))
    sections.append(console.columns(rows))
    return "\n\n".join(sections)


def _compared(profile: Profile, other: Profile, depth: int, top: int) -> str:
    one, two = statistics.median(profile.total), statistics.median(other.total)
    rows = [("where", "ms", "compared", "difference"), _difference("whole method", one, two)]
    sections = [console.columns(rows)]
    by_module = [p.modules(depth) for p in (profile, other)]
    named = any(o.module is not None for o in profile.operations)
    if named:
        listed = sorted({**by_module[0], **by_module[1]}.items(), key=_place)
        rows = [("module", "ms", "compared", "difference")]
        for path, _ in listed:
            times = (found.get(path, 0.0) for found in by_module)
            rows.append(_difference(_indented(path), *times))
        sections.append(console.columns(rows))
        return "\n\n".join(sections)
    totals = [dict[str, float](), dict[str, float]()]
    for found, each in zip(totals, (profile, other), strict=True):
        for operation in each.operations:
            spent = statistics.median(operation.times)
            found[operation.name] = found.get(operation.name, 0.0) + spent
    changes = {
        name: (totals[0].get(name, 0.0), totals[1].get(name, 0.0))
        for name in {**totals[0], **totals[1]}
    }
    largest = sorted(changes.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:top]
    rows = [("operation", "ms", "compared", "difference")]
    rows += [_difference(name, *times) for name, times in largest]
    sections.append(console.columns(rows))
    return "\n\n".join(sections)


def _difference(name: str, one: float, two: float) -> tuple[str, str, str, str]:
    return name, f"{one:.3f}", f"{two:.3f}", f"{two - one:+.3f}"


def _indented(path: str) -> str:
    if not path:
        return "(the model)"
    return f"{'  ' * (path.count('.') + 1)}{path}"


COMMAND = Command(
    name="profile",
    summary="show where the time of a .pte goes",
    description="Run a .pte with every operation timed, and show where the time goes: in "
    "delegates, around them, by operation and, with an ETRecord, by module of the model. Timing "
    "takes time itself, around operations most; run says how long a call takes without.",
    add_arguments=add_arguments,
    run=run,
)

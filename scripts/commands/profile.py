"""``coreml-delegate profile``: where the time of a program goes, by operation and by module."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import check_output, new_output
from coreml_delegate.scripts.commands import Command, add_number, add_path
from coreml_delegate.scripts.profiles import Profile, read_profile, tree_sort_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("program", type=Path, metavar="PROGRAM", help=".pte or .bpte")
    add_path(
        parser,
        "--etrecord",
        "FILE",
        "ETRecord that export wrote: show the modules and the calls of the model too",
    )
    add_path(
        parser,
        "--compare",
        "PROGRAM",
        "another program of the same model: show the differences, by module or operation",
    )
    parser.add_argument(
        "--compare-etrecord", type=Path, metavar="FILE", help="ETRecord of that program"
    )
    add_number(parser, "--depth", "N", "show modules down to N levels (default: 2)", default=2)
    add_number(parser, "--top", "N", "show the N slowest operations (default: 20)", default=20)
    parser.add_argument(
        "--repeat", type=arguments.positive, default=10, help="timed runs (default: 10)"
    )
    add_path(
        parser, "--html", "FILE", "write a page with a flame chart and the roofline of this machine"
    )
    arguments.add_inputs(parser)
    arguments.add_execution(parser)
    arguments.add_data(parser)
    arguments.add_seed(parser, "random inputs")
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.compare_etrecord is not None and args.compare is None:
        args.refuse_usage("--compare-etrecord goes with --compare")
    if args.compare is not None and (args.etrecord is None) != (args.compare_etrecord is None):
        args.refuse_usage("give an ETRecord for both programs, or for none")
    if args.html is not None:
        check_output(args.html, force=args.force)
    profile = _measure(args, args.program, args.etrecord)
    other = None
    if args.compare is not None:
        other = _measure(args, args.compare, args.compare_etrecord)
    if args.html is not None:
        _write_page(args, profile, other)
    if args.json:
        content = profile.as_dict()
        if other is not None:
            content["compared_with"] = other.as_dict()
        console.write_json(content)
    elif other is None:
        console.write(_profile_text(profile, args.depth, args.top))
    else:
        console.write(_comparison_text(profile, other, args.depth, args.top))
    return 0


def _write_page(args: argparse.Namespace, profile: Profile, other: Profile | None) -> None:
    from coreml_delegate.scripts.profile_page import to_html
    from coreml_delegate.scripts.roofline import measure_machine

    with console.step("Measuring this machine"):
        machine = measure_machine(args.threads, args.engine_precision.value)
    page = to_html(
        profile,
        machine,
        program=args.program.name,
        other=other,
        other_program=None if args.compare is None else args.compare.name,
    )
    with new_output(args.html, force=args.force) as file:
        file.write(page.encode())


def _measure(args: argparse.Namespace, path: Path, etrecord: Path | None) -> Profile:
    """Run a program, and read the times that it logs."""
    from coreml_delegate.patches.third_party import wrap_errors
    from coreml_delegate.runtime.devtools import Inspector
    from coreml_delegate.scripts.delegates import open_pte, read_etrecord
    from coreml_delegate.scripts.program_arguments import inputs_for, load_for

    if args.method not in (None, "forward") and etrecord is not None:
        raise OptionError("ExecuTorch's ETRecords support only the method forward", got=args.method)
    with console.step(f"Loading {path}"):
        program = load_for(args, path, enable_etdump=True)
    inputs = inputs_for(args, program)
    pte = open_pte(path, args.data)
    record = None if etrecord is None else read_etrecord(etrecord, pte)
    if pte.method(args.method or pte.default_method).has_jumps:
        raise ProgramError("a method with loops or branches is not profiled: its calls vary")
    with console.step("Running"):
        for _ in range(args.repeat + 1):
            program.run(inputs)
        etdump, _ = program.events()
    with wrap_errors("ExecuTorch's Inspector fails; is it this program's ETRecord?"):
        inspector = Inspector(etdump_data=etdump, etrecord=record)
    return read_profile(block.events for block in inspector.event_blocks)


def _profile_text(profile: Profile, depth: int, top: int) -> str:
    total = profile.milliseconds

    def share(time: float) -> tuple[str, str]:
        return f"{time:.3f}", f"{time / total:6.1%}"

    parts = [("where", "ms", "share"), ("whole method", *share(total))]
    for number, times in enumerate(profile.delegates):
        spent, inside = statistics.median(times), profile.in_kernels(number)
        parts.append((f"delegate {number}", *share(spent)))
        parts.append(("  its operations", *share(inside)))
        parts.append(("  around them", *share(spent - inside)))
    if any(operation.delegate is None for operation in profile.operations):
        parts.append(("operators on the CPU", *share(profile.on_cpu())))
    parts.append(("the host", *share(profile.of_host())))
    sections = [console.columns(parts)]
    if profile.has_modules:
        rows = [("module", "ms", "share")]
        for path, time in profile.modules(depth).items():
            rows.append((_indented(path), *share(time)))
        sections.append(console.columns(rows))
    slowest = sorted(profile.operations, key=lambda o: -o.milliseconds)[:top]
    rows = [("operation", "ms", "share", "kernel", "module")]
    for operation in slowest:
        times = share(operation.milliseconds)
        rows.append((operation.name, *times, operation.kernel or "-", operation.module or "-"))
    sections.append(console.columns(rows))
    return "\n\n".join(sections)


def _comparison_text(profile: Profile, other: Profile, depth: int, top: int) -> str:
    one, two = profile.milliseconds, other.milliseconds
    rows = [("where", "ms", "compared", "difference"), _difference("whole method", one, two)]
    sections = [console.columns(rows)]
    by_module = [p.modules(depth) for p in (profile, other)]
    if profile.has_modules:
        listed = sorted({**by_module[0], **by_module[1]}, key=tree_sort_key)
        rows = [("module", "ms", "compared", "difference")]
        for path in listed:
            times = (milliseconds.get(path, 0.0) for milliseconds in by_module)
            rows.append(_difference(_indented(path), *times))
        sections.append(console.columns(rows))
        return "\n\n".join(sections)
    totals = [dict[str, float](), dict[str, float]()]
    for milliseconds, measured in zip(totals, (profile, other), strict=True):
        for operation in measured.operations:
            milliseconds[operation.name] = (
                milliseconds.get(operation.name, 0.0) + operation.milliseconds
            )
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
    "itself takes time, mostly around operations; run measures calls without it.",
    add_arguments=add_arguments,
    run=run,
)

"""``coreml-delegate record``: run a program, and record its inputs and outputs in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import check_output, new_output
from coreml_delegate.scripts.commands import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_program(parser)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.cmlrun", help="file to write"
    )
    parser.add_argument(
        "--with-program",
        action="store_true",
        help="also put the program and its external data into the file",
    )
    arguments.add_inputs(parser)
    arguments.add_samples(parser, of=" for each method")
    arguments.add_engine(parser)
    parser.add_argument("--method", help="method of the program (default: every method)")
    arguments.add_data(parser)
    arguments.add_seed(parser, "random inputs")
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    check_output(args.output, force=args.force)
    from coreml_delegate.scripts.program_arguments import engine_options
    from coreml_delegate.scripts.recordings import Loading, describe, record

    loading = Loading(args.program, args.engine, args.host, engine_options(args), tuple(args.data))
    with console.step("Recording"):
        recording, execution = record(
            loading,
            method=args.method,
            inputs=args.input,
            samples=args.samples,
            seed=args.seed,
            with_program=args.with_program,
        )
    with new_output(args.output, force=args.force) as file:
        recording.write(file)
    size = args.output.stat().st_size
    if args.json:
        console.write_json({"file": str(args.output), "bytes": size, **describe(recording)})
        return 0
    content = "calls and program" if recording.has_program else "calls, without the program"
    console.write(
        f"{args.output}: {len(recording.calls)} calls of {', '.join(recording.methods)} "
        f"({console.size(size)}: {content})"
    )
    console.write(f"computed by {execution}")
    return 0


COMMAND = Command(
    name="record",
    summary="run a program, and write inputs, outputs and machine to a file",
    description="Run a program and write a file that `coreml-delegate replay` repeats and compares "
    "on another machine: inputs and outputs of every call, states, engine, compute units, and the "
    "versions of the software.",
    add_arguments=add_arguments,
    run=run,
)

"""``coreml-delegate trace``: find the first op of a program whose result is bad."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coreml_delegate.formats.text import decibels
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command, add_number

if TYPE_CHECKING:
    from coreml_delegate.runtime import Diagnosis, ValueReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_program(parser)
    arguments.add_inputs(parser)
    arguments.add_method(parser)
    arguments.add_seed(parser, "random inputs")
    add_number(parser, "--worst", "N", "show the N ops of largest error (default: 5)", default=5)
    parser.add_argument(
        "--min-sqnr",
        type=arguments.decibels,
        default=20.0,
        metavar="DB",
        help="a value is bad below this ratio of signal to error, in dB (default: 20)",
    )
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from coreml_delegate.scripts.program_arguments import inputs_for, load_to_diagnose

    with console.step(f"Loading {args.program}"):
        program = load_to_diagnose(args.program, args.method)
    inputs = inputs_for(args, program)
    with console.step("Tracing"):
        diagnoses = program.diagnose(inputs, min_sqnr_db=args.min_sqnr)
    warn_of_rounded_constants(diagnoses)
    if args.json:
        console.write_json([_record(name, d, args.worst) for name, d in diagnoses])
    else:
        _print(diagnoses, args.worst)
    return 0


def warn_of_rounded_constants(diagnoses: Sequence[tuple[str, Diagnosis]]) -> None:
    """Warn, once per model, if its constants' rounding errors in fp16 are unknown."""
    for name in dict.fromkeys(n for n, d in diagnoses if d.has_rounded_constants):
        console.warn(
            f"{name} lacks the fp32 values of its fp16 constants; their rounding is not shown"
        )


def _record(name: str, diagnosis: Diagnosis, worst: int) -> dict[str, Any]:
    bad = diagnosis.first_bad
    return {
        "model": name,
        "function": diagnosis.function,
        "values": len(diagnosis.values),
        "has_rounded_constants": diagnosis.has_rounded_constants,
        "first_bad": None if bad is None else _fields(bad),
        "worst": [_fields(value) for value in diagnosis.worst(worst)],
    }


def _fields(value: ValueReport) -> dict[str, Any]:
    return {
        "op": value.op_type,
        "output": value.name,
        "location": str(value.location),
        "turns": list(value.turns),
        "fault": value.fault.value if value.fault else None,
        "sqnr_db": value.sqnr_db,
        "nan": value.nan,
        "infinite": value.infinite,
        "max_abs": value.max_abs,
        "result": value.result,
        "inputs": dict(value.inputs),
    }


def _print(diagnoses: Sequence[tuple[str, Diagnosis]], worst: int) -> None:
    for name, diagnosis in diagnoses:
        bad = diagnosis.first_bad
        count = len(diagnosis.values)
        console.write(f"{name}: {f'first bad: {bad}' if bad else f'{count} values, none bad'}")
        rows = [("SQNR", "max", "op", "output", "location", "fault")]
        rows += [
            (
                decibels(value.sqnr_db),
                f"{value.max_abs:.4g}",
                value.op_type,
                value.name,
                str(value.location),
                value.fault.value if value.fault else "-",
            )
            for value in diagnosis.worst(worst)
        ]
        console.write(console.columns(rows, indent=2))


COMMAND = Command(
    name="trace",
    summary="find the first op whose result is NaN, overflows or is inaccurate",
    description="Run the program op by op at its own dtypes and in fp32 and int64, and name the "
    "first value that is NaN, overflows, is beyond int32 or is inaccurate, and the ops of largest "
    "error. The run in fp32 takes constants as before rounding to fp16. The delegates of a "
    ".pte are traced on the inputs that the program gives them.",
    add_arguments=add_arguments,
    run=run,
)

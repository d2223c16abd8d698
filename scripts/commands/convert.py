"""``coreml-delegate convert``: from StableHLO to an ``.mlpackage`` or a ``.pte``."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.mlpackage import SUFFIX
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.scripts import (
    arguments,
    console,
    interruption,
    precision_measuring,
    quantization_options,
)
from coreml_delegate.scripts.commands import Command, add_path
from coreml_delegate.scripts.model_packages import (
    PROGRAM_SUFFIX,
    add_interface,
    check_suffix,
    interface_of,
    is_package,
)

_SUFFIXES = (SUFFIX, PROGRAM_SUFFIX)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_path(
        parser,
        "source",
        "SOURCE",
        "MLIR text or bytecode (.mlir), a portable artifact (.stablehlo), or a serialized "
        "jax.export (.jax)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=".mlpackage, or .pte with one Core ML delegate",
    )
    arguments.add_options(
        parser, CompileOptions, ("compute_unit", "precision", "deployment_target", "device")
    )
    parser.set_defaults(precision="float32")
    arguments.add_inputs(parser, default="nothing is measured")
    quantization_options.add_calibration(
        parser,
        "data to measure with, in place of --input: a folder of images or arrays, FILE.npz or "
        "MODULE:FACTORY",
    )
    arguments.add_options(parser, PartitionerKeywords, ("min_sqnr_db",))
    precision_measuring.add_no_verify(parser)
    parser.add_argument(
        "--state",
        type=_state,
        action="append",
        default=[],
        metavar="INPUT=OUTPUT",
        help="keep an input as a state, replaced by an output after each run: name or position "
        "of the input, position of the output; repeatable",
    )
    add_interface(parser)
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    output: Path = args.output
    _check_output(output, force=args.force)
    interface = interface_of(args, output)
    with console.step("Importing coremltools and JAX"):
        from coreml_delegate import stablehlo
        from coreml_delegate.scripts.stablehlo_files import is_stablehlo
    if not is_stablehlo(args.source) or not args.source.is_file():
        raise OptionError(
            "no such StableHLO file", got=str(args.source), expected=".mlir, .stablehlo or .jax"
        )
    samples = _samples(args)
    with console.step(f"Converting {args.source}"):
        program = stablehlo.compile(
            args.source,
            **({"target": args.deployment_target} if args.deployment_target else {}),
            precision=args.precision,
            compute_units=args.compute_unit,
            device=args.device,
            states=dict(args.state),
            precision_data=samples if args.precision is Precision.AUTO else None,
            min_sqnr_db=args.min_sqnr,
        )
    report = program.precision
    if report is not None and not args.force:
        report.require()
    if report is None and samples is not None and not args.no_verify:
        measure = partial(program.measure_precision, samples)
        report = precision_measuring.measured(measure, args.min_sqnr)
    interruption.check()
    program.save(output, interface if is_package(output) else None)
    summary: dict[str, Any] = {
        "file": str(output),
        "inputs": {name: str(type) for name, type in program.parameters.items()},
        "outputs": {name: str(type) for name, type in program.outputs.items()},
        "states": {name: str(type) for name, type in program.executable.states.items()},
        "narrowed": list(program.narrowed),
        "precision": None if report is None else report.to_dict(),
    }
    if args.json:
        console.write_json(summary)
        return 0
    console.write(f"wrote {output}")
    for kind in ("inputs", "outputs", "states"):
        listed = ", ".join(f"{name} {type}" for name, type in summary[kind].items())
        if listed:
            console.write(f"{kind}: {listed}")
    if summary["narrowed"]:
        console.write(f"narrowed to 32 bits: {', '.join(summary['narrowed'])}")
    for line in () if report is None else report.lines():
        console.write(line)
    return 0


def _samples(args: argparse.Namespace) -> list[list[Any]] | None:
    """Read the inputs to measure with; None without the options that name them.

    Raises:
        OptionError: The inputs are missing, not needed, given twice, or cannot be read.
    """
    measures = args.precision is not Precision.FLOAT32
    is_given = bool(args.input) or args.calibration is not None
    if is_given and not measures:
        raise OptionError(
            "there is nothing to measure",
            got=f"--precision {args.precision.value}",
            remedy="Pass --precision auto or float16, or leave --input and --calibration out",
        )
    if args.input and args.calibration is not None:
        raise OptionError("--input and --calibration exclude each other", remedy="Pass one of them")
    if not is_given:
        if args.precision is Precision.AUTO:
            raise OptionError(
                "precision auto measures a program on example inputs",
                got="no example inputs",
                remedy="Pass --input or --calibration, or choose float16 or float32",
            )
        return None
    from coreml_delegate.scripts.inputs.input_files import read_inputs
    from coreml_delegate.scripts.program_arguments import calibration_samples
    from coreml_delegate.scripts.stablehlo_files import input_of
    from coreml_delegate.stablehlo.program import input_types

    types, dimensions = input_types(args.source, states=dict(args.state))
    inputs = [input_of(name, type, dimensions) for name, type in types.items()]
    samples = (
        calibration_samples(args, inputs)
        if args.calibration is not None
        else [read_inputs(args.input, inputs)]
    )
    return [[tensor.numpy() for tensor in sample] for sample in samples]


def _state(text: str) -> tuple[str | int, int]:
    name, separator, position = text.rpartition("=")
    if not (separator and name and position.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not INPUT=OUTPUT, such as cache=1")
    return int(name) if name.isdecimal() else name, int(position)


def _check_output(path: Path, *, force: bool) -> None:
    check_suffix(path, _SUFFIXES)
    arguments.check_output(path, force=force, is_folder=is_package(path))


COMMAND = Command(
    name="convert",
    summary="convert StableHLO, as JAX exports it, to an .mlpackage or a .pte",
    description="Convert a StableHLO program to an .mlpackage, or to a .pte with one Core ML "
    "delegate. Needs the extra: pip install 'coreml-delegate[jax]'.",
    add_arguments=add_arguments,
    run=run,
)

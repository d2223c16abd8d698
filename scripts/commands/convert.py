"""``coreml-delegate convert``: from StableHLO to an ``.mlpackage`` or a ``.pte``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_options import CompileOptions
from coreml_delegate.scripts import arguments, console, interruption
from coreml_delegate.scripts.commands import Command, add_path

_SUFFIXES = (".mlpackage", ".pte")


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
        parser, CompileOptions, ("compute_unit", "precision", "deployment_target")
    )
    parser.set_defaults(precision="float32")
    parser.add_argument(
        "--state",
        type=_state,
        action="append",
        default=[],
        metavar="INPUT=OUTPUT",
        help="keep an input as a state, replaced by an output after each run: name or position "
        "of the input, position of the output; repeatable",
    )
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    output: Path = args.output
    _check_output(output, force=args.force)
    with console.step("Importing coremltools and JAX"):
        from coreml_delegate import stablehlo
        from coreml_delegate.scripts.stablehlo_files import is_stablehlo
    if not is_stablehlo(args.source) or not args.source.is_file():
        raise OptionError(
            "no such StableHLO file", got=str(args.source), expected=".mlir, .stablehlo or .jax"
        )
    with console.step(f"Converting {args.source}"):
        program = stablehlo.compile(
            args.source,
            **({"target": args.deployment_target} if args.deployment_target else {}),
            precision=args.precision,
            compute_units=args.compute_unit,
            states=dict(args.state),
        )
    interruption.check()
    program.save(output)
    summary: dict[str, Any] = {
        "file": str(output),
        "inputs": {name: str(type) for name, type in program.parameters.items()},
        "outputs": {name: str(type) for name, type in program.outputs.items()},
        "states": {name: str(type) for name, type in program.executable.states.items()},
        "narrowed": list(program.narrowed),
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
    return 0


def _state(text: str) -> tuple[str | int, int]:
    name, separator, position = text.rpartition("=")
    if not (separator and name and position.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not INPUT=OUTPUT, such as cache=1")
    return int(name) if name.isdecimal() else name, int(position)


def _check_output(path: Path, *, force: bool) -> None:
    if path.suffix not in _SUFFIXES:
        raise OptionError("unknown kind of output", got=str(path), expected=" or ".join(_SUFFIXES))
    arguments.check_output(path, force=force, is_folder=path.suffix == ".mlpackage")


COMMAND = Command(
    name="convert",
    summary="convert StableHLO, as JAX exports it, to an .mlpackage or a .pte",
    description="Convert a StableHLO program to an .mlpackage, or to a .pte with one Core ML "
    "delegate. Needs the extra: pip install 'coreml-delegate[jax]'.",
    add_arguments=add_arguments,
    run=run,
)

"""``coreml-delegate demo``: MobileNetV2 from PyTorch to Core ML and back, in one command."""

from __future__ import annotations

import argparse
from pathlib import Path

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command

_FOLDER = Path("demo-output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=_FOLDER,
        metavar="DIR",
        help=f"folder for mv2.pte and mv2.mlpackage, replaced if they exist (default: {_FOLDER})",
    )
    parser.add_argument(
        "--repeat",
        type=arguments.positive,
        default=30,
        help="timed runs of program and model (default: 30)",
    )
    arguments.add_seed(parser, "random weights")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    with console.step("Importing torch, ExecuTorch and coremltools"):
        from coreml_delegate.scripts.mobilenet import demonstrate
    demonstrate(args.output, seed=args.seed, repeat=args.repeat)
    return 0


COMMAND = Command(
    name="demo",
    summary="export, run, compare and extract torchvision's MobileNetV2",
    description="Export torchvision's MobileNetV2 with Core ML delegates, run it on a photo on "
    "this machine, compare it with PyTorch, and extract the .mlpackage. Weights are random "
    "(nothing is downloaded); batch normalisation is calibrated on the photo.",
    add_arguments=add_arguments,
    run=run,
)

"""The options that say how to quantize, and what they alone tell before anything is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from coreml_delegate.errors import OptionError
from coreml_delegate.quantization_modes import FORMS, QuantizationAssignment, mode_of
from coreml_delegate.scripts import arguments, console

_CALIBRATION = (
    "data to calibrate with: a folder of images (.png, .jpg) or arrays (.npy, .npz, .pt), a .npz "
    "with an array for each input, or MODULE:FACTORY, which returns samples to iterate over"
)
DEFAULT_SAMPLES = 128


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """``--quantize`` or ``--quantize-config``, and the calibration."""
    group = parser.add_argument_group(
        "quantization", "; ".join(f"{form}: {meaning}" for form, meaning in FORMS.items())
    )
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--quantize", type=_assignment, metavar="MODE", help=f"quantize: {', '.join(FORMS)}"
    )
    choice.add_argument(
        "--quantize-config",
        type=Path,
        metavar="FILE.json",
        help="quantize as the file says, which quantize-report suggests",
    )
    add_calibration(group)


def add_mode(parser: argparse.ArgumentParser) -> None:
    """``--quantize`` where it is required, and the calibration."""
    parser.add_argument(
        "--quantize",
        type=_assignment,
        metavar="MODE",
        required=True,
        help=f"the mode to examine: {', '.join(FORMS)}",
    )
    add_calibration(parser)


def add_calibration(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage] - groups have no public type
    """``--calibration`` and how much of it to read."""
    parser.add_argument("--calibration", metavar="DATA", help=_CALIBRATION)
    parser.add_argument(
        "--calibration-samples",
        type=arguments.positive,
        metavar="N",
        help=f"samples to read at most (default: {DEFAULT_SAMPLES})",
    )


def assignment_of(args: argparse.Namespace) -> QuantizationAssignment | None:
    """How to quantize, or None.

    Raises:
        OptionError: The file cannot be read.
    """
    if args.quantize_config is not None:
        return QuantizationAssignment.read(args.quantize_config)
    assignment: QuantizationAssignment | None = args.quantize
    return assignment


def check(args: argparse.Namespace, assignment: QuantizationAssignment | None) -> None:
    """Check options against each other.

    Raises:
        OptionError: The deployment target is too old for the quantization; calibration data is
            missing, or given without a quantization.
    """
    if assignment is None:
        if args.calibration is not None or args.calibration_samples is not None:
            raise OptionError(
                "there is nothing to calibrate",
                remedy="Pass --quantize or --quantize-config, or leave --calibration out",
            )
        return
    newest = assignment.newest
    newest.require_target(getattr(args, "deployment_target", None), "--deployment-target")
    if assignment.activations and args.calibration is None:
        raise OptionError(
            f"{assignment.mode.name} quantizes activations and needs calibration data",
            remedy="Pass --calibration DIR, FILE.npz or MODULE:FACTORY",
        )


def wants_calibration(args: argparse.Namespace, assignment: QuantizationAssignment) -> bool:
    """Whether to read calibration data; says so if it is given in vain."""
    if args.calibration is not None and not assignment.activations:
        console.warn(f"{assignment.mode.name} quantizes weights alone: --calibration is not read")
    return assignment.activations


def _assignment(text: str) -> QuantizationAssignment:
    try:
        return QuantizationAssignment(mode_of(text))
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

"""``coreml-delegate quantize-report``: rank layers by sensitivity, and suggest modes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.scripts import arguments, console, quantization_options
from coreml_delegate.scripts.arguments import check_outputs, new_output
from coreml_delegate.scripts.commands import Command, add_path

if TYPE_CHECKING:
    from coreml_delegate.exported.source_model import SourceModel

_DEFAULT_TARGET = 30.0  # dB, as ``verify`` asks for


_FORMS = (".html", ".json", ".png", ".txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_source(parser)
    quantization_options.add_mode(parser)
    arguments.add_data_set(parser)
    parser.add_argument(
        "--target-sqnr",
        type=arguments.decibels,
        default=_DEFAULT_TARGET,
        metavar="DB",
        help="ratio of signal to error, in dB, that the suggestion should reach "
        f"(default: {_DEFAULT_TARGET:g})",
    )
    add_path(
        parser, "--suggest", "FILE.json", "write the suggested modes, for export --quantize-config"
    )
    arguments.add_report(parser, _FORMS, what="the ranking")
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    reports: list[Path] = args.report
    suggestion: Path | None = args.suggest
    check_outputs((suggestion, *reports), force=args.force)
    quantization_options.check(args, args.quantize)
    with console.step("Importing ExecuTorch and coremltools"):
        from coreml_delegate.quantization.sensitivity import SensitivityStudy
        from coreml_delegate.scripts.inputs.source import load_source
        from coreml_delegate.scripts.sensitivity_report import FORMS, to_table
    with console.step(f"Loading {args.source}"):
        source = load_source(
            args.source, shapes=args.input_shape, weights=args.weights, seed=args.seed
        )
    samples, data = _samples(args, source)
    study = SensitivityStudy(source, args.quantize.mode, samples, data)
    description = f"Quantizing single layers by {args.quantize.mode.name}"
    with console.progress(study.layers, description) as paths:
        measured = [study.measure(path) for path in paths]
    with console.step("Looking for a mixture"):
        sensitivity = study.suggest(measured, target_db=args.target_sqnr)
    with ExitStack() as files:
        for path in reports:
            file = files.enter_context(new_output(path, force=args.force))
            file.write(FORMS[path.suffix](sensitivity))
        if suggestion is not None:
            file = files.enter_context(new_output(suggestion, force=args.force))
            file.write(f"{sensitivity.suggestion.to_json()}\n".encode())
    if args.json:
        console.write_json(sensitivity.as_dict())
    else:
        console.write(to_table(sensitivity))
    if not sensitivity.reached:
        console.warn(
            f"no mixture of modes reaches {sensitivity.target_db:g} dB; the suggested mixture has "
            f"{sensitivity.suggested_db:.1f} dB"
        )
    return 0


def _samples(
    args: argparse.Namespace, source: SourceModel
) -> tuple[list[list[Any]], Iterable[list[Any]] | None]:
    """Return the samples to calibrate with, and the data to compare on; None for the same."""
    from coreml_delegate.scripts.inputs.data_sets import DataSet
    from coreml_delegate.scripts.inputs.random_tensors import resampled

    data_set, _ = arguments.split_data(args.data)
    data = None
    if data_set is not None:
        data = DataSet(data_set, source, limit=args.samples).inputs
    if args.calibration is not None:
        return quantization_options.read_samples(args, source), data
    count = arguments.SAMPLES if data is not None else args.samples or arguments.SAMPLES
    return list(resampled(source.leaves, count, args.seed)), data


COMMAND = Command(
    name="quantize-report",
    summary="rank layers by the accuracy that quantizing each costs; suggest modes",
    description="Quantize one layer of a PyTorch model at a time, compare the model's outputs with "
    "the float model's, rank the layers by the loss, and suggest layers to quantize less.",
    add_arguments=add_arguments,
    run=run,
)

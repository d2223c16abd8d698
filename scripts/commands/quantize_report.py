"""``coreml-delegate quantize-report``: which layers suffer from quantization, and a remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.scripts import arguments, console, quantization_options
from coreml_delegate.scripts.arguments import check_output, new_output
from coreml_delegate.scripts.commands import Command

if TYPE_CHECKING:
    from coreml_delegate.scripts.inputs.source import Source
    from coreml_delegate.scripts.sensitivity import Sensitivity

_DEFAULT_TARGET = 30.0  # dB, as ``verify`` asks for


def _as_html(sensitivity: Sensitivity) -> bytes:
    from coreml_delegate.scripts.sensitivity_page import to_html

    return to_html(sensitivity).encode()


def _as_json(sensitivity: Sensitivity) -> bytes:
    return f"{console.as_json(sensitivity.as_dict())}\n".encode()


def _as_png(sensitivity: Sensitivity) -> bytes:
    from coreml_delegate.scripts.sensitivity_picture import to_png

    return to_png(sensitivity)


def _as_text(sensitivity: Sensitivity) -> bytes:
    return f"{to_table(sensitivity)}\n".encode()


_FORMS: Mapping[str, Callable[[Sensitivity], bytes]] = {
    ".html": _as_html,
    ".json": _as_json,
    ".png": _as_png,
    ".txt": _as_text,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    arguments.add_source(parser)
    quantization_options.add_mode(parser)
    parser.add_argument(
        "--samples",
        type=arguments.positive,
        default=4,
        metavar="N",
        help="random inputs to compare on, without --calibration (default: 4)",
    )
    parser.add_argument(
        "--target-sqnr",
        type=arguments.decibels,
        default=_DEFAULT_TARGET,
        metavar="DB",
        help="ratio of signal to error, in dB, that the suggestion is to reach "
        f"(default: {_DEFAULT_TARGET:g})",
    )
    parser.add_argument(
        "--suggest",
        type=Path,
        metavar="FILE.json",
        help="write the suggested mixture, for export --quantize-config",
    )
    arguments.add_report(parser, _FORMS, what="the ranking")
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    reports: list[Path] = args.report
    suggestion: Path | None = args.suggest
    for path in (suggestion, *reports):
        if path is not None:
            check_output(path, force=args.force)
    quantization_options.check(args, args.quantize)
    with console.step("Importing ExecuTorch and coremltools"):
        from coreml_delegate.scripts.inputs.source import load_source
        from coreml_delegate.scripts.sensitivity import examine
    with console.step(f"Loading {args.source}"):
        source = load_source(
            args.source, shapes=args.input_shape, weights=args.weights, seed=args.seed
        )
    samples = _samples(args, source)
    found = examine(source, args.quantize.mode, samples, target_db=args.target_sqnr)
    with ExitStack() as files:
        for path in reports:
            file = files.enter_context(new_output(path, force=args.force))
            file.write(_FORMS[path.suffix](found))
        if suggestion is not None:
            file = files.enter_context(new_output(suggestion, force=args.force))
            file.write(f"{found.suggestion.to_json()}\n".encode())
    if args.json:
        console.write_json(found.as_dict())
    else:
        console.write(to_table(found))
    if not found.reached:
        console.warn(
            f"no mixture reaches {found.target_db:g} dB; the one suggested has "
            f"{found.suggested_db:.1f} dB"
        )
    return 0


def _samples(args: argparse.Namespace, source: Source) -> list[list[Any]]:
    from coreml_delegate.scripts.calibration import read_calibration
    from coreml_delegate.scripts.inputs.sampling import generator, resample

    if args.calibration is not None:
        limit = args.calibration_samples or quantization_options.DEFAULT_SAMPLES
        return read_calibration(args.calibration, source, limit=limit)
    random = generator(args.seed)
    return [[resample(leaf, random) for leaf in source.leaves] for _ in range(args.samples)]


def to_table(sensitivity: Sensitivity) -> str:
    """The ranking and the suggestion for a terminal."""
    from coreml_delegate.quantization_modes import QuantizationAssignment

    rows: list[tuple[str, ...]] = [("layer", "kind", "weights", "SQNR alone", "suggested")]
    for layer in sensitivity.layers:
        mode = sensitivity.suggestion.mode_for(layer.path)
        rows.append(
            (
                layer.path,
                layer.kind,
                str(layer.weights),
                decibels(layer.sqnr_db),
                "float" if mode is None else mode.name,
            )
        )
    uniform = QuantizationAssignment(sensitivity.mode)
    relieved = len(sensitivity.suggestion.modules)
    return "\n".join(
        (
            console.columns(rows),
            f"all by {sensitivity.mode.name}: {decibels(sensitivity.uniform_db)}, "
            f"{sensitivity.bits(uniform):.2f} bits per weight",
            f"suggested, {relieved} of {len(sensitivity.layers)} layers otherwise: "
            f"{decibels(sensitivity.suggested_db)}, "
            f"{sensitivity.bits(sensitivity.suggestion):.2f} bits per weight",
        )
    )


def decibels(value: float) -> str:
    """An SQNR for a reader."""
    return "equal" if value == float("inf") else f"{value:.1f} dB"


COMMAND = Command(
    name="quantize-report",
    summary="rank the layers by what quantizing each costs, and suggest a mixture",
    description="Quantize each layer of a PyTorch model alone, compare the model's outputs with "
    "those of the float model, rank the layers by what is lost, and suggest which of them to "
    "quantize less.",
    add_arguments=add_arguments,
    run=run,
)

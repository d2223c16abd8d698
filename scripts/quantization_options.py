"""The quantization options of a command: their checks, calibration data, and the summary of sizes.

Imports nothing slow: the options are declared when the command line is parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import CoreMLDelegateError, OptionError
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.quantization import (
    FORMS,
    MODULE_FORMS,
    Method,
    QuantizationAssignment,
    QuantizationMode,
    mode_of,
)
from coreml_delegate.scripts import arguments, console
from coreml_delegate.targets import Opset

if TYPE_CHECKING:
    from coreml_delegate.exported.source_model import SourceModel
    from coreml_delegate.llm.decoder import Decoder
    from coreml_delegate.llm.encoder_decoder import EncoderDecoder
    from coreml_delegate.runtime.mil.program import Feature

_CALIBRATION = (
    "data to calibrate with, and to measure for --precision auto: a folder of images (.png, .jpg) "
    "or arrays (.npy, .npz, .pt, .safetensors), a .npz or .safetensors with an array for each "
    "input, or MODULE:FACTORY, which "
    "returns samples to iterate over"
)
_DEFAULT_SAMPLES = 128
_GROUP = 32
_NONE = "none"
CALIBRATED = ("gptq-4", "skm-4")
"""Modes of ``llm.calibrated_weights``; a copy, because importing that takes seconds."""

_MAX_LISTED = 3  # modules listed in a warning


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """Declare ``--quantize``, ``--quantize-config`` and the calibration options."""
    group = parser.add_argument_group(
        "quantization", "; ".join(f"{form}: {meaning}" for form, meaning in FORMS.items())
    )
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--quantize", type=_assignment, metavar="MODE", help=f"mode: {', '.join(FORMS)}"
    )
    choice.add_argument(
        "--quantize-config",
        type=Path,
        metavar="FILE.json",
        help="a mode for each module, as quantize-report --suggest writes",
    )
    add_calibration(group, _CALIBRATION)


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Declare a required ``--quantize`` and the calibration options."""
    parser.add_argument(
        "--quantize",
        type=_assignment,
        metavar="MODE",
        required=True,
        help=f"the mode to examine: {', '.join(FORMS)}",
    )
    add_calibration(parser, _CALIBRATION)


def add_weight_modes(parser: argparse.ArgumentParser, *, calibrated: bool = False) -> None:
    """Declare the modes of the linear layers and of the embedding of a language model.

    Args:
        parser: The parser.
        calibrated: Whether a text may choose the weights.
    """
    names = ", ".join(MODULE_FORMS)
    if calibrated:
        names += f"; with --calibration {' or '.join(CALIBRATED)}"
    group = parser.add_argument_group("weights in few bits")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--quantize",
        default=_NONE,
        metavar="MODE",
        help=f"linear layers: {_NONE} (default), int4 (int4-groupN with N of --group-size), int8 "
        f"(int8-channel), {names}",
    )
    choice.add_argument(
        "--quantize-config",
        type=Path,
        metavar="FILE.json",
        help="a mode for each linear layer, by path with * (docs/quantization.md has the form)",
    )
    group.add_argument(
        "--group-size",
        type=arguments.positive,
        metavar="N",
        help=f"inputs that share a scale with int4 (default: {_GROUP})"
        + ("; the same with gptq-4; outputs that share a table with skm-4" if calibrated else ""),
    )
    if calibrated:
        group.add_argument(
            "--calibration",
            type=Path,
            metavar="FILE.txt",
            help=f"text in UTF-8, for {', '.join(CALIBRATED)} and --budget",
        )
        group.add_argument(
            "--budget",
            type=float,
            metavar="PERPLEXITY",
            help="largest perplexity of the text of --calibration: the layers that lose most get 8 "
            "bits in place of --quantize (default: int4), as few as suffice",
        )
    group.add_argument(
        "--embedding-quantize",
        default=_NONE,
        metavar="MODE",
        help=f"embeddings, and a head tied to them: {_NONE} (default), int8 (a scale per token), "
        "or another of these modes",
    )


def weight_modes_of(
    args: argparse.Namespace, *, int4: str | None = None
) -> tuple[QuantizationAssignment | None, QuantizationMode | None]:
    """Return the modes of the linear layers, and the mode of the embedding.

    Args:
        args: The arguments.
        int4: Mode that ``int4`` stands for; None for groups of ``--group-size``.

    Raises:
        OptionError: A mode is unknown, or does not fit the other options.
    """
    has_budget = getattr(args, "budget", None) is not None
    linear_name: str = args.quantize
    if has_budget and linear_name == _NONE:
        linear_name = "int4"
    uses_groups = not {"int4", *CALIBRATED}.isdisjoint((linear_name, args.embedding_quantize))
    if args.group_size is not None and not uses_groups:
        raise OptionError("--group-size belongs to int4", got=f"--quantize {args.quantize}")
    short = {"int4": int4 or f"int4-group{args.group_size or _GROUP}", "int8": "int8-channel"}
    if linear_name in CALIBRATED and hasattr(args, "calibration"):
        linear_name = _NONE
    chosen: tuple[str, str] = (linear_name, args.embedding_quantize)
    names = [short.get(name, name) for name in chosen]
    linear, embedding = (None if name == _NONE else mode_of(name) for name in names)
    if args.quantize_config is not None:
        assignment = QuantizationAssignment.read(args.quantize_config)
    else:
        assignment = None if linear is None else QuantizationAssignment(linear)
    for mode in (*(assignment.modes if assignment else ()), embedding):
        if mode is None:
            continue
        if mode.method is not Method.MODULES:
            raise OptionError(
                f"{mode.name} does not quantize modules of PyTorch",
                got=mode.method.value,
                expected=f"one of {', '.join(MODULE_FORMS)}",
            )
        mode.require_target(args.deployment_target, "--deployment-target")
    return assignment, embedding


def add_calibration(parser: argparse._ActionsContainer, purpose: str) -> None:  # pyright: ignore[reportPrivateUsage] - groups have no public type
    """Declare ``--calibration`` and ``--calibration-samples``."""
    parser.add_argument("--calibration", metavar="DATA", help=purpose)
    parser.add_argument(
        "--calibration-samples",
        type=arguments.positive,
        metavar="N",
        help=f"read at most N samples (default: {_DEFAULT_SAMPLES})",
    )


def assignment_of(args: argparse.Namespace) -> QuantizationAssignment | None:
    """Return the assignment that the options name, or None.

    Raises:
        OptionError: The file of ``--quantize-config`` cannot be read.
    """
    if args.quantize_config is not None:
        return QuantizationAssignment.read(args.quantize_config)
    assignment: QuantizationAssignment | None = args.quantize
    return assignment


def check(args: argparse.Namespace, assignment: QuantizationAssignment | None) -> None:
    """Check the options against each other.

    Raises:
        OptionError: The deployment target is too old for the quantization; calibration data is
            missing, or given without a quantization.
    """
    measures = getattr(args, "precision", None) is Precision.AUTO
    if assignment is None:
        is_given = args.calibration is not None or args.calibration_samples is not None
        if is_given and not measures:
            raise OptionError(
                "there is nothing to calibrate",
                remedy="Pass --quantize, --quantize-config or --precision auto, or leave "
                "--calibration out",
            )
        return
    newest = assignment.newest
    newest.require_target(getattr(args, "deployment_target", None), "--deployment-target")
    if assignment.activations and args.calibration is None:
        raise OptionError(
            f"{assignment.mode.name} quantizes activations and needs calibration data",
            remedy="Pass --calibration DIR, FILE.npz or MODULE:FACTORY",
        )


def calibration_samples(
    args: argparse.Namespace, source: SourceModel, assignment: QuantizationAssignment
) -> list[list[Any]]:
    """Read the calibration samples that an assignment needs; warn of data that it does not need.

    Raises:
        OptionError: The data cannot be read or do not fit the model.
    """
    if assignment.activations:
        return read_samples(args, source)
    if args.calibration is not None and getattr(args, "precision", None) is not Precision.AUTO:
        console.warn(f"{assignment.mode.name} quantizes only weights: --calibration is not read")
    return []


def read_samples(
    args: argparse.Namespace, source: SourceModel, image: Feature | None = None
) -> list[list[Any]]:
    """Read the data of ``--calibration``, at most ``--calibration-samples`` of it.

    Raises:
        OptionError: The data cannot be read or do not fit the model.
    """
    from coreml_delegate.scripts.inputs.data_sets import read_calibration

    limit = args.calibration_samples or _DEFAULT_SAMPLES
    return read_calibration(args.calibration, source, limit=limit, image=image)


def warn_of_float(in_float: Mapping[str, str]) -> None:
    """Warn of the modules that stay in float, with their reasons."""
    listed = [f"{path} ({why})" for path, why in in_float.items()]
    if listed:
        more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
        console.warn(f"modules left in float: {', '.join(listed[:_MAX_LISTED])}{more}")


def _assignment(text: str) -> QuantizationAssignment:
    try:
        return QuantizationAssignment(mode_of(text))
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Language models


def calibration_text(args: argparse.Namespace, target: Opset) -> str | None:
    """Return the text to calibrate a language model with, or None.

    Args:
        args: Of ``export-llm``.
        target: The deployment target.

    Raises:
        OptionError: The options do not fit the mode, or the file is not a text in UTF-8.
    """
    mode, file, checkpoint = args.quantize, args.calibration, args.checkpoint
    has_budget = args.budget is not None
    if mode not in CALIBRATED and not has_budget:
        if file is None:
            return None
        raise OptionError(
            "there is nothing to calibrate",
            got=f"--quantize {mode}",
            expected=f"{' or '.join(CALIBRATED)}, or --budget",
        )
    reader = "--budget" if has_budget else mode
    if has_budget and (mode in CALIBRATED or args.quantize_config is not None):
        raise OptionError(
            "--budget chooses the mode of each layer",
            got=f"--quantize {mode}" if mode in CALIBRATED else "--quantize-config",
            expected="a mode such as int4, from which it begins",
        )
    if file is None:
        raise OptionError(f"{reader} needs a text", remedy="Pass --calibration FILE.txt")
    name = arguments.TOKENIZERS[0]
    if checkpoint is None or not (checkpoint / name).is_file():
        raise OptionError(
            f"{reader} needs the tokenizer of the checkpoint",
            got=f"no {name} in {checkpoint}" if checkpoint else "--random",
            remedy=f"Put the model's {name} into the folder of the checkpoint",
        )
    if mode in CALIBRATED and target < Opset.iOS18:
        raise OptionError(
            f"--deployment-target must be {Opset.iOS18.name} or higher for {mode}", got=target.name
        )
    return arguments.read_text(file)


def calibrate(
    model: Decoder | EncoderDecoder,
    text: str,
    args: argparse.Namespace,
    linear: QuantizationAssignment | None,
) -> QuantizationAssignment | None:
    """Compress the weights of a language model with a calibration text, or choose their modes.

    Args:
        model: The model.
        text: The text.
        args: Of ``export-llm``.
        linear: Mode of the linear layers; None for a mode of ``CALIBRATED``.

    Returns:
        The modes to apply; None if the weights are compressed.

    Raises:
        CoreMLDelegateError: See ``calibrate_weights`` and ``assign_bits``; or the model has an
            encoder.
    """
    from coreml_delegate.llm.bit_budget import assign_bits
    from coreml_delegate.llm.calibrated_weights import calibrate_weights
    from coreml_delegate.llm.decoder import Decoder
    from coreml_delegate.llm.tokenizer import FileTokenizer

    if not isinstance(model, Decoder):
        raise OptionError("--calibration is for models without an encoder")
    tokens = FileTokenizer(args.checkpoint).encode(text)
    if linear is None:
        with console.step("Calibrating the weights"):
            calibrate_weights(model, args.quantize, tokens, group=args.group_size or _GROUP)
        return None
    with console.step("Measuring each layer in few bits"):
        result = assign_bits(model, tokens, args.budget, linear.mode)
    console.note(
        f"perplexity {result.quantized:.4g}, in float {result.in_float:.4g}; "
        f"{len(result.assignment.modules)} of {len(result.losses)} layers in more bits"
    )
    return result.assignment


# Summary


@dataclass(frozen=True, slots=True)
class QuantizationSummary:
    """Sizes of a model before and after quantization, in bytes.

    Attributes:
        after: Size of the weights in the Core ML delegates; None before lowering.
        program: Size of the ``.pte``; None before lowering.
    """

    assignment: QuantizationAssignment
    before: int
    after: int | None = None
    program: int | None = None

    @classmethod
    def of(cls, source: SourceModel, assignment: QuantizationAssignment) -> QuantizationSummary:
        """Begin the summary of a model that is not quantized yet."""
        return cls(assignment, _weight_bytes(source))

    def with_program(self, pte: bytes) -> QuantizationSummary:
        """Return the summary with the sizes of the lowered program."""
        from coreml_delegate.quantization.weight_inventory import weights_of
        from coreml_delegate.runtime.delegate import read_blob
        from coreml_delegate.runtime.program.pte import PteProgram
        from coreml_delegate.scripts.delegates import partitions_of

        program = PteProgram.open(pte)
        blobs = [
            partition.blob
            for method in program.methods
            for partition in partitions_of(program, method)
        ]
        models = [read_blob(blob)[0] for blob in blobs]
        stored = sum(weight.stored_bytes for model in models for weight in weights_of(model))
        return replace(self, after=stored, program=len(pte))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "config": self.assignment.as_dict(),
            "model_weight_bytes": self.before,
            "delegate_weight_bytes": self.after,
            "program_bytes": self.program,
        }

    def __str__(self) -> str:
        mixed = f" and modes for {len(self.assignment.modules)} modules"
        mode = f"{self.assignment.mode.name}{mixed if self.assignment.modules else ''}"
        text = f"quantized by {mode}: weights {console.size(self.before)}"
        if self.after is None or self.program is None:
            return text
        share = f" ({self.after / self.before:.0%})" if self.before else ""
        return (
            f"{text} before, {console.size(self.after)} after{share}; "
            f"program {console.size(self.program)}"
        )


def _weight_bytes(source: SourceModel) -> int:
    """Return the size of a model's parameters and buffers; shared ones count once."""
    from torch import nn

    if source.exported is not None:
        tensors = list(source.exported.state_dict.values())
    elif isinstance(source.module, nn.Module):
        tensors = [*source.module.parameters(), *source.module.buffers()]
    else:
        raise CoreMLDelegateError("the model has no weights to count")
    unique = {(t.data_ptr(), t.shape): t for t in tensors}
    return sum(tensor.nbytes for tensor in unique.values())

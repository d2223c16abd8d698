"""``coreml-delegate export-speech``: from a checkpoint to a ``.pte`` that recognizes speech."""

from __future__ import annotations

import argparse

from coreml_delegate.scripts import arguments, checkpoints, console, quantization_options
from coreml_delegate.scripts.arguments import check_outputs
from coreml_delegate.scripts.commands import Command

SECONDS = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    checkpoints.add_checkpoint(parser, "transformers saves them")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=SECONDS,
        metavar="S",
        help=f"length of the longest recording; every recording takes as long (default: "
        f"{SECONDS:g})",
    )
    quantization_options.add_weight_modes(parser)
    checkpoints.add_lowering(parser)
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    checkpoints.check_usage(args)
    linear, embedding = quantization_options.weight_modes_of(args)
    tokenizer = checkpoints.tokenizer_copy(args)
    check_outputs([args.output, *tokenizer], force=args.force)
    with console.step("Importing ExecuTorch, coremltools and transformers"):
        from coreml_delegate.llm.export import quantize_weights
        from coreml_delegate.llm.speech import export_recognizer, load_recognizer
        from coreml_delegate.llm.speech_features import FP32_MODULES
        from coreml_delegate.partition.export import lower_methods
    with console.step("Loading the model"):
        recognizer = load_recognizer(
            args.checkpoint,
            checkpoints.config_path(args),
            seconds=args.seconds,
            seed=args.seed,
        )
    parameters = sum(parameter.numel() for parameter in recognizer.parameters())
    with console.step("Quantizing the weights"):
        quantize_weights(recognizer, linear=linear, embedding=embedding)
    partitioner = checkpoints.partitioner(args, keep_fp32={"modules": FP32_MODULES})
    with console.step("Exporting with torch.export"):
        methods = export_recognizer(recognizer)
    with console.step("Lowering to Core ML"):
        program = lower_methods(methods, partitioner, recognizer.constants())
    checkpoints.write(args, program, tokenizer, partitioner.reports)
    facts = {
        "parameters": parameters,
        "kind": recognizer.kind.value,
        "frames": recognizer.frames,
    }
    rows = [
        ("parameters", f"{parameters:,}"),
        ("tokens", f"{recognizer.kind.value.upper()}, {recognizer.model.config.vocab_size:,}"),
        ("recordings", f"up to {args.seconds:g} s, {recognizer.frames:,} frames"),
    ]
    checkpoints.report(args, facts, rows, dict(zip(methods, partitioner.reports, strict=True)))
    checkpoints.require_kernels(args, partitioner.reports)
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of seconds above 0, not {text}")
    return value


COMMAND = Command(
    name="export-speech",
    summary="lower a Parakeet model to a .pte that transcribes recordings",
    description="Lower a speech recognizer of transformers (Parakeet: TDT, RNN-T or CTC), from a "
    "local checkpoint folder or with random weights, to a .pte with the methods that ExecuTorch's "
    "Parakeet runner calls.",
    add_arguments=add_arguments,
    run=run,
)

"""``coreml-delegate export-embedding``: from a checkpoint to a ``.pte`` that embeds texts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from coreml_delegate.scripts import arguments, checkpoints, console, quantization_options
from coreml_delegate.scripts.arguments import check_outputs
from coreml_delegate.scripts.commands import Command
from coreml_delegate.targets import Opset

if TYPE_CHECKING:
    from coreml_delegate.llm.embedding import TextEncoder

POOLINGS = ("mean", "cls", "last", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    checkpoints.add_checkpoint(parser, "sentence-transformers or transformers save them")
    parser.add_argument(
        "--length",
        type=_lengths,
        default=(),
        metavar="N[,N...]",
        help="tokens of a text with padding; several numbers give a method for each, which share "
        "the weights (default: the model's own maximum, at most 512)",
    )
    parser.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="how the hidden states of the tokens become one vector (default: as the checkpoint's "
        "modules.json says)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="divide vectors by their length (default: as modules.json says, yes without one)",
    )
    parser.add_argument(
        "--answers",
        type=_answers,
        metavar="YES,NO",
        help="score texts with a causal language model, by the logit of the token YES minus the "
        "logit of NO behind the text; texts of tokens, or their numbers (Qwen3-Reranker: yes,no)",
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
        from coreml_delegate.llm.embedding import constants, export_encoder
        from coreml_delegate.llm.export import quantize_weights
        from coreml_delegate.partition.export import lower_methods
    with console.step("Loading the model"):
        encoder = _encoder(args)
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    with console.step("Quantizing the weights"):
        quantize_weights(encoder, linear=linear, embedding=embedding)
    # Methods share weights from iOS18 on.
    target = args.deployment_target or Opset.iOS18
    partitioner = checkpoints.partitioner(args, minimum_deployment_target=target)
    with console.step("Exporting with torch.export"):
        methods = export_encoder(encoder)
    with console.step("Lowering to Core ML"):
        program = lower_methods(methods, partitioner, constants(encoder))
    checkpoints.write(args, program, tokenizer, partitioner.reports)
    facts = {
        "parameters": parameters,
        "lengths": list(encoder.lengths),
        "outputs": encoder.outputs,
        "head": encoder.describe_head(),
    }
    rows = [
        ("parameters", f"{parameters:,}"),
        ("lengths", ", ".join(map(str, encoder.lengths))),
        ("output", f"{encoder.outputs:,} numbers: {encoder.describe_head()}"),
    ]
    checkpoints.report(args, facts, rows, dict(zip(methods, partitioner.reports, strict=True)))
    checkpoints.require_kernels(args, partitioner.reports)
    return 0


def _encoder(args: argparse.Namespace) -> TextEncoder:
    from coreml_delegate.llm.embedding import Pooling, load_encoder

    return load_encoder(
        args.checkpoint,
        checkpoints.config_path(args),
        lengths=args.length,
        pooling=None if args.pooling is None else Pooling(args.pooling),
        normalizes=args.normalize,
        answers=args.answers,
        seed=args.seed,
    )


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(arguments.positive(part) for part in text.split(","))


def _answers(text: str) -> tuple[str, str]:
    yes, comma, no = text.partition(",")
    if not (yes and comma and no):
        raise argparse.ArgumentTypeError(f"two tokens with a comma between them, not {text!r}")
    return yes, no


COMMAND = Command(
    name="export-embedding",
    summary="lower a model that embeds or scores texts to a .pte",
    description="Lower an encoder of transformers or sentence-transformers, from a local "
    "checkpoint folder or with random weights, to a .pte that computes a vector of a text, or the "
    "scores of a cross-encoder.",
    add_arguments=add_arguments,
    run=run,
)

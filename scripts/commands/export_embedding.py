"""``coreml-delegate export-embedding``: from a checkpoint to a ``.pte`` that embeds texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_options import CompileOptions
from coreml_delegate.scripts import arguments, console, quantization_options
from coreml_delegate.scripts.arguments import check_outputs, new_output
from coreml_delegate.scripts.commands import Command, add_path
from coreml_delegate.targets import Opset

if TYPE_CHECKING:
    from coreml_delegate.llm.embedding import TextEncoder
    from coreml_delegate.partition import CoreMLPartitioner

POOLINGS = ("mean", "cls", "last", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_path(
        parser,
        "checkpoint",
        "CHECKPOINT",
        "folder with a config.json and *.safetensors, as sentence-transformers or transformers "
        "save them",
        nargs="?",
    )
    add_path(
        parser,
        "--random",
        "CONFIG.json",
        "instead of a checkpoint: a configuration that gets random weights",
    )
    arguments.add_seed(parser, "random weights")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.pte")
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
    quantization_options.add_weight_modes(parser)
    arguments.add_allow_missing_kernels(parser)
    arguments.add_options(parser, CompileOptions)
    arguments.add_force(parser)
    arguments.add_json(parser)
    parser.set_defaults(refuse_usage=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if (args.checkpoint is None) == (args.random is None):
        args.refuse_usage("exactly one is required: CHECKPOINT, or --random CONFIG.json")
    linear, embedding = quantization_options.weight_modes_of(args)
    tokenizer = arguments.tokenizer_copy(args)
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
    partitioner = _partitioner(args)
    with console.step("Exporting with torch.export"):
        methods = export_encoder(encoder)
    with console.step("Lowering to Core ML"):
        program = lower_methods(methods, partitioner, constants(encoder))
    with new_output(args.output, force=args.force) as file:
        program.write_to_file(file)
    for path, source in tokenizer.items():
        with new_output(path, force=args.force) as file:
            file.write(source.read_bytes())
    _report(args, encoder, parameters, dict(zip(methods, partitioner.reports, strict=True)))
    if not args.allow_missing_kernels:
        for report in partitioner.reports:
            report.require_kernels()
    return 0


def _encoder(args: argparse.Namespace) -> TextEncoder:
    from coreml_delegate.llm.checkpoint import CONFIG
    from coreml_delegate.llm.embedding import Pooling, load_encoder

    folder: Path | None = args.checkpoint
    if folder is not None and not folder.is_dir():
        raise OptionError("no such checkpoint folder", got=str(folder))
    return load_encoder(
        folder,
        args.random if folder is None else folder / CONFIG,
        lengths=args.length,
        pooling=None if args.pooling is None else Pooling(args.pooling),
        normalizes=args.normalize,
        seed=args.seed,
    )


def _partitioner(args: argparse.Namespace) -> CoreMLPartitioner:
    from coreml_delegate.backend import CoreMLBackend
    from coreml_delegate.partition import CoreMLPartitioner

    keywords = arguments.keywords_of(args, CompileOptions)
    # Methods share weights from iOS18 on.
    keywords["minimum_deployment_target"] = args.deployment_target or Opset.iOS18
    return CoreMLPartitioner(compile_specs=CoreMLBackend.generate_compile_specs(**keywords))


def _report(
    args: argparse.Namespace, encoder: TextEncoder, parameters: int, reports: dict[str, Any]
) -> None:
    """Print a summary; warn of operations on the CPU."""
    document: dict[str, Any] = {
        "parameters": parameters,
        "bytes": args.output.stat().st_size,
        "lengths": list(encoder.lengths),
        "outputs": encoder.outputs,
        "head": encoder.describe_head(),
        "methods": {
            name: {
                "operations": len(report.nodes),
                "delegated": len(report.delegated),
                "partitions": len(report.partitions),
                "on_the_cpu": sorted({node.op for node in report.undelegated}),
            }
            for name, report in reports.items()
        },
    }
    if args.json:
        console.write_json(document)
    else:
        rows = [
            ("parameters", f"{parameters:,}"),
            ("lengths", ", ".join(map(str, encoder.lengths))),
            ("output", f"{encoder.outputs:,} numbers: {encoder.describe_head()}"),
            *(
                (name, "{delegated} of {operations} operations on Core ML".format(**counts))
                for name, counts in document["methods"].items()
            ),
            ("file", console.size(document["bytes"])),
        ]
        console.write(console.columns(rows))
    for name, report in reports.items():
        if report.undelegated:
            console.warn(f"{name} does not run entirely on Core ML")
            console.write(report.to_table())


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(arguments.positive(part) for part in text.split(","))


COMMAND = Command(
    name="export-embedding",
    summary="lower a model that embeds or scores texts to a .pte",
    description="Lower an encoder of transformers or sentence-transformers, from a local "
    "checkpoint folder or with random weights, to a .pte that computes a vector of a text, or the "
    "scores of a cross-encoder.",
    add_arguments=add_arguments,
    run=run,
)

"""``coreml-delegate export-llm``: from a checkpoint to a ``.pte`` that generates text."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.arguments import check_output, new_output
from coreml_delegate.scripts.commands import Command

if TYPE_CHECKING:
    from coreml_delegate.llm.adapters import AdapterFile
    from coreml_delegate.llm.decoder import Decoder
    from coreml_delegate.llm.layout import Layout
    from coreml_delegate.llm.low_rank import Adapter
    from coreml_delegate.partition import CoreMLPartitioner

_CONTEXT = 2048
_CHUNK = {"io": 64, "state": 8}
_GROUP = 32
_BYTES = {"float16": 2, "float32": 4}  # of an element that is not quantized
CACHES = ("io", "state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        metavar="CHECKPOINT",
        help="folder with a config.json and *.safetensors, as transformers saves them",
    )
    parser.add_argument(
        "--random",
        type=Path,
        metavar="CONFIG.json",
        help="instead of a checkpoint: a configuration that gets random weights",
    )
    arguments.add_seed(parser, "random weights")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.pte")
    parser.add_argument(
        "--context",
        type=arguments.positive,
        metavar="N",
        help=f"tokens that the caches hold (default: the model's own maximum, at most {_CONTEXT})",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=arguments.positive,
        metavar="N",
        help="tokens that one call takes; with --cache state single tokens are padded to it, too "
        f"(default: {_CHUNK['io']}, with --cache state {_CHUNK['state']})",
    )
    parser.add_argument(
        "--cache",
        choices=CACHES,
        default="io",
        help="where keys and values of earlier tokens are kept: in inputs and outputs (io, the "
        "default), or in a Core ML state",
    )
    parser.add_argument(
        "--sample-in-model",
        metavar="argmax|top-k:K",
        help="return, in place of the logits of all tokens, the token with the largest logit "
        "(argmax), or the K largest logits and their tokens (top-k:K)",
    )
    parser.add_argument(
        "--adapter",
        type=_adapter,
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="LoRA adapter that peft has saved; it gets methods of its own, which share the "
        "model's weights; repeatable (default name: the folder's)",
    )
    _add_quantization(parser)
    arguments.add_compilation(parser)
    arguments.add_force(parser)
    arguments.add_json(parser)
    parser.set_defaults(refuse_usage=parser.error)


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("weights in few bits")
    group.add_argument(
        "--quantize",
        choices=("none", "int4", "int8"),
        default="none",
        help="linear layers: int4 with a scale per group of inputs, or int8 with a scale per "
        "output (default: none)",
    )
    group.add_argument(
        "--group-size",
        type=arguments.positive,
        default=_GROUP,
        metavar="N",
        help=f"inputs that share a scale with --quantize int4 (default: {_GROUP})",
    )
    group.add_argument(
        "--embedding-quantize",
        choices=("none", "int8"),
        default="none",
        help="embeddings and a head tied to them: int8 with a scale per token (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if (args.checkpoint is None) == (args.random is None):
        args.refuse_usage("exactly one is required: CHECKPOINT, or --random CONFIG.json")
    check_output(args.output, force=args.force)
    with console.step("Importing ExecuTorch, coremltools and transformers"):
        from coreml_delegate.llm.adapters import read_adapters
        from coreml_delegate.llm.export import export_methods, lower, quantize_weights
        from coreml_delegate.llm.low_rank import fit_adapter
    files = read_adapters(args.adapter)
    with console.step("Loading the model"):
        decoder, layout = _model(args, files)
        adapters = [fit_adapter(decoder, file) for file in files]
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    with console.step("Quantizing the weights"):
        quantize_weights(
            decoder,
            linear=args.quantize,
            embedding=args.embedding_quantize,
            group=args.group_size,
        )
    partitioner = _partitioner(args)
    with console.step("Exporting with torch.export"):
        methods = export_methods(decoder, layout, adapters)
    with console.step("Lowering to Core ML"):
        program = lower(methods, layout, partitioner)
    with new_output(args.output, force=args.force) as file:
        program.write_to_file(file)
    _report(args, parameters, decoder, layout, adapters, partitioner)
    return 0


def _model(args: argparse.Namespace, adapters: Sequence[AdapterFile]) -> tuple[Decoder, Layout]:
    from coreml_delegate.llm.candidates import Selection
    from coreml_delegate.llm.checkpoint import (
        CONFIG,
        end_tokens,
        load_decoder,
        most_context,
        random_decoder,
        read_config,
    )
    from coreml_delegate.llm.layout import CacheKind, Layout
    from coreml_delegate.llm.vision import image_input, read_preparation

    folder: Path | None = args.checkpoint
    if folder is not None and not folder.is_dir():
        raise OptionError("no such checkpoint folder", got=str(folder))
    config = read_config(args.random if folder is None else folder / CONFIG)
    selection = None if args.sample_in_model is None else Selection.parse(args.sample_in_model)
    if selection is not None:
        selection.check(config.get_text_config(decoder=True).vocab_size)
    most = most_context(config)
    context = args.context or min(most, _CONTEXT)
    if context > most:
        raise OptionError(
            "the context is longer than the model was made for",
            got=f"--context {context}",
            expected=f"at most {most}",
        )
    preparation = read_preparation(config, folder)
    options = {"context": context, "safe_norms": args.precision == "float16"}
    decoder = (
        random_decoder(config, args.seed, **options)
        if folder is None
        else load_decoder(folder, config, **options)
    )
    layout = Layout(
        vocabulary=decoder.vocabulary,
        context=context,
        chunk=min(args.prefill_chunk or _CHUNK[args.cache], context),
        cache=CacheKind(args.cache),
        bos=decoder.bos,
        eos=end_tokens(config, folder),
        selection=selection,
        adapters=tuple(adapter.name for adapter in adapters),
        image=image_input(decoder, preparation),
        replaced=decoder.replaced if args.cache == "io" else (),
    )
    return decoder, layout


def _partitioner(args: argparse.Namespace) -> CoreMLPartitioner:
    from coreml_delegate.backend import CoreMLBackend
    from coreml_delegate.compile_options import ComputeUnit, Precision
    from coreml_delegate.partition import CoreMLPartitioner
    from coreml_delegate.targets import Opset

    return CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(
            compute_unit=ComputeUnit(args.compute_unit),
            # Methods share weights from here on.
            minimum_deployment_target=args.deployment_target or Opset.iOS18,
            compute_precision=Precision(args.precision),
        )
    )


def _report(
    args: argparse.Namespace,
    parameters: int,
    decoder: Decoder,
    layout: Layout,
    adapters: Sequence[Adapter],
    partitioner: CoreMLPartitioner,
) -> None:
    """Print a summary; warn of operations on the CPU and of weights that are not shared."""
    reports = dict(zip(layout.methods, partitioner.reports, strict=True))
    width = _BYTES[args.precision]
    document = {
        "parameters": parameters,
        "bytes": args.output.stat().st_size,
        "layout": layout.constants(),
        "methods": {
            name: {
                "operations": len(report.nodes),
                "delegated": len(report.delegated),
                "partitions": len(report.partitions),
            }
            for name, report in reports.items()
        },
        "adapters": {
            adapter.name: {
                "modules": len(adapter.modules),
                "ranks": list(adapter.ranks),
                "bytes": adapter.elements * width,
            }
            for adapter in adapters
        },
    }
    if args.json:
        console.write_json(document)
    else:
        _print(document, decoder, layout)
    for name, report in reports.items():
        if report.undelegated:
            console.warn(f"{name} does not run on Core ML alone")
            console.write(report.to_table())
        # The layers are in the methods that decode alone.
        decoding = [method for method in layout.methods if method not in layout.input_methods]
        shares = len(decoding) > 1 and name in decoding
        for partition in report.partitions:
            if partition.not_shared and shares:
                console.warn(f"{name} does not share its weights: {partition.not_shared}")


def _print(document: dict[str, Any], decoder: Decoder, layout: Layout) -> None:
    rows: list[tuple[str, str]] = [
        ("parameters", f"{document['parameters']:,} in {len(decoder.layers)} layers"),
        ("vocabulary", f"{layout.vocabulary:,} tokens"),
        ("context", f"{layout.context:,} tokens, caches as {layout.cache.value}"),
        ("chunk", f"{layout.chunk:,} tokens a call"),
        *([] if layout.selection is None else [("selection", str(layout.selection))]),
        *([] if layout.image is None else [("images", layout.image.describe())]),
        *(
            (name, "{delegated} of {operations} operations on Core ML".format(**counts))
            for name, counts in document["methods"].items()
        ),
        *((f"adapter {name}", _branches(facts)) for name, facts in document["adapters"].items()),
        ("file", console.size(document["bytes"])),
    ]
    console.write(console.columns(rows))


def _branches(facts: dict[str, Any]) -> str:
    ranks = ", ".join(map(str, facts["ranks"]))
    return f"rank {ranks} in {facts['modules']} modules, {console.size(facts['bytes'])}"


def _adapter(text: str) -> tuple[str, Path]:
    """Parse ``[NAME=]FOLDER``; what is before the first ``=`` is no name if it is a path."""
    name, equals, folder = text.partition("=")
    if equals and "/" not in name and os.sep not in name:
        return name, Path(folder)
    return Path(os.path.abspath(text)).name, Path(text)


COMMAND = Command(
    name="export-llm",
    summary="lower a language model to a .pte that generates text",
    description="Lower a language model of transformers, from a local checkpoint folder or with "
    "random weights, to a .pte for coreml-delegate generate.",
    add_arguments=add_arguments,
    run=run,
)

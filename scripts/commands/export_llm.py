"""``coreml-delegate export-llm``: from a checkpoint to a ``.pte`` that generates text."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_specs import Precision, WeightSharing
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.options.weight_compression import OPTION, Stage, demand
from coreml_delegate.quantization import QuantizationAssignment, QuantizationMode
from coreml_delegate.quantization.configs import neural_engine_stage
from coreml_delegate.scripts import arguments, checkpoints, console, quantization_options
from coreml_delegate.scripts.arguments import check_outputs
from coreml_delegate.scripts.commands import Command, add_number
from coreml_delegate.targets import ComputeUnit, Opset

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from coreml_delegate.llm.adapters import AdapterFile
    from coreml_delegate.llm.candidates import Selection
    from coreml_delegate.llm.decoder import Decoder
    from coreml_delegate.llm.encoder_decoder import EncoderDecoder
    from coreml_delegate.llm.layout import Layout
    from coreml_delegate.llm.low_rank import Adapter
    from coreml_delegate.partition import CoreMLPartitioner, DelegationReport

_CONTEXT = 2048  # tokens
_IMAGE_SIDE = 448  # pixels
_CHUNK = {"io": 64, "state": 8, "buffer": 8}
_ANSWER_CHUNK = 8  # of encoder-decoder models, whose prompts have few tokens
_BYTES = {
    Precision.FLOAT16: 2,
    Precision.AUTO: 2,
    Precision.FLOAT32: 4,
}  # of an element that is not quantized
CACHES = ("io", "state", "buffer")
LAYOUTS = ("standard", "methods")
LOGITS = ("last", "all")
NEURAL_ENGINE = "neural-engine"
_FORM = (
    "the layout standard, caches as buffers, logits, scales per output or palettes, iOS16 or later"
)
_WITHOUT_NEURAL_ENGINE = (ComputeUnit.CPU_ONLY, ComputeUnit.CPU_AND_GPU)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    checkpoints.add_checkpoint(parser, "transformers saves them", ", or a .gguf file")
    add_number(
        parser,
        "--context",
        "N",
        f"tokens that the caches hold (default: the model's own maximum, at most {_CONTEXT})",
    )
    add_number(
        parser,
        "--prefill-chunk",
        "N",
        "tokens that one call takes; unless caches are inputs, single tokens are padded to it, too "
        f"(default: {_CHUNK['state']}, with --cache io {_CHUNK['io']}; of a model that encodes "
        f"texts {_ANSWER_CHUNK}, of a model of recordings 1; at least the positions of an image if "
        "they see each other)",
    )
    add_number(
        parser,
        "--source-length",
        "N",
        "tokens of the longest source text, of an encoder-decoder model that takes texts "
        "(default: the model's own maximum, at most 1024; 512 if it has none); samples of the "
        "longest recording, of Moonshine (default: those of 30 seconds)",
    )
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="leave out the parts of the model that read images, which is done with a warning if "
        "its images are not supported",
    )
    parser.add_argument(
        "--image-size",
        type=_image_size,
        metavar="HxW",
        help="height and width of images in pixels, of a model that takes images of any size "
        f"(default: about {_IMAGE_SIDE}x{_IMAGE_SIDE})",
    )
    parser.add_argument(
        "--for",
        dest="form",
        choices=(NEURAL_ENGINE,),
        help="write the layers in the form that suits the neural engine: convolutions, one head at "
        "a time, the head in parts; with the layout standard and caches as buffers",
    )
    add_number(
        parser,
        "--pieces",
        "N",
        "delegates, with about as many weights each, in which --for cuts the layers (default: 1)",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="methods of the file: those that ExecuTorch's runners call (standard, the "
        "default), or several with further inputs (methods, the default of models that read "
        "images, or encode texts or samples, with --sample-in-model and with --cache io)",
    )
    parser.add_argument(
        "--cache",
        choices=CACHES,
        help="where keys and values of earlier tokens are kept: in Core ML states (state, the "
        "default from iOS18 on), in mutable buffers of ExecuTorch (buffer), or in inputs and "
        "outputs (io, the default of --layout methods)",
    )
    parser.add_argument(
        "--logits",
        choices=LOGITS,
        default=LOGITS[0],
        help="in the layout standard, return the logits of the last token of a call (last, the "
        "default), or of all (all), so that generate can verify proposed tokens and evaluate takes "
        "a chunk a call",
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
    quantization_options.add_weight_modes(parser, calibrated=True)
    # Its form of the layers has an option of the same name.
    checkpoints.add_lowering(parser, without={"device"})
    arguments.add_force(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    checkpoints.check_usage(args)
    _check_form(args)
    linear, embedding = _weight_modes(args)
    text = quantization_options.calibration_text(args, _target(args))
    tokenizer = checkpoints.tokenizer_copy(args)
    of_bytes = arguments.beside(args.output, arguments.TOKENIZERS[0])
    has_bytes = args.random is not None and not tokenizer
    check_outputs([args.output, *([of_bytes] if has_bytes else tokenizer)], force=args.force)
    with console.step("Importing ExecuTorch, coremltools and transformers"):
        from coreml_delegate.llm.adapters import read_adapters
        from coreml_delegate.llm.export import lower, quantize_weights
        from coreml_delegate.llm.neural_engine import NeuralEngineDecoder
        from coreml_delegate.llm.tokenizer import BYTES, byte_tokenizer
    files = read_adapters(args.adapter)
    with console.step("Loading the model"):
        decoder, layout = _model(args, files)
        adapters = _fit(decoder, files)
    parameters = decoder.parameter_count  # before they are quantized
    if text is not None:
        linear = quantization_options.calibrate(decoder, text, args, linear)
    with console.step("Quantizing the weights"):
        if not isinstance(decoder, NeuralEngineDecoder):
            quantize_weights(decoder, linear=linear, embedding=embedding)
        elif linear is not None:
            decoder.check_mode(linear.mode)
    partitioner = _partitioner(args, layout)
    with console.step("Exporting with torch.export"):
        methods = _export(args, decoder, layout, adapters)
    with console.step("Lowering to Core ML"):
        program = lower(methods, layout, partitioner)
    if has_bytes and layout.vocabulary >= BYTES:
        image = None if layout.image is None else layout.image.token
        tokenizer[of_bytes] = partial(byte_tokenizer, layout.vocabulary, layout.bos, image)
    checkpoints.write(args, program, tokenizer, partitioner.reports)
    _report(args, parameters, decoder, layout, adapters, partitioner)
    checkpoints.require_kernels(args, partitioner.reports)
    return 0


def _check_form(args: argparse.Namespace) -> None:
    """Refuse options that contradict ``--for``, or need it.

    Raises:
        OptionError: There is such an option.
    """
    if args.form is None:
        if args.pieces is not None:
            raise OptionError(
                "only the form for the neural engine has pieces",
                got=f"--pieces {args.pieces}",
                remedy=f"Export it with --for {NEURAL_ENGINE}",
            )
        return
    target, unit = args.deployment_target or Opset.iOS16, args.compute_unit
    contradictions = {
        "--layout methods": args.layout == "methods",
        f"--cache {args.cache}": args.cache not in (None, "buffer"),
        f"--sample-in-model {args.sample_in_model}": args.sample_in_model is not None,
        f"--logits {args.logits}": args.logits != "last",
        "--adapter": bool(args.adapter),
        f"--embedding-quantize {args.embedding_quantize}": args.embedding_quantize != "none",
        f"--group-size {args.group_size}": args.group_size is not None,
        "--quantize-config": args.quantize_config is not None,
        "--calibration": args.calibration is not None,
        f"--deployment-target {target.name}": target < Opset.iOS16,
        f"--compute-unit {unit.value}": unit in _WITHOUT_NEURAL_ENGINE,
    }
    for option, applies in contradictions.items():
        if applies:
            raise OptionError(
                f"--for {NEURAL_ENGINE} contradicts another option",
                got=option,
                expected=_FORM,
                remedy=f"Leave out {option.split()[0]}, or --for",
            )


def _weight_modes(
    args: argparse.Namespace,
) -> tuple[QuantizationAssignment | None, QuantizationMode | None]:
    """Return the modes of the linear layers, and the mode of the embedding."""
    if args.form is None:
        return quantization_options.weight_modes_of(args)
    return quantization_options.weight_modes_of(args, int4="int4-channel")  # no blocks


def _compression(args: argparse.Namespace) -> Stage | None:
    """Return the compression of weights in the form for the neural engine; None without one."""
    linear, _ = _weight_modes(args)
    return None if args.form is None or linear is None else neural_engine_stage(linear.mode)


def _model(
    args: argparse.Namespace, adapters: Sequence[AdapterFile]
) -> tuple[Decoder | EncoderDecoder, Layout]:
    from coreml_delegate.llm.candidates import Selection
    from coreml_delegate.llm.checkpoint import (
        end_tokens,
        load_decoder,
        most_context,
        random_decoder,
        read_config,
    )
    from coreml_delegate.llm.layout import CacheKind, Layout
    from coreml_delegate.llm.neural_engine import NeuralEngineDecoder
    from coreml_delegate.llm.vision import image_input, read_preparation

    folder: Path | None = args.checkpoint
    config = read_config(checkpoints.config_path(args), text_only=args.text_only)
    image_options = _image_options(args, config)
    selection = None if args.sample_in_model is None else Selection.parse(args.sample_in_model)
    if selection is not None:
        selection.check(config.get_text_config(decoder=True).vocab_size)
    names = tuple(adapter.name for adapter in adapters)
    if config.is_encoder_decoder:
        if args.form is not None:
            raise OptionError(
                "a model with an encoder has no form for the neural engine",
                got=f"--for {args.form}",
                remedy="Export it without --for",
            )
        return _encoder_decoder(args, config, selection, names)
    if args.source_length is not None:
        raise OptionError("the model has no encoder", got=f"--source-length {args.source_length}")
    most = most_context(config)
    context = args.context or min(most, _CONTEXT)
    if context > most:
        raise OptionError(
            "the context is longer than the model supports",
            got=f"--context {context}",
            expected=f"at most {most}",
        )
    preparation = None if args.text_only else read_preparation(config, folder, args.image_size)
    options: dict[str, Any] = {"context": context, "text_only": args.text_only, **image_options}
    if args.form is not None:
        options |= {"kind": NeuralEngineDecoder, "pieces": args.pieces or 1}
    decoder = (
        random_decoder(config, args.seed, **options)
        if folder is None
        else load_decoder(folder, config, **options)
    )
    image = image_input(decoder, preparation)
    standard, cache = _form(args, needs_methods=selection is not None)
    # ExecuTorch's runner passes an image in one call.
    least = image.positions if standard and image is not None else decoder.least_chunk
    chunk = min(args.prefill_chunk or max(_CHUNK[cache], least), context)
    if standard and image is not None and chunk < image.positions:
        raise OptionError(
            "ExecuTorch's runner passes an image in one call, which is longer than a chunk",
            got=f"{chunk} tokens",
            expected=f"at least {image.positions}",
            remedy=f"Export with --prefill-chunk {image.positions}, or with --layout methods",
        )
    layout = Layout(
        vocabulary=decoder.vocabulary,
        context=context,
        chunk=chunk,
        cache=CacheKind(cache),
        bos=decoder.bos,
        eos=end_tokens(config, folder),
        selection=selection,
        adapters=names,
        image=image,
        replaced=decoder.replaced if cache == "io" else (),
        standard=standard,
        rewindable=decoder.rewindable,
    )
    if args.logits == "all" and not standard:
        raise _last_logits_only(f"the layout {layout.name}")
    return decoder, layout


def _image_options(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Return the options of a decoder about images; warn if images are left out.

    Raises:
        OptionError: Images that the exported model does not take have a size.
    """
    from coreml_delegate.llm.checkpoint import unsupported_images
    from coreml_delegate.llm.vision import reads_images

    unsupported = unsupported_images(config)
    if unsupported is not None and not args.text_only:
        console.warn(f"images are left out: {config.model_type} has {unsupported}")
    if args.image_size is None:
        return {}
    if args.text_only or not reads_images(config):
        raise OptionError("the exported model takes no images", got="--image-size")
    return {"image_size": args.image_size}


def _last_logits_only(what: str) -> OptionError:
    return OptionError(
        f"{what} returns the logits of the last token only",
        got="--logits all",
        remedy="Leave it out, or export a decoder with --layout standard",
    )


def _form(args: argparse.Namespace, *, needs_methods: bool) -> tuple[bool, str]:
    """Return whether the layout is standard, and the kind of the caches."""
    needs_methods = needs_methods or args.cache == "io"
    layout = args.layout or ("methods" if needs_methods else "standard")
    if layout == "methods":
        return False, args.cache or "io"
    has_states = _target(args) >= Opset.iOS18 and args.form is None
    return True, args.cache or ("state" if has_states else "buffer")


def _target(args: argparse.Namespace) -> Opset:
    if args.deployment_target is not None:
        return args.deployment_target
    if args.form is not None:
        stage = _compression(args)
        required = demand(None, None if stage is None else (stage,))
        return Opset.iOS16 if required is None else required[0]
    return Opset.iOS18  # methods share weights from here on


def _encoder_decoder(
    args: argparse.Namespace, config: Any, selection: Selection | None, adapters: tuple[str, ...]
) -> tuple[EncoderDecoder, Layout]:
    from coreml_delegate.llm.checkpoint import end_tokens, main_input
    from coreml_delegate.llm.encoder_decoder import source_kind
    from coreml_delegate.llm.encoder_decoder_checkpoint import (
        describe_source,
        load_encoder_decoder,
    )
    from coreml_delegate.llm.layout import CacheKind, Layout
    from coreml_delegate.llm.source import SourceKind

    if args.logits == "all":
        raise _last_logits_only("a model with an encoder")
    takes_spectrogram = source_kind(main_input(config)) is SourceKind.AUDIO
    standard, cache = _form(args, needs_methods=not takes_spectrogram)
    if not standard and cache != CacheKind.IO.value:
        raise OptionError(
            "an encoder-decoder model has several methods, which share no state on a device",
            got=f"--cache {cache}",
            expected=f"--cache {CacheKind.IO.value}",
        )
    if standard and takes_spectrogram and args.prefill_chunk not in (None, 1):
        raise OptionError(
            "ExecuTorch's runner passes the tokens of a transcription one by one",
            got=f"--prefill-chunk {args.prefill_chunk}",
            expected="1",
            remedy="Leave it out, or export with --layout methods",
        )
    folder: Path | None = args.checkpoint
    model = load_encoder_decoder(
        config,
        folder,
        seed=args.seed,
        context=args.context,
        source_length=args.source_length,
    )
    layout = Layout(
        vocabulary=model.vocabulary,
        context=model.context,
        chunk=1 if standard else min(args.prefill_chunk or _ANSWER_CHUNK, model.context),
        cache=CacheKind(cache),
        bos=model.bos,
        eos=end_tokens(config, folder),
        selection=selection,
        adapters=adapters,
        source=describe_source(model, config, folder),
        standard=standard,
    )
    return model, layout


def _fit(model: Decoder | EncoderDecoder, files: Sequence[AdapterFile]) -> list[Adapter]:
    from coreml_delegate.llm.decoder import Decoder
    from coreml_delegate.llm.low_rank import fit_adapter

    # Layouts of other models refuse adapters.
    return [fit_adapter(model, file) for file in files if isinstance(model, Decoder)]


def _export(
    args: argparse.Namespace,
    model: Decoder | EncoderDecoder,
    layout: Layout,
    adapters: Sequence[Adapter],
) -> dict[str, ExportedProgram]:
    import torch

    from coreml_delegate.llm.encoder_decoder import EncoderDecoder
    from coreml_delegate.llm.encoder_decoder_methods import export_encoder_decoder
    from coreml_delegate.llm.export import export_methods

    # Core ML models have fp16 inputs and outputs from iOS16 on.
    is_half = args.precision is not Precision.FLOAT32 and _target(args) >= Opset.iOS16
    dtype = torch.float16 if is_half else torch.float32
    if isinstance(model, EncoderDecoder):
        return export_encoder_decoder(model, layout, cache_dtype=dtype)
    return export_methods(
        model, layout, adapters, cache_dtype=dtype, all_logits=args.logits == "all"
    )


def _partitioner(args: argparse.Namespace, layout: Layout) -> CoreMLPartitioner:
    from coreml_delegate.backend import CoreMLBackend
    from coreml_delegate.llm.layout import CacheKind
    from coreml_delegate.partition import CoreMLPartitioner

    target = _target(args)
    keywords = arguments.keywords_of(args, CompileOptions)
    keywords["minimum_deployment_target"] = target
    if args.form is not None:
        keywords[OPTION] = _compression(args)
    specs = CoreMLBackend.generate_compile_specs(**keywords)
    if layout.source is not None and not layout.standard and target >= Opset.iOS18:
        # An encoder of audio may share no weight with the decoder, and is kept with it.
        specs.append(
            CoreMLBackend.generate_multimethod_weight_sharing_strategy_compile_spec(
                WeightSharing.POSITIONAL
            )
        )
    has_states = layout.cache is CacheKind.STATE
    return CoreMLPartitioner(
        compile_specs=specs, take_over_mutable_buffer=has_states, min_sqnr_db=args.min_sqnr
    )


def _report(
    args: argparse.Namespace,
    parameters: int,
    decoder: Decoder | EncoderDecoder,
    layout: Layout,
    adapters: Sequence[Adapter],
    partitioner: CoreMLPartitioner,
) -> None:
    """Print a summary; warn of operations on the CPU and of unshared weights."""
    reports = dict(zip(layout.methods, partitioner.reports, strict=True))
    width = _BYTES[args.precision]
    document = {
        "parameters": parameters,
        "bytes": args.output.stat().st_size,
        "layout": layout.constants(),
        "methods": checkpoints.methods_document(reports),
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
        if _left_on_cpu(name, report, layout):
            checkpoints.warn_of_cpu(name, report)
        # Only the methods that decode have the layers.
        decoding = [method for method in layout.methods if method not in layout.input_methods]
        shares = len(decoding) > 1 and name in decoding
        for partition in report.partitions:
            if partition.not_shared and shares:
                console.warn(f"{name} does not share its weights: {partition.not_shared}")


def _left_on_cpu(method: str, report: DelegationReport, layout: Layout) -> bool:
    """Whether the CPU has calls of the model that it does not have in the standard layout."""
    from coreml_delegate.llm.decoder_methods import is_core_ml
    from coreml_delegate.llm.layout import ENCODER, VISION_ENCODER

    if not layout.standard or method in (ENCODER, VISION_ENCODER):
        return bool(report.undelegated)
    return any(is_core_ml(node.module) for node in report.undelegated)


def _print(document: dict[str, Any], decoder: Decoder | EncoderDecoder, layout: Layout) -> None:
    from coreml_delegate.llm.image_rows import COUNTER

    layers = sum(layer is not COUNTER for layer in decoder.layers)
    rows: list[tuple[str, str]] = [
        ("parameters", f"{document['parameters']:,} in {layers} layers"),
        ("vocabulary", f"{layout.vocabulary:,} tokens"),
        ("layout", f"{layout.name}, caches as {layout.cache.value}"),
        ("context", f"{layout.context:,} tokens"),
        ("chunk", f"{layout.chunk:,} tokens a call"),
        *_source_rows(layout),
        *([] if layout.selection is None else [("selection", str(layout.selection))]),
        *([] if layout.image is None else [("images", layout.image.describe())]),
        *checkpoints.methods_rows(document["methods"]),
        *((f"adapter {name}", _branches(facts)) for name, facts in document["adapters"].items()),
        ("file", console.size(document["bytes"])),
    ]
    console.write(console.columns(rows))


def _branches(facts: dict[str, Any]) -> str:
    ranks = ", ".join(map(str, facts["ranks"]))
    return f"rank {ranks} in {facts['modules']} modules, {console.size(facts['bytes'])}"


def _adapter(text: str) -> tuple[str, Path]:
    """Parse ``[NAME=]FOLDER``; a path before the first ``=`` belongs to the folder."""
    name, equals, folder = text.partition("=")
    if equals and "/" not in name and os.sep not in name:
        return name, Path(folder)
    return Path(os.path.abspath(text)).name, Path(text)


def _image_size(text: str) -> tuple[int, int]:
    """Parse ``448x448``."""
    height, cross, width = text.partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r} is not a height and width such as 448x448")
    return arguments.positive(height), arguments.positive(width)


def _source_rows(layout: Layout) -> list[tuple[str, str]]:
    source = layout.source
    if source is None:
        return []
    units = {"tokens": "tokens", "audio": "frames of audio", "samples": "samples of audio"}
    return [("source", f"{source.length:,} {units[source.kind.value]}")]


COMMAND = Command(
    name="export-llm",
    summary="lower a language model to a .pte that generates text",
    description="Lower a language model of transformers, from a local checkpoint folder, a GGUF "
    "file or with random weights, to a .pte for coreml-delegate generate.",
    add_arguments=add_arguments,
    run=run,
)

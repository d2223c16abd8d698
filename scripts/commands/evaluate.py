"""``coreml-delegate evaluate``: perplexity of a language model in a ``.pte`` on a text."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.files import new_file
from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command, add_number, add_path

if TYPE_CHECKING:
    from coreml_delegate.llm.evaluation import Predict, Window
    from coreml_delegate.llm.generator import Generator
    from coreml_delegate.runtime.loading import Execution

_PROGRAM: Final = "program"
_CHECKPOINT: Final = "checkpoint"
_SCHEMA_VERSION: Final = 1  # of the file of --resume


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("program", type=Path, metavar="FILE.pte", help="written by export-llm")
    add_path(parser, "--text", "FILE", "text in UTF-8", required=True)
    add_path(
        parser,
        "--checkpoint",
        "FOLDER",
        "checkpoint of the program, whose perplexity is computed as well, in fp32 with PyTorch",
    )
    arguments.add_tokenizer(parser)
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="adapter of the program to use (default: the base model)",
    )
    add_number(
        parser, "--context", "N", "tokens of a window (default: as many as the program's context)"
    )
    add_number(
        parser,
        "--stride",
        "N",
        "tokens between the starts of two windows; tokens that the window before had are only read "
        "(default: the window, so that windows do not overlap)",
    )
    add_number(parser, "--max-windows", "N", "evaluate only the first N windows")
    add_path(
        parser,
        "--resume",
        "FILE.json",
        "file of finished windows: it is written after each window, and windows in it are not "
        "computed again",
    )
    arguments.add_engine(parser, judging=True)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    text = arguments.read_text(args.text)
    with console.step("Importing torch"):
        from coreml_delegate.llm.evaluation import predict_with_program, windows
        from coreml_delegate.llm.tokenizer import load_tokenizer
    with console.step(f"Loading {args.program}"):
        generator, execution = _load(args)
    predict = predict_with_program(generator)
    layout = generator.layout
    context = args.context or layout.context
    if context > layout.context:
        raise OptionError(
            "a window is longer than the context of the program",
            got=f"--context {context}",
            expected=f"at most {layout.context}",
        )
    tokenizer = load_tokenizer(
        arguments.tokenizer_of(args), vocabulary=layout.vocabulary, bos=layout.bos
    )
    tokens = tokenizer.encode(text)
    parts = windows(len(tokens), context, args.stride)[: args.max_windows]
    finished = FinishedWindows.open(args.resume, tokens, context, args.stride or context)
    keys = {_PROGRAM: _program_key(args, execution)}
    models: dict[str, Callable[[], Predict]] = {_PROGRAM: lambda: predict}
    if args.checkpoint is not None:
        load = _checkpoint_loader(args.checkpoint, layout.vocabulary)
        keys[_CHECKPOINT] = f"{_CHECKPOINT} {_digest(args.checkpoint)}"
        models[_CHECKPOINT] = load
    losses = {
        name: _losses(name, load, tokens, parts, finished.of(keys[name]), finished.write)
        for name, load in models.items()
    }
    document = _document(losses, parts, len(tokens), context, args.stride or context, execution)
    if args.json:
        console.write_json(document)
    else:
        _print(document, execution)
    return 0


def _losses(
    name: str,
    load: Callable[[], Predict],
    tokens: Sequence[int],
    windows: Sequence[Window],
    losses: list[float],
    save: Callable[[], None],
) -> list[float]:
    """Return the loss of each window.

    Args:
        name: Name of the model, for the progress bar.
        load: Loads the model; called if a window is not finished.
        tokens: The whole text.
        windows: The windows, in order.
        losses: Losses of finished windows, the first ones; gets the others, too.
        save: Called after each window.
    """
    from coreml_delegate.llm.evaluation import window_loss

    remaining = windows[len(losses) :]
    if remaining:
        predict = load()
        with console.progress(remaining, f"Windows of the {name}") as items:
            for window in items:
                losses.append(window_loss(predict, tokens, window))
                save()
    return losses[: len(windows)]


class FinishedWindows:
    """Losses of finished windows by model, in a file.

    One file has the losses of several programs on one text, and of their checkpoint.

    Args:
        path: The file; None to keep nothing.
        text: What the losses are of, apart from the model: tokens, context and stride.
        losses: Losses of the first windows by model.
    """

    def __init__(
        self, path: Path | None, text: Mapping[str, Any], losses: dict[str, list[float]]
    ) -> None:
        self._path = path
        self._text = text
        self._losses = losses

    @classmethod
    def open(
        cls, path: Path | None, tokens: Sequence[int], context: int, stride: int
    ) -> FinishedWindows:
        """Read the file if it exists.

        Raises:
            OptionError: The file is malformed, or has windows of another text, context or stride.
        """
        digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
        text = {"tokens": digest, "context": context, "stride": stride}
        if path is None or not path.exists():
            return cls(path, text, {})
        try:
            document = json.loads(path.read_bytes())
            version, stored = document["schema_version"], document["text"]
            losses = {
                str(model): [float(loss) for loss in values]
                for model, values in document["losses"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"{path} is not a file of --resume", got=repr(error)) from error
        if version != _SCHEMA_VERSION or stored != text:
            differing = next((key for key in text if stored.get(key) != text[key]), "version")
            raise OptionError(
                f"{path} has windows of another evaluation",
                got=f"{differing} {stored.get(differing, version)}",
                expected=str(text.get(differing, _SCHEMA_VERSION)),
                remedy="Pass another file to --resume",
            )
        return cls(path, text, losses)

    def of(self, model: str) -> list[float]:
        """Return the losses of a model's first windows; the caller appends further ones."""
        return self._losses.setdefault(model, [])

    def write(self) -> None:
        """Write the file."""
        if self._path is None:
            return
        document = {
            "schema_version": _SCHEMA_VERSION,
            "text": self._text,
            "losses": self._losses,
        }
        with new_file(self._path) as file:
            file.write(f"{console.as_json(document)}\n".encode())


def _load(args: argparse.Namespace) -> tuple[Generator, Execution]:
    from coreml_delegate import runtime
    from coreml_delegate.llm.generator import Generator
    from coreml_delegate.runtime.loading import Execution
    from coreml_delegate.scripts.program_arguments import engine_options

    options = engine_options(args)
    program = runtime.load_program(
        args.program, host=args.host, engine=args.engine, options=options
    )
    generator = Generator(program, adapter=args.adapter)
    layout = generator.layout
    methods = (*layout.input_methods[1:], *layout.methods_of(args.adapter))
    return generator, Execution.of_methods(program, methods, options)


def _program_key(args: argparse.Namespace, execution: Execution) -> str:
    """Return a text that names the program and all that its losses depend on."""
    from coreml_delegate.scripts.program_arguments import engine_options

    numerics = engine_options(args).numerics_option
    adapter = None if args.adapter is None else f"adapter {args.adapter}"
    parts = (f"{_PROGRAM} {_digest(args.program)}", adapter, f"{execution}", numerics)
    return ", ".join(part for part in parts if part)


def _digest(path: Path) -> str:
    from coreml_delegate.scripts.sweeping.contents import digest

    return digest(path)


def _checkpoint_loader(folder: Path, vocabulary: int) -> Callable[[], Predict]:
    """Return a function that loads a checkpoint, whose configuration is checked here.

    Raises:
        OptionError: The checkpoint has no language model of the program's vocabulary.
    """
    from coreml_delegate.llm.checkpoint import config_file, load_model, read_config
    from coreml_delegate.llm.evaluation import predict_with_module
    from coreml_delegate.llm.stored_weights import read_weights

    config = read_config(config_file(folder))
    size = config.get_text_config(decoder=True).vocab_size
    if config.is_encoder_decoder or size != vocabulary:
        raise OptionError(
            "the checkpoint is not the program's",
            got="an encoder-decoder model" if config.is_encoder_decoder else f"{size} tokens",
            expected=f"a language model with a vocabulary of {vocabulary} tokens",
        )

    def load() -> Predict:
        with console.step("Loading the checkpoint"):
            model = load_model(folder, config)
            read_weights(model)
        return predict_with_module(model)

    return load


def _document(
    losses: Mapping[str, Sequence[float]],
    windows: Sequence[Window],
    tokens: int,
    context: int,
    stride: int,
    execution: Execution,
) -> dict[str, Any]:
    """Return the result as plain data; losses are in nats per token."""
    from coreml_delegate.llm.evaluation import perplexity_of

    predicted = sum(window.count for window in windows)
    return {
        "tokens": tokens,
        "predicted": predicted,
        "windows": len(windows),
        "context": context,
        "stride": stride,
        "engines": {name: list(types) for name, types in execution.engines.items()},
        **{
            name: {"perplexity": perplexity_of(values, windows), "loss": sum(values) / predicted}
            for name, values in losses.items()
        },
    }


def _print(document: Mapping[str, Any], execution: Execution) -> None:
    names = [name for name in (_PROGRAM, _CHECKPOINT) if name in document]
    rows: list[tuple[str, str]] = [
        (f"perplexity of the {name}", f"{document[name]['perplexity']:.4f}") for name in names
    ]
    if _CHECKPOINT in document:
        ratio = document[_PROGRAM]["perplexity"] / document[_CHECKPOINT]["perplexity"]
        rows.append(("difference", f"{ratio - 1:+.2%}"))
    rows += [
        ("predicted tokens", f"{document['predicted']:,} of {document['tokens']:,}"),
        ("windows", "{windows:,} of {context:,} tokens, every {stride:,}".format(**document)),
        ("engine", str(execution)),
    ]
    console.write(console.columns(rows))


COMMAND = Command(
    name="evaluate",
    summary="compute the perplexity of a language model in a .pte",
    description="Compute the perplexity of a language model that coreml-delegate export-llm made, "
    "or another exporter for ExecuTorch's runners, on a text; and the perplexity of its "
    "checkpoint, to compare.",
    add_arguments=add_arguments,
    run=run,
)

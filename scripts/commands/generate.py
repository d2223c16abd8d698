"""``coreml-delegate generate``: text from a language model in a ``.pte``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import CoreMLDelegateError, OptionError
from coreml_delegate.scripts import arguments, chats, console, saved_calls, token_choice
from coreml_delegate.scripts.commands import Command, add_number, add_path

if TYPE_CHECKING:
    import torch

    from coreml_delegate.llm.chat import Conversation
    from coreml_delegate.llm.generator import Generator, Throughput
    from coreml_delegate.llm.layout import Layout
    from coreml_delegate.llm.sampling import Sampler
    from coreml_delegate.llm.tokenizer import TextStream, Tokenizer


EXECUTORCH = "executorch"
RUNNERS = ("own", EXECUTORCH)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("program", type=Path, metavar="FILE.pte", help="written by export-llm")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue; with --chat, the only turn; of an encoder-decoder model the source "
        "text, to translate or summarize for example",
    )
    add_path(
        source,
        "--audio",
        "FILE.wav",
        "recording to transcribe, with samples of 16 bits at the model's rate",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=arguments.natural,
        nargs="+",
        default=[],
        metavar="ID",
        help="tokens that the answer of an encoder-decoder model begins with, after its start "
        "token: language and task of Whisper for example",
    )
    arguments.add_tokenizer(parser)
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="adapter of the program to use (default: the base model)",
    )
    add_path(
        parser,
        "--image",
        "FILE",
        "image in the place of the prompt's image token, which without --tokenizer is "
        "<image>; repeatable, in the order of the tokens",
        action="append",
        default=[],
    )
    add_number(
        parser,
        "--max-new-tokens",
        "N",
        "tokens to generate at most (default: as many as fit into the context)",
    )
    parser.add_argument(
        "--stop",
        type=_stop,
        action="append",
        default=[],
        metavar="ID|TEXT",
        help="token, if it is a number, or text that ends the output; repeatable (default: the "
        "model's own end tokens, which always end it)",
    )
    token_choice.add_arguments(parser)
    saved_calls.add_arguments(parser)
    parser.add_argument(
        "--runner",
        choices=RUNNERS,
        default="own",
        help="what generates: this package (own, the default), or ExecuTorch's runner of texts "
        "and images with our delegate, as an app does (executorch)",
    )
    chats.add_arguments(parser)
    arguments.add_engine(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    chats.check_usage(args)
    if not args.chat:
        args.tokenizer = arguments.tokenizer_of(args)
    token_choice.check_usage(args)
    saved_calls.check_usage(args)
    if args.runner == EXECUTORCH:
        return _run_executorch(args)
    with console.step("Importing torch"):
        rule = token_choice.rule_of(args)
    if args.chat:
        _chat(args, rule)
    else:
        _continue(args, rule)
    return 0


def _load(args: argparse.Namespace) -> Generator:
    """Load the program and the draft model."""
    generator = _load_program(args, args.program, args.adapter)
    saved_calls.speculate(args, generator, lambda path: _load_program(args, path, None))
    return generator


def _load_program(args: argparse.Namespace, path: Path, adapter: str | None) -> Generator:
    from coreml_delegate.llm.generator import Generator
    from coreml_delegate.scripts.program_arguments import engine_options

    with console.step(f"Loading {path}"):
        return Generator.load(
            path,
            adapter=adapter,
            host=args.host,
            engine=args.engine,
            options=engine_options(args),
        )


def _run_executorch(args: argparse.Namespace) -> int:
    """Continue a text with ExecuTorch's runner."""
    refused_options = {
        "--chat": args.chat,
        "--audio": args.audio,
        "--prompt-tokens": args.prompt_tokens,
        "--adapter": args.adapter,
        "--stop": args.stop,
        "--host": args.host != "auto",
        **token_choice.refused_options(args),
        **saved_calls.refused_options(args),
    }
    for name, value in refused_options.items():
        if value:
            args.refuse_usage(f"{name} does not go with --runner {EXECUTORCH}")
    with console.step("Importing ExecuTorch"):
        from coreml_delegate.llm.executorch_runner import generate, layout_of
        from coreml_delegate.scripts.program_arguments import engine_options
    if args.tokenizer is None:
        raise OptionError(
            "ExecuTorch's runner needs the model's tokenizer",
            remedy="Pass --tokenizer with the tokenizer.json",
        )
    result = generate(
        args.program,
        args.tokenizer,
        args.prompt,
        _images(args.image, layout_of(args.program)) if args.image else (),
        limit=args.max_new_tokens,
        temperature=args.temperature,
        engine=args.engine,
        options=engine_options(args),
    )
    speeds = {"prefill": result.prefill, "decode": result.decode}
    if args.json:
        console.write_json({"text": result.text, **_speed_data(speeds)})
        return 0
    console.write(result.text)
    for name, speed in speeds.items():
        _note_speed(name, speed, "tokens")
    return 0


def _continue(args: argparse.Namespace, rule: str | None) -> None:
    """Continue a text, which has to follow a rule, unless it is None."""
    from coreml_delegate.llm.tokenizer import TextStream, load_tokenizer

    generator = _load(args)
    layout = generator.layout
    sampler = token_choice.sampler_of(args, rule, layout, args.tokenizer)
    tokenizer = load_tokenizer(
        args.tokenizer,
        vocabulary=layout.vocabulary,
        bos=layout.bos,
        image=None if layout.image is None else layout.image.token,
    )
    images = _images(args.image, layout)
    stops, texts = _stops(args)
    stream = TextStream(tokenizer, texts)
    prompt = _first_tokens(args, generator, tokenizer)
    file = saved_calls.PromptFile(args.prompt_cache, generator)
    tokens = generator.generate(
        file.resume(prompt),
        sampler,
        limit=args.max_new_tokens,
        stops=stops,
        images=images,
        before_last=file.before_last,
    )
    pieces = _pieces(tokens, stream)
    if args.json:
        _write_json(generator, list(pieces), stream, sampler, file)
    else:
        chats.write_stream(text for _, text in pieces)
        _note_speeds(generator)
        saved_calls.note(generator, file)
    ending = _ending(generator, stream)
    if ending == "context":
        console.warn(f"the context of {layout.context} tokens is full")
    token_choice.warn_of_incomplete_text(args, ending)


def _chat(args: argparse.Namespace, rule: str | None) -> None:
    """Answer one turn or several; each answer has to follow a rule, unless it is None."""
    with console.step("Importing transformers"):
        from coreml_delegate.llm.chat import Conversation

        tokenizer = chats.load_tokenizer(args)
    generator = _load(args)
    sampler = token_choice.sampler_of(args, rule, generator.layout, args.tokenizer)
    file = saved_calls.PromptFile(args.prompt_cache, generator)
    conversation = Conversation(generator, tokenizer, args.system)
    stops, texts = _stops(args)
    try:
        chats.converse(
            args,
            conversation,
            lambda turn: conversation.ask(
                turn,
                sampler,
                limit=args.max_new_tokens,
                stops=stops,
                stop_texts=texts,
                before_last=None if conversation.replies else file.before_last,
            ),
        )
    except CoreMLDelegateError:
        if args.json and conversation.replies:  # keep the turns before the error
            _write_chat(conversation, file)
        raise
    if conversation.replies:
        file.take(conversation.replies[0].kept)
    if args.json:
        _write_chat(conversation, file)
    else:
        _note_speeds(generator)
        saved_calls.note(generator, file)
    for reply in conversation.replies:
        token_choice.warn_of_incomplete_text(args, reply.ending and reply.ending.value)


def _write_chat(conversation: Conversation, file: saved_calls.PromptFile) -> None:
    generator = conversation.generator
    console.write_json(
        {
            **chats.document(conversation),
            **_speed_data(_speeds(generator)),
            **saved_calls.document(generator, file),
        }
    )


def _stops(args: argparse.Namespace) -> tuple[list[int], list[str]]:
    """Return the tokens and the texts that end the output."""
    return (
        [stop for stop in args.stop if isinstance(stop, int)],
        [stop for stop in args.stop if isinstance(stop, str)],
    )


def _images(paths: Sequence[Path], layout: Layout) -> list[torch.Tensor]:
    """Return the pixels of each image."""
    from coreml_delegate.llm.images import refuse_images
    from coreml_delegate.scripts.inputs.images import open_image

    if layout.image is None:
        refuse_images(paths)
        return []
    return [layout.image.preparation.pixels(open_image(path)) for path in paths]


def _first_tokens(
    args: argparse.Namespace, generator: Generator, tokenizer: Tokenizer
) -> list[int]:
    """Encode the model's source, if it takes one; return the first tokens of the text."""
    import torch

    from coreml_delegate.llm.audio import read_wav, spectrogram
    from coreml_delegate.llm.source import SourceKind

    source = generator.layout.source
    takes_audio = source is not None and source.is_recording
    _check_source(args, takes_audio=takes_audio, answers=source is not None)
    if source is None:
        return tokenizer.encode(args.prompt)
    if takes_audio:
        settings = source.spectrogram
        samples = read_wav(args.audio, settings.sampling_rate)
        generator.encode(
            spectrogram(samples, generator.source_shape, settings)
            if source.kind is SourceKind.AUDIO
            else torch.from_numpy(samples)
        )
    else:
        generator.encode(tokenizer.encode(args.prompt))
    return [*source.start, *args.prompt_tokens]


def _check_source(args: argparse.Namespace, *, takes_audio: bool, answers: bool) -> None:
    if takes_audio != (args.audio is not None):
        raise OptionError(
            f"the model takes {'recordings' if takes_audio else 'texts'}",
            got="--prompt" if takes_audio else "--audio",
            expected="--audio FILE.wav" if takes_audio else "--prompt TEXT",
        )
    if args.prompt_tokens and not answers:
        raise OptionError(
            "--prompt-tokens is for encoder-decoder models", remedy="Put the text into --prompt"
        )


def _pieces(tokens: Iterator[int], stream: TextStream) -> Iterator[tuple[int | None, str]]:
    """Yield each token with the text that it completes, then the remaining text."""
    for token in tokens:
        yield token, stream.push(token)
        if stream.stopped:
            return
    yield None, stream.end()


def _ending(generator: Generator, stream: TextStream) -> str | None:
    if stream.stopped:
        return "stop"
    return None if generator.ending is None else generator.ending.value


def _write_json(
    generator: Generator,
    pieces: Sequence[tuple[int | None, str]],
    stream: TextStream,
    sampler: Sampler,
    file: saved_calls.PromptFile,
) -> None:
    tokens = [token for token, _ in pieces if token is not None]
    logprobs = [
        {
            "token": entry.token,
            "logprob": entry.chosen,
            "most_probable": [list(item) for item in entry.most_probable.items()],
        }
        for entry in sampler.log_probabilities[: len(tokens)]  # without an end token
    ]
    console.write_json(
        {
            "text": "".join(text for _, text in pieces),
            "tokens": tokens,
            **({"logprobs": logprobs} if logprobs else {}),
            "ending": _ending(generator, stream),
            **_speed_data(_speeds(generator)),
            **saved_calls.document(generator, file),
        }
    )


def _speeds(generator: Generator) -> dict[str, Throughput]:
    encoder = {} if generator.layout.source is None else {"encode": generator.encoder}
    return {**encoder, "prefill": generator.prefill, "decode": generator.decode}


def _speed_data(speeds: Mapping[str, Throughput]) -> dict[str, Any]:
    return {
        name: {"tokens": speed.tokens, "seconds": speed.seconds, "tokens_per_second": speed.rate}
        for name, speed in speeds.items()
    }


def _note_speeds(generator: Generator) -> None:
    source = generator.layout.source
    for name, speed in _speeds(generator).items():
        kind = "tokens" if name != "encode" or source is None else source.kind.value
        _note_speed(name, speed, "frames" if kind == "audio" else kind)


def _note_speed(name: str, speed: Throughput, unit: str) -> None:
    console.note(
        f"{name}: {speed.tokens} {unit} in {speed.seconds:.2f} s, {speed.rate:.1f} {unit}/s"
    )


def _stop(text: str) -> int | str:
    """Parse a token, if it is a number, or text."""
    return arguments.natural(text) if text.isascii() and text.isdigit() else text


COMMAND = Command(
    name="generate",
    summary="generate text with a language model in a .pte",
    description="Continue, translate or transcribe with a language model that coreml-delegate "
    "export-llm made, or chat with it. The text goes to stdout as it is generated, tokens per "
    "second to stderr.",
    add_arguments=add_arguments,
    run=run,
)

"""``coreml-delegate transcribe``: the text of a recording."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from coreml_delegate.scripts import arguments, console
from coreml_delegate.scripts.commands import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("program", type=Path, metavar="FILE.pte", help="written by export-speech")
    parser.add_argument(
        "recording",
        type=Path,
        metavar="FILE.wav",
        help="recording with samples of 16 bits at the model's rate",
    )
    arguments.add_tokenizer(parser)
    arguments.add_engine(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    with console.step("Importing torch"):
        from coreml_delegate.llm.audio import read_wav
        from coreml_delegate.llm.tokenizer import load_tokenizer
        from coreml_delegate.llm.transcriber import Transcriber
        from coreml_delegate.scripts.program_arguments import engine_options
    with console.step(f"Loading {args.program}"):
        transcribe = Transcriber.load(
            args.program, host=args.host, engine=args.engine, options=engine_options(args)
        )
    tokenizer = load_tokenizer(
        arguments.tokenizer_of(args), vocabulary=transcribe.vocabulary, bos=None
    )
    samples = read_wav(args.recording, transcribe.sampling_rate)
    start = time.perf_counter()
    with console.step("Transcribing"):
        tokens = transcribe(samples)
    elapsed = time.perf_counter() - start
    text = tokenizer.decode([token.number for token in tokens])
    if args.json:
        rows = [{"token": token.number, "start": token.start} for token in tokens]
        console.write_json({"text": text, "tokens": rows})
    else:
        console.write(text)
    length = len(samples) / transcribe.sampling_rate
    console.note(f"{length:.2f} s in {elapsed:.2f} s, {len(tokens)} tokens")
    return 0


COMMAND = Command(
    name="transcribe",
    summary="transcribe a recording with a .pte of a speech recognizer",
    description="Transcribe a WAV file with a program of export-speech, token by token the most "
    "probable one.",
    add_arguments=add_arguments,
    run=run,
)

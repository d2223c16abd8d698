"""Text generation by ExecuTorch's own runners, with the delegates on our runtime.

``TextLLMRunner``, and ``MultimodalRunner`` for images, are the C++ classes that apps use, in the
Python binding of ExecuTorch's wheel. They tokenize, sample and write the text to the standard
output themselves, without bytes that cannot be printed; their callbacks fail at tokens that are
parts of a character.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from coreml_delegate import runtime
from coreml_delegate.errors import EngineUnavailableError, OptionError, ProgramError
from coreml_delegate.llm.generator import Throughput
from coreml_delegate.llm.images import refuse_images
from coreml_delegate.llm.layout import Layout
from coreml_delegate.llm.tokenizer import FileTokenizer, tokenizer_file
from coreml_delegate.options.engine_options import EngineOptions
from coreml_delegate.patches.third_party import quiet_import

_STDOUT, _STDERR = 1, 2
_OBSERVER = "\nPyTorchObserver"  # the runner's statistics, which follow the text
_MOST_TEMPERATURE = 1.0
_ROUTINE = re.compile(
    r"I |\[(llm_runner_helper|text_llm_runner|text_prefiller|stats)\.|\[method\.cpp.*arg \d"
)
"""Lines of the log that do not say why the runner fails."""
_SHOWN_LINES = 3


@dataclass(frozen=True, slots=True)
class RunnerResult:
    """A text that ExecuTorch's runner has generated.

    Attributes:
        text: The text, as the runner prints it.
        prefill: Throughput of the prompt's tokens.
        decode: Throughput of generated tokens, except the first.
    """

    text: str
    prefill: Throughput
    decode: Throughput


def generate(
    path: Path,
    tokenizer: Path,
    prompt: str,
    images: Sequence[torch.Tensor] = (),
    *,
    limit: int | None = None,
    temperature: float = 0.0,
    engine: str = runtime.AUTO,
    options: EngineOptions | None = None,
) -> RunnerResult:
    """Continue a text with ``TextLLMRunner``, or ``MultimodalRunner`` if the model reads images.

    Args:
        path: A ``.pte`` with the standard layout.
        tokenizer: The model's ``tokenizer.json``, or its folder.
        prompt: The text to continue, with the text of the image token for each image.
        images: Pixels [1, 3, height, width] of each image, as the model takes them.
        limit: Largest number of tokens to generate; None for as many as fit into the context.
        temperature: Divides the logits, from 0 to 1; 0 takes the most probable token.
        engine: See ``runtime.register``.
        options: See ``runtime.register``.

    Raises:
        OptionError: The temperature is out of range, the tokenizer cannot be read, or a text is
            longer than the context, or than a chunk in a model that reads images.
        InputError: The images do not fit the prompt or the model.
        EngineUnavailableError: ExecuTorch's wheel has no runner.
        ProgramError: The program has another layout, or the runner fails.
    """
    if not 0 <= temperature <= _MOST_TEMPERATURE:
        raise OptionError(
            "ExecuTorch's runner does not take the temperature",
            got=str(temperature),
            expected=f"0 to {_MOST_TEMPERATURE:g}",
        )
    layout = layout_of(path)
    reader = FileTokenizer(tokenizer)
    room = _room(layout, reader.encode(prompt), images)
    mark = None if layout.image is None else reader.text_of(layout.image.token)
    texts = [prompt] if mark is None else prompt.split(mark)
    if mark is not None:
        _check_texts(layout, reader, texts)
    runtime.register(engine=engine, options=options)
    stats: list[Any] = []
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as output:
        try:
            with _redirected(_STDERR, log), _redirected(_STDOUT, output):
                binding = _binding()
                # Without a number the runner leaves out the tokens that the tokenizer's template
                # adds to a text; with 1 it encodes as FileTokenizer does.
                config = binding.GenerationConfig(
                    echo=False,
                    temperature=temperature,
                    max_new_tokens=min(room, limit or room),
                    num_bos=1,
                )
                files = str(path), str(tokenizer_file(tokenizer))
                if mark is None:
                    runner = binding.TextLLMRunner(*files)
                    runner.generate(prompt, config, None, stats.append)
                else:
                    runner = binding.MultimodalRunner(*files, None)
                    inputs = _inputs(binding, reader, texts, images)
                    runner.generate(inputs, config, None, stats.append)
        except RuntimeError as error:
            lines = [line for line in _read(log).splitlines() if not _ROUTINE.match(line)]
            reason = "; ".join(lines[-_SHOWN_LINES:]) or str(error)
            raise ProgramError("ExecuTorch's runner fails", got=reason) from error
        text = _read(output).partition(_OBSERVER)[0]
    (numbers,) = stats[-1:]
    return RunnerResult(
        text,
        _throughput(
            numbers.num_prompt_tokens, numbers.inference_start_ms, numbers.prompt_eval_end_ms
        ),
        _throughput(
            numbers.num_generated_tokens, numbers.prompt_eval_end_ms, numbers.inference_end_ms
        ),
    )


def layout_of(path: Path) -> Layout:
    """Return the layout of a program that one of ExecuTorch's runners of texts calls.

    Raises:
        ProgramError: None of them calls it.
    """
    program = runtime.load_program(path)
    layout = Layout.read(program.method_names, lambda name: program.run(name, []))
    if layout.standard and layout.source is None:
        return layout
    raise ProgramError(
        "ExecuTorch's runners of texts cannot call the program",
        got=f"the layout {layout.name} with the methods {', '.join(layout.methods)}",
        remedy="Export it with --layout standard, or generate with this package's own runner",
    )


def _room(layout: Layout, tokens: Sequence[int], images: Sequence[torch.Tensor]) -> int:
    """Return how many tokens fit into the context after the prompt; the runner does not check."""
    count = len(tokens)
    if layout.image is None:
        refuse_images(images)
    else:
        layout.image.check(tokens, images)
        count += len(images) * (layout.image.positions - 1)
    if not 0 < count < layout.context:
        raise OptionError(
            "the prompt does not fit into the context",
            got=f"{count} tokens",
            expected=f"1 to {layout.context - 1}",
        )
    return layout.context - count


def _check_texts(layout: Layout, reader: FileTokenizer, texts: Sequence[str]) -> None:
    """Check that each text between images is a chunk at most."""
    longest = max(len(reader.encode(text)) for text in texts)
    if longest > layout.chunk:
        raise OptionError(
            "ExecuTorch's runner passes a text in one call, which is longer than a chunk",
            got=f"{longest} tokens",
            expected=f"at most {layout.chunk}",
            remedy=f"Export with --prefill-chunk {longest}",
        )


def _inputs(
    binding: Any, reader: FileTokenizer, texts: Sequence[str], images: Sequence[torch.Tensor]
) -> list[Any]:
    """Return texts with the images between them, as ``MultimodalRunner`` takes them."""
    inputs: list[Any] = []
    # The runner puts what begins a text before the first text, and nothing before an image.
    if not texts[0] and (beginning := reader.encode("")):
        inputs.append(binding.make_token_input(beginning))
    for text, image in itertools.zip_longest(texts, images):
        if text:
            inputs.append(binding.make_text_input(text))
        if image is not None:
            inputs.append(binding.make_image_input(image[0]))
    return inputs


def _binding() -> Any:
    try:
        with quiet_import():
            return importlib.import_module("executorch.extension.llm.runner")
    except (ImportError, RuntimeError) as error:
        raise EngineUnavailableError(
            "ExecuTorch's wheel has no runner of language models", got=str(error)
        ) from error


@contextmanager
def _redirected(descriptor: int, file: IO[bytes]) -> Generator[None]:
    """Let native code write to a file in place of a file descriptor."""
    saved = os.dup(descriptor)
    try:
        os.dup2(file.fileno(), descriptor)
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _throughput(tokens: int, start_ms: int, end_ms: int) -> Throughput:
    return Throughput(tokens, (end_ms - start_ms) / 1e3)

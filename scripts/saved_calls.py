"""Options of ``generate`` that save calls of the model: speculation, and a file of caches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts import console
from coreml_delegate.scripts.commands import add_number, add_path

if TYPE_CHECKING:
    from coreml_delegate.llm.generator import Generator

_DRAFT_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = parser.add_argument_group("fewer calls of the model, with the same tokens")
    proposers = group.add_mutually_exclusive_group()
    proposers.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="propose what followed the last tokens where the text had them before, and "
        "verify a chunk of them in one call; the program has to be exported with --logits all",
    )
    add_path(
        proposers,
        "--draft",
        "FILE.pte",
        "propose tokens by a smaller model with the same tokenizer; otherwise as --prompt-lookup",
    )
    add_number(
        group,
        "--draft-tokens",
        "N",
        f"with --draft: tokens to propose for a call (default: {_DRAFT_TOKENS}, less than a chunk)",
    )
    add_path(
        group,
        "--prompt-cache",
        "FILE",
        "keep the model's caches after the prompt in FILE, and take from it the tokens that the "
        "prompt begins with",
    )


def refused_options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options that ExecuTorch's runner lacks; an option in use has a true value."""
    return {
        "--prompt-lookup": args.prompt_lookup,
        "--draft": args.draft,
        "--prompt-cache": args.prompt_cache,
    }


def check_usage(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, as wrong usage."""
    if args.draft_tokens is not None and args.draft is None:
        args.refuse_usage("--draft-tokens needs --draft")
    if args.prompt_cache is not None:
        for name, value in (("--image", args.image), ("--audio", args.audio)):
            if value:
                args.refuse_usage(f"{name} does not go with --prompt-cache")


def speculate(
    args: argparse.Namespace, generator: Generator, load: Callable[[Path], Generator]
) -> None:
    """Let the generator verify proposals, if an option says so.

    Args:
        args: The arguments.
        generator: The model.
        load: Loads a draft model.

    Raises:
        OptionError: The program or the draft model cannot.
    """
    from coreml_delegate.llm.speculation import Draft, PromptLookup

    if args.prompt_lookup:
        generator.speculate(PromptLookup())
    elif args.draft is not None:
        generator.speculate(Draft(load(args.draft), args.draft_tokens or _DRAFT_TOKENS))


class PromptFile:
    """The file of ``--prompt-cache``, and its use for the first prompt.

    Args:
        path: The file; None without one.
        generator: The model.

    Attributes:
        taken: Number of tokens of the prompt that were taken from the file; None without one.

    Raises:
        OptionError: The model has an encoder.
        CoreMLDelegateError: See ``Generator.load_context``.
    """

    def __init__(self, path: Path | None, generator: Generator) -> None:
        self._path = path
        self._generator = generator
        self.taken: int | None = None
        if path is not None and generator.layout.source is not None:
            raise OptionError(
                "a model with an encoder has no prompt to keep", got=f"--prompt-cache {path}"
            )
        if path is not None and path.exists() and not generator.load_context(path):
            console.warn(f"{path} is of another program or adapter, and is not used")

    def resume(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of the prompt that the context does not have yet."""
        common = self._generator.resume(tokens)
        self.take(common)
        return tokens[common:]

    def take(self, count: int) -> None:
        """Set the number of tokens that were taken from the file."""
        if self._path is not None:
            self.taken = count

    def save(self) -> None:
        """Write the context, if there is a file."""
        if self._path is not None:
            self._generator.save_context(self._path)

    @property
    def before_last(self) -> Callable[[], None] | None:
        """Function that writes the context, for ``Generator.generate``; None without a file."""
        return None if self._path is None else self.save


def document(generator: Generator, file: PromptFile) -> dict[str, Any]:
    """Return the facts for JSON; empty without these options."""
    speculation = generator.speculation
    facts: dict[str, Any] = {}
    if file.taken is not None:
        facts["prompt_cache"] = {"tokens": file.taken}
    if speculation.calls:
        facts["speculation"] = {
            "calls": speculation.calls,
            "proposed": speculation.proposed,
            "accepted": speculation.accepted,
            "tokens_per_call": speculation.tokens_per_call,
        }
    return facts


def note(generator: Generator, file: PromptFile) -> None:
    """Write the facts to stderr."""
    speculation = generator.speculation
    if file.taken is not None:
        console.note(f"prompt cache: {file.taken} tokens taken")
    if speculation.calls:
        console.note(
            f"speculation: {speculation.accepted} of {speculation.proposed} proposed tokens "
            f"accepted, {speculation.tokens_per_call:.1f} tokens a call"
        )

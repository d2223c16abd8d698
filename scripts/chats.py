"""Chats on a terminal: turns from the command line or standard input, answers to stdout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.scripts import console

if TYPE_CHECKING:
    from coreml_delegate.llm.chat import ChatTokenizer, Conversation

_TRIAL_TURN = "Hi"  # rendered before the program is loaded, to try the template
_INPUT_PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of a chat."""
    group = parser.add_argument_group("chats")
    group.add_argument(
        "--chat",
        action="store_true",
        help="answer by the chat template in the folder of --tokenizer: --prompt, or the lines of "
        "standard input, each a turn of one conversation",
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument(
        "--chat-template",
        metavar="NAME",
        help="chat template, of a tokenizer with several (default: the template named default)",
    )


def check_usage(args: argparse.Namespace) -> None:
    """Refuse options that do not go together, as wrong usage."""
    if args.chat:
        refused_options = {
            "--image": args.image,
            "--audio": args.audio,
            "--prompt-tokens": args.prompt_tokens,
        }
        for name, value in refused_options.items():
            if value:
                args.refuse_usage(f"{name} does not go with --chat")
        return
    chat_options = {"--system": args.system, "--chat-template": args.chat_template}
    for name, value in chat_options.items():
        if value is not None:
            args.refuse_usage(f"{name} needs --chat")
    if args.prompt is None and args.audio is None:
        args.refuse_usage("--prompt or --audio is required, except with --chat")


def load_tokenizer(args: argparse.Namespace) -> ChatTokenizer:
    """Return the tokenizer, after it has rendered the first turn.

    Raises:
        OptionError: A file is missing or malformed, or the template does not take the messages.
    """
    from coreml_delegate.llm.chat import USER, ChatTokenizer, Message, opening

    path: Path | None = args.tokenizer
    if path is None:
        raise OptionError(
            "a chat needs the tokenizer and the chat template of the model",
            remedy="Pass --tokenizer with the folder of its checkpoint",
        )
    tokenizer = ChatTokenizer(path, args.chat_template)
    tokenizer.render([*opening(args.system), Message(USER, args.prompt or _TRIAL_TURN)])
    return tokenizer


def converse(
    args: argparse.Namespace, conversation: Conversation, ask: Callable[[str], Iterator[str]]
) -> None:
    """Answer all turns; end at the end of the input, or when the user interrupts it.

    Raises:
        InputError: The conversation does not fit into the context, or standard input is not UTF-8.
    """
    if args.prompt is not None:
        _answer(args, conversation, ask(args.prompt))
        return
    try:
        for turn in _lines():
            _answer(args, conversation, ask(turn))
    except KeyboardInterrupt:
        return  # the usual end of a chat


def document(conversation: Conversation) -> dict[str, Any]:
    """Return the turns for JSON; an answer has its tokens, its ending and its counts of tokens."""
    from coreml_delegate.llm.chat import ASSISTANT

    replies = iter(conversation.replies)
    turns: list[dict[str, Any]] = []
    for message in conversation.messages:
        turn: dict[str, Any] = asdict(message)
        if message.role == ASSISTANT:
            reply = next(replies)
            turn |= {
                "tokens": list(reply.tokens),
                "ending": None if reply.ending is None else reply.ending.value,
                "kept": reply.kept,
                "fed": reply.fed,
            }
        turns.append(turn)
    return {"turns": turns}


def _answer(args: argparse.Namespace, conversation: Conversation, pieces: Iterator[str]) -> None:
    from coreml_delegate.llm.generator import Ending

    if args.json:
        for _ in pieces:
            pass
    else:
        write_stream(pieces)
    if conversation.replies[-1].ending is Ending.CONTEXT:
        context = conversation.generator.layout.context
        console.warn(f"the context of {context} tokens is full")


def write_stream(pieces: Iterator[str]) -> None:
    """Write text to stdout as it comes; end the line even if an error breaks the text off."""
    is_line_open = False
    try:
        for text in pieces:
            is_line_open = True
            sys.stdout.write(text)
            sys.stdout.flush()
        is_line_open = True
    finally:
        if is_line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _lines() -> Iterator[str]:
    """Yield the non-blank lines of standard input; show a prompt on a terminal."""
    while sys.stdin is not None:
        if sys.stdin.isatty():
            sys.stderr.write(_INPUT_PROMPT)
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError("standard input is not UTF-8", got=str(error)) from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")

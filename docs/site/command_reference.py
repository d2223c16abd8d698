"""The page of all commands, from their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from coreml_delegate.scripts.cli import main_parser
from coreml_delegate.scripts.console import PROGRAM

_WIDTH = 88  # columns of a usage


def page() -> str:
    """Return the page: a table of the commands, then usage and arguments of each."""
    return "\n".join(_lines()) + "\n"


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    return dict(_subparsers().choices)


def _subparsers() -> argparse._SubParsersAction[argparse.ArgumentParser]:
    (subparsers,) = (a for a in main_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return subparsers


def _lines() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield (
        f"`{PROGRAM} COMMAND --help` prints the same. [The command line](../cli.md) explains "
        "sources, inputs, outputs and exit codes."
    )
    yield ""
    yield "| command | |"
    yield "|---|---|"
    for choice in _subparsers()._choices_actions:
        yield f"| [`{choice.dest}`](#{choice.dest}) | {_plain(str(choice.help))} |"
    for name, parser in commands().items():
        yield ""
        yield f"## {name}"
        yield ""
        yield _plain(str(parser.description))
        yield from _interface(parser)


def _interface(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = argparse.HelpFormatter(parser.prog, width=_WIDTH)
    formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups, prefix="")
    yield ""
    yield "```text"
    yield formatter.format_help().strip()
    yield "```"
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
        if not actions:
            continue
        yield ""
        yield f"| {str(group.title).capitalize()} | |"
        yield "|---|---|"
        for action in actions:
            meaning = formatter._expand_help(action) if action.help else ""
            yield f"| {_typed(action)} | {_plain(meaning)} |"


def _typed(action: argparse.Action) -> str:
    """Return the forms of an argument on the command line."""
    if action.metavar is not None:
        value = str(action.metavar)
    elif action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = "" if action.nargs == 0 else action.dest.upper()
    forms = [f"{option} {value}".strip() for option in action.option_strings] or [value]
    return " ".join(f"`{form}`".replace("|", "\\|") for form in forms)


def _plain(text: str) -> str:
    """Return a text as Markdown, with special characters escaped."""
    for character in "\\`*_<[|":
        text = text.replace(character, f"\\{character}")
    return text

"""Commands: one module each, which declares its arguments and runs it. Imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coreml_delegate.scripts.arguments import positive


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand.

    Attributes:
        summary: One line for the list of commands, without a final full stop.
        add_arguments: Declares its arguments; imports nothing slow.
        run: Runs it and returns the exit code; slow imports belong here.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_Container = argparse._ActionsContainer  # pyright: ignore[reportPrivateUsage] - groups have no public type


def add_path(parser: _Container, name: str, metavar: str, help: str, **options: Any) -> None:
    """Declare an argument that is a path."""
    parser.add_argument(name, type=Path, metavar=metavar, help=help, **options)


def add_number(parser: _Container, name: str, metavar: str, help: str, **options: Any) -> None:
    """Declare an argument that is a positive integer."""
    parser.add_argument(name, type=positive, metavar=metavar, help=help, **options)

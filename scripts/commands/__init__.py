"""Commands: one module each, which declares its arguments and runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


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

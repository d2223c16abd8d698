"""Output of the command: data on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

from coreml_delegate.errors import naming
from coreml_delegate.formats.text import to_json
from coreml_delegate.scripts import interruption

PROGRAM = "coreml-delegate"
_PACKAGE = "coreml_delegate"
_STDOUT = "stdout"
_Item = TypeVar("_Item")
_WARNING = f"{PROGRAM}: warning: %(message)s"
_FORMAT = "%(levelname)s %(name)s: %(message)s"


def open_closed_streams() -> None:
    """Open stdout and stderr if the process was started without them.

    Writing to stdout then fails as if its reader had left; stderr discards. Both get their own file
    numbers, because libraries would write to any other file that got one of them.
    """
    if sys.stdout is None:
        reader, writer = os.pipe()
        sys.stdout = _stream(writer, 1)
        if reader != 1:  # 1 is stdout's own number by now
            os.close(reader)
    if sys.stderr is None:
        sys.stderr = _stream(os.open(os.devnull, os.O_WRONLY), 2)


def _stream(descriptor: int, number: int) -> TextIO:
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return open(number, "w", encoding="utf-8", closefd=False)


def write(text: str) -> None:
    """Write ``text`` and a newline to stdout."""
    with naming(_STDOUT):
        sys.stdout.write(f"{text}\n")


def flush() -> None:
    """Write buffered text to stdout."""
    with naming(_STDOUT):
        sys.stdout.flush()


def write_json(document: Any) -> None:
    """Write ``document`` to stdout as JSON, with inf and nan as strings."""
    write(as_json(document))


def as_json(document: Any) -> str:
    """Return ``document`` as JSON, with inf and nan as strings."""
    return to_json(document, indent=2)


def note(message: str) -> None:
    """Write a line of information to stderr."""
    sys.stderr.write(f"{message}\n")


def warn(message: str) -> None:
    """Write one line of warning to stderr."""
    _complain("warning", message)


def until_interrupted(command: Callable[[], int]) -> int:
    """Run a command, with streams open and signals handled; return its exit code.

    Raises:
        SystemExit: A signal to terminate arrived.
    """
    open_closed_streams()
    with interruption.handled():
        try:
            return command()
        except KeyboardInterrupt:
            complain("interrupted")
            return interruption.INTERRUPTED


def complain(message: str) -> None:
    """Write one line of error to stderr."""
    _complain("error", message)


def columns(rows: Iterable[Sequence[object]], *, indent: int = 0) -> str:
    """Return rows as left-aligned columns, two spaces apart; no line ends in spaces."""
    table = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    )
    return "\n".join(" " * indent + line.rstrip() for line in lines)


def size(count: int) -> str:
    """Return a number of bytes for a reader, in decimal units."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f} {unit}"
    return f"{count} B"


@contextmanager
def step(description: str) -> Generator[None]:
    """Show that a long step is under way, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(description):
        yield


@contextmanager
def progress(items: Sequence[_Item], description: str) -> Generator[Iterable[_Item]]:
    """Show, if stderr is a terminal, how many items have been processed."""
    if not sys.stderr.isatty():
        yield items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        yield bar.track(items, description=description)


@contextmanager
def session(verbosity: int) -> Generator[None]:
    """Set up logging and warnings for one command, and put them back afterwards.

    Args:
        verbosity: 0 shows this package's warnings and nothing of other libraries; 1 shows every
            library's log from INFO on, 2 from DEBUG on, and Python's warnings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT if verbosity else _WARNING))
    handler.setLevel(logging.NOTSET if verbosity else logging.WARNING)
    root, own = logging.getLogger(), logging.getLogger(_PACKAGE)
    # A root handler of ours also keeps libraries from installing theirs through basicConfig.
    installed = (root, handler) if verbosity else (root, logging.NullHandler())
    levels = [(logger, logger.level) for logger in (root, own)]
    with warnings.catch_warnings():
        if verbosity:
            root.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
        else:
            warnings.simplefilter("ignore")
            own.addHandler(handler)
        installed[0].addHandler(installed[1])
        try:
            with _quiet_torch(enabled=not verbosity):
                yield
        finally:
            own.removeHandler(handler)
            installed[0].removeHandler(installed[1])
            for logger, level in levels:
                logger.setLevel(level)


@contextmanager
def _quiet_torch(*, enabled: bool) -> Generator[None]:
    """Silence torch, which also raises the errors that it logs: the command reports them once."""
    if not enabled:
        yield
        return
    from coreml_delegate.patches.torch import quiet_loggers

    with quiet_loggers():
        yield


def _complain(kind: str, message: str) -> None:
    sys.stderr.write(f"{PROGRAM}: {kind}: {' '.join(message.split())}\n")

"""Raises exceptions for signals, so that a command closes and removes its files.

An exception that a signal raises can get lost where C code calls Python. The signal is therefore
recorded too, and checked before a file gets its final name.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells count it."""

_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
_received: list[int] = []


@contextmanager
def handled() -> Generator[None]:
    """Raise ``KeyboardInterrupt`` on SIGINT and ``SystemExit`` on SIGTERM and SIGHUP meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it receives signals
        return
    previous = {number: signal.signal(number, _receive) for number in _SIGNALS}
    _received.clear()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _received.clear()  # ``check`` is not to raise an exception for a command that has ended


def check() -> None:
    """Raise the exception of a recorded signal, in case it got lost.

    Raises:
        KeyboardInterrupt: SIGINT arrived.
        SystemExit: SIGTERM or SIGHUP arrived.
    """
    if _received:
        _raise(_received[-1])


def _receive(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

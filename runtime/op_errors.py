"""Errors that name the op where they occurred.

Kernels, translations and delegates may raise any exception. The code that runs an op passes it to
:func:`blame`, which raises an error with the op's name; errors of nested ops already have a name.
"""

from __future__ import annotations

from typing import NoReturn

from coreml_delegate.errors import CoreMLDelegateError, ExecutionError, UnsupportedOpError


class OpError(CoreMLDelegateError):
    """An error with the op's name in its message; enclosing ops raise it unchanged."""


class OpExecutionError(OpError, ExecutionError):
    """An op failed while a program ran, or while its constants were computed."""


class OpTranslationError(OpError, UnsupportedOpError):
    """An engine cannot translate an op."""


def blame(
    error: Exception,
    kind: type[OpError],
    what: str,
    *,
    got: str | None = None,
    remedy: str | None = None,
) -> NoReturn:
    """Raise ``error`` again as an error that names the op.

    ``what`` is the op and the problem, ``got`` the op's operands.

    Raises:
        OpError: Caused by ``error``; ``error`` itself if it already names an op.
    """
    if isinstance(error, OpError):
        raise error
    raise kind(what, got=got, remedy=remedy) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the class name if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, OpenVINO's reason, or else the class name."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def summary(error: BaseException) -> str:
    """Return the class name of an error, with the first line of its message unless it is empty."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name

"""Errors that name the op they happened at.

Kernels, translations and delegates raise anything. The code that runs an op passes the exception to
:func:`blame`, which raises an error with the op's name; errors of nested ops have a name already.
"""

from __future__ import annotations

from typing import NoReturn

from coreml_delegate.errors import CoreMLDelegateError, ExecutionError, UnsupportedOpError


class OpError(CoreMLDelegateError):
    """An error whose message names the op; the ops around that op pass it on."""


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

    Args:
        error: The exception being handled.
        kind: Class of the new error.
        what: Names the op and says what is wrong.
        got: The op's operands, for a reader.
        remedy: What the caller can do, in the imperative.

    Raises:
        OpError: Caused by ``error``; ``error`` itself if it names an op already.
    """
    if isinstance(error, OpError):
        raise error
    raise kind(what, got=got, remedy=remedy) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def last_line(error: BaseException) -> str:
    """Return the last line of a message, where OpenVINO says what is wrong; or the class name."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def summary(error: BaseException) -> str:
    """Return the class of an error, and the first line of its message if it has one."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name

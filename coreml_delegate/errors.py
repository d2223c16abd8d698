"""The exceptions of this package, all subclasses of ``CoreMLDelegateError``.

A message has up to four parts: the failure, the value got, the expected value, and the remedy for
the caller. ``str(error)`` is a single line for a terminal.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Self


class CoreMLDelegateError(Exception):
    """Base of every error raised by ``coreml_delegate``.

    Args:
        what: The failure, as a clause without a final full stop.
        got: The offending value, as text.
        expected: The accepted values.
        remedy: The remedy for the caller, in the imperative.
    """

    def __init__(
        self,
        what: str,
        *,
        got: str | None = None,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.remedy = remedy
        details = [
            f"{label} {text}" for label, text in (("got", got), ("expected", expected)) if text
        ]
        message = what + (f": {', '.join(details)}" if details else "")
        super().__init__(f"{message.removesuffix('.')}. {remedy}" if remedy else message)

    def prefixed(self, prefix: str) -> Self:
        """Return an equal error whose message begins with ``prefix``."""
        parts = {"got": self.got, "expected": self.expected, "remedy": self.remedy}
        return type(self)(f"{prefix}{self.what}", **parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword fields across pickling (process pools, pytest-xdist)."""
        return (_rebuild, (type(self), str(self), self.__dict__))


def _rebuild(
    cls: type[CoreMLDelegateError], message: str, fields: dict[str, object]
) -> CoreMLDelegateError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


@contextmanager
def naming(file: object) -> Generator[None]:
    """Set the file name of an ``OSError`` without a file name.

    Errors of an open file, for example a write to a full disk, have no file name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def near_matches(
    name: object,
    candidates: Iterable[str],
    otherwise: str | None = None,
    *,
    cutoff: float = 0.5,
) -> str:
    """Return the text for ``expected`` if a name is unknown: similar known names.

    Args:
        name: The unknown name.
        candidates: The known names.
        otherwise: Text if no name is similar; None to list all candidates.
        cutoff: Smallest similarity, from 0 to 1; short names are similar by chance.
    """
    candidates = list(candidates)
    near = difflib.get_close_matches(str(name), candidates, n=3, cutoff=cutoff)
    if near:
        return f"perhaps {', '.join(near)}"
    return ", ".join(candidates) if otherwise is None else otherwise


class OptionError(CoreMLDelegateError, ValueError):
    """A compile spec, partitioner option or argument has a value that is not accepted."""


class LoweringError(CoreMLDelegateError):
    """A program cannot be lowered to Core ML."""


class UnsupportedOperatorError(LoweringError, NotImplementedError):
    """Core ML does not support an operator that had to be delegated.

    Also a ``NotImplementedError``, which ExecuTorch's own backend raises.
    """


class MissingKernelError(LoweringError):
    """A lowered program needs kernels that ExecuTorch's runtime does not have."""


class PrecisionError(LoweringError):
    """fp16 loses numbers of a program, and no choice of fp32 operations restores them."""


class ConversionError(LoweringError):
    """coremltools failed to convert a partition that the rules had accepted.

    Attributes:
        node: Name of the graph node at which it failed, or None if unknown.
    """

    node: str | None = None


class ContractError(LoweringError):
    """A converted model breaks the contract of the device runtime (names, dtypes, ranks, state)."""


class GraphError(CoreMLDelegateError, ValueError):
    """A graph has an operand, shape, dtype or attribute that does not fit."""


class BlobFormatError(CoreMLDelegateError, ValueError):
    """A malformed blob, mlpackage, MIL program or ``.pte``."""


class ProgramError(CoreMLDelegateError):
    """A well-formed program cannot be run as requested (no such method, function or delegate)."""


class InputError(CoreMLDelegateError, ValueError):
    """An input, state or output buffer has the wrong name, count, shape or dtype."""


class UnsupportedOpError(CoreMLDelegateError):
    """An engine has no implementation of a MIL op (or of one of its modes)."""


class ExecutionError(CoreMLDelegateError):
    """An op failed while a program ran; the message names the op, its output and its inputs."""


class EngineUnavailableError(CoreMLDelegateError):
    """An engine or host cannot be used on this machine; the message has the reason."""

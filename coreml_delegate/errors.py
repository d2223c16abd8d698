"""The exceptions of this package: all that it raises on purpose descend from one class.

A message answers four questions: what went wrong, what was got, what was expected, and what the
caller can do about it. ``str(error)`` is one line, ready for a terminal.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable
from contextlib import contextmanager


class CoreMLDelegateError(Exception):
    """Base of every error raised by ``coreml_delegate``.

    Args:
        what: What went wrong, as a clause without a final full stop.
        got: The offending value, already formatted for a reader.
        expected: What would have been accepted.
        remedy: What the caller can do, in the imperative.
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
    """Set the file name of an ``OSError`` that has none.

    An error of an open file, such as a write to a full disk, has none.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def near_matches(
    given: object,
    known: Iterable[str],
    otherwise: str | None = None,
    *,
    cutoff: float = 0.5,
) -> str:
    """Return the text for ``expected`` when a name is unknown: similar names that are known.

    Args:
        given: The unknown name.
        known: The known names.
        otherwise: Text if no name is similar; None to list all known names.
        cutoff: Similarity from 0 to 1 that names must have; short names are similar by chance.
    """
    known = list(known)
    near = difflib.get_close_matches(str(given), known, n=3, cutoff=cutoff)
    if near:
        return f"perhaps {', '.join(near)}"
    return ", ".join(known) if otherwise is None else otherwise


class OptionError(CoreMLDelegateError, ValueError):
    """A compile spec, partitioner option or argument has a value that is not accepted."""


class LoweringError(CoreMLDelegateError):
    """A program cannot be lowered to Core ML."""


class UnsupportedOperatorError(LoweringError, NotImplementedError):
    """An operator that had to be delegated is not supported by Core ML.

    A ``NotImplementedError`` as well, which is what ExecuTorch's own backend raises.
    """


class MissingKernelError(LoweringError):
    """A lowered program needs kernels that ExecuTorch's runtime does not have."""


class ConversionError(LoweringError):
    """Coremltools failed to convert a partition that the rules had accepted.

    Attributes:
        node: Name of the graph node it failed at, or None if it failed at no single one.
    """

    node: str | None = None


class ContractError(LoweringError):
    """A converted model breaks the contract of the device runtime (names, dtypes, ranks, state)."""


class GraphError(CoreMLDelegateError, ValueError):
    """A graph is built wrongly: an operand, shape, dtype or attribute that does not fit."""


class BlobFormatError(CoreMLDelegateError, ValueError):
    """Bytes that should hold a blob, mlpackage, MIL program or ``.pte`` do not parse."""


class ProgramError(CoreMLDelegateError):
    """A well-formed program cannot be run as asked (no such method, function or delegate)."""


class InputError(CoreMLDelegateError, ValueError):
    """An input, state or output buffer has the wrong name, count, shape or dtype."""


class UnsupportedOpError(CoreMLDelegateError):
    """An engine has no implementation of a MIL op (or of one of its modes)."""


class ExecutionError(CoreMLDelegateError):
    """An op failed while a program ran; names the op, its output and its inputs."""


class EngineUnavailableError(CoreMLDelegateError):
    """An engine or host cannot be used on this machine; the message carries the reason."""

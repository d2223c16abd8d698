"""Reports of coremltools while it converts: errors, log records and progress bars."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from coreml_delegate.errors import (
    ContractError,
    ConversionError,
    LoweringError,
    OptionError,
    UnsupportedOperatorError,
)
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches import patched
from coreml_delegate.patches.third_party import describe_error, quiet_import

# Errors


@contextmanager
def conversion_errors(source: str = "pytorch") -> Generator[None]:
    """Raise coremltools' errors as ``ConversionError``, with the node being translated.

    Errors of this machine, as a full disk, are raised as ``LoweringError``.
    """
    failed_nodes: list[str] = []
    try:
        with patched(coremltools_patches.RECORD_FAILURE.with_state(failed_nodes)):
            yield
    except (LoweringError, OptionError):
        raise
    except (OSError, MemoryError) as error:
        raise LoweringError(
            "this machine cannot convert the subgraph",
            got=describe_error(error),
            remedy="Free disk space or memory and lower again",
        ) from error
    except Exception as error:
        is_partition = source == "pytorch"
        remedy = "Exclude the operator with skip_ops_for_coreml_delegation"
        failure = ConversionError(
            f"coremltools cannot convert the {'sub' if is_partition else ''}graph",
            got=describe_error(error),
            remedy=remedy if is_partition else None,
        )
        failure.node = failed_nodes[0] if failed_nodes else None
        raise failure from error


def is_about_the_graph(error: Exception) -> bool:
    """Return whether a lowering failed because of the graph, so that a part of it may succeed.

    With refused options, or without memory, disk space or a compiler, every graph fails.
    """
    graph_errors = (UnsupportedOperatorError, ConversionError, ContractError)
    other_errors = (OptionError, LoweringError, OSError, MemoryError)
    return isinstance(error, graph_errors) or not isinstance(error, other_errors)


# Log records and progress bars


@contextmanager
def quiet() -> Generator[None]:
    """Silence coremltools' progress bars and numpy's arithmetic warnings.

    coremltools casts limits of fp32 to fp16, where infinity is the right result, and folds calls on
    constants: the logarithm of 0 is infinite, 0 / 0 is NaN, as on the device.
    """
    with (
        quiet_import(),
        filtered_log(_is_unexpected),
        np.errstate(over="ignore", divide="ignore", invalid="ignore"),
        patched(*coremltools_patches.SILENCE),
    ):
        yield


_EXPECTED_MESSAGES = (
    "ERROR - converting",
    "Saving value type of int64 into a builtin type of int32",
    "Saving value type of float64 into a builtin type of fp32",
)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Return whether a log record of coremltools has news for the caller.

    Failures are in the raised error, and int64 always becomes int32. fp64 becomes fp32 only for
    Python floats by which coremltools folds scalars: op records take fp64 tensors only for a cast
    to fp32, as in PyTorch.
    """
    return not record.getMessage().lstrip().startswith(_EXPECTED_MESSAGES)


def is_critical(record: logging.LogRecord) -> bool:
    """Return whether a record of coremltools is more than a warning or error of a trial."""
    return record.levelno >= logging.CRITICAL


@contextmanager
def filtered_log(is_kept: Callable[[logging.LogRecord], bool]) -> Generator[None]:
    """Drop coremltools' log records of this thread unless ``is_kept``."""
    logger = logging.getLogger("coremltools")
    thread = threading.get_ident()

    def is_other_or_kept(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or is_kept(record)

    logger.addFilter(is_other_or_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_other_or_kept)

"""The one door through which coremltools and the stock runtime are imported.

On anything but macOS its import warns about missing native proxies, and everywhere about versions
of torch and scikit-learn it was not tested with; none of that concerns a user of this package.
Exactly those messages are dropped, during the import only.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

# logger -> messages of its import that are dropped
_NOISE = {
    "coremltools": (
        r"Failed to load _ML\w+: No module named 'coremltools\.libcoremlpython'",
        r"(scikit-learn version|Torch version) \S+ (is not supported|has not been tested)",
    ),
    "torchao": (r"Failed to load \S+\.so",),
    "torchao.kernel.intmm": (r"Warning: Detected no triton",),
    "torch.utils._pytree": (r"<enum '\w+'> is an Enum subclass and is now natively supported",),
}


@cache
def coremltools() -> Any:
    """The ``coremltools`` module, imported without noise."""
    with quiet_import():
        return importlib.import_module("coremltools")


@contextmanager
def quiet_import() -> Generator[None]:
    """Drop the known import-time messages of coremltools and torchao."""
    filters = [(logging.getLogger(name), _Drop(patterns)) for name, patterns in _NOISE.items()]
    for logger, drop in filters:
        logger.addFilter(drop)
    try:
        with warnings.catch_warnings():
            # Their own deprecation notices, raised by importing them.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.filterwarnings("ignore", "This API is experimental and subject to change")
            yield
    finally:
        for logger, drop in filters:
            logger.removeFilter(drop)


class _Drop(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None

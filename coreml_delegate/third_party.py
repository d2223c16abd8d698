"""Imports of coremltools and ExecuTorch's runtime, without their noise and delays.

On anything but macOS the import of coremltools warns about missing native proxies, and everywhere
about versions of torch and scikit-learn it was not tested with; none of that concerns a user of
this package. Exactly those messages are dropped, during the import only.

Core ML's protobuf messages are had without the seconds that ``import coremltools`` takes. The
generated modules in the coremltools wheel need only protobuf, but importing them by their own name
runs ``coremltools/__init__``, which loads every converter. Under an alias they load in about a
tenth of a second; protobuf keeps one class per message, so they are coremltools' own classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from coreml_delegate.errors import EngineUnavailableError

_PROTO_ALIAS = "_coreml_delegate_proto"

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


@cache
def _proto_package() -> str:
    """Import coremltools' package of generated modules under the alias; return the alias."""
    spec = importlib.util.find_spec("coremltools")
    if spec is None or not spec.submodule_search_locations:
        raise EngineUnavailableError(
            "coremltools is not installed", remedy="Install it: pip install coremltools==9.0"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "proto"
    alias = importlib.util.spec_from_file_location(
        _PROTO_ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if alias is None or alias.loader is None:
        raise EngineUnavailableError("coremltools has no proto package", got=str(folder))
    module = importlib.util.module_from_spec(alias)
    sys.modules[_PROTO_ALIAS] = module
    alias.loader.exec_module(module)
    return _PROTO_ALIAS


def model_pb2() -> ModuleType:
    """``coremltools.proto.Model_pb2``."""
    return importlib.import_module(f"{_proto_package()}.Model_pb2")


def mil_pb2() -> ModuleType:
    """``coremltools.proto.MIL_pb2``."""
    return importlib.import_module(f"{_proto_package()}.MIL_pb2")


def feature_types_pb2() -> ModuleType:
    """``coremltools.proto.FeatureTypes_pb2``."""
    return importlib.import_module(f"{_proto_package()}.FeatureTypes_pb2")

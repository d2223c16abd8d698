"""Core ML's protobuf messages, without the seconds that ``import coremltools`` takes.

The generated modules in the coremltools wheel need only protobuf, but importing them by their own
name runs ``coremltools/__init__``, which loads every converter. Under an alias they load in about a
tenth of a second; protobuf keeps one class per message, so they are coremltools' own classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from coreml_delegate.errors import EngineUnavailableError

_ALIAS = "_coreml_delegate_proto"


@cache
def _package() -> str:
    spec = importlib.util.find_spec("coremltools")
    if spec is None or not spec.submodule_search_locations:
        raise EngineUnavailableError(
            "coremltools is not installed", remedy="Install it: pip install coremltools==9.0"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "proto"
    alias = importlib.util.spec_from_file_location(
        _ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if alias is None or alias.loader is None:
        raise EngineUnavailableError("coremltools has no proto package", got=str(folder))
    module = importlib.util.module_from_spec(alias)
    sys.modules[_ALIAS] = module
    alias.loader.exec_module(module)
    return _ALIAS


def model_pb2() -> ModuleType:
    """``coremltools.proto.Model_pb2``."""
    return importlib.import_module(f"{_package()}.Model_pb2")


def mil_pb2() -> ModuleType:
    """``coremltools.proto.MIL_pb2``."""
    return importlib.import_module(f"{_package()}.MIL_pb2")


def feature_types_pb2() -> ModuleType:
    """``coremltools.proto.FeatureTypes_pb2``."""
    return importlib.import_module(f"{_package()}.FeatureTypes_pb2")

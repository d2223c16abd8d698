"""Run Core ML programs on this machine: mlpackages, blobs and delegated ``.pte`` files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

if __name__ == "runtime":
    raise ImportError("'runtime' is a subpackage; import coreml_delegate.runtime instead")

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.formats.entry_cache import CacheOptions
from coreml_delegate.options.engine_options import EngineOptions, Precision
from coreml_delegate.runtime.coremltools_patch import CoreMLToolsPatch, patch_coremltools
from coreml_delegate.runtime.delegate import load_blob
from coreml_delegate.runtime.diagnosis import Diagnosis, Fault, ValueReport
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.runtime.engines.reference.interpreter import TracedValue
from coreml_delegate.runtime.engines.selection import AUTO
from coreml_delegate.runtime.hosts import HOSTS, load_program, register
from coreml_delegate.runtime.loading import Execution, Input, LoadedProgram, load
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.pipeline import Pipeline, load_mlpackage
from coreml_delegate.runtime.program import shim
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.host_program import HostProgram
from coreml_delegate.runtime.program.stock import StockProgram


def cmake_prefix_path() -> str:
    """Return the ``CMAKE_PREFIX_PATH`` of applications that run ``.pte`` files without Python.

    It contains the CMake packages ``coreml-delegate``, ``executorch`` and ``OpenVINO``.

    Raises:
        EngineUnavailableError: A package is not installed.
    """
    executorch, openvino = shim.executorch_root(), importlib.util.find_spec("openvino")
    for name, location in (("executorch", executorch), ("openvino", openvino)):
        if location is None:
            raise EngineUnavailableError(
                f"the {name} package is not installed", remedy=f"pip install {name}"
            )
    folders = executorch, Path(str(openvino and openvino.origin)).parent, Path(__file__).parent
    return ";".join(str(folder) for folder in folders)


__all__ = [
    "AUTO",
    "HOSTS",
    "CacheOptions",
    "CoreMLToolsPatch",
    "Diagnosis",
    "EngineOptions",
    "Execution",
    "Fault",
    "HostProgram",
    "Input",
    "LoadedProgram",
    "Model",
    "Pipeline",
    "Precision",
    "PythonProgram",
    "State",
    "StockProgram",
    "TracedValue",
    "ValueReport",
    "cmake_prefix_path",
    "load",
    "load_blob",
    "load_mlpackage",
    "load_program",
    "patch_coremltools",
    "register",
]

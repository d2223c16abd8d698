"""Run Core ML programs on this machine: mlpackages, blobs and delegated ``.pte`` files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

if __name__ == "runtime":
    raise ImportError("'runtime' is a subpackage; import coreml_delegate.runtime instead")

from coreml_delegate.errors import EngineUnavailableError, OptionError
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.entry_cache import CacheOptions
from coreml_delegate.formats.mlpackage import map_package
from coreml_delegate.runtime import hosts
from coreml_delegate.runtime.coremltools_patch import CoreMLToolsPatch, patch_coremltools
from coreml_delegate.runtime.delegate import blob_files, delegate_loader
from coreml_delegate.runtime.diagnosis import Diagnosis, Fault, ValueReport
from coreml_delegate.runtime.engines.base import EngineOptions, Precision, State
from coreml_delegate.runtime.engines.selection import AUTO, ENGINES
from coreml_delegate.runtime.hosts import HOSTS
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.pipeline import Pipeline, load_package
from coreml_delegate.runtime.program import shim_build, stock
from coreml_delegate.runtime.program.host import PythonProgram
from coreml_delegate.runtime.program.ptd import Sources
from coreml_delegate.runtime.program.stock import StockProgram
from coreml_delegate.runtime.tracing import TracedValue


def load_mlpackage(
    path: Path | str,
    *,
    function_name: str | None = None,
    engine: str = AUTO,
    options: EngineOptions | None = None,
) -> Model | Pipeline:
    """Load an ``.mlpackage`` with an ML Program or a pipeline of ML Programs.

    Args:
        path: The package folder; weights are mapped, not read.
        function_name: None for the default function.
        engine: ``auto`` (the fastest engine that can run the program), ``coreml`` (on macOS),
            ``openvino`` or ``reference``.
        options: How to execute.

    Raises:
        ProgramError: No such package or function, or a model of another type.
        BlobFormatError: A part is missing or malformed.
        UnsupportedOpError: The engine lacks an op.
        EngineUnavailableError: The engine cannot be used here.
    """
    return load_package(
        map_package(Path(path)), function_name=function_name, engine=engine, options=options
    )


def load_blob(
    blob: Buffer,
    *,
    function_name: str | None = None,
    engine: str = AUTO,
    options: EngineOptions | None = None,
) -> Model:
    """Load the blob of a delegate, which ``CoreMLBackend.preprocess`` returns.

    Args:
        blob: The bytes; weights are views of them.
        function_name: None for the default function.
        engine: ``auto``, or an engine's name.
        options: How to execute.

    Raises:
        BlobFormatError: Not a blob, or a part is missing or malformed.
        CoreMLDelegateError: As ``load_mlpackage``.
    """
    files, _ = blob_files(blob)
    return Model.from_files(files, function_name=function_name, engine=engine, options=options)


def load_program(
    program: Path | str | bytes,
    *,
    data: Sources | None = None,
    host: str = AUTO,
    engine: str = AUTO,
    options: EngineOptions | None = None,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
) -> PythonProgram | StockProgram:
    """Load a ``.pte``: Core ML delegates run on an engine, all other ops on the CPU.

    Args:
        program: Path, or the bytes.
        data: External data of the program: path or bytes of one or several ``.ptd`` files; the
            stock host accepts one file.
        host: ``python`` (executes the ``.pte`` with torch's kernels), ``stock`` (ExecuTorch's
            runtime) or ``auto``. ``auto`` is ``python``, which needs no compiler, and whose kernels
            are faster than the stock host's portable kernels. If only the stock host can run the
            program (delegates of other backends, ops that torch lacks), ``auto`` is ``stock``, and
            logs the reason. On macOS the stock host runs delegates by ExecuTorch's own Core ML
            backend, which keeps no states.
        engine: ``auto``, or an engine's name.
        options: How to execute.
        enable_etdump: Whether calls log events, the time of each op, also in delegates, which makes
            calls slower. ``write_etdump_result_to_file`` writes the events for ExecuTorch's
            Inspector.
        debug_buffer_size: Bytes for the values that ops compute, for which each delegate computes
            twice; 0 to log no values. Inspector reads the values of one run.

    Returns:
        An object with ``method_names``, ``run(method, inputs)``, and ``reset_state``,
        ``snapshot_state`` and ``restore_state``.

    Raises:
        OptionError: Unknown host or engine, or several ``data`` for the stock host; or, on macOS,
            an engine or engine options for the stock host, which does not use engines there.
        BlobFormatError: Not a ``.pte`` or ``.ptd``, or a corrupt file.
        ProgramError: A file cannot be read, or ``data`` lacks external data of the program.
        EngineUnavailableError: The stock host cannot be used here; the message has the reason.
    """
    for kind, name, names in (("host", host, HOSTS), ("engine", engine, (AUTO, *ENGINES))):
        if name not in names:
            raise OptionError(f"unknown {kind}", got=repr(name), expected=" | ".join(names))
    if debug_buffer_size < 0 or (debug_buffer_size and not enable_etdump):
        raise OptionError(
            "values are logged with the events of a program",
            got=f"debug_buffer_size={debug_buffer_size} and enable_etdump={enable_etdump}",
            remedy="Pass enable_etdump=True, and 0 or more bytes",
        )
    return hosts.load(
        program,
        delegate_loader(engine, options),
        engine=engine,
        options=options,
        data=data,
        host=host,
        enable_etdump=enable_etdump,
        debug_buffer_size=debug_buffer_size,
    )


def register(*, engine: str = AUTO, options: EngineOptions | None = None) -> None:
    """Let ``executorch.runtime.Runtime`` run programs with Core ML delegates.

    Programs loaded afterwards use this engine; a later call replaces it. On macOS, where the
    runtime has its own Core ML backend, nothing is registered.

    Args:
        engine: ``auto``, or an engine's name.
        options: How to execute.

    Raises:
        OptionError: Unknown engine; or, on macOS, an engine other than Core ML.
        EngineUnavailableError: For example, there is no C++ compiler for the required library.
    """
    if engine not in (AUTO, *ENGINES):
        raise OptionError("unknown engine", got=repr(engine), expected=" | ".join((AUTO, *ENGINES)))
    hosts.check_stock_options(engine, options)
    stock.register(delegate_loader(engine, options))


def cmake_prefix_path() -> str:
    """Return the ``CMAKE_PREFIX_PATH`` of applications that run ``.pte`` files without Python.

    It contains the CMake packages ``coreml-delegate``, ``executorch`` and ``OpenVINO``.

    Raises:
        EngineUnavailableError: A package is not installed.
    """
    executorch, openvino = shim_build.executorch_root(), importlib.util.find_spec("openvino")
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
    "Fault",
    "Model",
    "Pipeline",
    "Precision",
    "PythonProgram",
    "State",
    "StockProgram",
    "TracedValue",
    "ValueReport",
    "cmake_prefix_path",
    "load_blob",
    "load_mlpackage",
    "load_program",
    "patch_coremltools",
    "register",
]

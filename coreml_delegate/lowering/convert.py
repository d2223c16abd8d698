"""Conversion of a subgraph by coremltools, to a model specification and weights.

Only this module calls ``coremltools.convert``.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from coreml_delegate import opaque_ops, ops
from coreml_delegate.errors import (
    ContractError,
    ConversionError,
    LoweringError,
    OptionError,
    UnsupportedOperatorError,
)
from coreml_delegate.formats.blob import Content
from coreml_delegate.formats.files import temporary_folder, write_folder
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.lowering.coremltools_options import compression_passes, convert_keywords
from coreml_delegate.lowering.debug_handles import HANDLE, operation_calls
from coreml_delegate.lowering.fp16 import fp16_cast, remaining_constants, remove_dead_code
from coreml_delegate.lowering.native_parts import native_parts
from coreml_delegate.mil.passes.for_devices import REWRITES, REWRITES_IN_FP32
from coreml_delegate.mil.passes.matching import rewrite
from coreml_delegate.ops.call import target_name
from coreml_delegate.options.compile_specs import ModelType, Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches import Patch, coremltools_errors, patched
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches.third_party import coremltools, describe_error, quiet_import
from coreml_delegate.targets import Device, Opset

MilSource = tuple[Any, Mapping[str, Any]]
"""A program that coremltools converts, and further keywords of ``coremltools.convert``."""

# coremltools keeps global state while it converts.
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted subgraph.

    Attributes:
        spec: The ``Model`` message.
        package: The mlpackage on disk; it is removed at the end of ``convert_program``.
        compiled: The mlmodelc on disk, with ``ModelType.COMPILED_MODEL`` only.
        calls: Number of the call that an operation was translated from, by its first output.
        fp32_constants: Constants that fp16 rounds, by name: those that are stored, or all; None if
            the precision is not fp16.
    """

    spec: Any
    package: Path
    compiled: Path | None
    calls: Mapping[str, int] = field(default_factory=dict[str, int])
    fp32_constants: Constants | None = None


@contextmanager
def convert_program(
    program: ExportedProgram,
    options: CompileOptions,
    in_fp32: frozenset[int] = frozenset(),
    *,
    records_constants: bool = False,
) -> Generator[Conversion]:
    """Convert ``program`` inside a temporary directory that is always removed.

    Args:
        program: A whole subgraph, in edge or ATen dialect; it may be modified.
        options: How to lower.
        in_fp32: Debug handles of calls that stay in fp32; see ``fp16.mark_fp32_calls``.
        records_constants: Whether to return all constants that fp16 rounds.

    Raises:
        OptionError: Coremltools does not accept an option, as an unknown pass or op type.
        ConversionError: Coremltools failed; the cause is chained.
        LoweringError: Ahead-of-time compilation is requested, but there is no compiler.
    """
    if options.model_type is ModelType.COMPILED_MODEL:
        check_compiler()
    with temporary_folder() as folder:
        yield _convert(
            lambda: (program, {}),
            options,
            in_fp32,
            folder,
            natural_lookups=_natural_lookups(program),
            records_constants=records_constants,
        )


def _natural_lookups(program: ExportedProgram) -> frozenset[int]:
    """Return the debug handles of lookups whose indices PyTorch refuses if negative."""
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    records = ((node, ops.record_of(target_name(node.target))) for node in calls)
    naturals = (node for node, record in records if record and record.natural_indices)
    return frozenset(node.meta[HANDLE] for node in naturals if HANDLE in node.meta)


@contextmanager
def convert_mil(
    build: Callable[[], MilSource],
    options: CompileOptions,
    in_fp32: frozenset[int] = frozenset(),
    *,
    records_constants: bool = False,
) -> Generator[Conversion]:
    """Convert a MIL program inside a temporary directory that is always removed.

    Args:
        build: Returns the program, made with coremltools' builder, and keywords of
            ``coremltools.convert`` such as ``inputs``. Called under the lock of coremltools' state.
        options: How to lower.
        in_fp32: Numbers of calls that stay in fp32; see ``debug_handles.numbered``.
        records_constants: Whether to return all constants that fp16 rounds.

    Raises:
        ConversionError: As ``convert_program``.
        LoweringError: As ``convert_program``.
    """
    with temporary_folder() as folder:
        yield _convert(
            build,
            options,
            in_fp32,
            folder,
            source="milinternal",
            records_constants=records_constants,
        )


@contextmanager
def compile_package(package: Mapping[str, Content]) -> Generator[Path]:
    """Compile an mlpackage inside a temporary directory that is always removed.

    Args:
        package: Its files.

    Yields:
        The mlmodelc.

    Raises:
        LoweringError: There is no compiler, or it fails.
    """
    check_compiler()
    with temporary_folder() as folder:
        source, destination = folder / "merged.mlpackage", folder / "merged.mlmodelc"
        write_folder(package, source)
        try:
            coremltools().models.utils.compile_model(str(source), str(destination))
        except Exception as error:
            raise LoweringError(
                "Core ML's compiler fails on the model",
                got=describe_error(error),
            ) from error
        yield destination


def translate(program: ExportedProgram, target: Opset | None) -> None:
    """Translate ``program`` to MIL by coremltools, without passes and without saving.

    This is much cheaper than a conversion, and nearly all failing conversions fail here.

    Args:
        program: As for ``convert_program``, but constants may be zeros of their shape and dtype.
        target: Opset to translate to, or None for the oldest.

    Raises:
        ConversionError: Coremltools failed; the cause is chained.
    """
    ct = coremltools()
    with (
        _LOCK,
        _quiet(),
        _filtered_log(_is_critical),
        patched(*_process_state()),
        _conversion_errors(),
    ):
        ct.convert(
            program,
            source="pytorch",
            convert_to="milinternal",
            minimum_deployment_target=None if target is None else ct.target(int(target)),
            pass_pipeline=ct.PassPipeline.EMPTY,
        )


def _process_state() -> tuple[Patch, ...]:
    """Return patches that keep a conversion from changing coremltools' process-wide state."""
    translations = {**ops.translations(), **opaque_ops.TRANSLATIONS}
    return (
        *coremltools_patches.own_names(),
        *coremltools_patches.with_translations(translations),
    )


def _convert(
    build: Callable[[], MilSource],
    options: CompileOptions,
    in_fp32: frozenset[int],
    folder: Path,
    *,
    records_constants: bool,
    natural_lookups: frozenset[int] = frozenset(),
    source: str = "pytorch",
) -> Conversion:
    ct = coremltools()
    keywords = {**convert_keywords(ct, options, in_fp32), "source": source}
    compression = compression_passes(ct, options)
    rewrites = () if options.device is None else REWRITES_IN_FP32[options.device]
    with (
        _LOCK,
        _quiet(),
        patched(
            coremltools_patches.TEMPORARY_FOLDER.with_state(str(folder)),
            *_process_state(),
        ),
    ):
        with (
            _conversion_errors(source),
            fp16_cast(rewrites, records_all=records_constants) as recorded,
            native_parts(),
            patched(
                *coremltools_errors.WORKAROUNDS,
                *coremltools_patches.faster(),
                coremltools_patches.GUARD_INDICES.with_state(natural_lookups),
                *_device_rewrites(options.device),
            ),
            _collecting_new_objects_only(),
        ):
            program, inputs = build()
            package_path = str(folder / "converted.mlpackage")
            model = ct.convert(program, package_dir=package_path, **keywords, **inputs)
            del program
            # Before compression, which creates a new model without handles.
            mil_program = coremltools_patches.mil_program(model)
            calls = operation_calls(mil_program)
            is_fp16 = options.precision is Precision.FLOAT16
            fp32_constants = remaining_constants(mil_program, recorded) if is_fp16 else None
            del mil_program
            for compress in compression:
                gc.collect()
                model = compress(model)
            compiled = None
            if options.model_type is ModelType.COMPILED_MODEL:
                # coremltools removes its compiled model with the object.
                compiled = shutil.copytree(
                    model.get_compiled_model_path(), folder / "converted.mlmodelc"
                )
            # coremltools 9.1 removes the package of a compressed model with the object.
            package = Path(model.package_path).rename(folder / "model.mlpackage")
            conversion = Conversion(model.get_spec(), package, compiled, calls, fp32_constants)
            # The MIL program holds the weights, and itself in cycles.
            del model
            gc.collect()
            _return_freed_memory()
        return conversion


def _device_rewrites(device: Device | None) -> tuple[Patch, ...]:
    """Return the patch that rewrites a program for a device at the end of a conversion."""
    if device is None:
        return ()

    def shape(program: Any) -> None:
        rewrite(program, REWRITES[device])
        remove_dead_code(program)

    return (coremltools_patches.BEFORE_NAMES.with_state(shape),)


def _return_freed_memory() -> None:
    """Return freed memory of constants to the system.

    Glibc retains freed blocks of up to 32 MB, which most weights are: 0.17 GB after two methods of
    a language model of 88 million parameters. Other allocators are not touched.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # other C libraries lack it
            trim(0)


def is_about_the_graph(error: Exception) -> bool:
    """Return whether a lowering failed because of the graph, so that a part of it may succeed.

    With refused options, or without memory, disk space or a compiler, every graph fails.
    """
    graph_errors = (UnsupportedOperatorError, ConversionError, ContractError)
    other_errors = (OptionError, LoweringError, OSError, MemoryError)
    return isinstance(error, graph_errors) or not isinstance(error, other_errors)


@contextmanager
def _collecting_new_objects_only() -> Generator[None]:
    """Exclude existing objects from garbage collection.

    A full collection takes twice as long as the conversion of a small network, because of the
    objects of torch and ExecuTorch; coremltools collects once per conversion.
    """
    if gc.get_freeze_count():  # unfreezing would undo the caller's freeze
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _conversion_errors(source: str = "pytorch") -> Generator[None]:
    """Raise coremltools' errors as ``ConversionError``, with the node being translated."""
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


def check_compiler() -> None:
    """Check that this machine can compile ahead of time.

    Raises:
        LoweringError: It cannot.
    """
    if shutil.which("xcrun") is None:
        raise LoweringError(
            "model_type COMPILED_MODEL needs Core ML's compiler, which only macOS has",
            remedy="Use MODEL_TYPE.MODEL (the device compiles at first load), or export on a Mac",
        )


@contextmanager
def _quiet() -> Generator[None]:
    """Silence coremltools' progress bars and numpy's arithmetic warnings.

    coremltools casts limits of fp32 to fp16, where infinity is the right result, and folds calls on
    constants: the logarithm of 0 is infinite, 0 / 0 is NaN, as on the device.
    """
    with (
        quiet_import(),
        _filtered_log(_is_unexpected),
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


def _is_critical(record: logging.LogRecord) -> bool:
    """Return whether a record of coremltools is more than a warning or error of a trial."""
    return record.levelno >= logging.CRITICAL


@contextmanager
def _filtered_log(is_kept: Callable[[logging.LogRecord], bool]) -> Generator[None]:
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

"""Lowering of one subgraph to the files of its blob; ``_lower`` has the steps, in order.

Only this module calls ``coremltools.convert``.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from coreml_delegate import opaque_ops, ops
from coreml_delegate.dynamic_shapes.symbols import relations_of
from coreml_delegate.errors import OptionError, UnsupportedOperatorError, near_matches
from coreml_delegate.formats import fp32_constants
from coreml_delegate.formats.blob import Files
from coreml_delegate.formats.blob_layout import DEBUG_INFO, identify
from coreml_delegate.formats.files import temporary_folder
from coreml_delegate.lowering import store
from coreml_delegate.lowering.compression import compression_passes
from coreml_delegate.lowering.contract import (
    Boundary,
    boundary_of,
    check_program,
    fix_sizes,
    name_boundary,
)
from coreml_delegate.lowering.debug_handles import (
    HANDLE,
    describe,
    number_calls,
    operation_calls,
)
from coreml_delegate.lowering.diagnostics import (
    conversion_errors,
    filtered_log,
    is_critical,
    quiet,
)
from coreml_delegate.lowering.fp16 import (
    fp16_cast,
    fp16_selector,
    mark_fp32_calls,
    remaining_constants,
)
from coreml_delegate.lowering.model_files import Conversion, check_compiler, model_files
from coreml_delegate.lowering.native_parts import native_parts
from coreml_delegate.lowering.prepare import prepare
from coreml_delegate.lowering.store import CachedBlob, ConversionCacheEntry
from coreml_delegate.mil.passes.for_devices import REWRITES, REWRITES_IN_FP32
from coreml_delegate.mil.passes.matching import remove_dead_code, rewrite
from coreml_delegate.ops.call import target_name
from coreml_delegate.options.compile_specs import ModelType, Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches import Patch, coremltools_errors, patched
from coreml_delegate.patches import coremltools as coremltools_patches
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Device, Opset


def build_files(
    program: ExportedProgram, options: CompileOptions, *, records_constants: bool = False
) -> Files:
    """Lower a subgraph, or read the result of an earlier lowering from the cache.

    Large files are mapped: they are deleted, but occupy disk space until the last reference is
    gone.

    Args:
        program: The subgraph, in edge or ATen dialect; it may be modified, its tensors are not.
        options: The compile options.
        records_constants: Whether to return the constants that fp16 rounds as well, as files beside
            those of the blob; see ``formats.fp32_constants``.

    Returns:
        The files of the blob; see ``formats.blob_layout``. Debug info has numbers of calls, which
        ``with_handles`` replaces. Equal arguments give equal bytes.

    Raises:
        UnsupportedOperatorError: Operators have no translation; the message lists all.
        ConversionError: Coremltools failed.
        ContractError: The device would refuse the result.
        OptionError: Weight compression needs a later deployment target.
    """
    options.check_compression()
    entry = ConversionCacheEntry.of(program, options, records_constants=records_constants)
    files = entry and entry.find()
    if files is None:
        files = _lower(program, options, records_constants=records_constants)
        if entry is not None:
            entry.keep(files)
    return files


def cached_blob(
    program: ExportedProgram, options: CompileOptions, *, records_constants: bool = False
) -> CachedBlob:
    """Lower a subgraph for ``CoreMLBackend.preprocess``, which takes the blob from the cache.

    Args:
        program: As for ``build_files``, also for errors.
        options: The compile options.
        records_constants: Whether the record has the constants that fp16 rounds.

    Returns:
        The record of the blob, which is cached as long as the record is referenced.
    """
    record = store.find(program, options)
    if record is None or (records_constants and record.fp32_constants is None):
        record = store.keep(program, options)
        files = build_files(program, options, records_constants=records_constants)
        record.files, constants = fp32_constants.split(files)
        record.fp32_constants = constants if records_constants else None
    return record


def _lower(program: ExportedProgram, options: CompileOptions, *, records_constants: bool) -> Files:
    # Check
    boundary = boundary_of(program, options)
    fix_sizes(program, boundary.shapes)
    check_program(boundary, options.deployment_target)
    _check_calls(program, options.deployment_target)
    if options.deployment_target is None:
        opset = max(required_opset(program, boundary), options.oldest_for_compression)
        # None is coremltools' oldest target, so only a later target is set.
        options = replace(options, deployment_target=opset if opset > Opset.iOS15 else None)
    # Number calls
    calls = number_calls(program)
    in_fp32 = mark_fp32_calls(program, options.keep_fp32)
    relations = {} if boundary.enumerated else relations_of(program)
    # Prepare
    prepare(program, options.deployment_target, options.device)
    # Convert
    with convert_program(
        program, options, in_fp32, records_constants=records_constants
    ) as conversion:
        # Name the boundary
        names = name_boundary(boundary, conversion.spec, relations)
        # Identify
        package = model_files(conversion, is_declared=bool(boundary.enumerated))
        files = identify(package, {"": names})[1]
        # Describe
        info = describe(conversion.spec, calls, conversion.calls, coremltools().__version__)
        constants = (conversion.fp32_constants if records_constants else None) or {}
        return {**files, DEBUG_INFO: info.encode(), **fp32_constants.as_files(constants)}


def check_translation(program: ExportedProgram, options: CompileOptions) -> None:
    """Check that coremltools translates a subgraph, whose constants may lack values.

    Raises:
        ConversionError: Coremltools failed.
    """
    boundary = boundary_of(program, options)
    target = options.deployment_target or required_opset(program, boundary)
    prepare(program, target)
    translate(program, target)


def _check_calls(program: ExportedProgram, target: Opset | None) -> None:
    """Refuse a program with calls that Core ML does not support.

    Raises:
        UnsupportedOperatorError: There are unsupported calls; the message lists all.
    """
    obstacles: dict[str, list[str]] = {}
    for node, reason in ops.obstacles_in(program, target).items():
        obstacles.setdefault(str(reason), []).append(node.name)
    if not obstacles:
        return
    listed = "; ".join(
        f"{', '.join(nodes[:3])}{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''}: {why}"
        for why, nodes in sorted(obstacles.items())
    )
    raise UnsupportedOperatorError(
        f"Core ML cannot take {sum(map(len, obstacles.values()))} node(s) of the graph",
        got=listed,
        remedy="Lower with CoreMLPartitioner(lower_full_graph=False) to run them on the CPU",
    )


def required_opset(program: ExportedProgram, boundary: Boundary) -> Opset:
    """Return the oldest opset that can express a subgraph, including its boundary and states."""
    return max(ops.required_opset(program.graph.nodes), boundary.opset)


# Conversion by coremltools

MilSource = tuple[Any, Mapping[str, Any]]
"""A program that coremltools converts, and further keywords of ``coremltools.convert``."""

# coremltools keeps global state while it converts.
_LOCK = threading.Lock()


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
        quiet(),
        filtered_log(is_critical),
        patched(*_process_state()),
        conversion_errors(),
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
    keywords = {**_keywords(ct, options, in_fp32), "source": source}
    compression = compression_passes(ct, options)
    rewrites = () if options.device is None else REWRITES_IN_FP32[options.device]
    with (
        _LOCK,
        quiet(),
        patched(
            coremltools_patches.TEMPORARY_FOLDER.with_state(str(folder)),
            *_process_state(),
        ),
    ):
        with (
            conversion_errors(source),
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
            constants = remaining_constants(mil_program, recorded) if is_fp16 else None
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
            conversion = Conversion(model.get_spec(), package, compiled, calls, constants)
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


# Options of coremltools

# With fp16 this pass narrows integers in gather, squeeze and top-k to 16 bits, signed or unsigned,
# for any values: apple/coremltools#2222, apple/coremltools#2626.
_EXCLUDED_PASSES = {"common::add_int16_cast"}


def _keywords(ct: Any, options: CompileOptions, in_fp32: frozenset[int]) -> dict[str, Any]:
    """Return the keywords for ``coremltools.convert``.

    Args:
        ct: Coremltools.
        options: How to lower.
        in_fp32: Debug handles of the calls that stay in fp32.

    Raises:
        OptionError: Coremltools does not know a graph pass or MIL op; or precision is ``auto``.
    """
    if options.precision is Precision.AUTO:
        raise OptionError(
            "precision auto is chosen by a measurement before a program is lowered",
            remedy="Lower with to_edge_transform_and_lower and CoreMLPartitioner, or choose "
            "float16 or float32",
        )
    target = options.deployment_target
    return {
        "convert_to": "mlprogram",
        "minimum_deployment_target": None if target is None else ct.target(int(target)),
        "compute_units": ct.ComputeUnit[options.compute_unit.name],
        "pass_pipeline": _pipeline(ct, options),
        "compute_precision": _precision(ct, options, in_fp32),
        # Ahead-of-time compilation needs loading, which is only possible with Core ML.
        "skip_model_load": options.model_type is not ModelType.COMPILED_MODEL,
    }


def _precision(ct: Any, options: CompileOptions, in_fp32: frozenset[int]) -> Any:
    """Return coremltools' precision, or its fp16 transform if ops stay in fp32."""
    keep = options.keep_fp32
    is_fp32 = options.precision is Precision.FLOAT32
    if is_fp32 or not (keep.ops or in_fp32):
        return ct.precision.FLOAT32 if is_fp32 else ct.precision.FLOAT16
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    core_ops = SSAOpRegistry.core_ops
    for name in keep.ops:
        if name not in core_ops:
            raise OptionError(
                "keep_fp32 names an unknown MIL op",
                got=repr(name),
                expected=near_matches(name, core_ops, ""),
            )
    return ct.transform.FP16ComputePrecision(op_selector=fp16_selector(keep, in_fp32))


def _pipeline(ct: Any, options: CompileOptions) -> Any:
    if options.pass_names is not None:
        return pass_pipeline(options.pass_names)
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(_EXCLUDED_PASSES)
    return pipeline


def pass_pipeline(pass_names: Sequence[str]) -> Any:
    """Return coremltools' ``PassPipeline`` with these passes.

    Raises:
        OptionError: A pass is unknown.
    """
    ct = coremltools()
    passes = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY.passes
    for name in pass_names:
        if name not in passes:
            raise OptionError(
                "unknown coremltools pass",
                got=repr(name),
                expected=near_matches(name, passes, ""),
            )
    return ct.PassPipeline(list(pass_names), pipeline_name="coreml_delegate")


def check_accepted(options: CompileOptions) -> None:
    """Check that coremltools accepts the options.

    Raises:
        OptionError: Coremltools does not know a graph pass or MIL op, or does not take a
            compression of weights.
    """
    ct = coremltools()
    _pipeline(ct, options)
    _precision(ct, options, frozenset())
    compression_passes(ct, options)

"""Lowering of one subgraph to the files of its blob; ``_lower`` has the steps, in order."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from executorch.exir.backend.backend_details import PreprocessResult
from torch.export import ExportedProgram

from coreml_delegate.dynamic_shapes.symbols import relations_of
from coreml_delegate.errors import UnsupportedOperatorError
from coreml_delegate.formats import fp32_constants
from coreml_delegate.formats.blob import Files, flatten
from coreml_delegate.formats.blob_layout import (
    COMPILED,
    DEBUG_INFO,
    PACKAGE,
    debug_info_in,
    identify,
    in_folder,
)
from coreml_delegate.formats.mlpackage import MAIN, WEIGHTS, assemble, locate, map_folder
from coreml_delegate.lowering import fp16
from coreml_delegate.lowering.contract import (
    Boundary,
    boundary_of,
    check_program,
    fix_sizes,
    name_boundary,
)
from coreml_delegate.lowering.convert import (
    Conversion,
    compile_package,
    convert_program,
    translate,
)
from coreml_delegate.lowering.debug_handles import describe, handle_map, number_calls
from coreml_delegate.lowering.prepare import prepare
from coreml_delegate.lowering.store import ConversionCacheEntry
from coreml_delegate.ops import obstacles_in
from coreml_delegate.ops import required_opset as opset_of_calls
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset

_COREMLTOOLS = "com.github.apple.coremltools"
_MAPPED = 16 * 2**20
"""Smallest size in bytes of a file that is mapped, not read, until the blob is assembled."""


def result_of(files: Files) -> PreprocessResult:
    """Return ExecuTorch's result for a blob, with the debug handles of its debug info."""
    handles = handle_map(debug_info_in(files))
    return PreprocessResult(processed_bytes=flatten(files), debug_handle_map=handles)


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
    in_fp32 = fp16.mark_fp32_calls(program, options.keep_fp32)
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
    for node, reason in obstacles_in(program, target).items():
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
    return max(opset_of_calls(program.graph.nodes), boundary.opset)


def model_files(conversion: Conversion, *, is_declared: bool) -> Files:
    """Return the files of a converted model, with their paths in a blob.

    Args:
        conversion: The converted model.
        is_declared: Whether enumerated shapes were declared after the conversion, so that a
            compiled model has to be compiled again.
    """
    if conversion.compiled is not None and not is_declared:
        return compiled_files(conversion.compiled)
    parts = locate(map_folder(conversion.package, smallest=_MAPPED))
    weights = {name.removeprefix(f"{WEIGHTS}/"): data for name, data in parts.weights.items()}
    metadata = conversion.spec.description.metadata.userDefined
    _drop_build_details(metadata)
    if conversion.fp32_constants is not None:
        fp32_constants.write(metadata, {MAIN: conversion.fp32_constants})
    # Map entries have no order in protobuf; deterministic serialization sorts them.
    spec = conversion.spec.SerializeToString(deterministic=True)
    package = assemble(spec, weights)
    if conversion.compiled is None:
        return in_folder(PACKAGE, package)
    with compile_package(package) as path:
        return compiled_files(path)


def _drop_build_details(metadata: MutableMapping[str, str]) -> None:
    """Remove the conversion date and torch's build (``+cpu`` in ``2.13.0+cpu``) from metadata.

    They would make the bytes, and thus the identifiers, of equal models differ.
    """
    metadata.pop(f"{_COREMLTOOLS}.conversion_date", None)
    source = f"{_COREMLTOOLS}.source"
    if source in metadata:
        metadata[source] = metadata[source].partition("+")[0]


def compiled_files(folder: Path) -> Files:
    """Return the files of a compiled model; the folder may be removed afterwards."""
    return in_folder(COMPILED, map_folder(folder, smallest=_MAPPED))

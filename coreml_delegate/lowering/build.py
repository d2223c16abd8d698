"""Lowering of one subgraph to the files of its blob."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from executorch.exir.backend.backend_details import PreprocessResult
from torch.export import ExportedProgram

from coreml_delegate.compile_options import CompileOptions, Precision
from coreml_delegate.dynamic_shapes import input_sizes, symbols
from coreml_delegate.dynamic_shapes.enumerated import Shape
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
from coreml_delegate.lowering import contract, enumerated_shapes, fp16
from coreml_delegate.lowering.conversion_cache import ConversionCacheEntry
from coreml_delegate.lowering.convert import Conversion, compile_package, convert_program
from coreml_delegate.lowering.debug_handles import (
    describe,
    handle_map,
    handles_of,
    number_calls,
    with_handles,
)
from coreml_delegate.lowering.prepare import prepare
from coreml_delegate.ops import obstacles_in
from coreml_delegate.ops import required_opset as opset_of_calls
from coreml_delegate.targets import Opset
from coreml_delegate.third_party import coremltools

_COREMLTOOLS = "com.github.apple.coremltools"
_MAPPED = 16 * 2**20
"""Smallest size in bytes of a file that is mapped, not read, until the blob is assembled."""


def build_blob(program: ExportedProgram, options: CompileOptions) -> bytes:
    """Lower a subgraph to its blob; see ``build_files``."""
    handles = handles_of(program)
    return flatten(with_handles(build_files(program, options), handles))


def result_of(files: Files) -> PreprocessResult:
    """Return ExecuTorch's result for a blob, with the debug handles of its debug info."""
    handles = handle_map(debug_info_in(files))
    return PreprocessResult(processed_bytes=flatten(files), debug_handle_map=handles)


def build_files(program: ExportedProgram, options: CompileOptions) -> Files:
    """Lower a subgraph, or read the result of an earlier lowering from the cache.

    Large files are mapped: they are deleted, but occupy disk space until the last reference is
    gone.

    Args:
        program: The subgraph, in edge or ATen dialect; it may be modified, its tensors are not.
        options: The compile options.

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
    entry = ConversionCacheEntry.of(program, options)
    files = entry and entry.find()
    if files is None:
        files = _convert(program, options)
        if entry is not None:
            entry.keep(files)
    return files


def _convert(program: ExportedProgram, options: CompileOptions) -> Files:
    shapes = check_enumerated(program, options)
    inputs = enumerated_shapes.enumerated_inputs(shapes)
    enumerated_shapes.fix_sizes(program, shapes)
    boundary = contract.boundary_of(program)
    contract.check_program(boundary, options.deployment_target)
    check_supported(program, options.deployment_target)
    if options.deployment_target is None:
        opset = max(required_opset(program, inputs), options.oldest_for_compression)
        # None is coremltools' oldest target, so only a later target is set.
        options = replace(options, deployment_target=opset if opset > Opset.iOS15 else None)
    calls = number_calls(program)
    in_fp32 = fp16.mark_fp32_calls(program, options.keep_fp32)
    sizes = {} if inputs else symbols.relations_of(program)
    prepare(program, _fp16_rewrites(options, in_fp32))
    with convert_program(program, options, in_fp32) as conversion:
        names = contract.check_model(boundary, conversion.spec)
        # Features may have other names than inputs, but are in the same order.
        feature_of = {name: names.input_names[i] for i, (name, _) in enumerate(boundary.inputs)}
        enumerated_shapes.declare(
            conversion.spec, {feature_of[name]: shapes for name, shapes in inputs.items()}
        )
        input_sizes.write(
            conversion.spec.description.metadata.userDefined,
            {MAIN: {feature_of[name]: listed for name, listed in sizes.items()}},
        )
        files = identify(model_files(conversion, is_declared=bool(inputs)), {"": names})[1]
        info = describe(conversion.spec, calls, conversion.calls, coremltools().__version__)
        return {**files, DEBUG_INFO: info.encode()}


def _fp16_rewrites(
    options: CompileOptions, in_fp32: frozenset[int]
) -> Callable[[ExportedProgram], None] | None:
    """Return the rewrites of a prepared program for fp16; None for another precision."""
    if options.precision is not Precision.FLOAT16:
        return None

    def rewrite(program: ExportedProgram) -> None:
        fp16.avoid_fp16_overflow(program, in_fp32, options.keep_fp32.ops)

    return rewrite


def check_supported(program: ExportedProgram, target: Opset | None) -> None:
    """Refuse a program with operators that Core ML does not support.

    Raises:
        UnsupportedOperatorError: There are unsupported operators; the message lists all.
    """
    obstacles: dict[str, list[str]] = {}
    for node, reason in obstacles_in(program, target).items():
        obstacles.setdefault(str(reason), []).append(node.name)
    if obstacles:
        raise unsupported_error(obstacles)


def unsupported_error(obstacles: Mapping[str, list[str]]) -> UnsupportedOperatorError:
    """Return an error that lists every obstacle with its nodes."""
    listed = "; ".join(
        f"{', '.join(nodes[:3])}{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''}: {why}"
        for why, nodes in sorted(obstacles.items())
    )
    return UnsupportedOperatorError(
        f"Core ML cannot take {sum(map(len, obstacles.values()))} node(s) of the graph",
        got=listed,
        remedy="Lower with CoreMLPartitioner(lower_full_graph=False) to run them on the CPU",
    )


def required_opset(
    program: ExportedProgram, enumerated: Mapping[str, tuple[Shape, ...]] | None = None
) -> Opset:
    """Return the oldest opset that can express a subgraph, including its boundary and states.

    Args:
        program: The subgraph.
        enumerated: Enumerated shapes by input name.
    """
    boundary = contract.boundary_of(program)
    calls = opset_of_calls(program.graph.nodes)
    several = len(enumerated or ()) > 1
    shapes = enumerated_shapes.SEVERAL_INPUTS_OPSET if several else Opset.iOS15
    return max(calls, contract.required_opset(boundary), shapes)


def check_enumerated(
    program: ExportedProgram, options: CompileOptions
) -> dict[str, tuple[Shape, ...]]:
    """Return each input's shape per combination; empty without enumerated shapes.

    Raises:
        ContractError: The target does not support enumerated shapes of several inputs, or an
            input's shape does not follow from the shapes of the program's inputs.
    """
    if options.enumerated_shapes is None:
        return {}
    shapes = enumerated_shapes.boundary_shapes(program, options.enumerated_shapes)
    enumerated_shapes.check_target(
        enumerated_shapes.enumerated_inputs(shapes), options.deployment_target
    )
    return shapes


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

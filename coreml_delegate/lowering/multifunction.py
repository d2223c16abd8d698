"""Lowering of several methods: partitions that share weights become functions of one model.

A multifunction model is stored once, in the program's named data, and each delegate refers to it.
It needs iOS18. By strategy:

- ``positional``: the n-th partitions of all methods become one model; if they cannot, it is an
  error.
- no strategy: in methods with equally many partitions, the n-th partitions become one model if
  they have common weights and the same target, iOS18 or later. All others become separate models,
  and the reason is stored with their blobs.
- ``disabled``: every partition becomes a separate model.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: one ``MLState`` per loaded handle.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from coreml_delegate.errors import ContractError, LoweringError, OptionError
from coreml_delegate.formats.blob import ALIGNMENT, BlobReference, Files, flatten, size_of
from coreml_delegate.formats.blob_layout import (
    DEBUG_INFO,
    PACKAGE,
    debug_info_in,
    identify,
    in_folder,
)
from coreml_delegate.lowering import debug_handles, store
from coreml_delegate.lowering.build import build_files, required_opset
from coreml_delegate.lowering.contract import boundary_of
from coreml_delegate.lowering.debug_handles import handles_of, with_handles
from coreml_delegate.lowering.merging import FunctionModel, merge
from coreml_delegate.lowering.model_files import (
    check_compiler,
    compile_package,
    compiled_files,
    result_of,
)
from coreml_delegate.lowering.store import Outcome, Sharing
from coreml_delegate.ops.constants import state_value
from coreml_delegate.options.compile_specs import ModelType, WeightSharing
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.executorch import NamedDataStore
from coreml_delegate.targets import STATE_OPSET, Opset

logger = logging.getLogger(__name__)

_OR_DISABLE = "Use strategy DISABLED to make every partition a model by itself"


@dataclass(frozen=True, slots=True)
class _Partition:
    """A subgraph and its compile options.

    Attributes:
        handles: Debug handles of its calls; see ``handles_of``.
    """

    method: str
    index: int
    program: ExportedProgram
    options: CompileOptions
    handles: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"partition {self.index} of {self.method!r}"


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A partition with the files of its blob, before weights are shared."""

    partition: _Partition
    files: Files
    outcome: Outcome

    def __str__(self) -> str:
        return str(self.partition)


def lower_methods(
    programs: Mapping[str, Sequence[ExportedProgram]],
    specs: Mapping[str, Sequence[list[CompileSpec]]],
) -> dict[str, list[PreprocessResult]]:
    """Lower the partitions of all methods.

    Args:
        programs: The subgraphs of each method, in order.
        specs: The compile specs of each subgraph; rewritten in place to the canonical form.

    Returns:
        By method the blob of each subgraph, or a reference to a blob in the named data.

    Raises:
        OptionError: Options of different methods, or a strategy and a target, exclude each other.
        ContractError: Several methods would have separate states for one buffer.
        LoweringError: ``positional``, and the methods have different numbers of partitions; or see
            ``build_files``.
    """
    partitions = {
        method: [
            _Partition(method, index, program, CompileOptions.from_specs(spec), handles_of(program))
            for index, (program, spec) in enumerate(zip(subgraphs, specs[method], strict=True))
        ]
        for method, subgraphs in programs.items()
    }
    strategy = _strategy(p.options for listed in partitions.values() for p in listed)
    if strategy is WeightSharing.POSITIONAL and len(partitions) > 1:
        partitions = {
            method: list(map(_with_sharing_target, listed)) for method, listed in partitions.items()
        }
    results = _results(partitions, strategy)
    for method, listed in partitions.items():
        for partition, spec in zip(listed, specs[method], strict=True):
            spec[:] = partition.options.to_specs()
    return {
        method: [results[method, partition.index] for partition in listed]
        for method, listed in partitions.items()
    }


def check_target(options: CompileOptions) -> None:
    """Check that the deployment target supports the weight-sharing strategy.

    Raises:
        OptionError: ``positional`` below iOS18.
    """
    target = options.deployment_target
    if (
        options.weight_sharing is WeightSharing.POSITIONAL
        and target is not None
        and target < STATE_OPSET
    ):
        raise OptionError(
            f"methods share weights from {STATE_OPSET.name} ({STATE_OPSET.platforms}) on",
            got=f"strategy POSITIONAL and minimum_deployment_target {target.name}",
            remedy=f"Raise it. {_OR_DISABLE}",
        )


_Results = dict[tuple[str, int], PreprocessResult]
_Partitions = Mapping[str, Sequence[_Partition]]


def _results(partitions: _Partitions, strategy: WeightSharing | None) -> _Results:
    everything = [partition for listed in partitions.values() for partition in listed]
    if len(partitions) < 2:
        return _separate_blobs(_lower_each(everything))
    _check_shared_buffers(
        {m: [p.program for p in listed] for m, listed in partitions.items()},
        are_independent=strategy is WeightSharing.DISABLED,
    )
    if strategy is WeightSharing.DISABLED:
        lowered = _lower_each(everything)
        for entry in lowered:
            entry.outcome.sharing = Sharing(reason="strategy DISABLED was asked for")
        return _separate_blobs(lowered)
    if strategy is WeightSharing.POSITIONAL:
        return _share_by_position(partitions)
    return _share_where_safe(partitions)


def _strategy(options: Iterable[CompileOptions]) -> WeightSharing | None:
    strategies = {o.weight_sharing for o in options if o.weight_sharing is not None}
    if len(strategies) > 1:
        raise OptionError(
            "methods are given different strategies to share weights",
            got=" and ".join(sorted(strategy.name for strategy in strategies)),
            expected="one for all",
        )
    return strategies.pop() if strategies else None


def _lower_each(partitions: Sequence[_Partition]) -> list[_Lowered]:
    """Lower each partition separately, or take its blob from the cache."""
    cached = [
        (partition, store.find(partition.program, partition.options)) for partition in partitions
    ]
    records = {id(record): record for _, record in cached if record is not None}
    # Methods with equal partitions have one record.
    uses = Counter(id(record) for _, record in cached if record is not None)
    outcomes = {key: iter(record.latest(uses[key])) for key, record in records.items()}
    blobs = {key: record.hand_over() for key, record in records.items()}
    lowered: list[_Lowered] = []
    for partition, record in cached:
        files = None if record is None else blobs[id(record)]
        outcome = Outcome() if record is None else next(outcomes[id(record)])
        files = build_files(partition.program, partition.options) if files is None else files
        lowered.append(_Lowered(partition, with_handles(files, partition.handles), outcome))
    return lowered


def _by_method(lowered: Iterable[_Lowered]) -> dict[str, list[_Lowered]]:
    groups: dict[str, list[_Lowered]] = {}
    for entry in lowered:
        groups.setdefault(entry.partition.method, []).append(entry)
    return groups


def _separate_blobs(lowered: Iterable[_Lowered]) -> _Results:
    return {(e.partition.method, e.partition.index): result_of(e.files) for e in lowered}


def _share_by_position(partitions: _Partitions) -> _Results:
    """Merge the n-th partitions of all methods into one model, for every n."""
    counts = {method: len(listed) for method, listed in partitions.items()}
    if len(set(counts.values())) > 1:
        raise LoweringError(
            "strategy POSITIONAL needs equally many partitions in all methods",
            got=", ".join(f"{count} in {method!r}" for method, count in counts.items()),
            remedy=f"See partitioner.reports for what divides them. {_OR_DISABLE}",
        )
    everything = [partition for listed in partitions.values() for partition in listed]
    kinds = {partition.options.model_type for partition in everything}
    if len(kinds) > 1:
        raise OptionError(
            "methods that share weights need one model_type",
            got=" and ".join(sorted(kind.name for kind in kinds)),
        )
    if ModelType.COMPILED_MODEL in kinds:
        check_compiler()
    # Only the merged model is compiled.
    packages = [
        replace(partition, options=replace(partition.options, model_type=ModelType.MODEL))
        for partition in everything
    ]
    lowered = _by_method(_lower_each(packages))
    results: _Results = {}
    for row in zip(*lowered.values(), strict=True):
        models = [FunctionModel.of(entry.files) for entry in row]
        reason = _target_reason(models)
        if reason:
            raise LoweringError(
                "partitions cannot be one model",
                got=f"{', '.join(map(str, row))}: {reason}",
                remedy=f"Pass the latest target as minimum_deployment_target. {_OR_DISABLE}",
            )
        results |= _share_model(row, models, kinds.copy().pop())
    return results


def _with_sharing_target(partition: _Partition) -> _Partition:
    """Return the partition with a deployment target that has multifunction models.

    Raises:
        OptionError: The options name an older deployment target.
    """
    options = replace(partition.options, weight_sharing=WeightSharing.POSITIONAL)
    check_target(options)
    if options.deployment_target is None:
        boundary = boundary_of(partition.program, options)
        target = max(required_opset(partition.program, boundary), STATE_OPSET)
        options = replace(options, deployment_target=target)
    return replace(partition, options=options)


def _share_where_safe(partitions: _Partitions) -> _Results:
    """Merge partitions with common weights; record why all others are separate models."""
    lowered = _by_method(_lower_each([p for listed in partitions.values() for p in listed]))
    by_count: dict[int, list[str]] = {}
    for method, listed in lowered.items():
        by_count.setdefault(len(listed), []).append(method)
    results: _Results = {}
    for count, methods in by_count.items():
        for index in range(count):
            row = [lowered[method][index] for method in methods]
            if len(row) == 1:
                counts = ", ".join(
                    f"{m!r} {len(p)}" for m, p in partitions.items() if m != methods[0]
                )
                results |= _keep_separate(row, f"no other method has as many partitions ({counts})")
            else:
                results |= _share_at_position(row)
    return results


def _share_at_position(row: Sequence[_Lowered]) -> _Results:
    """Share weights among the n-th partitions of several methods."""
    by_kind: dict[ModelType, list[_Lowered]] = {kind: [] for kind in ModelType}
    for entry in row:
        by_kind[entry.partition.options.model_type].append(entry)
    packages = by_kind[ModelType.MODEL]
    results = _keep_separate(
        by_kind[ModelType.COMPILED_MODEL],
        "a model compiled ahead of time is shared with strategy POSITIONAL only",
    )
    models = [FunctionModel.of(package.files) for package in packages]
    for group in _group_by_common_weights(models):
        members, member_models = [packages[i] for i in group], [models[i] for i in group]
        if len(members) == 1:
            results |= _keep_separate(
                members, "no other method has a weight in common with it here"
            )
        elif reason := _target_reason(member_models):
            results |= _keep_separate(members, reason)
        else:
            results |= _share_model(members, member_models, ModelType.MODEL)
    return results


def _group_by_common_weights(models: Sequence[FunctionModel]) -> list[list[int]]:
    """Return groups of indices: models with a common weight are in the same group."""
    groups: list[tuple[set[object], list[int]]] = []
    for index, model in enumerate(models):
        keys: set[object] = set(model.weights)
        members = [index]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            members += group[1]
        groups.append((keys, sorted(members)))
    return sorted(members for _, members in groups)


def _target_reason(models: Sequence[FunctionModel]) -> str:
    """Return why the targets of the models prevent a merge; empty if they do not."""
    versions = sorted({model.version for model in models})
    if versions[0] < STATE_OPSET:
        return (
            f"weights in common can be shared from {STATE_OPSET.name} on, and this is lowered for "
            f"{Opset(versions[0]).name}; see minimum_deployment_target"
        )
    if len(versions) > 1:
        return f"they need different targets ({', '.join(Opset(v).name for v in versions)})"
    return ""


def _keep_separate(lowered: Sequence[_Lowered], reason: str) -> _Results:
    for entry in lowered:
        entry.outcome.sharing = Sharing(reason=reason)
        logger.info("%s is a model by itself: %s", entry, reason)
    return _separate_blobs(lowered)


def _share_model(
    row: Sequence[_Lowered], models: Sequence[FunctionModel], kind: ModelType
) -> _Results:
    """Merge partitions into one model with a function for each."""
    methods = tuple(entry.partition.method for entry in row)
    functions = _function_names(methods)
    names = {method: model.names for method, model in zip(methods, models, strict=True)}
    package = merge(dict(zip(functions, models, strict=True)))
    infos = [
        debug_handles.of_function(debug_info_in(entry.files), function)
        for entry, function in zip(row, functions, strict=True)
    ]
    key, files = identify(_model_files(package, kind), names)
    if info := debug_handles.merge_infos(infos):
        files[DEBUG_INFO] = encoded = info.encode()
        # Equal models may have different debug handles, and a key has only one content.
        key = f"{key}_{hashlib.sha256(encoded).hexdigest()[:8]}"
    blob = flatten(files)
    store = NamedDataStore()
    store.add_named_data(key, blob, alignment=ALIGNMENT)
    data = store.get_named_data_store_output()
    separate = sum(size_of(content) for entry in row for content in entry.files.values())
    logger.info(
        "%s are one model: %d bytes instead of %d", ", ".join(map(str, row)), len(blob), separate
    )
    results: _Results = {}
    for entry, function, info in zip(row, functions, infos, strict=True):
        entry.outcome.sharing = Sharing(methods=methods)
        results[entry.partition.method, entry.partition.index] = PreprocessResult(
            processed_bytes=BlobReference(key, function).encode(),
            debug_handle_map=debug_handles.handle_map(info),
            data_store_output=data,
        )
    return results


def _model_files(package: Files, kind: ModelType) -> Files:
    if kind is ModelType.MODEL:
        return in_folder(PACKAGE, package)
    with compile_package(package) as folder:
        return compiled_files(folder)


def _function_names(methods: Sequence[str]) -> Sequence[str]:
    """Return the function names: the methods' names, if all are valid names in MIL."""
    if all(name.isascii() and name.isidentifier() for name in methods):
        return methods
    return [f"function_{index}" for index in range(len(methods))]


# Buffers that methods share

_PASS_THROUGH = "Pass the buffer in and out of every method"
# ExecuTorch shares the buffers that methods write; a buffer that a method only reads is a constant.
_LEAVE_TO_EXECUTORCH = (
    "Set take_over_mutable_buffer=False and let ExecuTorch share the buffer, with "
    "MemoryPlanningPass(share_mutable_buffers=True), or pass it in and out of every method"
)


@dataclass(frozen=True, slots=True)
class _BufferUse:
    """How a method uses a buffer inside its delegates."""

    method: str
    is_written: bool

    def __str__(self) -> str:
        return f"{'written' if self.is_written else 'read'} by {self.method!r}"


def _check_shared_buffers(
    programs: Mapping[str, Sequence[ExportedProgram]], *, are_independent: bool
) -> None:
    """Check that no buffer is a state of one method and also used by another method.

    A module's methods share its buffers, but Core ML shares no state between delegates: no method
    would see the writes of another. Buffers are the same if they have the same name, shape and
    dtype.

    Args:
        programs: The subgraphs of each method.
        are_independent: Only warn, because methods are declared independent.

    Raises:
        ContractError: There is such a buffer, and methods are not independent.
    """
    uses: dict[tuple[str, torch.Size, torch.dtype], dict[str, _BufferUse]] = {}
    for method, subgraphs in programs.items():
        for program in subgraphs:
            for name, tensor, is_written in _buffers(program):
                by_method = uses.setdefault((name, tensor.shape, tensor.dtype), {})
                before = by_method.get(method)
                by_method[method] = _BufferUse(
                    method, is_written or (before is not None and before.is_written)
                )
    divided = {
        name: by_method.values()
        for (name, _, _), by_method in uses.items()
        if len(by_method) > 1 and any(use.is_written for use in by_method.values())
    }
    if not divided:
        return
    listed = "; ".join(f"{name} ({', '.join(map(str, used))})" for name, used in divided.items())
    if are_independent:
        logger.warning(
            "Core ML states are not shared between methods; each has its own of: %s", listed
        )
        return
    all_write = all(use.is_written for used in divided.values() for use in used)
    raise ContractError(
        "Core ML states are not shared between methods",
        got=listed,
        remedy=f"{_LEAVE_TO_EXECUTORCH if all_write else _PASS_THROUGH}. "
        "Strategy DISABLED gives each method a buffer of its own",
    )


def _buffers(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name and value of each buffer inside a delegate, and whether the delegate writes it."""
    signature = program.graph_signature
    mutated = set(signature.buffers_to_mutate.values())
    for name in signature.inputs_to_buffers.values():
        value = state_value(program, name)
        if value is not None:
            yield name, value, name in mutated

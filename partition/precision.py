"""Precision ``auto`` of a program of ``torch.export``.

While a program is partitioned, its partitions in fp16 are lowered and measured, and again with the
calls in fp32 that ``runtime.precision`` chooses. Calls are found by debug handle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.blob_layout import METADATA, ModelMetadata
from coreml_delegate.formats.fp32_constants import Constants
from coreml_delegate.lowering.delegation_tags import copy_program, tag_constants
from coreml_delegate.lowering.store import CachedBlob
from coreml_delegate.lowering.subgraph import real_values
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.partition.undelegated import decompose_undelegated, require_out_variants
from coreml_delegate.patches.torch import OpOverload, pytree
from coreml_delegate.runtime.precision import Call


class _TaggedPartitioner(Partitioner):
    """Delegates the partitions of a program that is tagged already."""

    def __init__(self, delegations: Mapping[str, DelegationSpec], *, tags_constants: bool) -> None:
        super().__init__()
        self._delegations = delegations
        self._tags_constants = tags_constants

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        if self._tags_constants:
            tag_constants(exported_program)  # a copied graph has the users in another order
        return PartitionResult(exported_program, dict(self._delegations))


def lower_tagged(
    program: ExportedProgram,
    delegations: Mapping[str, DelegationSpec],
    blobs: Collection[CachedBlob],
    preserved: Collection[OpOverload],
    *,
    tags_constants: bool,
) -> bytes:
    """Return the ``.pte`` of a tagged program; its method is ``forward``.

    Args:
        program: In edge dialect; its parameters and buffers may be fake. It is not changed.
        delegations: Of the partitions, by tag.
        blobs: Of the partitions; they stay in the cache.
        preserved: The ops protected from decomposition.
        tags_constants: Whether partitions contain the constants that they use.

    Raises:
        OptionError: The program has delegates of other backends, which do not run here.
        CoreMLDelegateError: See ``decompose_undelegated`` and ``require_out_variants``.
    """
    _refuse_other_backends(program)
    copied = copy_program(program, real_values(program.state_dict))
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = EdgeProgramManager(copied, compile_config=config)
    with ExitStack() as stack:
        for blob in blobs:
            stack.enter_context(blob.lent())
        partitioner = _TaggedPartitioner(delegations, tags_constants=tags_constants)
        manager = manager.to_backend(partitioner)
    lowered = manager.exported_program()
    decompose_undelegated(lowered, preserved)
    require_out_variants(lowered)
    return bytes(manager.to_executorch().buffer)


def _refuse_other_backends(program: ExportedProgram) -> None:
    backends = {
        module.backend_id
        for module in program.graph_module.modules()
        if isinstance(module, LoweredBackendModule)
    }
    if backends:
        raise OptionError(
            "precision auto cannot measure a program with delegates of another backend",
            got=", ".join(sorted(backends)),
            remedy="Put CoreMLPartitioner before the other partitioners",
        )


def fp32_constants_of(blobs: Iterable[CachedBlob]) -> Mapping[str, Constants]:
    """Return the constants that fp16 rounds, of each partition, by identifier of its model."""
    return {
        ModelMetadata.decode(cast(Buffer, blob.files[METADATA])).identifier: blob.fp32_constants
        for blob in blobs
        if blob.files is not None and blob.fp32_constants is not None
    }


def calls_by_handle(report: DelegationReport) -> Mapping[int, list[Call]]:
    """Return the delegated calls of a report, by debug handle."""
    by_handle: dict[int, list[Call]] = {}
    for node in report.delegated:
        if node.debug_handle is not None:
            by_handle.setdefault(node.debug_handle, []).append(Call(node.name, node.place))
    return by_handle


def samples_for(
    program: ExportedProgram, data: Collection[Collection[Any]] | None
) -> list[list[Any]]:
    """Return the inputs to measure a program with, flattened.

    Args:
        program: From ``torch.export``.
        data: The user's samples, each with the arguments of a call; None for the example inputs
            that the program was exported with.

    Raises:
        OptionError: There are no inputs.
        InputError: A sample has another number of inputs than the program.
    """
    samples = [program.example_inputs] if data is None else list(data)
    if not samples or samples[0] is None:
        raise OptionError(
            "precision auto measures a program on example inputs",
            got="a program without example inputs" if data is None else "an empty list",
            remedy="Pass precision_data, a list of the arguments of calls",
        )
    leaves = [pytree.tree_leaves(sample) for sample in samples]
    count = len(program.graph_signature.user_inputs)
    for sample in leaves:
        if len(sample) != count:
            raise InputError(
                "a sample of precision_data has the wrong number of inputs",
                got=str(len(sample)),
                expected=str(count),
                remedy="Pass a list of samples, each a tuple of the arguments of a call",
            )
    return [[_copied(leaf) for leaf in sample] for sample in leaves]


def interface_of(program: ExportedProgram) -> tuple[str, ...]:
    """Return the ranks of a program's inputs, or their types; names and symbols may change."""
    inputs = set(program.graph_signature.user_inputs)
    return tuple(
        _described(node.meta.get("val"))
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in inputs
    )


def _described(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"{value.dim()} dimensions" if is_tensor else type(value).__name__


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

"""Precision ``auto`` of a program of ``torch.export``: its calls by debug handle, its samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.partition.report import DelegationReport
from coreml_delegate.patches.torch import pytree
from coreml_delegate.runtime.precision import Call


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
    """Return the names and shapes of a program's inputs, which tell methods apart."""
    inputs = set(program.graph_signature.user_inputs)
    return tuple(
        f"{node.name} {_described(node.meta.get('val'))}"
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in inputs
    )


def _described(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

"""Blobs converted while partitioning, kept for ``preprocess``, so that nothing is converted twice.

A partitioner converts each partition to see that it converts. ExecuTorch then cuts the same
partition out of the program, copies it, and asks the backend for its blob. A blob is handed over
only for the very same subgraph: same graph, same options, equal constants.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.compile_options import CompileOptions


@dataclass(slots=True, weakref_slot=True, eq=False)
class KeptBlob:
    """A blob waiting for its subgraph; it waits as long as somebody holds this record."""

    blob: bytes | None
    constants: Mapping[str, tuple[torch.Tensor, int]]


_KEPT: weakref.WeakValueDictionary[str, KeptBlob] = weakref.WeakValueDictionary()


def fingerprint(program: ExportedProgram, options: CompileOptions) -> str:
    """Digest of a subgraph, values of constants aside, and of how it is to be lowered."""
    lines = [f"{spec.key}={bytes(spec.value)!r}" for spec in options.to_specs()]
    lines += [str(spec) for spec in program.graph_signature.input_specs]
    lines += [str(spec) for spec in program.graph_signature.output_specs]
    for node in program.graph.nodes:
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
        if node.op != "output":
            lines.append(_described(node.meta.get("val")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def keep(key: str, program: ExportedProgram) -> KeptBlob:
    """A place for a blob.

    Args:
        key: The subgraph's ``fingerprint``.
        program: The subgraph, not yet converted, which may change it.

    Returns:
        A record to put the blob into, and to hold for as long as it may be wanted.
    """
    record = KeptBlob(None, _constants(program))
    _KEPT[key] = record
    return record


def waiting(key: str) -> KeptBlob | None:
    """The record of a subgraph whose blob is waiting, or None."""
    record = _KEPT.get(key)
    return record if record is not None and record.blob is not None else None


def take(program: ExportedProgram, options: CompileOptions) -> bytes | None:
    """Hand a blob over, once; None if there is none for this subgraph."""
    if not _KEPT:
        return None
    record = waiting(fingerprint(program, options))
    if record is None or not _same(record.constants, _tensors(program)):
        return None
    blob, record.blob, record.constants = record.blob, None, {}
    return blob


def _constants(program: ExportedProgram) -> dict[str, tuple[torch.Tensor, int]]:
    """The constants of a subgraph; the version of a tensor counts the changes made in place."""
    return {name: (tensor, tensor._version) for name, tensor in _tensors(program).items()}


def _tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _same(before: Mapping[str, tuple[torch.Tensor, int]], now: Mapping[str, torch.Tensor]) -> bool:
    return before.keys() == now.keys() and all(
        tensor._version == version
        and tensor.dtype == now[name].dtype
        and torch.equal(tensor, now[name])
        for name, (tensor, version) in before.items()
    )


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return repr(value)

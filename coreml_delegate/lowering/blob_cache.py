"""In-memory cache that passes blobs from the partitioner to ``preprocess``.

The partitioner converts each partition to prove that it converts. ExecuTorch then cuts the same
partition out of the program, copies it, and asks the backend for its blob. A blob is reused only
for the same subgraph: same graph, same options, equal constants.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.formats.blob import Files


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether a partition shares its weights with other methods.

    Attributes:
        methods: The methods whose partitions are functions of one model; empty if the partition is
            a separate model.
        reason: Why it is separate; empty if it is not.
    """

    methods: tuple[str, ...] = ()
    reason: str = ""


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of a partition's lowering, for the report.

    Attributes:
        sharing: None until its blob is taken, and for a single method.
    """

    sharing: Sharing | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class CachedBlob:
    """A blob in the cache, which has only weak references to this record.

    Attributes:
        files: The files of the blob; None before it is made and after it is taken.
        constants: The constants of the subgraph, each with its version.
        outcomes: One per partition with this blob, in lowering order: methods may have equal
            partitions.
    """

    files: Files | None
    constants: Mapping[str, tuple[torch.Tensor, int]]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def expect(self) -> Outcome:
        """Add a partition with this blob, and return its outcome, filled in later."""
        self.outcomes.append(Outcome())
        return self.outcomes[-1]

    def latest(self, count: int) -> list[Outcome]:
        """Return the last ``count`` outcomes, of the current lowering, in order.

        Earlier outcomes belong to abandoned lowerings.
        """
        missing = [Outcome() for _ in range(count - len(self.outcomes))]
        return [*missing, *self.outcomes[max(0, len(self.outcomes) - count) :]]

    def hand_over(self) -> Files | None:
        """Return the files and drop them from the record; None the second time."""
        files, self.files, self.constants = self.files, None, {}
        return files


# By fingerprint, which does not depend on the values of constants.
_RECORDS: dict[str, weakref.WeakSet[CachedBlob]] = {}


def fingerprint(program: ExportedProgram, options: CompileOptions) -> str:
    """Return a digest of a subgraph and its options, without the values of constants."""
    lines = [f"{spec.key}={bytes(spec.value)!r}" for spec in options.to_specs()]
    lines += [str(spec) for spec in program.graph_signature.input_specs]
    lines += [str(spec) for spec in program.graph_signature.output_specs]
    for node in program.graph.nodes:
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
        if node.op == "placeholder":  # the values of calls follow from these
            lines.append(_describe(node.meta.get("val")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def keep(program: ExportedProgram, options: CompileOptions) -> CachedBlob:
    """Add a record for a blob that will be made.

    Args:
        program: The subgraph, before the conversion, which may change it.
        options: How it is lowered.

    Returns:
        A record for the files; the caller references it as long as they may be needed.
    """
    for key in [key for key, records in _RECORDS.items() if not records]:
        del _RECORDS[key]
    record = CachedBlob(None, _constants(program))
    _RECORDS.setdefault(fingerprint(program, options), weakref.WeakSet()).add(record)
    return record


def find(program: ExportedProgram, options: CompileOptions) -> CachedBlob | None:
    """Return the record of this subgraph with its blob, or None."""
    if not _RECORDS:
        return None
    constants = _tensors(program)
    for record in _RECORDS.get(fingerprint(program, options), ()):
        if record.files is not None and _same(record.constants, constants):
            return record
    return None


def take(program: ExportedProgram, options: CompileOptions) -> Files | None:
    """Return the files of this subgraph's blob and drop them from the cache; None if missing."""
    record = find(program, options)
    return None if record is None else record.hand_over()


def _constants(program: ExportedProgram) -> dict[str, tuple[torch.Tensor, int]]:
    """Return constants with versions; a tensor's version counts in-place changes."""
    return {name: (tensor, tensor._version) for name, tensor in _tensors(program).items()}


def _tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    values: dict[str, Any] = {**program.state_dict, **program.constants}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _same(old: Mapping[str, tuple[torch.Tensor, int]], new: Mapping[str, torch.Tensor]) -> bool:
    return old.keys() == new.keys() and all(
        tensor._version == version and (tensor is new[name] or _equal(tensor, new[name]))
        for name, (tensor, version) in old.items()
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return repr(value)

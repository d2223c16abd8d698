"""Cache by which a blob made while partitioning reaches ``preprocess``: nothing is converted twice.

A partitioner converts each partition to prove that it converts. ExecuTorch then cuts the same
partition out of the program, copies it, and asks the backend for its blob. A blob is handed over
only for the same subgraph: same graph, same options, equal constants.
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
    """The answer whether a partition shares its weights with other methods.

    Attributes:
        methods: The methods whose partitions are functions of one model; empty if this one is a
            model by itself.
        reason: Why it is by itself; empty if it is not.
    """

    methods: tuple[str, ...] = ()
    reason: str = ""


@dataclass(slots=True, eq=False)
class Outcome:
    """How a partition was lowered in the end, for the report.

    Attributes:
        sharing: None until its blob is handed over, and if there is only one method.
    """

    sharing: Sharing | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class KeptBlob:
    """A blob in the cache, which keeps it as long as somebody holds this record.

    Attributes:
        files: The files of the blob; None before it is made and after it is handed over.
        constants: The constants of the subgraph, each with its version.
        outcomes: One for each partition that the blob is for, in the order in which they will be
            lowered: methods may have equal partitions.
    """

    files: Files | None
    constants: Mapping[str, tuple[torch.Tensor, int]]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])

    def expect(self) -> Outcome:
        """Add a partition that the blob is for, and return its outcome, filled in later."""
        self.outcomes.append(Outcome())
        return self.outcomes[-1]

    def latest(self, count: int) -> list[Outcome]:
        """Return the outcomes of the ``count`` partitions that are lowered now, in order.

        Earlier outcomes belong to lowerings that were given up.
        """
        missing = [Outcome() for _ in range(count - len(self.outcomes))]
        return [*missing, *self.outcomes[max(0, len(self.outcomes) - count) :]]

    def hand_over(self) -> Files | None:
        """Return the files and drop them from the record; None the second time."""
        files, self.files, self.constants = self.files, None, {}
        return files


# By fingerprint; subgraphs that differ in the values of their constants have one fingerprint.
_KEPT: dict[str, weakref.WeakSet[KeptBlob]] = {}


def fingerprint(program: ExportedProgram, options: CompileOptions) -> str:
    """Return a digest of a subgraph, without the values of constants, and of its options."""
    lines = [f"{spec.key}={bytes(spec.value)!r}" for spec in options.to_specs()]
    lines += [str(spec) for spec in program.graph_signature.input_specs]
    lines += [str(spec) for spec in program.graph_signature.output_specs]
    for node in program.graph.nodes:
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
        if node.op == "placeholder":  # the values of calls follow from these
            lines.append(_described(node.meta.get("val")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def keep(program: ExportedProgram, options: CompileOptions) -> KeptBlob:
    """Add a record for a blob that is about to be made.

    Args:
        program: The subgraph, before the conversion, which may change it.
        options: How it is lowered.

    Returns:
        A record to put the files into, and to hold for as long as they may be needed.
    """
    for key in [key for key, records in _KEPT.items() if not records]:
        del _KEPT[key]
    record = KeptBlob(None, _constants(program))
    _KEPT.setdefault(fingerprint(program, options), weakref.WeakSet()).add(record)
    return record


def find(program: ExportedProgram, options: CompileOptions) -> KeptBlob | None:
    """Return the record of this subgraph, if it has its blob, or None."""
    if not _KEPT:
        return None
    constants = _tensors(program)
    for record in _KEPT.get(fingerprint(program, options), ()):
        if record.files is not None and _same(record.constants, constants):
            return record
    return None


def take(program: ExportedProgram, options: CompileOptions) -> Files | None:
    """Return the files of this subgraph's blob and drop them from the cache; None if missing."""
    record = find(program, options)
    return None if record is None else record.hand_over()


def _constants(program: ExportedProgram) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the constants of a subgraph; a tensor's version counts the changes made in place."""
    return {name: (tensor, tensor._version) for name, tensor in _tensors(program).items()}


def _tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    held: dict[str, Any] = {**program.state_dict, **program.constants}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _same(before: Mapping[str, tuple[torch.Tensor, int]], now: Mapping[str, torch.Tensor]) -> bool:
    return before.keys() == now.keys() and all(
        tensor._version == version and (tensor is now[name] or _equal(tensor, now[name]))
        for name, (tensor, version) in before.items()
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _described(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}"
    return repr(value)

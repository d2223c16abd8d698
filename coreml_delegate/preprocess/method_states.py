"""Buffers that several methods use, of which each would have a state of its own.

A module's methods share its buffers. Core ML shares no state between delegates: what one method
writes, the others would not see.

Source: ExecuTorch 1.0 to 1.5, Core ML runtime: one ``MLState`` for each loaded handle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from coreml_delegate.errors import ContractError
from coreml_delegate.ops.constants import state_value

logger = logging.getLogger(__name__)

_PASS_IT = "Pass the buffer in and out of every method"
# ExecuTorch shares the buffers that methods write; one that a method only reads is a constant.
_LEAVE_IT = (
    "Set take_over_mutable_buffer=False and let ExecuTorch share the buffer, with "
    "MemoryPlanningPass(share_mutable_buffers=True), or pass it in and out of every method"
)


@dataclass(frozen=True, slots=True)
class _Use:
    """A buffer inside a delegate."""

    method: str
    written: bool

    def __str__(self) -> str:
        return f"{'written' if self.written else 'read'} by {self.method!r}"


def check_methods(programs: Mapping[str, Sequence[ExportedProgram]], *, demand: bool) -> None:
    """Check that no method writes a state that another is to see.

    Buffers are the same if they have the same name, shape and dtype.

    Args:
        programs: The subgraphs of each method.
        demand: Whether it is an error; otherwise a warning, for methods known to be independent.

    Raises:
        ContractError: ``demand``, and there is such a buffer.
    """
    uses: dict[tuple[str, torch.Size, torch.dtype], dict[str, _Use]] = {}
    for method, subgraphs in programs.items():
        for program in subgraphs:
            for name, tensor, written in _buffers(program):
                by_method = uses.setdefault((name, tensor.shape, tensor.dtype), {})
                before = by_method.get(method)
                by_method[method] = _Use(method, written or (before is not None and before.written))
    torn = {
        name: by_method.values()
        for (name, _, _), by_method in uses.items()
        if len(by_method) > 1 and any(use.written for use in by_method.values())
    }
    if not torn:
        return
    listed = "; ".join(f"{name} ({', '.join(map(str, found))})" for name, found in torn.items())
    if not demand:
        logger.warning(
            "Core ML states are not shared between methods; each has its own of: %s", listed
        )
        return
    all_write = all(use.written for found in torn.values() for use in found)
    raise ContractError(
        "Core ML states are not shared between methods",
        got=listed,
        remedy=f"{_LEAVE_IT if all_write else _PASS_IT}. Strategy DISABLED gives each method a "
        "buffer of its own",
    )


def _buffers(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The buffers inside a delegate, each with whether it is written."""
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    for name in signature.inputs_to_buffers.values():
        value = state_value(program, name)
        if value is not None:
            yield name, value, name in written

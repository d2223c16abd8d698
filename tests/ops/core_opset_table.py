"""Writes the table in ``docs/partitioner.md``: ``python -m tests.ops.core_opset_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.export import default_decompositions

from coreml_delegate.ops import REFUSED, record_of
from coreml_delegate.ops.call import target_name
from coreml_delegate.partition.verdicts.cpu_kernels import has_kernel
from coreml_delegate.transforms.complex_operators import OPERATORS
from tests.support.generated_sections import with_section

PAGE = Path(__file__).parents[2] / "docs" / "partitioner.md"


def core_ops() -> Iterator[OpOverload]:
    """Yield the core ATen opset as the partitioner meets it: functional, not decomposed before."""
    decomposed = default_decompositions()
    packets: Any = (getattr(torch.ops.aten, name) for name in sorted(dir(torch.ops.aten)))
    for packet in packets:
        for name in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
            op: Any = getattr(packet, name)
            if torch.Tag.core in op.tags and op not in decomposed and not op._schema.is_mutable:
                yield op


def reason(op: OpOverload) -> str | None:
    """Return why no call of an op is delegated, None if some are."""
    name = target_name(op)
    if record_of(name) is not None or name in OPERATORS:
        return None
    if name in REFUSED:
        return REFUSED[name].text
    results = cast("Any", op)._schema.returns
    if not any(isinstance(result.type, torch.TensorType) for result in results):
        return "it gives a size, no tensor"
    raise LookupError(f"{name} has neither a record nor a reason in ops/refused.py")


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| op | why it stays on the CPU | kernel of ExecuTorch |"
    yield "|---|---|---|"
    for op in core_ops():
        text = reason(op)
        if text is not None:
            yield f"| `{target_name(op)}` | {text} | {'yes' if has_kernel(op) else 'no'} |"


def page(text: str) -> str:
    """Return the document with the table of today."""
    return with_section(text, "core opset", rows())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

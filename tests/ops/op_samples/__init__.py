"""Calls of every op with a rule: those Core ML takes, and those that stay on the CPU."""

from __future__ import annotations

from ops.op_samples import (
    activation,
    control_flow,
    convolution,
    creation,
    detection,
    elementwise,
    indexing,
    linear,
    linear_algebra,
    logic,
    normalization,
    pooling,
    recurrent,
    reduction,
    resizing,
    shape,
    windows,
    writing,
)
from ops.op_samples.sample import Rejected, Sample

_FAMILIES = (
    activation,
    control_flow,
    convolution,
    creation,
    detection,
    elementwise,
    indexing,
    linear,
    linear_algebra,
    logic,
    normalization,
    pooling,
    recurrent,
    reduction,
    resizing,
    shape,
    windows,
    writing,
)

ACCEPTED: dict[str, tuple[Sample, ...]] = {
    f.__name__.rpartition(".")[2]: f.ACCEPTED for f in _FAMILIES
}
REJECTED: dict[str, tuple[Rejected, ...]] = {
    f.__name__.rpartition(".")[2]: f.REJECTED for f in _FAMILIES
}

__all__ = ["ACCEPTED", "REJECTED", "Rejected", "Sample"]

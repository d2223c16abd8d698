"""Calls of control flow that holds its branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ops.op_samples.sample import Rejected, accept, b, i, reject, x
from torch import nn

from coreml_delegate.opaque_ops.control_flow import write_branches
from coreml_delegate.ops import ReasonCode

_COND, _WHILE = "coreml_delegate.cond.default", "coreml_delegate.while_loop.default"
_SCAN = "coreml_delegate.scan.default"


class _Branch(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def _text(inputs: tuple[torch.Tensor, ...], *functions: Callable[..., Any]) -> str:
    branches = [torch.export.export(_Branch(each), inputs) for each in functions]
    return write_branches([branch.run_decompositions({}) for branch in branches])


_MATRIX, _COUNT = torch.zeros(2, 3), torch.tensor(0)
_CHOICE = _text((_MATRIX,), lambda v: (v.sin() * 2,), lambda v: (v.relu(),))
_LOOP = _text(
    (_COUNT, _MATRIX, _MATRIX),
    lambda n, v, w: (n < 3,),
    lambda n, v, w: (n + 1, v * 0.5 + w),
)
_STEP = _text((_MATRIX, _MATRIX), lambda total, row: (total + row, (total * row).sum(-1)))

ACCEPTED = (
    accept(_COND, _CHOICE, b(), [x(2, 3)], takes=(0,)),
    accept(_COND, _CHOICE, b(1), [x(2, 3)], takes=(0,), note="one element"),
    accept(_WHILE, _LOOP, [i(low=0, high=1), x(2, 3)], [x(2, 3)]),
    accept(_SCAN, _STEP, [x(2, 3)], [x(4, 2, 3)], []),
)

REJECTED: tuple[Rejected, ...] = (
    reject(
        ReasonCode.DTYPE,
        "argument 'operands' is int16",
        _COND,
        _text((_MATRIX.short(),), lambda v: (v.float(),), lambda v: (v.float() * 2,)),
        b(),
        [i(2, 3, dtype=torch.int16)],
        takes=(0,),
        note="narrow",
    ),
)

"""Reductions and running sums.

Source: coremltools' MIL op reference, ``reduction`` and ``tensor_operation``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import Ints, kernel

_Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _product(x: Tensor, axes: list[int], keep_dims: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keep_dims)
    return x


_EXACT: dict[str, _Reduce] = {
    "reduce_l1_norm": lambda x, axes, keep: torch.sum(x.abs(), axes, keep),
    "reduce_max": torch.amax,
    "reduce_min": torch.amin,
    "reduce_prod": _product,
    "reduce_sum": torch.sum,
    "reduce_sum_square": lambda x, axes, keep: torch.sum(x * x, axes, keep),
}

_INEXACT: dict[str, _Reduce] = {
    "reduce_l2_norm": lambda x, axes, keep: torch.sum(x * x, axes, keep).sqrt(),
    "reduce_log_sum": lambda x, axes, keep: torch.sum(x, axes, keep).log(),
    "reduce_log_sum_exp": torch.logsumexp,
    "reduce_mean": torch.mean,
}


def _reduce_over_axes(function: _Reduce, *, exact: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, axes: Ints | None = None, keep_dims: bool = False) -> Tensor:
        over = list(range(x.dim())) if axes is None else list(axes)
        if not over:
            # torch takes an empty list for all axes, so reduce a new axis of size 1 instead.
            return run(x.unsqueeze(-1), axes=(-1,))
        if exact or x.is_floating_point():
            return function(x, over, keep_dims)
        return function(x.double(), over, keep_dims).to(x.dtype)  # integers: truncated

    return run


for _name, _function in _EXACT.items():
    kernel(_name, widen=True)(_reduce_over_axes(_function, exact=True))
for _name, _function in _INEXACT.items():
    kernel(_name, widen=True)(_reduce_over_axes(_function, exact=False))


def _index_of_extremum(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        axis: int = -1,
        keep_dims: bool = False,
        output_dtype: str = "int32",  # noqa: ARG001 - the declared type of the output says the same
    ) -> Tensor:
        return function(x, dim=axis, keepdim=keep_dims)

    return run


kernel("reduce_argmax")(_index_of_extremum(torch.argmax))
kernel("reduce_argmin")(_index_of_extremum(torch.argmin))


@kernel("cumsum", widen=True)
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """``y[i] = x[0] + ... + x[i]`` along ``axis``; ``exclusive`` leaves out ``x[i]``."""
    ordered = x.flip(axis) if reverse else x
    if exclusive and x.shape[axis]:
        first = torch.zeros_like(x.narrow(axis, 0, 1))
        ordered = torch.cat([first, ordered.narrow(axis, 0, x.shape[axis] - 1)], dim=axis)
    total = ordered.cumsum(axis)
    return total.flip(axis) if reverse else total

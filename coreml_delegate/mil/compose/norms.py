"""Layer norms and root mean square norms by ``layer_norm``, whose sums stay in range in fp16.

The root mean square norm of ``x`` is the layer norm of ``[x, -x]``, whose mean is 0. The neural
engine runs it, with fewer ops than the formula has, and it is exact for rows of any magnitude; the
squares of the formula overflow fp16 from 256 on. Source: ANEMLL, apple/coremltools#2585.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.mil.compose import mb, number

SMALLEST_EPSILON = float(np.finfo(np.float16).smallest_subnormal)
"""fp16 rounds smaller numbers to 0, or to this number."""

_IMAGE_RANK = 4
_ROUNDING = 2.0**-12  # relative error of rounding to fp16


def rms_norm(x: Any, axes: Iterable[int], epsilon: float, scale: Any = None) -> Any:
    """Return ``x / sqrt(mean(x^2) + epsilon) * scale`` in fp32; ``fp16_range`` makes it a ``Norm``.

    Args:
        x: MIL variable.
        axes: Axes of the mean.
        epsilon: Above 0.
        scale: Variable or array that broadcasts to ``x``, or None for 1.
    """
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=list(axes), keep_dims=True)
    y = mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float32(epsilon)))
    return y if scale is None else mb.mul(x=y, y=scale)


@dataclass(frozen=True, slots=True)
class Norm:
    """``(x - m) / sqrt(mean((x - m)^2) + epsilon)``, where m is 0 or mean(x).

    Attributes:
        x: MIL variable.
        axes: Axes of the means, of fixed size, in ascending order.
        is_centred: Whether m is the mean.
        epsilon: At least ``SMALLEST_EPSILON``.
    """

    x: Any
    axes: tuple[int, ...]
    is_centred: bool
    epsilon: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(int(self.x.shape[axis]) for axis in self.axes)

    @property
    def operand_scale(self) -> float:
        """Factor k <= 1 of x for which fp16 does not round k^2 epsilon, which is a power of two."""
        rounded = float(np.float16(self.epsilon))
        if abs(rounded - self.epsilon) <= _ROUNDING * self.epsilon:
            return 1.0
        return math.sqrt(2.0 ** math.floor(math.log2(self.epsilon)) / self.epsilon)

    def compose(self, parameters: Mapping[str, Any], **keywords: Any) -> Any:
        """Return the variable of the norm, times ``gamma`` plus ``beta``.

        Args:
            parameters: ``gamma``, or ``gamma`` and ``beta``, or neither: arrays of ``shape``.
            keywords: ``name`` of the result, ``before_op``: where to insert the ops.
        """
        x = self.x
        rank, width, k = x.rank, self.shape[-1], self.operand_scale
        order = [*(axis for axis in range(rank) if axis not in self.axes), *self.axes]
        has_channels = rank == _IMAGE_RANK and self.axes == (1,)
        is_moved = order != list(range(rank)) and not has_channels
        # coremltools too makes a layer_norm over the channels of [N, C, H, W] without moving them
        # (fuse_layernorm_or_instancenorm, pattern 5).
        axes = [self.axes[0] - rank] if has_channels else list(range(-len(self.axes), 0))
        steps: list[tuple[Any, dict[str, Any]]] = []
        if is_moved:
            steps += [(mb.transpose, {"perm": order})]
        if self.is_centred:
            steps += [(mb.mul, {"y": number(k, x)})] if k != 1 else []
        else:
            signs = np.repeat([k, -k], width).reshape((-1,) + (1,) * (-1 - axes[-1]))
            join = {"axis": axes[-1]}
            steps += [(lambda x, **keywords: mb.concat(values=[x, x], **keywords), join)]
            steps += [(mb.mul, {"y": number(signs, x)})]
            parameters = {n: np.concatenate([p, p], axis=-1) for n, p in parameters.items()}
        norm = {
            "axes": axes,
            "epsilon": number(self.epsilon * k * k, x),
            **{name: number(value, x) for name, value in parameters.items()},
        }
        steps += [(mb.layer_norm, norm)]
        if not self.is_centred:
            half = [axis - rank == axes[-1] for axis in range(rank)]
            ends = {"end": [width * is_half for is_half in half]}
            ends["end_mask"] = [not is_half for is_half in half]
            steps += [(mb.slice_by_index, {"begin": [0] * rank, **ends})]
        if is_moved:
            steps += [(mb.transpose, {"perm": [order.index(axis) for axis in range(rank)]})]
        inner = {n: v for n, v in keywords.items() if n != "name"}
        for op, arguments in steps[:-1]:
            x = op(x=x, **arguments, **inner)
        op, arguments = steps[-1]
        return op(x=x, **arguments, **keywords)

"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coreml_delegate.errors import GraphError
from coreml_delegate.graph.compose import Composer, Var, const, convert
from coreml_delegate.graph.emitter import Emitter, operation, same_size
from coreml_delegate.graph.node import Node, Value
from coreml_delegate.graph.operations.axes import flip, reshape, spread, transpose
from coreml_delegate.graph.operations.contraction import product_dtype, sum_dtype
from coreml_delegate.graph.tensor_types import NUMBERS, Dim, DType, TensorType
from coreml_delegate.graph.window_sizes import SlidingWindows
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.compose.movement import pad

# fp32 holds all integers below 2**24.
_EXACT_BITS = 24


@dataclass(frozen=True, slots=True)
class ConvolutionLayout:
    """Roles of the axes of a convolution's tensors, as in ``jax.lax.ConvDimensionNumbers``.

    Attributes:
        input: The batch axis, the channel axis, then the spatial axes.
        kernel: The axes of output channels and of input channels, then the spatial axes.
        output: The same as for ``input``.
    """

    input: tuple[int, ...]
    kernel: tuple[int, ...]
    output: tuple[int, ...]

    @classmethod
    def of(cls, spec: Any, rank: int) -> ConvolutionLayout:
        """Parse a layout.

        Args:
            spec: A layout; None for channels first; ``"NHWC,HWIO->NHWC"``, or its three parts,
                with any letters for spatial axes.
            rank: Rank of the tensors.

        Raises:
            GraphError: Not a layout for this rank.
        """
        if isinstance(spec, ConvolutionLayout):
            layout = spec
        elif spec is None:
            layout = cls(*(tuple(range(rank)),) * 3)
        else:
            layout = _parse(spec)
        for axes in (layout.input, layout.kernel, layout.output):
            if sorted(axes) != list(range(rank)):
                raise GraphError(
                    "the layout of a convolution does not fit its operands",
                    got=str(spec),
                    expected=f"every axis of rank {rank} once",
                )
        return layout


def _parse(layout: Any) -> ConvolutionLayout:
    parts = layout.replace("->", ",").split(",") if isinstance(layout, str) else list(layout)
    if len(parts) != 3 or not all(isinstance(part, str) for part in parts):
        raise _bad_layout(layout)
    image, kernel, output = (part.strip() for part in parts)
    spatial = [letter for letter in kernel if letter not in "OI"]

    def axes(spec: str, first: str) -> tuple[int, ...]:
        letters = [*first, *spatial]
        if sorted(spec) != sorted(letters):
            raise _bad_layout(layout)
        return tuple(spec.index(letter) for letter in letters)

    return ConvolutionLayout(axes(image, "NC"), axes(kernel, "OI"), axes(output, "NC"))


def _bad_layout(layout: Any) -> GraphError:
    return GraphError(
        "not a layout of a convolution",
        got=str(layout),
        expected="for example 'NHWC,HWIO->NHWC': N and C, O and I, and the same spatial letters",
    )


def _compose_convolution(c: Composer, node: Node, x: Var, kernel: Var) -> Var:
    result = node.type
    if x is None or kernel is None:
        return c.full(0, result)
    layout: ConvolutionLayout = node["layout"]
    x, sizes = transpose(c, x, node.types[0].shape, layout.input)
    kernel, taps = transpose(c, kernel, node.types[1].shape, layout.kernel)
    taps = tuple(int(size) for size in taps)
    kernel = flip(
        kernel, [axis + 2 for axis, is_reversed in enumerate(node["reversal"]) if is_reversed]
    )
    windows, groups = node["windows"], node["feature_groups"]
    if len(sizes) == 2:
        # Without spatial axes it is a matrix product; MIL needs a spatial axis.
        x, kernel = reshape(c, x, sizes, (*sizes, 1)), reshape(c, kernel, taps, (*taps, 1))
        sizes, taps = (*sizes, 1), (*taps, 1)
        windows = SlidingWindows((1,), (1,), ((0, 0),), (1,), (1,))
    if node["batch_groups"] != 1:
        groups = node["batch_groups"]
        x, sizes = _batches_to_channels(c, x, sizes, groups)
    compose = _Convolution(sizes, taps, windows, groups)
    dtypes = [operand.dtype for operand in node.operands]
    accumulator = sum_dtype(dtypes, result.dtype)
    if accumulator is DType.INT32:
        product = compose.of_integers(c, (x, kernel), dtypes)
    else:
        x, kernel = (convert(v, d, accumulator) for v, d in zip((x, kernel), dtypes, strict=True))
        product = compose.of_floats(c, x, kernel, accumulator)
    shape = [result.shape[axis] for axis in layout.output]
    if len(sizes) != len(shape):
        product = c.reshape(product, shape)
    product, _ = transpose(c, product, shape, np.argsort(layout.output).tolist())
    return convert(product, accumulator, result.dtype)


def _batches_to_channels(
    c: Composer, x: Var, sizes: Sequence[Dim], groups: int
) -> tuple[Var, tuple[Dim, ...]]:
    """Reshape [G * N, C, ...] to [N, G * C, ...]: batch groups become groups of channels."""
    batch, channels, *spatial = (int(size) for size in sizes)
    pixels = math.prod((channels, *spatial))
    grouped = reshape(c, x, sizes, (groups, batch // groups, pixels))
    grouped, shape = transpose(c, grouped, (groups, batch // groups, pixels), (1, 0, 2))
    new_shape = (batch // groups, groups * channels, *spatial)
    return reshape(c, grouped, shape, new_shape), new_shape


class _Convolution:
    """Makes the MIL of convolutions of [N, C, *spatial] with [O, C / groups, *kernel].

    Args:
        sizes: Shape of the input.
        taps: Shape of the kernel.
        windows: Strides, padding and dilations.
        groups: Number of groups of channels.
    """

    def __init__(
        self, sizes: Sequence[Dim], taps: tuple[int, ...], windows: SlidingWindows, groups: int
    ) -> None:
        self.sizes = tuple(sizes)
        self.taps = taps
        self.windows = windows
        self.groups = groups

    def of_floats(self, c: Composer, x: Var, kernel: Var, dtype: DType = DType.FLOAT32) -> Var:
        """Return the convolution of floats; ``dtype`` decides on the storage dtype."""
        windows = self.windows
        padding = windows.padding
        undilated = (1, 1)
        zero = const(0, dtype)
        if any(factor != 1 for factor in windows.base_dilation):
            if self._is_transposed(kernel):
                return self._compose_transposed(x, kernel)
            x = spread(c, x, self.sizes, (*undilated, *windows.base_dilation), zero)
        if any(amount < 0 for pair in padding for amount in pair):
            cropped = [(min(low, 0), min(high, 0)) for low, high in padding]
            x = pad(x, [(0, 0), (0, 0), *cropped], zero)
            padding = tuple((max(low, 0), max(high, 0)) for low, high in padding)
        dilations = windows.window_dilation
        if kernel.val is None and any(factor != 1 for factor in dilations):
            # MIL dilates only constant kernels.
            kernel = spread(c, kernel, self.taps, (*undilated, *dilations), zero)
            dilations = (1,) * len(dilations)
        pads = [amount for pair in padding for amount in pair]
        return mb.conv(
            x=x,
            weight=kernel,
            strides=list(windows.strides),
            pad_type="custom" if any(pads) else "valid",
            pad=pads,
            dilations=list(dilations),
            groups=self.groups,
        )

    def of_integers(self, c: Composer, operands: Sequence[Var], dtypes: Sequence[DType]) -> Var:
        """Return the convolution of integers, modulo 2**32.

        MIL convolves only floats. Operands are split into digits of d bits, so small that fp32
        holds every sum of products: the result is the sum of ``conv(x_n, k_m) * 2**(d * (n + m))``.
        """
        terms = math.prod(self.taps[1:])
        sum_bits = _EXACT_BITS - (terms - 1).bit_length()
        widths = [d.bits - (not d.is_unsigned) if d.bits < 32 else 32 for d in dtypes]
        digit = max(sum_bits // 2, 1)
        if sum(widths) <= sum_bits:
            digit = max(widths)
        x_digits, kernel_digits = (
            _digits(var, width, digit) for var, width in zip(operands, widths, strict=True)
        )
        total = None
        for n, x in enumerate(x_digits):
            for m, kernel in enumerate(kernel_digits):
                shift = (n + m) * digit
                if shift >= 32:
                    continue
                part = mb.cast(x=self.of_floats(c, x, kernel), dtype="int32")
                if shift:
                    part = mb.mul(x=part, y=np.array(1 << shift, np.uint32).view(np.int32)[()])
                total = part if total is None else mb.add(x=total, y=part)
        return total

    def _is_transposed(self, kernel: Var) -> bool:
        """Whether MIL's transposed convolution has this: a constant kernel, padding within it."""
        windows = self.windows
        return (
            kernel.val is not None
            and all(stride == 1 for stride in windows.strides)
            and all(
                amount < reach
                for pair, reach in zip(windows.padding, windows.reach, strict=True)
                for amount in pair
            )
        )

    def _compose_transposed(self, x: Var, kernel: Var) -> Var:
        out, depth, *taps = self.taps
        grouped = kernel.val.reshape(self.groups, out // self.groups, depth, *taps)
        flipped = np.flip(np.swapaxes(grouped, 1, 2), tuple(range(3, grouped.ndim)))
        weight = flipped.reshape(self.groups * depth, out // self.groups, *taps)
        pads = [
            reach - 1 - amount
            for pair, reach in zip(self.windows.padding, self.windows.reach, strict=True)
            for amount in pair
        ]
        return mb.conv_transpose(
            x=x,
            weight=const(weight),
            pad_type="custom" if any(pads) else "valid",
            pad=pads,
            strides=list(self.windows.base_dilation),
            dilations=list(self.windows.window_dilation),
            groups=self.groups,
        )


def _digits(x: Var, width: int, digit: int) -> list[Var]:
    """Return the digits of int32 values as fp32, lowest first; only the highest is signed.

    Values have ``width`` bits, and digits ``digit`` bits.
    """
    digits = []
    for low in range(0, width, digit):
        part = x
        if low + digit < width:
            part = mb.mod(x=x, y=np.int32(1 << digit))
            x = mb.floor_div(x=x, y=np.int32(1 << digit))
        digits.append(mb.cast(x=part, dtype="fp32"))
    return digits


class Convolution(Emitter):
    """Convolutions."""

    @operation(NUMBERS, _compose_convolution)
    def convolution(
        self,
        x: Value,
        kernel: Value,
        *,
        strides: Sequence[int] | None = None,
        padding: str | Sequence[tuple[int, int]] | None = None,
        input_dilation: Sequence[int] | None = None,
        kernel_dilation: Sequence[int] | None = None,
        reversal: Sequence[bool] | None = None,
        layout: ConvolutionLayout | str | Sequence[str] | None = None,
        feature_groups: int = 1,
        batch_groups: int = 1,
        preferred_dtype: Any = None,
    ) -> Value:
        """Return the convolution of an input with a kernel, with up to 3 spatial axes.

        Integers are exact, and wrap; a model of precision float16 rounds them like floats.

        Args:
            x: The input.
            kernel: The kernel; its input channels are those of ``x`` over ``feature_groups``.
            strides: Steps of the kernel for each spatial axis.
            padding: Zeros before and after; negative amounts crop. ``"VALID"`` is no padding,
                ``"SAME"`` gives ceil(size / stride) outputs.
            input_dilation: Distance of neighbours of the input, with zeros between them.
            kernel_dilation: Distance of neighbours of the kernel.
            reversal: Whether the kernel is reversed, for each spatial axis.
            layout: See ``ConvolutionLayout.of``.
            feature_groups: Number of groups of channels, which are convolved separately.
            batch_groups: Number of groups of the batch, each convolved with its own kernels.
            preferred_dtype: Element type of the result; None for the operands' type.

        Raises:
            GraphError: Arguments that do not fit together.
        """
        dtype = product_dtype("convolution", x, kernel, preferred_dtype)
        if x.rank != kernel.rank or not 2 <= x.rank <= 5:
            raise GraphError(
                "convolution: ranks of the operands",
                got=f"{x.type} and {kernel.type}",
                expected="the same, from 2 to 5",
            )
        shapes = ConvolutionLayout.of(layout, x.rank)
        sizes = [x.shape[axis] for axis in shapes.input]
        taps = list(TensorType(kernel.dtype, kernel.shape).static_shape)
        taps = [taps[axis] for axis in shapes.kernel]
        _check_channels(sizes, taps, feature_groups, batch_groups)
        spatial = len(taps) - 2
        dilations = {"input_dilation": input_dilation, "kernel_dilation": kernel_dilation}
        windows = SlidingWindows.of("convolution", sizes[2:], taps[2:], strides, padding, dilations)
        counts = windows.counts(sizes[2:])
        batch = sizes[0] if batch_groups == 1 else int(sizes[0]) // batch_groups
        dimensions: list[Dim] = [batch, taps[0], *counts]
        shape = [dimensions[shapes.output.index(axis)] for axis in range(x.rank)]
        return self.emit(
            "convolution",
            (x, kernel),
            TensorType(dtype, tuple(shape)),
            windows=windows,
            layout=shapes,
            reversal=_flags(reversal, spatial),
            feature_groups=feature_groups,
            batch_groups=batch_groups,
        )


def _check_channels(
    sizes: Sequence[Dim], taps: Sequence[int], feature_groups: int, batch_groups: int
) -> None:
    batch, channels = sizes[:2]
    if feature_groups < 1 or batch_groups < 1 or (feature_groups > 1 and batch_groups > 1):
        raise GraphError(
            "convolution: groups",
            got=f"{feature_groups} of features and {batch_groups} of batches",
            expected="1 or more, one of them 1",
        )
    if not same_size(channels, taps[1] * feature_groups):
        raise GraphError(
            "convolution: channels of the input and of the kernel differ",
            got=f"{channels} and {taps[1]} in each of {feature_groups} groups",
        )
    if taps[0] % (feature_groups * batch_groups):
        raise GraphError(
            "convolution: output channels are not divisible by the groups",
            got=f"{taps[0]} by {feature_groups * batch_groups}",
        )
    if batch_groups > 1 and not (
        all(isinstance(size, int) for size in sizes) and int(batch) % batch_groups == 0
    ):
        raise GraphError(
            "convolution: with batch_groups, sizes are fixed, and the batch divisible",
            got=f"{list(sizes)} by {batch_groups}",
        )


def _flags(values: Sequence[bool] | None, count: int) -> tuple[bool, ...]:
    flags = (False,) * count if values is None else tuple(bool(flag) for flag in values)
    if len(flags) != count:
        raise GraphError("reversal: wrong number", got=str(len(flags)), expected=str(count))
    return flags

"""Discrete Fourier transforms on pairs of reals, as products with constant matrices.

A transform of up to ``LARGEST_MATRIX`` points is a product of each part with a matrix of cosines
and a matrix of sines. A longer transform, of ``a * b`` points, is ``b`` transforms of ``a`` points,
a rotation, and ``a`` transforms of ``b`` points (Cooley and Tukey): matrices of 32 by 32 instead of
1024 by 1024. A short-time transform is a convolution with the matrix times the window as kernel.

Matrices are computed in fp64, from angles reduced to one turn by integer arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.ops.edits import value_of
from coreml_delegate.transforms.complex_pairs import ATEN, FormError, Pair, PairCall, Part

LARGEST_MATRIX = 512
"""Points up to which a transform is one product: two matrices of 1 MB each in fp32."""

LARGEST_PRIME = 2048
"""Points up to which a transform of prime length is one product: two matrices of 16 MB each."""

LARGEST_FRAME = 4096
"""Points up to which a short-time transform is one convolution, with a kernel of 64 MB in fp32."""

_SCALES = MappingProxyType({0: 0.0, 1: -0.5, 2: -1.0})
"""Exponents e of the scale ``points ** e``, by torch's number of a normalization."""

_FORWARD, _INVERSE = -1, 1
"""Sign of the angles."""


def real_to_complex(call: PairCall) -> Pair:
    """Return ``_fft_r2c``: first along the last dimension, half of it if one-sided."""
    x = call.pair("self")
    *other_dims, last = _dims(call, x)
    size = _size(x, last)
    count = size // 2 + 1 if call.arguments["onesided"] else size
    scale = _scale(call, [size, *(_size(x, dim) for dim in other_dims)])
    x = _transform(call, x, last, (count, size, _FORWARD), scale)
    return _transform_dims(call, x, other_dims, _FORWARD)


def complex_to_complex(call: PairCall) -> Pair:
    """Return ``_fft_c2c``."""
    x = call.pair("self")
    dims = _dims(call, x)
    sign = _FORWARD if call.arguments["forward"] else _INVERSE
    return _transform_dims(call, x, dims, sign, _scale(call, [_size(x, dim) for dim in dims]))


def complex_to_real(call: PairCall) -> Part:
    """Return ``_fft_c2r``, an inverse transform of the first half of the last dimension."""
    x = call.pair("self")
    *other_dims, last = _dims(call, x)
    size = call.arguments["last_dim_size"]
    _require_static(size)
    scale = _scale(call, [size, *(_size(x, dim) for dim in other_dims)])
    x = _transform_dims(call, x, other_dims, _INVERSE)
    if _balanced_factors(size) is None:

        def matrix() -> torch.Tensor:
            return (_twiddles(size // 2 + 1, size, size, _INVERSE) * _half_weights(size) * scale).mT

        return _product(call, x, last, ("half", size, scale), matrix, is_real=True).real
    # The other half is the mirrored conjugate of the first half.
    tail = [
        part and call.emit(ATEN.flip.default, _slice(call, part, last, 1, size - size // 2), [last])
        for part in x.parts
    ]
    mirrored = call.conjugate(Pair(*tail))
    x = Pair(
        *(
            part and call.emit(ATEN.cat.default, [part, mirrored_part], last)
            for part, mirrored_part in zip(x.parts, mirrored.parts, strict=True)
        )
    )
    return _transform(call, x, last, (size, size, _INVERSE), scale, is_real=True).real


# Transforms along one dimension


def _transform_dims(
    call: PairCall, x: Pair, dims: Sequence[int], sign: int, scale: float = 1.0
) -> Pair:
    """Transform along dimensions, one after the other."""
    for position, dim in enumerate(dims):
        size = _size(x, dim)
        factor = scale if position == len(dims) - 1 else 1.0
        x = _transform(call, x, dim, (size, size, sign), factor)
    return x


def _transform(
    call: PairCall,
    x: Pair,
    dim: int,
    form: tuple[int, int, int],
    scale: float = 1.0,
    *,
    is_real: bool = False,
) -> Pair:
    """Transform along one dimension.

    Args:
        call: The call to rewrite.
        x: The values.
        dim: The dimension, not negative.
        form: Number of values of the result, number of points, and the sign.
        scale: Factor of the result.
        is_real: Whether to omit the imaginary part of the result.
    """
    count, size, sign = form
    factors = _balanced_factors(size)
    if factors is not None:
        return _cooley_tukey(call, x, dim, form, factors, scale, is_real=is_real)

    def matrix() -> torch.Tensor:
        return _twiddles(count, size, size, sign) * scale

    return _product(call, x, dim, (*form, scale), matrix, is_real=is_real)


def _cooley_tukey(
    call: PairCall,
    x: Pair,
    dim: int,
    form: tuple[int, int, int],
    factors: tuple[int, int],
    scale: float,
    *,
    is_real: bool,
) -> Pair:
    """Transform ``a * b`` points as a matrix [a, b]: columns, a rotation, then rows."""
    count, size, sign = form
    a, b = factors
    last = value_of(x.node).dim() - 1

    def map_parts(target: Any, *args: Any) -> Pair:
        return Pair(*(part and call.emit(target, part, *args) for part in x.parts))

    if dim != last:
        x = map_parts(ATEN.transpose.int, dim, last)
    leading = call.sizes(x.node)[:-1]
    x = map_parts(ATEN.reshape.default, [*leading, a, b])
    x = _transform(call, x, last, (a, a, sign))

    def rotation() -> torch.Tensor:
        return _twiddles(a, b, size, sign)

    x = call.multiply(x, Pair(*_constants(call, ("rotation", a, b, sign), rotation)))
    x = _transform(call, x, last + 1, (b, b, sign), scale, is_real=is_real)
    x = map_parts(ATEN.transpose.int, last, last + 1)
    x = map_parts(ATEN.reshape.default, [*leading, size])
    if count < size:
        x = Pair(*(part and _slice(call, part, last, 0, count) for part in x.parts))
    return x if dim == last else map_parts(ATEN.transpose.int, dim, last)


def _product(
    call: PairCall,
    x: Pair,
    dim: int,
    key: tuple[Any, ...],
    matrix: Callable[[], torch.Tensor],
    *,
    is_real: bool,
) -> Pair:
    """Multiply by a complex matrix of [results, points]."""
    cosines, sines = _constants(call, key, matrix)

    def times(factor: Part, part: Part) -> Part:
        if not isinstance(factor, Node) or not isinstance(part, Node):
            return None
        return _multiply_along(call, factor, part, dim)

    real = call.difference(times(cosines, x.real), times(sines, x.imag))
    imag = None if is_real else call.sum(times(cosines, x.imag), times(sines, x.real))
    return Pair(real, imag)


def _multiply_along(call: PairCall, matrix: Node, x: Node, dim: int) -> Node:
    """Multiply by a real matrix of [results, points] along one dimension of ``x``."""
    last = value_of(x).dim() - 1
    if dim == last:
        return call.emit(ATEN.linear.default, x, matrix)
    if dim == last - 1:
        return call.emit(ATEN.matmul.default, matrix, x)
    transposed = call.emit(ATEN.transpose.int, x, dim, last)
    product = call.emit(ATEN.linear.default, transposed, matrix)
    return call.emit(ATEN.transpose.int, product, dim, last)


def _constants(
    call: PairCall, key: tuple[Any, ...], value: Callable[[], torch.Tensor]
) -> tuple[Part, Part]:
    """Return the parts of a complex constant; None for a part of zeros."""
    matrix = value()
    real, imag = (
        call.constant((*key, suffix), lambda: part) if part.any() else None  # noqa: B023 - called now
        for suffix, part in (("real", matrix.real), ("imag", matrix.imag))
    )
    return real, imag


def _twiddles(rows: int, columns: int, points: int, sign: int) -> torch.Tensor:
    """Return ``exp(sign * 2j * pi * row * column / points)``, [rows, columns], complex128."""
    exponents = torch.outer(torch.arange(rows), torch.arange(columns)) % points
    angles = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    roots = torch.stack([angles.cos(), sign * angles.sin()], -1)
    roots[roots.abs() < _ROUNDED_TO_ZERO] = 0.0
    return torch.view_as_complex(roots)[exponents]


def _half_weights(size: int) -> torch.Tensor:
    """Return the multiplicity in the full spectrum of each value of the first half, as a column."""
    weights = torch.full((size // 2 + 1, 1), 2.0, dtype=torch.float64)
    weights[0] = 1.0
    if size % 2 == 0:
        weights[-1] = 1.0
    return weights


def _balanced_factors(size: int) -> tuple[int, int] | None:
    """Return the two most similar factors of a size; None for a single product.

    Raises:
        FormError: The size is prime, and too large for a single product.
    """
    if size <= LARGEST_MATRIX:
        return None
    a = next((n for n in range(math.isqrt(size), 1, -1) if size % n == 0), 1)
    if a == 1 and size > LARGEST_PRIME:
        raise FormError(
            f"a transform of {size} points, a prime number greater than {LARGEST_PRIME}",
            "Pad or trim the signal, by n=, to a number of points with small factors",
        )
    return None if a == 1 else (a, size // a)


# Short-time transforms


def short_time(call: PairCall) -> Pair | Part:
    """Return ``stft``: a convolution by the windowed wave of each frequency."""
    arguments = call.arguments
    size, hop = _frame(call)
    if arguments["align_to_window"]:
        raise FormError("stft with align_to_window")
    x, window = call.pair("self"), _window(call, size)
    onesided = arguments["onesided"]
    if onesided is None:
        onesided = x.imag is None and not window.is_complex()
    count = size // 2 + 1 if onesided else size
    scale = size**-0.5 if arguments["normalized"] else 1.0

    def kernel() -> torch.Tensor:
        waves = _twiddles(count, size, size, _FORWARD) * window * scale
        return torch.cat([waves.real, waves.imag]).unsqueeze(1)

    weight = call.constant((call.node.name,), kernel)
    is_batched = value_of(x.node).dim() == 2

    def frames(part: Part) -> Pair:
        if not isinstance(part, Node):
            return Pair(None)
        signal = call.emit(ATEN.unsqueeze.default, part, -2)
        if not is_batched:
            signal = call.emit(ATEN.unsqueeze.default, signal, 0)
        waves = call.emit(ATEN.conv1d.default, signal, weight, None, [hop])
        if not is_batched:
            waves = call.emit(ATEN.squeeze.dim, waves, 0)
        return Pair(*(_slice(call, waves, -2, n, n + count) for n in (0, count)))

    a, b = map(frames, x.parts)
    result = Pair(call.difference(a.real, b.imag), call.sum(a.imag, b.real))
    if value_of(call.node).is_complex():
        return result
    return call.emit(ATEN.stack.default, list(call.as_nodes(result)), -1)


def inverse_short_time(call: PairCall) -> Part:
    """Return ``istft``: a transposed convolution, over the sum of the squared windows."""
    arguments = call.arguments
    if arguments["return_complex"]:
        raise FormError("istft with return_complex")
    size, hop = _frame(call)
    window = _window(call, size)
    if window.is_complex():
        raise FormError("istft with a complex window")
    count = size // 2 + 1
    x = Pair(*(part and _slice(call, part, -2, 0, count) for part in call.pair("self").parts))
    scale = size**-0.5 if arguments["normalized"] else 1 / size

    def kernel() -> torch.Tensor:
        waves = _twiddles(count, size, size, _INVERSE) * _half_weights(size) * window * scale
        return torch.cat([waves.real, -waves.imag]).unsqueeze(1)

    bins = call.emit(ATEN.cat.default, list(call.as_nodes(x)), -2)
    is_batched = value_of(bins).dim() == 3
    if not is_batched:
        bins = call.emit(ATEN.unsqueeze.default, bins, 0)
    weight = call.constant((call.node.name,), kernel)
    sums = call.emit(ATEN.conv_transpose1d.default, bins, weight, None, [hop])
    signal = _crop_to_signal(call, call.emit(ATEN.squeeze.dim, sums, 1), size)
    signal = call.emit(ATEN.mul.Tensor, signal, _envelope(call, bins, window, hop))
    if arguments["length"] is not None:
        missing = arguments["length"] - value_of(signal).shape[-1]
        if not isinstance(missing, int) or missing > 0:
            signal = call.emit(ATEN.constant_pad_nd.default, signal, [0, missing], 0.0)
    return signal if is_batched else call.emit(ATEN.squeeze.dim, signal, 0)


def _crop_to_signal(call: PairCall, signal: Node, size: int) -> Node:
    """Crop the sums to the signal: half a frame less on each side if centered."""
    start = size // 2 if call.arguments["center"] else 0
    length = call.arguments["length"]
    end = -start if length is None and start else _END if length is None else start + length
    return _slice(call, signal, -1, start, end)


def _envelope(call: PairCall, bins: Node, window: torch.Tensor, hop: int) -> Node:
    """Return ``1 / sum(window ** 2)`` over the frames at each sample."""
    size, frames = len(window), value_of(bins).shape[-1]
    square = window.abs() ** 2
    if not isinstance(frames, int):
        unit_row = call.emit(ATEN.full_like.default, _slice(call, bins, -2, 0, 1), 1.0)
        weight = call.constant((call.node.name, "square"), lambda: square.reshape(1, 1, -1))
        sums = call.emit(ATEN.conv_transpose1d.default, unit_row, weight, None, [hop])
        sums = _crop_to_signal(call, call.emit(ATEN.squeeze.dim, sums, 1), size)
        return call.emit(ATEN.reciprocal.default, sums)
    sums = torch.nn.functional.conv_transpose1d(
        torch.ones(1, 1, frames, dtype=square.dtype), square.reshape(1, 1, -1), stride=hop
    ).flatten()
    start = size // 2 if call.arguments["center"] else 0
    length = call.arguments["length"]
    sums = sums[start : len(sums) - start if length is None else start + length]
    if sums.min() < _MIN_ENVELOPE:
        raise FormError("istft with windows that leave samples out")
    return call.constant((call.node.name, "envelope"), lambda: 1 / sums)


def _frame(call: PairCall) -> tuple[int, int]:
    """Return frame size and hop length."""
    size = call.arguments["n_fft"]
    hop = call.arguments["hop_length"]
    _require_static(size)
    if size > LARGEST_FRAME:
        raise FormError(
            f"frames of {size} points, more than {LARGEST_FRAME}", "Choose a smaller n_fft"
        )
    return size, size // 4 if hop is None else hop


def _window(call: PairCall, size: int) -> torch.Tensor:
    """Return the window in fp64 or complex128, with zeros on both sides up to ``size``."""
    length = call.arguments["win_length"] or size
    node = call.arguments["window"]
    window = torch.ones(length) if node is None else call.constant_value(node)
    if window is None:
        raise FormError(
            "a window that is computed from inputs",
            "Make it a buffer, or compute it from numbers",
        )
    padding = (size - length) // 2
    window_64 = window.to(torch.complex128 if window.is_complex() else torch.float64)
    return torch.nn.functional.pad(window_64, [padding, size - length - padding])


# Arguments


def _dims(call: PairCall, x: Pair) -> list[int]:
    return [dim % value_of(x.node).dim() for dim in call.arguments["dim"]]


def _size(x: Pair, dim: int) -> int:
    size: Any = value_of(x.node).shape[dim]
    _require_static(size)
    return size


def _require_static(size: Any) -> None:
    if not isinstance(size, int):
        raise FormError(
            "a transform of a dynamic number of points, on which its matrix depends",
            "Export a program for each number of points; other dimensions may be dynamic",
        )


def _scale(call: PairCall, sizes: Sequence[int]) -> float:
    return float(math.prod(sizes)) ** _SCALES[call.arguments["normalization"]]


def _slice(call: PairCall, part: Part, dim: int, start: int, end: int) -> Node:
    return call.emit(ATEN.slice.Tensor, part, dim, start, end)


_END = (1 << 63) - 1
_ROUNDED_TO_ZERO = 1e-15  # relative to 1
_MIN_ENVELOPE = 1e-11  # torch's limit

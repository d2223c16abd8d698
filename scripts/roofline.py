"""The roofline of this machine: how fast a kernel can be, given its operations and its bytes.

A kernel computes no faster than the processor multiplies, and no faster than memory brings its
operands: its intensity, operations per byte, says which of the two it meets first.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coreml_delegate.options.engine_options import Precision
from coreml_delegate.runtime.threads import cpu_count
from coreml_delegate.scripts.profiles import Kernel

_PRODUCT = 1024  # rows and columns of the matrices that are multiplied
_COPIED = 1 << 27  # bytes, more than caches hold
_TRIES = 7

# The chart, in units of its own.
_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_SMALLEST, _LARGEST = 2.5, 14.0  # radius of a kernel


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured speed of this machine.

    Attributes:
        flops_per_second: Of a product of two large matrices.
        bytes_per_second: Read and written by a copy of more than the caches hold.
    """

    flops_per_second: float
    bytes_per_second: float
    threads: int
    precision: str

    @property
    def ridge(self) -> float:
        """The intensity from which on the processor is the limit, in operations per byte."""
        return self.flops_per_second / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """Return the operations per second that a kernel of this intensity can reach."""
        return min(self.flops_per_second, intensity * self.bytes_per_second)


def measure_machine(threads: int | None, precision: str) -> Machine:
    """Measure this machine; takes about half a second."""
    import torch

    dtype = torch.bfloat16 if Precision(precision) is Precision.BF16 else torch.float32
    before = torch.get_num_threads()
    used = threads or cpu_count()
    torch.set_num_threads(used)
    try:
        left, right = (torch.rand(_PRODUCT, _PRODUCT).to(dtype) for _ in range(2))
        product = torch.empty_like(left)
        source = torch.ones(_COPIED // 4)
        target = torch.empty_like(source)
        multiplied = _fastest(lambda: torch.mm(left, right, out=product))
        copied = _fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)
    return Machine(2 * _PRODUCT**3 / multiplied, 2 * _COPIED / copied, used, precision)


def _fastest(action: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel in the chart.

    Attributes:
        share: Fraction of the attainable speed; above 1 where caches hold its operands.
        y: Place in the chart, from above.
    """

    kernel: Kernel
    intensity: float
    flops_per_second: float
    share: float
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Chart:
    """The roofline with kernels below it, both axes logarithmic.

    Attributes:
        points: The kernels, the longest first.
        roof: Corners of the roof, left to right.
        across: Lines of the horizontal axis: place, and operations per byte.
        up: Lines of the vertical axis: place, and operations per second.
    """

    points: tuple[Point, ...]
    roof: tuple[tuple[float, float], ...]
    across: tuple[tuple[float, float], ...]
    up: tuple[tuple[float, float], ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = _HEIGHT - _BOTTOM


def draw_roofline(kernels: Iterable[Kernel], machine: Machine) -> Chart:
    """Lay out the chart of the kernels that compute something and whose work is known."""
    charted = [k for k in kernels if k.milliseconds > 0 and k.flops and k.bytes]
    charted.sort(key=lambda kernel: -kernel.milliseconds)
    coordinates = [_coordinates(kernel) for kernel in charted]
    low_x, high_x = _decades([x for x, _ in coordinates], machine.ridge)
    low_y, high_y = _decades([y for _, y in coordinates], machine.flops_per_second)

    def across(intensity: float) -> float:
        part = (math.log10(intensity) - low_x) / (high_x - low_x)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def up(speed: float) -> float:
        part = (math.log10(speed) - low_y) / (high_y - low_y)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    longest = max((kernel.milliseconds for kernel in charted), default=1.0)
    points = [
        Point(
            kernel,
            intensity,
            speed,
            speed / machine.attainable(intensity),
            across(intensity),
            up(speed),
            max(_SMALLEST, _LARGEST * math.sqrt(kernel.milliseconds / longest)),
        )
        for kernel, (intensity, speed) in zip(charted, coordinates, strict=True)
    ]
    foot = max(10.0**low_x, 10.0**low_y / machine.bytes_per_second)
    corners = (foot, machine.ridge, 10.0**high_x)
    return Chart(
        tuple(points),
        tuple((across(x), up(machine.attainable(x))) for x in corners),
        tuple((across(10.0**n), 10.0**n) for n in range(low_x, high_x + 1)),
        tuple((up(10.0**n), 10.0**n) for n in range(low_y, high_y + 1)),
    )


def _coordinates(kernel: Kernel) -> tuple[float, float]:
    """Return operations per byte, and operations per second, of a kernel that has both."""
    flops, moved = kernel.flops or 0, kernel.bytes or 0
    return flops / moved, flops / (kernel.milliseconds / 1e3)


def _decades(values: Sequence[float], own: float) -> tuple[int, int]:
    """Return the exponents of the powers of ten around ``values`` and ``own``."""
    numbers = (*values, own)
    low, high = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
    return low, max(high, low + 1)

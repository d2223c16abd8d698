"""Fourier transforms of any size, dimensions and normalization: NumPy computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lowering import Function
from support.tolerances import FOURIER

from coreml_delegate.transforms.complex_numbers import split_complex_numbers

pytestmark = pytest.mark.property

REAL_INPUT = ("fft", "ifft", "rfft", "ihfft", "fft2", "ifft2", "rfft2", "fftn", "ifftn", "rfftn")
COMPLEX_INPUT = ("fft", "ifft", "irfft", "hfft", "fft2", "ifft2", "irfft2", "fftn", "irfftn")
SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13])
# Primes and products on both sides of what is one matrix: 512 points.
LONG = (500, 509, 512, 513, 521, 997, 1000, 1024, 1155, 2000)


def transformed(
    name: str, x: np.ndarray, *, is_complex: bool, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return a transform by the rewritten program and by NumPy, which computes in fp64."""

    def function(real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
        given = torch.complex(real, imag) if is_complex else real + 0 * imag
        result = getattr(torch.fft, name)(given, **_by_torch(name, options))
        return torch.view_as_real(result.resolve_conj()) if result.is_complex() else result

    parts = tuple(torch.from_numpy(part.astype(np.float32)) for part in (x.real, x.imag))
    program = split_complex_numbers(torch.export.export(Function(function), parts))
    actual = program.module()(*parts).numpy()
    expected = getattr(np.fft, name)(x if is_complex else x.real, **options)
    if np.iscomplexobj(expected):
        expected = np.stack([expected.real, expected.imag], -1)
    return actual, expected


def _by_torch(name: str, options: dict[str, Any]) -> dict[str, Any]:
    several = name.endswith(("2", "n"))
    names = {"axes": "dim", "axis": "dim"} | ({} if several else {"s": "n"})
    return {names.get(key, key): value for key, value in options.items()}


def assert_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    largest = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(actual / largest, expected / largest, rtol=0, atol=FOURIER)


@settings(
    max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(st.data())
def test_transforms_are_those_of_numpy(data: st.DataObject) -> None:
    is_complex = data.draw(st.booleans())
    name = data.draw(st.sampled_from(COMPLEX_INPUT if is_complex else REAL_INPUT))
    shape = data.draw(st.lists(SIZES, min_size=3, max_size=4))
    count = {"2": 2, "n": data.draw(st.sampled_from([1, 2, 3]))}.get(name[-1], 1)
    axes = data.draw(st.permutations(range(-len(shape), 0)))[:count]
    # Half transforms of one point are refused by both.
    lengths = data.draw(st.lists(SIZES.filter(lambda n: n > 1), min_size=count, max_size=count))
    options: dict[str, Any] = {"norm": data.draw(st.sampled_from(["backward", "ortho", "forward"]))}
    if name.endswith(("2", "n")):
        options |= {"s": tuple(lengths), "axes": tuple(axes)}
    else:
        options |= {"n": lengths[0], "axis": axes[0]}
    numbers = np.random.default_rng(data.draw(st.integers(0, 9)))
    x = numbers.standard_normal(shape) + 1j * numbers.standard_normal(shape)
    x = x.astype(np.complex64).astype(np.complex128)
    assert_equal(*transformed(name, x, is_complex=is_complex, **options))


@pytest.mark.share(3)
@pytest.mark.parametrize("size", LONG)
def test_long_transforms_are_those_of_numpy(size: int) -> None:
    numbers = np.random.default_rng(size)
    x = numbers.standard_normal((2, size, 2)) + 1j * numbers.standard_normal((2, size, 2))
    x = x.astype(np.complex64).astype(np.complex128)
    for name, is_complex in (("fft", True), ("rfft", False), ("irfft", True)):
        options = {"n": size, "axis": 1}
        assert_equal(*transformed(name, x, is_complex=is_complex, **options))

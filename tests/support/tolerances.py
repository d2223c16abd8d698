"""Every tolerance of the test suite, each with its reason.

``ATOL_RTOL`` bounds single ops; ``SQNR`` bounds whole programs, in dB of signal over error energy.
"""

from __future__ import annotations

import numpy as np

# dtype of the computation -> (atol, rtol)
ATOL_RTOL: dict[str, tuple[float, float]] = {
    # Two correct fp32 kernels differ by summation order: a few ulp over thousands of terms.
    "fp32": (1e-5, 1e-4),
    # fp16 has an 11-bit significand (ulp 2**-11 relative): two or three roundings.
    "fp16": (2e-3, 2e-3),
    # Integers and booleans have one right answer.
    "int32": (0.0, 0.0),
    "bool": (0.0, 0.0),
}


def sqnr_db(expected: np.ndarray, actual: np.ndarray) -> float:
    """Signal to quantization-noise ratio in dB; inf when equal, nan-safe (nan -> -inf)."""
    signal = np.asarray(expected, dtype=np.float64)
    noise = np.asarray(actual, dtype=np.float64) - signal
    if not np.isfinite(noise).all():
        return -np.inf
    noise_energy = float((noise**2).sum())
    if noise_energy == 0.0:
        return np.inf
    return float(
        10 * np.log10(max(float((signal**2).sum()), np.finfo(np.float64).tiny) / noise_energy)
    )


# Whole programs, dB over eager fp32.
# fp32: summation order only; torchvision's deepest model stays 15 dB above.
SQNR_FP32 = 60.0
# fp16: every intermediate value rounds to 11 bits; a hundred layers cost about 25 dB of the 66.
SQNR_FP16 = 35.0
# Models that cannot keep it, with the reason.
SQNR_FP16_LOWER = {
    # Ninety-four convolutions with random weights amplify rounding: eager half precision itself
    # gives 23 dB at 128 and at 299 pixels.
    "inception_v3": 20.0,
}

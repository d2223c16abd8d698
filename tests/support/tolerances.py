"""Every tolerance of the test suite, each with its reason.

``ATOL_RTOL`` bounds single ops; ``SQNR`` bounds whole programs: signal over error energy, in dB.
"""

from __future__ import annotations

import numpy as np
import torch

# dtype of the computation -> (atol, rtol)
ATOL_RTOL: dict[str, tuple[float, float]] = {
    # Two correct fp32 kernels differ by summation order: a few ulp over thousands of terms.
    "fp32": (1e-5, 1e-4),
    # fp16 has an 11-bit significand (ulp 2**-11 relative): two or three roundings.
    "fp16": (2e-3, 2e-3),
    # bf16 has an 8-bit significand (ulp 2**-8 relative): two or three roundings.
    "bf16": (1.6e-2, 1.6e-2),
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
# bf16: every value stored between kernels rounds to 8 bits, worth 50 dB, and softmax magnifies what
# its input has lost; a sum of thousands of terms kept in 8 bits would leave less than 10.
SQNR_BF16 = 30.0
# Logits of tiny language models in the form for the neural engine: 46 to 57 dB on the reference
# engine, for two layers of which every value rounds to 11 bits.
SQNR_NEURAL_ENGINE = 40.0
# Logits of one layer and a head with compressed weights. Against the same rounding by PyTorch; of
# weights half way between two of 15 values a few are rounded to the other one (30.5 dB). Palettes
# against the weights as they were: 10.2 dB with 16 values for 16 outputs; each bit halves the
# distance of values, which is worth 6 dB.
SQNR_WEIGHTS = {
    "int8-channel": 40.0,
    "int4-channel": 25.0,
    "codebook-4-group16": 8.0,
    "codebook-6-group16": 18.0,
    "codebook-8-group16": 28.0,
}
# Models that cannot keep it, with the reason.
SQNR_FP16_LOWER = {
    # Ninety-four convolutions with random weights amplify rounding: eager half precision itself
    # gives 23 dB at 128 and at 299 pixels.
    "inception_v3": 20.0,
}
# Models of docs/models.md that cannot keep SQNR_FP32 or SQNR_FP16, with the reason.
SQNR_FP32_OF_MODELS = {
    # Regions are sampled where the boxes of an untrained network are: rounding moves the boxes, and
    # with them every value of a region.
    "maskrcnn_resnet50_fpn": 45.0,
    # Input and result are rounded to 8 bits.
    "MobileNet v2, bf16": 45.0,
    # A value between two integers is rounded to either: a step of 256 in some of each layer's.
    "ResNet-18, int8": 25.0,
}
SQNR_FP16_OF_MODELS = {
    # As in fp32, with more values near the middle.
    "ResNet-18, int8": 20.0,
}
# A model whose interface is half precision, computed in fp32: input, weights and result are rounded
# to 11 bits (66 dB each) or 8 (48 dB), and a layer norm amplifies what the layers before have lost.
SQNR_HALF = {torch.float16: 50.0, torch.bfloat16: 32.0}
# By which a kernel that adds in half precision is told: sums of 2,048 terms in bfloat16 lose over
# 10 dB; sums in fp32 that are rounded once differ from torch's by less than 3.
SUM_LOST_DB = 6.0


def kolmogorov_bound(count: int) -> float:
    """The largest accepted distance of draws from their distribution (Kolmogorov, Smirnov).

    A correct generator exceeds it once in 10**5 samples: 2 * exp(-2 * count * bound**2) = 1e-5.
    """
    return float(np.sqrt(np.log(2 / 1e-5) / (2 * count)))


# Eight bits over fp32, dB: each tensor's 256 steps are worth 45, of which untrained layers with
# activations of few large values keep little.
SQNR_INT8 = 15.0
# fp16 rounds a value next to the middle between two integers to either: results may be a step of
# their grid apart, and another for the steps that come before; the half is for estimated steps.
QUANTIZED_STEPS = 2.5


def flips_allowed(images: int) -> int:
    """Images that two runs of one quantized model may classify differently, by such rounding."""
    return max(1, images // 500)


# Logits of two implementations of one language model in fp32: the order of sums differs in every
# layer, and logits of a few units are sums of large terms.
ATOL_RTOL_LOGITS = (1e-4, 1e-4)
# Fourier transforms in fp32 beside fp64, relative to the largest value: sums of up to 2000 terms.
FOURIER = 2e-6


def logits_bounds(expected: torch.Tensor) -> tuple[float, float]:
    """As ``ATOL_RTOL_LOGITS``, for models whose logits may be large.

    The terms that cancel in a small logit are as large as the terms of the largest logit.
    """
    atol, rtol = ATOL_RTOL_LOGITS
    return atol * max(1.0, float(expected.abs().max())), rtol


# Perplexity relative to eager fp32. fp16 changes single logits by thousandths; 4 bits a weight by
# tenths, which on average over a text cost a model next to nothing.
PERPLEXITY_FP32 = 1e-4  # as ATOL_RTOL_LOGITS: the logarithm of a perplexity is a mean of logits
PERPLEXITY_FP16 = 0.01
PERPLEXITY_INT4 = 0.05
# Expressions of a few ops that fp16 would lose, guarded: results round to 11 bits, worth 66 dB, and
# so do operands that are results of layers.
SQNR_FP16_GUARDED = 40.0
# `auto` holds that against the program in fp32. PyTorch differs from this program too, from machine
# to machine: EfficientNet B1, whose fp32 program has 57 dB, has 39.5 to 39.9 over it.
SQNR_AUTO = 39.0

ATOL_RTOL_DEQUANTIZED = (1e-7, 1e-6)
"""Weights computed from integers, scales and zero points: fp32 operations differ in order."""

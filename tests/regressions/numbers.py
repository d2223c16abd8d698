"""Reports about arithmetic and activations in coremltools' converter, after release 9.0."""

from __future__ import annotations

import math

import torch
from ops.op_samples.sample import i, w, x
from torch.nn import functional

from regressions.record import COREMLTOOLS, Here, Regression, case, issues, released

_BY_49 = x(values=[49.0 * n for n in range(-9, 10)])
_SMALL = x(values=[1e-3, 1e-2, 0.25, 1.0])
_ABOUT_ONE = x(values=[0.25, 1.25, 2.5, 7.25, -0.25, -1.75])
_QUOTIENT = (
    i(values=[10, -10, 7, -7, 16777217], dtype=torch.int32),
    i(values=[3, 3, 2, 2, 1], dtype=torch.int32),
)
_LONG_QUOTIENT = (i(values=[99, -99, 7, -7]), i(values=[2, 2, -2, -2]))
_LOWEST = torch.finfo(torch.float32).min


def _hide(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Softmax over scores whose hidden ones get the smallest number of fp32.

    A row that is hidden altogether has weights that say nothing; they may not be nan.
    """
    weights = torch.softmax(scores + (1.0 - keep) * _LOWEST, -1)
    return weights * keep.amax(-1, keepdim=True)


def _spiky_norm(spiky: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(spiky, (8,), eps=1e-2)


RECORDS = (
    Regression(
        issues(COREMLTOOLS, 2773),
        "`reciprocal` added 1e-4 to its argument",
        Here.DELEGATED,
        "a division",
        (
            case(torch.reciprocal, _SMALL),
            case(torch.reciprocal, x(values=[1e-4, -1e-4]), note="smaller", fp16=False),
            case(lambda v: 1.0 / v, _SMALL, note="one-over"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2769),
        "`atan2` gave 0 for pi where y is zero, and was pi off where x is hardly below zero",
        Here.REPAIRED,
        "the shorter side is divided by the longer, and the angle mirrored into its octant",
        (
            case(torch.atan2, x(values=[0.0, 0.0, 0.0]), x(values=[-1.0, -3.0, 0.0])),
            case(
                torch.atan2,
                x(values=[1.0, -1.0, 1.0, -1.0]),
                x(values=[-1e-9, -1e-9, 1e-9, 0.0]),
                note="close-to-the-axis",
            ),
            case(torch.atan2, x(3, 4), x(3, 4), note="anywhere"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2674, 2569),
        "`acosh` and `asinh` were registered and failed to convert",
        Here.REPAIRED,
        "logarithms and roots, whose squares fp16 has",
        (
            case(torch.asinh, x(3)),
            case(torch.asinh, x(values=[-5e4, -1e-3, 0.0, 300.0]), note="far"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2669),
        "A mask of the smallest fp32 number became minus infinity in fp16, and a hidden row nan",
        Here.DELEGATED,
        "such masks and the scores they hide are clamped to fp16's range",
        (case(_hide, x(3, 4), x(values=[[1.0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])),),
    ),
    Regression(
        issues(COREMLTOOLS, 2680, 2573),
        "`alpha` of `add` and `sub` was ignored when given by keyword, as exported programs do",
        Here.DELEGATED,
        "the second term is multiplied by it",
        (
            case(torch.sub, x(2, 3), x(2, 3), alpha=5),
            case(torch.add, x(2, 3), x(2, 3), alpha=-0.5, note="add"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2718),
        "`correction` of `var` and `std` above 1 counted as 1",
        Here.DELEGATED,
        "the uncorrected variance is scaled",
        (
            case(torch.var, x(3, 5), dim=-1, correction=2, keepdim=True),
            case(torch.std, x(3, 5), dim=0, correction=0, note="std"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2734, 2733),
        "`div` of integers with a rounding mode gave floats",
        Here.DELEGATED,
        "integers are divided as integers",
        tuple(
            case(torch.div, *_QUOTIENT, rounding_mode=mode, note=mode)
            for mode in ("floor", "trunc")
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2738, 2681, 2570),
        "`floor_divide` of integers gave floats",
        Here.DELEGATED,
        "integers are divided as integers",
        (case(torch.floor_divide, *_LONG_QUOTIENT),),
    ),
    Regression(
        issues(COREMLTOOLS, 2735),
        "`log2` and `log10` of integers failed to convert",
        Here.DELEGATED,
        "the argument is cast to fp32",
        (
            case(torch.log2, i(values=[1, 2, 1000])),
            case(torch.log10, i(values=[1, 10, 1000]), note="log10"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2836, 2761, 2762),
        "`remainder` by 1 gave zeros: a quotient rounded down was taken for its dividend",
        Here.REPAIRED,
        "the quotient is rounded once more; likewise `fmod` and `floor_divide`",
        (
            case(lambda v: v % 1, _ABOUT_ONE),
            case(torch.remainder, _ABOUT_ONE, 1.0, note="number"),
            case(torch.remainder, _ABOUT_ONE, w(values=[1.0] * 6), note="tensor"),
            case(lambda v: v % torch.ones_like(v), _ABOUT_ONE, note="ones"),
            case(lambda v: v % torch.ones(6).view(6), _ABOUT_ONE, note="computed"),
            case(torch.fmod, _ABOUT_ONE, 1.0, note="fmod"),
            case(lambda v: torch.floor_divide(v * 2, 1.0) + 1, _ABOUT_ONE, note="floor_divide"),
            case(torch.remainder, _ABOUT_ONE, 2.0, note="two"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2839),
        "`clamp` of integers with one bound computed in fp32, which has not all integers",
        Here.REPAIRED,
        "the larger or smaller of two integers",
        (
            case(torch.clamp, i(values=[16777217, 2000000001, -16777217, -1, 5]), min=0),
            case(torch.clamp, i(values=[16777217, 5, -16777217]), max=16777217, note="max"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2821, 2822),
        "`rms_norm` scaled its input and not epsilon: percents of error beside a large value, and "
        "nan for a row of zeros",
        Here.DELEGATED,
        "epsilon is scaled too",
        (case(_spiky_norm, x(values=[[0.0] * 7 + [60.0], [0.0] * 8, [0.5] * 8])),),
    ),
    Regression(
        issues(COREMLTOOLS, 2863),
        "`gelu(approximate='tanh')` became the exact one in exported programs",
        Here.DELEGATED,
        "its formula, which coremltools fuses",
        (case(functional.gelu, x(4, 8, low=-4.0, high=4.0), approximate="tanh"),),
    ),
    Regression(
        issues(COREMLTOOLS, 2725),
        "The threshold of `softplus` was ignored",
        Here.REPAIRED,
        "the term that vanishes above the threshold is left out there",
        (
            case(functional.softplus, x(values=[-3.0, 0.5, 1.5, 4.0]), 1.0, 1.0),
            case(functional.softplus, x(values=[-3.0, 0.5, 1.5, 40.0]), 2.0, note="beta"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2763, 2727, 2728),
        "`log_softmax` took the logarithm of a softmax: minus infinity, or -103, far below the "
        "largest score",
        Here.REPAIRED,
        "the scores less the logarithm of their sum of exponentials",
        (
            case(torch.log_softmax, x(values=[[0.0, 200.0, 150.0], [-300.0, 0.0, -0.5]]), -1),
            case(torch.log_softmax, x(values=[[0.0] * 3 + [50.0]]), -1, note="one-class"),
            case(functional.cross_entropy, x(values=[[0.0, 40.0]]), i(values=[0]), note="loss"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2729),
        "`logcumsumexp` took exponentials of the scores themselves, which overflow",
        Here.REFUSED,
        "coremltools unrolls it",
        (case(torch.logcumsumexp, x(values=[1.0, 10.0, 100.0]), 0),),
        refused={"aten.logcumsumexp.default": "coremltools unrolls it over the dimension"},
    ),
    Regression(
        released("9.0"),
        "A quotient by a constant is a product with its reciprocal, in fp16 below whole numbers: "
        "`div` with `rounding_mode='trunc'` was one too small",
        Here.REPAIRED,
        "the op that divides and rounds down, on magnitudes",
        (
            case(torch.div, _BY_49, 49.0, rounding_mode="trunc", note="trunc"),
            case(torch.div, _BY_49, -49.0, rounding_mode="trunc", note="trunc-negative"),
            case(torch.floor_divide, _BY_49, 49.0, note="floor"),
        ),
    ),
    Regression(
        released("9.1.dev1"),
        "`selu` and `celu` lost their scale",
        Here.DELEGATED,
        "the scale is a factor",
        (
            case(functional.selu, x(3, 4), note="selu"),
            case(functional.celu, x(3, 4), 0.5, note="celu"),
        ),
    ),
    Regression(
        released("9.1.dev1"),
        "`ones_like` of another dtype had that of its argument",
        Here.DELEGATED,
        "the result is cast",
        (case(lambda v: torch.ones_like(v, dtype=torch.float32) * 0.5, i(3), note="ones_like"),),
    ),
    Regression(
        released("9.1.dev1"),
        "`cumsum` and `arange` of floats were folded to wrong values",
        Here.DELEGATED,
        "the cases fold, and are right",
        (
            case(lambda v: torch.cumsum(torch.ones(4), 0) + v, x(4), note="cumsum"),
            case(lambda v: torch.arange(0, 1, 0.25) + v, x(4), note="arange"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2568),
        "`randint` drew its upper bound, too",
        Here.REFUSED,
        "coremltools rounds toward zero, so not all integers are equally likely",
        (case(lambda v: torch.randint(0, 3, (4,)) + v, x(4), compare=False),),
        refused={"aten.randint.low": "not all integers are equally likely"},
    ),
    Regression(
        issues(COREMLTOOLS, 2601),
        "`pow(x, 2)` differed from `x * x` on the device, in fp16",
        Here.DELEGATED,
        "by as much as fp16 rounds",
        (case(torch.pow, x(8, low=98.0, high=102.0), 2),),
    ),
    Regression(
        issues(COREMLTOOLS, 2742, 2628),
        "The device computes `pow` with the constant base 2 as the square of the exponent",
        Here.REPAIRED,
        "the op for powers of two",
        (
            case(torch.pow, 2, x(values=[0.0, 1.0, 3.0, -1.5])),
            case(lambda v: 2**v, x(2, 3), note="operator"),
            case(torch.pow, w(values=[2.0]), x(values=[[0.0, 3.0]]), note="tensor"),
            case(lambda v: torch.full_like(v, 2.0) ** v, x(values=[0.0, 3.0]), note="filled"),
        ),
        absent=("pow",),
    ),
    Regression(
        issues(COREMLTOOLS, 2770),
        "`all` and `any` of numbers cast them to integers, and took -1 for false",
        Here.DELEGATED,
        "numbers are compared with zero",
        (
            case(torch.all, i(values=[[-1, 0, 3], [-1, -2, -3]]), 1),
            case(torch.any, i(values=[[-1, 0, -3], [0, 0, 0]]), 1, note="any"),
            case(torch.all, x(values=[[0.5, 0.5], [-0.5, 0.0]]), 1, note="all-floats"),
            case(torch.any, x(values=[[0.5, 0.5], [-0.5, 0.0]]), 1, note="any-floats"),
            case(torch.all, x(values=[[0.5, 0.5], [-0.5, 0.25]]), note="all-elements"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2809),
        "The `dtype` of `sum` and `decimals` of `round` were taken for other arguments",
        Here.DELEGATED,
        "arguments are known by their names",
        (
            case(torch.sum, i(2, 3), dtype=torch.float32),
            case(torch.sum, x(2, 3), dtype=torch.float32, note="floats"),
            case(torch.round, x(values=[1.234, -2.345]), decimals=2, note="round", fp16=False),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2833, 1778),
        "`stack` of floats and integers failed to convert",
        Here.DELEGATED,
        "ExecuTorch casts them",
        (case(lambda a, b: torch.stack([a, b]), x(2, 3), i(2, 3)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2813),
        "`rand` always gave fp32",
        Here.DELEGATED,
        "it is `rand_like` of zeros of its type",
        (case(lambda v: (torch.rand(2, dtype=torch.float16) <= 1) + v, x(2)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2710, 2337),
        "`multinomial` gave floats for indices",
        Here.REFUSED,
        "coremltools takes what is not normalized for probabilities",
        (case(torch.multinomial, x(2, 4, low=0.1), 3, True, compare=False),),
        refused={"aten.multinomial.default": "unnormalized weights"},
    ),
    Regression(
        issues(COREMLTOOLS, 2834),
        "`isinf` and its like did not convert",
        Here.REPAIRED,
        "comparisons of the magnitude with infinity",
        tuple(
            case(function, x(values=[1.0, math.nan, math.inf, -math.inf]), note=name)
            for name, function in (("isinf", torch.isinf), ("isfinite", torch.isfinite))
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2832),
        "`cdist` did not convert",
        Here.REPAIRED,
        "norms of differences",
        (case(torch.cdist, x(1, 3, 4), x(1, 5, 4)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2641),
        "`l1_loss` did not convert",
        Here.DELEGATED,
        "`torch.export` decomposes it",
        (case(functional.l1_loss, x(2, 3), x(2, 3)),),
    ),
    Regression(
        issues(COREMLTOOLS, 2812),
        "`softplus` with a `beta` and `nll_loss` failed to convert with a dynamic dimension",
        Here.DELEGATED,
        "both are computed of other ops",
        (
            case(functional.softplus, x(2, 4, 5), 2.0, dynamic=True),
            case(
                lambda v: functional.nll_loss(torch.log_softmax(v.t(), -1), v.argmax(0)),
                x(4, 3),
                dynamic=True,
                note="loss",
            ),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2815),
        "`prod` did not convert",
        Here.REPAIRED,
        "Core ML's product of elements",
        (case(torch.prod, x(2, 3), -1),),
    ),
    Regression(
        issues(COREMLTOOLS, 2816, 2668),
        "`|=` and other ops of which masks are made did not convert",
        Here.DELEGATED,
        "exported programs have the op that is not in place, and it has a rule",
        (
            case(lambda a, b: (a > 0) | (b > 0), x(2, 3), x(2, 3), fp16=False),
            case(
                lambda a, b: (a > 0).clone().bitwise_or_(b > 0), x(2, 3), x(2, 3), note="in-place"
            ),
            case(lambda a: a.new_ones(2, 3) + a, x(2, 3), note="ones"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2687, 2359, 2618),
        "`softplus` and `mish` are zero on the Neural Engine in fp16 beyond about 10",
        Here.REPAIRED,
        "`max(x, softplus(min(x, 10)))` in fp16",
        (
            case(functional.softplus, x(values=[-30.0, -1.0, 0.0, 8.0, 10.5, 20.0, 50.0])),
            case(functional.mish, x(values=[-30.0, -1.0, 0.0, 8.0, 10.5, 50.0]), note="mish"),
        ),
    ),
    Regression(
        issues(COREMLTOOLS, 2690, 2726),
        "`logsumexp` is zero on the Neural Engine in fp16 beyond about 7",
        Here.REPAIRED,
        "exponentials of the distance from the largest number",
        (
            case(torch.logsumexp, x(values=[[7.0, 8.0, 12.0], [200.0, 3.0, 1.0]]), -1),
            case(torch.logsumexp, x(2, 3, 4), (0, 2), keepdim=True, note="dimensions"),
            case(torch.logsumexp, x(values=[[math.inf, 1.0]]), -1, note="infinite"),
        ),
        absent=("reduce_log_sum_exp",),
    ),
)

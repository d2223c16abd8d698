"""Rewrites for devices leave the numbers as they are, and nothing for the rules to find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.engine_runs import assert_close
from support.mil import build, builder_program, features, main, serialized
from support.tolerances import SQNR_FP32, sqnr_db

from coreml_delegate.device_check import RULES, CheckedModel, Use, check
from coreml_delegate.mil.compose import mb
from coreml_delegate.mil.passes import for_devices
from coreml_delegate.mil.passes.for_devices import REWRITES, REWRITES_IN_FP32, is_smooth
from coreml_delegate.mil.passes.matching import remove_dead_code, rewrite
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference.engine import ReferenceEngine
from coreml_delegate.runtime.mil.program import Program
from coreml_delegate.targets import Device, Opset

RANDOM = np.random.default_rng(0)
NEURAL_ENGINE = Device.NEURAL_ENGINE


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A function of MIL ops with a finding.

    Attributes:
        rule: The rule of the finding.
        function: Takes builder variables.
        inputs: Arrays by name.
        device: The device whose rewrites remove the finding.
    """

    rule: str
    function: Callable[..., object]
    inputs: dict[str, np.ndarray]
    device: Device = NEURAL_ENGINE
    opset: Opset = field(default=Opset.iOS18)


HIDDEN = np.where(np.arange(6) < 4, 0, -math.inf).astype(np.float32)
ROWS = np.array([[True] * 6, [False] * 6] + [[True, False] * 3] * 4)  # the second sees nothing
QUERY = {"x": numbers(2, 3, 6, 8)}


def attention(x, mask=None):
    further = {} if mask is None else {"attn_mask": mask}
    return mb.scaled_dot_product_attention(query=x, key=x, value=x, **further)


def zeroed(x, mask):
    """PyTorch's attention as it is translated: rows without a visible key are 0."""
    visible = mb.reduce_max(x=mb.cast(x=mask, dtype="fp32"), axes=[-1], keep_dims=True)
    return mb.select(cond=mb.less_equal(x=visible, y=0.0), a=0.0, b=attention(x, mask))


def scores(x):
    return mb.matmul(x=x, y=x, transpose_y=True)


def twice(x, mask):
    for _ in range(2):
        weights = mb.softmax(x=mb.add(x=scores(x), y=mask), axis=-1)
        x = mb.matmul(x=weights, y=x)
    return x


def convolution(weight: np.ndarray, **options):
    return lambda x: mb.conv(x=x, weight=weight, **options)


def pooling(kind: str, **options):
    return lambda x: getattr(mb, kind)(x=x, **{"pad_type": "valid", **options})


WEIGHT = numbers(5, 4, 7, 3)
IMAGE = {"x": numbers(1, 4, 33, 20)}
CONVOLUTIONS = {
    "kernel of a stride": convolution(numbers(5, 4, 7, 5), strides=[7, 5], pad_type="valid"),
    "overlapping": convolution(WEIGHT, strides=[5, 1], pad_type="valid"),
    "in groups": convolution(numbers(6, 2, 7, 3), strides=[5, 3], groups=2, pad_type="valid"),
    "padded": convolution(WEIGHT, strides=[5, 2], pad_type="custom", pad=[3, 1, 0, 2]),
    "same": convolution(WEIGHT, strides=[5, 7], pad_type="same"),
    "same, more before": convolution(WEIGHT, strides=[7, 7], pad_type="same_lower"),
    "with a bias": convolution(WEIGHT, strides=[5, 5], pad_type="valid", bias=numbers(5)),
    "shorter than the stride": convolution(numbers(5, 4, 2, 3), strides=[5, 5], pad_type="valid"),
}
SQUARE = {"x": numbers(1, 4, 32, 64)}
POOLS = {
    "maxima of 8": pooling("max_pool", kernel_sizes=[8, 16], strides=[8, 16]),
    "means of 16": pooling(
        "avg_pool", kernel_sizes=[16, 2], strides=[16, 2], exclude_padding_from_average=True
    ),
    "one window": pooling("max_pool", kernel_sizes=[32, 64], strides=[7, 5]),
    "one window of squares": pooling("l2_pool", kernel_sizes=[32, 64], strides=[32, 64]),
}
FEW = np.repeat(np.linspace(-1, 1, 30, dtype=np.float32), 256).reshape(64, 120)
SIX = np.tile(np.linspace(-1, 1, 6, dtype=np.float32), 1280).reshape(64, 120)
WIDE = numbers(10, 350 * 49)
BIAS = numbers(6, 6)

CASES = {
    "attention": Case("fused-attention", attention, QUERY),
    "attention with a mask": Case(
        "fused-attention", lambda x: attention(x, np.where(ROWS, 0, -math.inf)[:1]), QUERY
    ),
    "attention with truths": Case("unsupported-type", zeroed, {**QUERY, "mask": ROWS}),
    "infinite mask": Case(
        "infinite-mask", lambda x: mb.softmax(x=mb.add(x=scores(x), y=HIDDEN), axis=-1), QUERY
    ),
    "infinity in two layers": Case(
        "infinite-mask",
        lambda x: twice(
            x, mb.select(cond=np.isinf(HIDDEN), a=np.float32(-math.inf), b=mb.reduce_max(x=x))
        ),
        QUERY,
    ),
    "infinity by selection": Case(
        "infinite-mask",
        lambda x: mb.softmax(
            x=mb.select(cond=np.isinf(HIDDEN), a=np.float32(-math.inf), b=scores(x)), axis=-1
        ),
        QUERY,
    ),
    "a large batch": Case(
        "gpu-attention",
        lambda x: mb.matmul(x=mb.softmax(x=mb.add(x=scores(x), y=BIAS), axis=-1), y=x),
        {"x": numbers(11, 3, 6, 8)},
        Device.GPU,
    ),
    "a flattened image": Case(
        "large-dimension",
        lambda x: mb.linear(x=mb.reshape(x=x, shape=[2, 350 * 49]), weight=WIDE),
        {"x": numbers(2, 350, 7, 7)},
    ),
    **{f"convolution, {name}": Case("conv-stride", f, IMAGE) for name, f in CONVOLUTIONS.items()},
    "convolution of a signal": Case(
        "conv-stride",
        convolution(numbers(6, 2, 10), strides=[5], pad_type="custom", pad=[3, 3]),
        {"x": numbers(1, 2, 403)},
    ),
    **{f"pooling, {name}": Case("pool-stride", f, SQUARE) for name, f in POOLS.items()},
    **{
        f"few values, {device.value}, {opset.name}, {name}": Case(
            "few-values", lambda x, w=w: mb.mul(x=x, y=w), {"x": numbers(64, 120)}, device, opset
        )
        for device, opset, name, w in (
            (NEURAL_ENGINE, Opset.iOS18, "thirty", FEW),
            (Device.GPU, Opset.iOS16, "six", SIX),
            (Device.CPU, Opset.iOS18, "six", SIX),
        )
    },
    "equal factors": Case(
        "equal-values",
        lambda x: mb.mul(x=np.full((64, 120), 0.5, np.float32), y=x),
        {"x": numbers(64, 120)},
        Device.CPU,
    ),
    "a bias of zeros": Case(
        "equal-values",
        convolution(numbers(1500, 4, 1, 1), pad_type="valid", bias=np.zeros(1500, np.float32)),
        {"x": numbers(1, 4, 2, 2)},
    ),
}


def shaped(case: Case) -> Program:
    program = builder_program(case.function, case.inputs, case.opset)
    rewrite(program, (*REWRITES_IN_FP32[case.device], *REWRITES[case.device]))
    remove_dead_code(program)
    return serialized(program, case.opset)


def findings(program: Program) -> set[str]:
    return {f.rule.name for f in check([CheckedModel(program, (Use("model", "main"),))])}


def run(program: Program, inputs: dict[str, np.ndarray]) -> np.ndarray:
    function = main(program)
    compiled = ReferenceEngine().compile(function, EngineOptions())
    return np.asarray(compiled(features(function, inputs))[function.block.outputs[-1]])


@pytest.mark.parametrize("name", CASES)
def test_the_finding_is_gone_and_the_numbers_are_the_same(name: str) -> None:
    case = CASES[name]
    before, after = build(case.function, case.inputs, case.opset), shaped(case)
    assert case.rule in findings(before)
    assert case.rule not in findings(after)
    expected = run(before, case.inputs)
    assert sqnr_db(expected, run(after, case.inputs)) > SQNR_FP32


def test_operations_share_a_table() -> None:
    def weighted(x):
        weight = mb.const(val=FEW)
        return mb.add(x=mb.mul(x=x, y=weight), y=weight)

    after = shaped(Case("few-values", weighted, {"x": numbers(64, 120)}))
    types = [op.type for op in main(after).block.ops]
    assert types.count("constexpr_lut_to_dense") == 1


def test_smooth_strides() -> None:
    assert [stride for stride in range(13) if is_smooth(stride)] == [1, 2, 3, 4, 6, 8, 9, 12]


def masked(x):
    scores_of_visible = mb.add(x=scores(x), y=HIDDEN)
    return mb.softmax(x=scores_of_visible, axis=-1), scores_of_visible


def counted(x, mask):
    """A selection by counts, which are no truths."""
    count = mb.reduce_max(x=mb.cast(x=mask, dtype="fp32"), axes=[-1], keep_dims=True)
    return mb.select(cond=mb.less_equal(x=count, y=0.0), a=0.0, b=attention(x))


def joined(x):
    """A constant of few values for an operation that takes tables, and one that does not."""
    weight = mb.const(val=FEW)
    return mb.concat(values=[mb.mul(x=x, y=weight), weight], axis=0)


KEPT = {
    "few values for an op without tables": Case("few-values", joined, {"x": numbers(64, 120)}),
    "minus infinity that is returned": Case("infinite-mask", masked, QUERY),
    "a selection by counts": Case(
        "unsupported-type", counted, {**QUERY, "mask": 3 * ROWS.astype(np.int32)}
    ),
    "too many channels": Case(
        "conv-stride",
        convolution(numbers(1, 700, 5, 5), strides=[5, 5], pad_type="valid"),
        {"x": numbers(1, 700, 5, 5)},
    ),
    "overlapping windows": Case(
        "pool-stride", pooling("max_pool", kernel_sizes=[9, 9], strides=[8, 8]), SQUARE
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_numbers_that_would_change_stay(name: str) -> None:
    case = KEPT[name]
    after = shaped(case)
    assert case.rule in findings(after)
    expected = run(build(case.function, case.inputs, case.opset), case.inputs)
    assert_close(run(after, case.inputs), expected)  # infinities included


def test_every_rewrite_of_mil_is_named_by_a_rule() -> None:
    by_rules = {
        (device, function)
        for rule in RULES
        if rule.rewrite is not None
        for device in rule.rewrite.devices
        for function in rule.rewrite.functions
        if function.__module__ == for_devices.__name__
    }
    applied = {
        (device, function)
        for table in (REWRITES, REWRITES_IN_FP32)
        for device, functions in table.items()
        for function in functions
    }
    assert by_rules == applied

"""Programs with the fault that a rule names, and without: a case for each rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from support import handmade
from support.mil import Opset, build, mb

from coreml_delegate.device_check import (
    CheckedModel,
    Use,
    check,
)
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, NamedType, Program, StateType, TensorType
from coreml_delegate.targets import ComputeUnit


def tensor(*shape: int | None, dtype: DType = DType.FP16) -> TensorType:
    return TensorType(dtype, shape)


def program(
    ops: Any = (),
    outputs: Any = (),
    *,
    inputs: tuple[Feature, ...] = (Feature("x", tensor(4, 64)),),
    states: tuple[Feature, ...] = (),
) -> Program:
    """A program of one function, whose outputs are the results of ops of these names."""
    function = replace(
        handmade.function(ops, ()),
        params=(
            *(NamedType(f.name, f.type) for f in inputs),
            *(NamedType(f.name, StateType(f.type)) for f in states),
        ),
        inputs=inputs,
        outputs=tuple(Feature(name, tensor(4, 64)) for name in outputs),
        states=states,
    )
    return Program(Opset.iOS18, {"main": function}, "main", {})


def one_op(op_type: str, declared: TensorType, **arguments: Any) -> Program:
    return program([handmade.op(op_type, "y", declared, **({"x": "x"} | arguments))])


def of_input(feature: Feature) -> Program:
    return program(inputs=(feature,))


def of_state(*shape: int) -> Program:
    return program(states=(Feature("cache", tensor(*shape)),))


def ranged(low: int, high: int | None, name: str = "x") -> Feature:
    return Feature(name, tensor(None, 64), bounds=((low, high), (64, 64)))


ENUMERATED = Feature("x", tensor(None, 64), shapes=((1, 64), (8, 64)))
_NORM = handmade.op("layer_norm", "y", tensor(None, 64), x="x")
MASKED = {"x": np.zeros((2, 64), np.float16)}


def masked(value: float) -> Program:
    """Scores that a mask hides from a softmax, through a choice and a sum."""

    def function(x: Any) -> Any:
        hidden = np.zeros((2, 64), np.float16)
        hidden[0, 0] = value
        return mb.softmax(x=mb.add(x=mb.reshape(x=x, shape=(2, 64)), y=hidden), axis=-1)

    return build(function, MASKED, Opset.iOS17)


def attention(batch: int, dtype: Any = np.float32) -> Program:
    """Attention with a bias, written out."""

    def function(q: Any, k: Any, v: Any) -> Any:
        scores = mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.ones((1, 1, 5, 5), dtype))
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v)

    example = np.zeros((batch, 2, 5, 4), dtype)
    return build(function, dict.fromkeys("qkv", example), Opset.iOS17)


def infinity_elsewhere() -> Program:
    """Infinity that no softmax takes: a maximum begins with it."""

    def function(x: Any) -> Any:
        return mb.maximum(x=mb.softmax(x=x, axis=-1), y=np.float16(-np.inf))

    return build(function, MASKED, Opset.iOS17)


def island(dtype: str) -> Program:
    """A square root in ``dtype`` among ops in fp16."""

    def function(x: Any) -> Any:
        wide = mb.sqrt(x=mb.square(x=mb.cast(x=mb.relu(x=x), dtype=dtype)))
        return mb.tanh(x=mb.cast(x=wide, dtype="fp16"))

    return build(function, MASKED, Opset.iOS17)


def in_one_type(dtype: type) -> Program:
    return build(lambda x: mb.tanh(x=mb.relu(x=x)), {"x": np.zeros((2, 64), dtype)}, Opset.iOS17)


def with_weight(*weights: np.ndarray, of: str = "fp16") -> Program:
    """Products with these weights, in ``of``."""

    def function(x: Any) -> Any:
        results = []
        for weight in weights:
            product = mb.matmul(x=mb.cast(x=x, dtype=of), y=weight)
            results.append(mb.tanh(x=mb.cast(x=product, dtype="fp16")))
        return tuple(results)

    return build(function, {"x": np.zeros((2, 64), np.float16)}, Opset.iOS17)


INDICES = {"x": np.zeros(3, np.int32)}


def integers(dtype: type, low: int, high: int) -> np.ndarray:
    return np.resize(np.arange(low, high + 1), (256, 256)).astype(dtype)


def looked_up(table: np.ndarray, x: Any) -> Any:
    return mb.gather(x=table, indices=x, axis=0, validate_indices=False)


def with_table(dtype: type, low: int, high: int, opset: Opset = Opset.iOS17) -> Program:
    """A table of integers that is looked up, stored in ``dtype``."""
    return build(functools.partial(looked_up, integers(dtype, low, high)), INDICES, opset)


def blocks(scales: int) -> Program:
    """A product with a weight of int8 that has several scales in a row."""
    rng = np.random.default_rng(0)
    data = rng.integers(-8, 8, (64, 64)).astype(np.int8)
    scale = rng.random((64, scales)).astype(np.float16)

    def function(x: Any) -> Any:
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=scale)
        return mb.linear(x=x, weight=weight)

    return build(function, {"x": np.zeros((2, 64), np.float16)}, Opset.iOS18)


_RANDOM = np.random.default_rng(0).standard_normal
DISTINCT = _RANDOM((64, 64)).astype(np.float16)
_OTHER = _RANDOM((64, 64)).astype(np.float16)


def gather(rows: int, indices: Any = "x") -> Program:
    found = handmade.op(
        "gather",
        "y",
        tensor(3, 8),
        x="table",
        indices=indices,
        axis=handmade.constant(0, DType.INT32),
    )
    given = (Feature("table", tensor(rows, 8)), Feature("x", tensor(3, dtype=DType.INT32)))
    return program([found], inputs=given)


def strided(op_type: str, *strides: int) -> Program:
    return one_op(op_type, tensor(1, 8, 9, 9), strides=handmade.constant(strides, DType.INT32))


Case = tuple[Callable[[], Program], Callable[[], Program], str]
"""With the fault, without it, and what is got."""

CASES: dict[str, Case] = {
    "large-dimension": (
        lambda: one_op("linear", tensor(1, 16385)),
        lambda: one_op("linear", tensor(1, 16384)),
        "16385",
    ),
    "state-width": (lambda: of_state(32, 270), lambda: of_state(270, 256), "fp16[32, 270]"),
    "flexible-input": (
        lambda: of_input(ranged(1, None)),
        lambda: of_input(ENUMERATED),
        "fp16[1.., 64]",
    ),
    "computed-shape": (
        lambda: one_op("non_zero", tensor(None, 2, dtype=DType.INT32)),
        lambda: program([_NORM], inputs=(ranged(1, 8),)),
        "int32[?, 2]",
    ),
    "enumerated-layer-norm": (
        lambda: program([_NORM], inputs=(ENUMERATED,)),
        lambda: program([_NORM], inputs=(ranged(1, 8),)),
        "1 with 2 enumerated shapes",
    ),
    "state-with-range": (
        lambda: program(
            inputs=(ranged(1, 8), Feature("fixed", tensor(5))),
            states=(Feature("cache", tensor(4, 32)),),
        ),
        lambda: program(inputs=(ranged(1, 8), Feature("fixed", tensor(5)))),
        "1 inputs with ranges, 1 fixed",
    ),
    "high-rank": (
        lambda: one_op("reshape", tensor(1, 2, 1, 2, 1, 64)),
        lambda: one_op("reshape", tensor(1, 2, 1, 2, 64)),
        "rank 6",
    ),
    "narrow-last-axis": (
        lambda: of_input(Feature("x", tensor(16, 16, 1))),
        lambda: of_input(Feature("x", tensor(16, 16, 32))),
        "fp16[16, 16, 1], 32 times the memory",
    ),
    "topk": (
        lambda: one_op("topk", tensor(4, 5)),
        lambda: one_op("reduce_max", tensor(4)),
        "at the end of the model",
    ),
    "recurrent": (
        lambda: one_op("lstm", tensor(4, 8)),
        lambda: one_op("linear", tensor(4, 8)),
        "lstm",
    ),
    "fused-attention": (
        lambda: one_op("scaled_dot_product_attention", tensor(1, 4, 8)),
        lambda: one_op("softmax", tensor(1, 4, 8)),
        "1 scaled_dot_product_attention",
    ),
    "gpu-attention": (
        lambda: attention(10),
        lambda: attention(9),
        "1 in fp32 with a batch of 10 or more",
    ),
    "wide-gather": (lambda: gather(65537), lambda: gather(65536), "65,537 rows"),
    "infinite-mask": (lambda: masked(-np.inf), lambda: masked(-4e4), "infinity in a mask"),
    "conv-stride": (lambda: strided("conv", 14, 14), lambda: strided("conv", 12, 1), "strides [14"),
    "pool-stride": (
        lambda: strided("max_pool", 3, 3),
        lambda: strided("max_pool", 2, 4),
        "strides [3, 3]",
    ),
    "fp32-program": (
        lambda: in_one_type(np.float32),
        lambda: in_one_type(np.float16),
        "2 results in fp32, none in fp16",
    ),
    "fp32-island": (lambda: island("fp32"), lambda: island("fp16"), "2 in fp32: square 1, sqrt 1"),
    "unsupported-type": (
        lambda: one_op("greater", tensor(4, dtype=DType.BOOL)),
        lambda: one_op("add", tensor(4, dtype=DType.INT16)),
        "bool: greater 1",
    ),
    "blockwise-weights": (lambda: blocks(4), lambda: blocks(1), "1 with several scales in a row"),
    "fp32-weights": (
        lambda: with_weight(DISTINCT.astype(np.float32), of="fp32"),
        lambda: with_weight(DISTINCT),
        "fp32[64, 64]",
    ),
    "wide-integers": (
        lambda: with_table(np.int32, -100, 0),
        lambda: with_table(np.int8, -100, 0),
        "65,536 int32 from -100 to 0, fit int8",
    ),
    "equal-values": (
        lambda: with_weight(np.full((64, 64), 0.5, np.float16)),
        lambda: with_weight(DISTINCT),
        "4,096 times 0.5",
    ),
    "few-values": (
        lambda: with_weight(np.sign(DISTINCT) * np.float16(0.1)),
        lambda: with_weight(DISTINCT),
        "2 different values, 1 bits with a table",
    ),
    "duplicate-weights": (
        lambda: with_weight(DISTINCT, DISTINCT.copy()),
        lambda: with_weight(DISTINCT, _OTHER),
        "2 times 8,192 bytes",
    ),
    "deployment-target": (
        lambda: build(lambda x: mb.relu(x=x), {"x": np.zeros(4, np.float32)}, Opset.iOS17),
        lambda: build(lambda x: mb.relu(x=x), {"x": np.zeros(4, np.float32)}, Opset.iOS15),
        "iOS17; iOS15 has all that it uses",
    ),
}
# Other evidence than a program alone: tested in test_rules.py and test_accuracy.py.
OTHERS = {"unit-in-vain", "large-file", "fp16-accuracy", "fp16-overflow", "fp16-underflow"}


def findings(found: Program, rule: str, unit: ComputeUnit | None = None) -> list[Any]:
    uses = tuple(Use("forward_0", name, unit) for name in found.functions)
    return [f for f in check([CheckedModel(found, uses)]) if f.rule.name == rule]

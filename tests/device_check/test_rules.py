"""Each rule on a program with the fault, and on its neighbour without."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
from device_check import rule_table
from support import handmade
from support.mil import Opset, build, builder_program, ct, mb
from support.packages import package_files

from coreml_delegate.device_check import (
    RULES,
    CheckedModel,
    Consequence,
    Use,
    check,
    rule_named,
    weights,
)
from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_options import ComputeUnit
from coreml_delegate.quantization.weight_inventory import weights_of
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, NamedType, Program, StateType, TensorType
from coreml_delegate.runtime.mil.reader import read_mlpackage


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
_MASKED = {"x": np.zeros((2, 64), np.float16)}


def masked(value: float) -> Program:
    """Scores that a mask hides from a softmax, through a choice and a sum."""

    def function(x: Any) -> Any:
        hidden = np.zeros((2, 64), np.float16)
        hidden[0, 0] = value
        return mb.softmax(x=mb.add(x=mb.reshape(x=x, shape=(2, 64)), y=hidden), axis=-1)

    return build(function, _MASKED, Opset.iOS17)


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

    return build(function, _MASKED, Opset.iOS17)


def island(dtype: str) -> Program:
    """A square root in ``dtype`` among ops in fp16."""

    def function(x: Any) -> Any:
        wide = mb.sqrt(x=mb.square(x=mb.cast(x=mb.relu(x=x), dtype=dtype)))
        return mb.tanh(x=mb.cast(x=wide, dtype="fp16"))

    return build(function, _MASKED, Opset.iOS17)


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


_INDICES = {"x": np.zeros(3, np.int32)}


def integers(dtype: type, low: int, high: int) -> np.ndarray:
    return np.resize(np.arange(low, high + 1), (256, 256)).astype(dtype)


def looked_up(table: np.ndarray, x: Any) -> Any:
    return mb.gather(x=table, indices=x, axis=0, validate_indices=False)


def with_table(dtype: type, low: int, high: int, opset: Opset = Opset.iOS17) -> Program:
    """A table of integers that is looked up, stored in ``dtype``."""
    return build(functools.partial(looked_up, integers(dtype, low, high)), _INDICES, opset)


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
_DISTINCT = _RANDOM((64, 64)).astype(np.float16)
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
        lambda: with_weight(_DISTINCT.astype(np.float32), of="fp32"),
        lambda: with_weight(_DISTINCT),
        "fp32[64, 64]",
    ),
    "wide-integers": (
        lambda: with_table(np.int32, -100, 0),
        lambda: with_table(np.int8, -100, 0),
        "65,536 int32 from -100 to 0, fit int8",
    ),
    "equal-values": (
        lambda: with_weight(np.full((64, 64), 0.5, np.float16)),
        lambda: with_weight(_DISTINCT),
        "4,096 times 0.5",
    ),
    "few-values": (
        lambda: with_weight(np.sign(_DISTINCT) * np.float16(0.1)),
        lambda: with_weight(_DISTINCT),
        "2 different values, 1 bits with a table",
    ),
    "duplicate-weights": (
        lambda: with_weight(_DISTINCT, _DISTINCT.copy()),
        lambda: with_weight(_DISTINCT, _OTHER),
        "2 times 8,192 bytes",
    ),
    "deployment-target": (
        lambda: build(lambda x: mb.relu(x=x), {"x": np.zeros(4, np.float32)}, Opset.iOS17),
        lambda: build(lambda x: mb.relu(x=x), {"x": np.zeros(4, np.float32)}, Opset.iOS15),
        "iOS17; iOS15 has all that it uses",
    ),
}
# Other evidence than a program alone: tested below, and in test_accuracy.py.
OTHERS = {"unit-in-vain", "large-file", "fp16-accuracy", "fp16-overflow", "fp16-underflow"}


def findings(found: Program, rule: str, unit: ComputeUnit | None = None) -> list[Any]:
    uses = tuple(Use("forward_0", name, unit) for name in found.functions)
    return [f for f in check([CheckedModel(found, uses)]) if f.rule.name == rule]


def test_every_rule_has_a_case():
    assert {rule.name for rule in RULES} == CASES.keys() | OTHERS


@pytest.mark.parametrize("rule", CASES)
def test_finds_the_fault(rule):
    faulty, _, got = CASES[rule]
    (finding,) = findings(faulty(), rule)
    assert got in finding.details.got
    assert finding.details.delegate == "forward_0"


@pytest.mark.parametrize("rule", CASES)
def test_finds_nothing_in_its_neighbour(rule):
    _, sound, _ = CASES[rule]
    assert findings(sound(), rule) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_complete(rule):
    assert rule.sources
    for source in rule.sources:
        address = urlparse(source.url)
        assert address.scheme == "https"
        assert address.netloc.count(".")
        assert len(address.path) > 1
        assert source.title
    assert rule.reason.endswith(".")
    assert not rule.remedy.endswith(".")


def test_the_table_of_the_guide():
    text = rule_table.PAGE.read_text()
    assert rule_table.page(text) == text, "run python -m tests.device_check.rule_table"


def test_names_and_sources_differ():
    assert len({rule.name for rule in RULES}) == len(RULES)
    by_url = {source.url: source for rule in RULES for source in rule.sources}
    assert {source for rule in RULES for source in rule.sources} == set(by_url.values())


def test_the_gravest_come_first():
    order = list(Consequence)
    assert [order.index(rule.consequence) for rule in RULES] == sorted(
        order.index(rule.consequence) for rule in RULES
    )


# --- what a finding says --------------------------------------------------------------------------


def test_places_name_op_output_and_module():
    found = one_op("topk", tensor(4, 5))
    model = CheckedModel(found, (Use("forward_0", "main"),), {"y:topk": "head.select"})
    (finding,) = [f for f in check([model]) if f.rule.name == "topk"]
    assert str(finding.details.places[0]) == "topk 'y' at main op 0 (head.select)"
    assert finding.where == "forward_0: topk 'y' at main op 0 (head.select)"
    assert finding.as_dict()["places"] == [
        {"what": "topk", "name": "y", "location": "main op 0", "module": "head.select"}
    ]


def test_modules_of_several_functions_have_the_name_of_theirs():
    found = one_op("topk", tensor(4, 5))
    model = CheckedModel(
        found, (Use("forward_0", "main"),), {"y:topk": "wrong", "main:y:topk": "right"}
    )
    (finding,) = [f for f in check([model]) if f.rule.name == "topk"]
    assert finding.details.places[0].module == "right"


def test_equal_values_are_one_finding():
    ops = [handmade.op("linear", name, tensor(1, 20000), x="x") for name in ("a", "b")]
    ops.append(handmade.op("linear", "c", tensor(1, 30000), x="x"))
    found = findings(program(ops), "large-dimension")
    assert [(f.details.got, [p.name for p in f.details.places]) for f in found] == [
        ("20000", ["a", "b"]),
        ("30000", ["c"]),
    ]
    assert found[0].where.endswith("and 1 more")


def test_topk_whose_results_are_used_is_told_apart():
    ops = [
        handmade.op("topk", "top", tensor(4, 5), x="x"),
        handmade.op("cast", "out", tensor(4, 5, dtype=DType.FP32), x="top"),
        handmade.op("topk", "inner", tensor(4, 5), x="x"),
        handmade.op("relu", "y", tensor(4, 5), x="inner"),
    ]
    got = {f.details.got: f.details.places[0].name for f in findings(program(ops), "topk")}
    assert got == {"at the end of the model": "top", "its results are used in the model": "inner"}


def test_topk_between_two_layers_is_advice():
    """Moved to the CPU, it would leave two models; at an end it leaves one."""
    weight = _DISTINCT

    def function(x, *, first, last):
        x = mb.linear(x=x, weight=weight) if first else mb.identity(x=x)
        x, _ = mb.topk(x=x, k=64, axis=1)
        if last == "suppression":
            boxes = mb.reshape(x=x, shape=(1, 64, 4))
            return mb.non_maximum_suppression(
                boxes=boxes,
                scores=mb.slice_by_index(x=boxes, begin=(0, 0, 0), end=(1, 64, 1)),
                iou_threshold=np.float16(0.5),
                max_boxes=4,
                per_class_suppression=False,
            )
        return mb.linear(x=x, weight=weight) if last else mb.identity(x=x)

    inputs = {"x": np.zeros((4, 64), np.float16)}
    in_the_middle = "in the middle of the model, which would become two"
    for first, last, obstacle in (
        (True, True, in_the_middle),
        (True, False, None),
        (False, True, None),
        (True, "suppression", in_the_middle),  # for which ExecuTorch has no kernel
    ):
        partial = functools.partial(function, first=first, last=last)
        (finding,) = findings(build(partial, inputs, Opset.iOS17), "topk")
        assert finding.obstacle == finding.as_dict()["obstacle"] == obstacle
        assert (finding.rewrite is None) == (obstacle is not None)


def test_constant_indices_are_looked_at():
    few = handmade.constant([3, 60000, 5], DType.INT32)
    many = handmade.constant([3, 70000, 5], DType.INT32)
    assert findings(gather(70001, few), "wide-gather") == []
    assert len(findings(gather(70001, many), "wide-gather")) == 1


def test_infinity_that_no_softmax_takes_is_none():
    assert findings(infinity_elsewhere(), "infinite-mask") == []


def test_islands_apart_are_findings_apart():
    def function(x):
        parts = []
        for _ in range(2):
            wide = mb.exp(x=mb.cast(x=mb.relu(x=x), dtype="fp32"))
            parts.append(mb.tanh(x=mb.cast(x=wide, dtype="fp16")))
        return tuple(parts)

    found = findings(build(function, _MASKED, Opset.iOS17), "fp32-island")
    assert [f.details.got for f in found] == ["1 in fp32: exp 1"] * 2


def test_a_few_padded_rows_are_nothing():
    assert findings(of_input(Feature("x", tensor(16, 15, 1))), "narrow-last-axis") == []


# --- weights --------------------------------------------------------------------------------------


def test_bytes_that_could_be_saved():
    (wide,) = findings(CASES["fp32-weights"][0](), "fp32-weights")
    assert wide.details.saved_bytes == 64 * 64 * 2
    (few,) = findings(CASES["few-values"][0](), "few-values")
    assert few.details.saved_bytes == 64 * 64 * 2 - (64 * 64 // 8 + 2 * 2)
    (twice,) = findings(CASES["duplicate-weights"][0](), "duplicate-weights")
    assert twice.details.saved_bytes == 64 * 64 * 2


@pytest.mark.parametrize(
    ("opset", "low", "high", "narrow"),
    [
        (Opset.iOS17, -3, 100, "int8"),
        (Opset.iOS17, 0, 200, "uint8"),
        (Opset.iOS17, 0, 5, None),  # a byte each, as varints
        (Opset.iOS17, -1, 200, None),  # varints, in int16 too
        (Opset.iOS18, -1, 200, "int16"),
        (Opset.iOS18, 30000, 40000, "uint16"),
        (Opset.iOS18, 10000, 70000, None),  # fits none
    ],
)
def test_integers_are_measured_as_they_are_stored(opset, low, high, narrow):
    """By serializing the program with coremltools in both types."""
    found = findings(with_table(np.int32, low, high, opset), "wide-integers")
    if narrow is None:
        assert found == []
        return
    saved = [table_bytes(dtype, low, high, opset) for dtype in (np.int32, np.dtype(narrow).type)]
    # A weight file has a header, and a line in the manifest.
    assert found[0].details.saved_bytes == pytest.approx(saved[0] - saved[1], abs=1000)


def table_bytes(dtype: type, low: int, high: int, opset: Opset) -> int:
    """Bytes that a program takes with a table."""
    table = functools.partial(looked_up, integers(dtype, low, high))
    files = package_files(builder_program(table, _INDICES, opset), opset)
    return sum(len(content) for content in files.values())


def test_small_weights_and_savings_are_left_alone(monkeypatch):
    small = np.zeros((64, 2), np.float16)
    assert findings(with_weight(small), "equal-values") == []
    zeros = np.zeros((64, 64), np.float16)
    assert len(findings(with_weight(zeros, _DISTINCT), "equal-values")) == 1
    monkeypatch.setattr(weights, "WORTH", 0.6)
    assert findings(with_weight(zeros, _DISTINCT), "equal-values") == []
    assert findings(with_weight(_DISTINCT, _DISTINCT.copy()), "duplicate-weights") == []


@pytest.mark.parametrize("colours", [2, 3, 16, 17, 64, 256])
def test_few_values_fit_a_table(colours):
    values = np.arange(4096).reshape(64, 64) % colours
    (finding,) = findings(with_weight(values.astype(np.float16)), "few-values")
    bits = next(bits for bits in (1, 2, 4, 6, 8) if 2**bits >= colours)
    assert finding.details.got == f"{colours} different values, {bits} bits with a table"


def test_the_remedy_for_few_values_saves_what_it_says():
    """By coremltools, which changes no value."""
    weight = np.resize(np.arange(17), (64, 64)).astype(np.float16)
    (finding,) = findings(with_weight(weight), "few-values")
    function = lambda x: mb.matmul(x=x, y=weight)  # noqa: E731
    program = builder_program(function, {"x": np.zeros((2, 64), np.float16)}, Opset.iOS17)
    model = ct.convert(program, minimum_deployment_target=ct.target.iOS17, skip_model_load=True)
    unique = ct.optimize.coreml.OpPalettizerConfig(mode="unique", weight_threshold=0)
    config = ct.optimize.coreml.OptimizationConfig(global_config=unique)
    smaller = ct.optimize.coreml.palettize_weights(model, config)
    with tempfile.TemporaryDirectory() as folder:
        smaller.save(f"{folder}/small.mlpackage")
        (stored,) = weights_of(read_mlpackage(f"{folder}/small.mlpackage"))
    assert stored.scheme == "lut"
    assert weight.nbytes - stored.stored_bytes == finding.details.saved_bytes


def test_weights_of_several_models_are_compared():
    models = [CheckedModel(with_weight(_DISTINCT), (Use(name, "main"),)) for name in ("a_0", "b_0")]
    (finding,) = [f for f in check(models) if f.rule.name == "duplicate-weights"]
    assert finding.details.delegate == "a_0, b_0"
    assert [place.name.split(": ")[0] for place in finding.details.places] == ["a_0", "b_0"]
    assert "weight_sharing" in finding.remedy


def test_a_model_that_delegates_share_is_looked_at_once():
    model = CheckedModel(with_weight(_DISTINCT), (Use("a_0", "main"), Use("b_0", "main")))
    found = check([model])
    assert [f for f in found if f.rule.name == "duplicate-weights"] == []
    assert {f.details.delegate for f in found} <= {"a_0, b_0"}


def test_a_file_of_two_gigabytes(monkeypatch):
    found = with_weight(_DISTINCT)
    assert findings(found, "large-file") == []
    monkeypatch.setattr(weights, "LARGEST_WEIGHTS", 64 * 64 * 2)
    assert findings(found, "large-file")[0].details.got == "8,192 bytes"


# --- compute units --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "found"),
    [
        (None, True),
        (ComputeUnit.ALL, True),
        (ComputeUnit.CPU_AND_NE, True),
        (ComputeUnit.CPU_AND_GPU, False),
        (ComputeUnit.CPU_ONLY, False),
    ],
)
def test_the_neural_engine_is_no_matter_where_it_is_left_out(unit, found):
    names = [f.rule.name for f in check([CheckedModel(one_op("topk", tensor(4, 5)), _use(unit))])]
    assert ("topk" in names) is found


def _use(unit):
    return (Use("forward_0", "main", unit),)


def test_a_unit_in_vain():
    wide, narrow = in_one_type(np.float32), in_one_type(np.float16)
    (finding,) = findings(wide, "unit-in-vain", ComputeUnit.CPU_AND_NE)
    assert finding.details.got == "cpu_and_ne and fp32"
    assert findings(narrow, "unit-in-vain", ComputeUnit.CPU_AND_NE) == []
    assert findings(wide, "unit-in-vain", ComputeUnit.ALL) == []


# --- names ----------------------------------------------------------------------------------------


def test_ignored_rules_find_nothing():
    model = CheckedModel(one_op("topk", tensor(4, 5)), (Use("forward_0", "main"),))
    assert "topk" in {f.rule.name for f in check([model])}
    assert "topk" not in {f.rule.name for f in check([model], ignore=["topk"])}


def test_an_unknown_rule_is_an_error():
    with pytest.raises(OptionError, match="unknown rule: got 'topkk', expected perhaps topk"):
        check([], ignore=["topkk"])
    assert rule_named("topk").name == "topk"

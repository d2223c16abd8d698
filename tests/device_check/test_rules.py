"""Each rule on a program with the fault, and on its neighbour without."""

from __future__ import annotations

import functools
from urllib.parse import urlparse

import numpy as np
import pytest
from device_check import rule_table
from device_check.rule_cases import (
    CASES,
    DISTINCT,
    MASKED,
    OTHERS,
    findings,
    gather,
    in_one_type,
    infinity_elsewhere,
    of_input,
    one_op,
    program,
    tensor,
)
from support import handmade
from support.mil import Opset, build, mb

from coreml_delegate.device_check import (
    RULES,
    CheckedModel,
    Consequence,
    Use,
    check,
    rule_named,
)
from coreml_delegate.errors import OptionError
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature
from coreml_delegate.targets import ComputeUnit


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
    weight = DISTINCT

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


@pytest.mark.parametrize("reader", ["linear", "relu"])
def test_an_image_that_a_layer_flattens_can_be_mended(reader):
    """``--for`` makes the layer a convolution over the image."""
    filters = np.ones((8, 4, 1, 1), np.float16)
    weight = np.ones((64, 8 * 48 * 48), np.float16)

    def function(x):
        x = mb.reshape(x=mb.conv(x=x, weight=filters), shape=(1, -1))
        return mb.linear(x=x if reader == "linear" else mb.relu(x=x), weight=weight)

    program = build(function, {"x": np.zeros((1, 4, 48, 48), np.float16)}, Opset.iOS17)
    found = findings(program, "large-dimension")
    assert {f.obstacle is None for f in found} == {reader == "linear"}


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

    found = findings(build(function, MASKED, Opset.iOS17), "fp32-island")
    assert [f.details.got for f in found] == ["1 in fp32: exp 1"] * 2


def test_a_few_padded_rows_are_nothing():
    assert findings(of_input(Feature("x", tensor(16, 15, 1))), "narrow-last-axis") == []


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

"""Every op rule against eager PyTorch: what it accepts runs, what it rejects stays on the CPU."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ops.op_samples import ACCEPTED, REJECTED, Rejected, Sample
from ops.op_samples.sample import Calls
from support.sample_flows import Flow, assert_close, batch_outcome, batches, lower_and_run
from torch.fx import Node

from coreml_delegate import ops
from coreml_delegate.lowering import prepare
from coreml_delegate.ops import RECORDS, Reason, obstacle, record_of
from coreml_delegate.ops.call import OpCall
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.ops.mil_ops import kind_of
from coreml_delegate.targets import Opset

_FP16_SAMPLES = 3


FLOWS = (
    # The oldest opset, everything that can be kept whole.
    Flow("oldest", "fp32", None, core=False, engines=("reference", "openvino")),
    # A new opset, decomposed to core ATen.
    Flow("core", "fp32", Opset.iOS18, core=True, engines=("reference", "openvino"), share=16),
    # As devices compute.
    Flow("fp16", "fp16", Opset.iOS17, core=False, engines=("reference",), share=16),
)


def chosen(flow: Flow, samples: Sequence[Sample]) -> Iterator[Sample]:
    """The calls to lower in this way; in fp16, a few of each op."""
    counts: Counter[str] = Counter()
    for sample in samples:
        if flow.core and not sample.core:
            continue
        if flow.precision == "fp16":
            counts[sample.target] += sample.fp16
            if not sample.fp16 or counts[sample.target] > _FP16_SAMPLES:
                continue
        yield sample


def cases(flow: Flow) -> list[Any]:
    found = []
    for samples, slow in itertools.product(ACCEPTED.values(), (False, True)):
        together = [s for s in chosen(flow, samples) if flow.is_slow(s) is slow]
        for batch in batches(together):
            # One process lowers a batch, for all its samples.
            marks = [pytest.mark.xdist_group(f"{flow.name}-{batch[0].id}")]
            marks += [pytest.mark.slow] if slow else []
            found += [
                pytest.param(flow, batch, s, id=f"{flow.name}-{s.id}", marks=marks) for s in batch
            ]
    return found


@pytest.mark.parametrize(
    ("flow", "batch", "sample"), [case for flow in FLOWS for case in cases(flow)]
)
def test_accept_samples_are_accepted(flow: Flow, batch: tuple[Sample, ...], sample: Sample) -> None:
    outcome = batch_outcome(batch, flow) or lower_and_run([sample], flow, flow.engines)
    assert [(n.op, str(n.reason)) for n in outcome.report.undelegated] == []
    if sample.compare:
        assert_close(outcome, sample, flow.precision)


@pytest.mark.parametrize("family", ACCEPTED)
def test_rules_accept_the_calls_of_accept_samples(family: str) -> None:
    """Before ExecuTorch decomposes or casts anything."""
    for batch in batches(ACCEPTED[family]):
        for sample, _, reason in calls(batch):
            assert reason is None, f"{sample.id}: {reason}"


def calls(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Node, Reason | None]]:
    """Each call with its node in the exported graph and why it is rejected."""
    module = Calls(samples)
    exported = torch.export.export(module, module.inputs(), dynamic_shapes=module.dynamic_shapes())
    nodes: dict[Any, list[Node]] = defaultdict(list)
    for node in exported.graph.nodes:
        nodes[node.target].append(node)
    constants = stored_nodes(exported)
    for sample in samples:
        node = nodes[sample.overload].pop(0)
        yield sample, node, obstacle(node, sample.target_opset, constants)


@functools.cache
def verdicts(family: str) -> dict[str, tuple[Node, Reason | None]]:
    """By sample id, the node and why it is rejected."""
    found = {}
    for batch in batches([r.sample for r in REJECTED[family]]):
        for sample, node, reason in calls(batch):
            found[sample.id] = node, reason
    return found


REJECTIONS = [
    pytest.param(family, rejected, id=rejected.id)
    for family, group in REJECTED.items()
    for rejected in group
]


@pytest.mark.parametrize(("family", "rejected"), REJECTIONS)
def test_reject_samples_are_rejected_with_the_reason(family: str, rejected: Rejected) -> None:
    _, reason = verdicts(family)[rejected.id]
    assert reason is not None
    assert reason.code is rejected.code
    assert rejected.text in reason.text


@pytest.mark.share(6)
@pytest.mark.parametrize("family", REJECTED)
def test_rejected_calls_do_not_abort_an_export(family: str) -> None:
    """They stay on the CPU, or ExecuTorch makes of them what Core ML takes."""
    refused = 0
    for batch in batches([r.sample for r in REJECTED[family]]):
        outcome = lower_and_run(batch, FLOWS[0], ("reference",))
        # Those of core ATen are still there; what others decompose to may have its own reasons.
        targets = {s.target for s in batch}
        codes = {r.code for r in REJECTED[family]}
        for node in outcome.report.undelegated:
            assert node.reason is not None
            assert node.op not in targets or node.reason.code in codes
        # Either is to be seen in the report: calls on the CPU, or none of the ops any more.
        reported = {node.op for node in outcome.report.nodes}
        refused += len(outcome.report.undelegated) + len(targets - reported)
        for sample in batch:
            if sample.compare:
                assert_close(outcome, sample, "fp32")
    assert refused


def test_ids_are_unique() -> None:
    samples = [s for group in ACCEPTED.values() for s in group]
    samples += [r.sample for group in REJECTED.values() for r in group]
    assert len({s.id for s in samples}) == len(samples)


def test_every_rule_has_an_accepted_call() -> None:
    called = {s.target for samples in ACCEPTED.values() for s in samples}
    assert called == {target for target, rule in RECORDS.items() if rule.standalone}


def test_every_constraint_has_a_rejected_call() -> None:
    broken: dict[str, set[int]] = defaultdict(set)
    for family, group in REJECTED.items():
        for rejected in group:
            node, _ = verdicts(family)[rejected.id]
            rule = record_of(rejected.sample.target)
            if rule is None:
                continue
            call = OpCall.of(node)
            broken[rule.target] |= {
                n for n, holds in enumerate(rule.constraints) if holds(call) is not None
            }
    missing = {
        rule.target: sorted(set(range(len(rule.constraints))) - broken[rule.target])
        for rule in RECORDS.values()
        if rule.standalone and set(range(len(rule.constraints))) - broken[rule.target]
    }
    assert not missing


# Upstream bugs that rewrites cite: these tests pass one day, and the rewrite can go.

_CITING = {
    "aten.add.Tensor-alpha": "apple/coremltools#2573",
    "aten.sub.Tensor-alpha": "apple/coremltools#2573",
    "aten.argmax.default-flat": "pytorch/executorch#11715",
    "aten.argmin.default-flat": "pytorch/executorch#11715",
    "aten.diagonal.default-above": "apple/coremltools#2565",
    "aten.softplus.default-threshold": "apple/coremltools#2725",
    "aten._log_softmax.default-far": "apple/coremltools#2763",
    "aten.atan2.default-octants": "apple/coremltools#2769",
    "aten.remainder.Scalar-one": "apple/coremltools#2836",
    "aten.remainder.Tensor-ones": "apple/coremltools#2836",
    "aten.fmod.Scalar-one": "apple/coremltools#2836",
    "aten.clamp.default-least": "apple/coremltools#2839",
    "aten.clamp.Tensor-most": "apple/coremltools#2839",
}
CITED = [
    pytest.param(s, id=s.id, marks=pytest.mark.xfail(strict=True, reason=_CITING[s.id]))
    for samples in ACCEPTED.values()
    for s in samples
    if s.id in _CITING
]


@pytest.mark.parametrize("sample", CITED)
def test_cited_issue_is_fixed_upstream(sample: Sample) -> None:
    found = record_of(sample.target)
    assert found is not None
    bare = replace(found, rewrite=None)
    kind = kind_of(sample.target)
    others = {name: value for name, value in ops.translations().items() if name != kind}
    with (
        mock.patch.object(
            prepare, "record_of", lambda name: bare if record_of(name) is found else record_of(name)
        ),
        mock.patch.object(ops, "translations", return_value=others),
    ):
        outcome = lower_and_run([sample], FLOWS[0], ("reference",))
    assert not outcome.report.undelegated
    assert_close(outcome, sample, "fp32")


def test_translations_are_of_one_op() -> None:
    """coremltools has one name for overloads of an op: all of them have the translation."""
    translations = defaultdict(set)
    for record in RECORDS.values():
        translations[kind_of(record.target)].add(record.translation)
    assert [kind for kind, functions in translations.items() if len(functions) > 1] == []


def test_every_cited_issue_is_watched() -> None:
    assert {param.values[0].id for param in CITED} == set(_CITING)

"""Calls of upstream reports: delegated with PyTorch's results in fp16 and fp32, or refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ops.op_samples.sample import Calls
from support.lowering import lower_unchecked
from support.partitioned import delegate_functions
from support.sample_flows import Flow, assert_close, batch_outcome, batches, lower_and_run

from coreml_delegate.targets import Opset
from regressions import RECORDS, Here, Regression, page
from regressions.record import Case

_ROOT = Path(__file__).parents[2]
_ENGINES = ("reference", "openvino")
_FLOWS = (
    Flow("fp32", "fp32", None, core=False, engines=_ENGINES, share=5),
    # From iOS17 coremltools also narrows integers in fp16.
    Flow("fp16", "fp16", Opset.iOS17, core=False, engines=_ENGINES, share=5),
)


def _delegated(flow: Flow) -> list[Case]:
    return [
        case
        for record in RECORDS
        for case in record.cases
        if record.here is not Here.REFUSED and (flow.precision == "fp32" or case.fp16)
    ]


def _params(flow: Flow) -> list[Any]:
    found = []
    for is_slow in (False, True):
        together = [case for case in _delegated(flow) if flow.is_slow(case) is is_slow]
        for batch in batches(together):
            # One process lowers a batch, for all its cases.
            marks = [pytest.mark.xdist_group(f"{flow.name}-{batch[0].id}")]
            marks += [pytest.mark.slow] if is_slow else []
            found += [
                pytest.param(flow, batch, case, id=f"{flow.name}-{case.id}", marks=marks)
                for case in batch
            ]
    return found


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("flow", "batch", "case"), [param for flow in _FLOWS for param in _params(flow)]
)
def test_case_is_delegated_and_right(flow: Flow, batch: tuple[Case, ...], case: Case) -> None:
    outcome = batch_outcome(batch, flow) or lower_and_run([case], flow, flow.engines)
    assert [(n.op, str(n.reason)) for n in outcome.report.undelegated] == []
    assert_close(outcome, case, flow.precision)


@pytest.mark.parametrize(
    ("record", "case"),
    [
        pytest.param(record, case, id=case.id)
        for record in RECORDS
        if record.absent
        for case in record.cases
    ],
)
def test_case_does_without_ops_that_the_device_computes_wrongly(
    record: Regression, case: Case
) -> None:
    lowered = lower_unchecked(Calls([case]), case.inputs())
    (function,) = delegate_functions(lowered.edge)
    assert not {op.type for op in function.block.ops} & set(record.absent)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("record", "case"),
    [
        pytest.param(record, case, id=case.id)
        for record in RECORDS
        if record.here is Here.REFUSED
        for case in record.cases
    ],
)
def test_case_stays_on_the_cpu_for_the_reason(record: Regression, case: Case) -> None:
    outcome = lower_and_run([case], _FLOWS[0], ("reference",) if case.compare else ())
    reasons = {n.op: str(n.reason) for n in outcome.report.undelegated}
    for op, text in record.refused.items():
        assert text in reasons[op]
    if case.compare:
        assert_close(outcome, case, "fp32")


def test_every_record_is_held_by_something() -> None:
    def is_held(record: Regression) -> bool:
        return bool(record.cases or record.held_by) or record.here is Here.NOT_CONCERNED

    assert [record.issues for record in RECORDS if not is_held(record)] == []
    refused = [record for record in RECORDS if record.here is Here.REFUSED]
    assert [record.issues for record in refused if not record.refused] == []
    for record in RECORDS:
        path, _, name = record.held_by.partition("::")
        assert not path or f"def {name}(" in (_ROOT / path).read_text()


def test_ids_and_issues_are_well_formed() -> None:
    ids = [case.id for record in RECORDS for case in record.cases]
    assert _repeated(ids) == []
    issues = [issue for record in RECORDS for issue in record.issues]
    assert [i for i in issues if not re.fullmatch(r"[\w-]+/[\w-]+(#\d+|@[\w.]+)", i)] == []


def _repeated(values: Sequence[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})


def test_the_page_is_that_of_the_records() -> None:
    assert page.PAGE.read_text() == page.page(), "run make regressions"

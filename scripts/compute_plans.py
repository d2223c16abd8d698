"""Compute plans of a program's models, from Core ML or files, beside the rules' predictions."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coreml_delegate.device_check import Finding
from coreml_delegate.device_check.compute_plan import (
    ComparedOp,
    MatchedPlan,
    PlannedOp,
    Processor,
    compare_plan,
    compute_plan,
    match_plan,
    require_same_model,
    score_rules,
)
from coreml_delegate.device_check.plan_files import plan_document, read_plan
from coreml_delegate.errors import ProgramError
from coreml_delegate.formats.files import write_folder
from coreml_delegate.formats.mlpackage import empty_folders
from coreml_delegate.scripts import console
from coreml_delegate.scripts.device_findings import ProgramModels

_NO_RULE = "(no rule)"


def plans_of_core_ml(models: ProgramModels) -> Iterator[MatchedPlan]:
    """Ask Core ML on this Mac for the plan of each model.

    Raises:
        EngineUnavailableError: This is not a Mac.
        ProgramError: Core ML has no plan of a model.
    """
    for entry in models.models:
        with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
            package = Path(folder) / "model.mlpackage"
            write_folder(entry.files, package, folders=empty_folders(entry.files))
            units = {use.compute_unit for use in entry.model.uses}
            plan = compute_plan(package, units.pop() if len(units) == 1 else None)
        yield match_plan(plan, [entry.model])


def plans_of_files(paths: Sequence[Path], models: ProgramModels) -> Iterator[MatchedPlan]:
    """Read plans, and find the model of each plan.

    Raises:
        OptionError: A file cannot be read, or is no plan.
        ProgramError: A plan is of another model, or excludes the neural engine.
    """
    if not models.models:
        raise ProgramError("no model of the program can be compared with a plan")
    for path in paths:
        match = match_plan(read_plan(path), models.checked)
        try:
            require_same_model(match)
        except ProgramError as error:
            raise error.prefixed(f"{path}: ") from error
        yield match


def compare(match: MatchedPlan, findings: Sequence[Finding]) -> tuple[str, dict[str, Any]]:
    """Compare a plan with the findings; return it as text for a terminal, and as plain data.

    The data is a plan's document, with the predictions of each operation, hits and misses.
    """
    compared = compare_plan(match.plan.operations, findings, match.model.name)
    document = plan_document(match.plan)
    for entry, op in zip(document["operations"], compared, strict=True):
        entry["predicted_by"] = list(op.predicted)
    rules = [asdict(score) for score in score_rules(compared)]
    counts = {"matched": match.matched, "in_program": match.in_program, "rules": rules}
    return _text(match, compared), document | counts


def _text(match: MatchedPlan, compared: Sequence[ComparedOp]) -> str:
    plan = match.plan
    origin = ", ".join(filter(None, (plan.device, plan.system)))
    title = f"Core ML's plan of {match.model.name}{f' on {origin}' if origin else ''}"
    sections = [title, console.columns(_processor_rows(plan.operations), indent=2)]
    if match.matched < max(len(plan.operations), match.in_program):
        sections.insert(
            1,
            f"  {match.matched} of its {len(plan.operations)} operations match; the program has "
            f"{match.in_program}",
        )
    sections.append(console.columns(_rule_rows(compared), indent=2))
    operations = _operation_rows(compared)
    if len(operations) > 1:
        sections.append(console.columns(operations, indent=2))
    return "\n".join(sections)


def _processor_rows(operations: Sequence[PlannedOp]) -> list[tuple[str, ...]]:
    counts = Counter(map(_processor, operations))
    costs: dict[str, float] = {}
    for op in operations:
        costs[_processor(op)] = costs.get(_processor(op), 0.0) + (op.cost or 0.0)
    rows = [("runs on", "operations", "share")]
    return rows + [(name, str(n), f"{costs[name]:.1%}") for name, n in counts.most_common()]


def _rule_rows(compared: Sequence[ComparedOp]) -> list[tuple[str, ...]]:
    rows = [("predicted by", "hits", "not supported there", "misses")]
    return rows + [
        (
            score.rule or _NO_RULE,
            str(score.hits),
            str(score.unsupported),
            str(score.misses) if score.rule else "-",
        )
        for score in score_rules(compared)
    ]


def _operation_rows(compared: Sequence[ComparedOp]) -> list[tuple[str, ...]]:
    rows = [("operation", "output", "runs on", "share", "predicted by")]
    for entry in compared:
        op = entry.planned
        if op.preferred is not Processor.NEURAL_ENGINE or entry.predicted:
            share = "-" if op.cost is None else f"{op.cost:.1%}"
            rules = ", ".join(entry.predicted) or "-"
            rows.append((op.op_type, op.output, _processor(op), share, rules))
    return rows


def _processor(op: PlannedOp) -> str:
    return "unknown" if op.preferred is None else op.preferred.value

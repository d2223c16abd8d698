"""The share of a program's work that the neural engine can run, by the rules of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coreml_delegate.device_check.functions import FunctionView
from coreml_delegate.device_check.records import CheckedModel, Consequence, Finding
from coreml_delegate.runtime.mil.program import Op
from coreml_delegate.targets import Device

_LISTED = 5  # kinds of operations in a line


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """The operations of a delegate's function that the neural engine can run.

    An operation counts as elsewhere if a rule says that it leaves the neural engine; a rule about
    the whole function says so of all operations.

    Attributes:
        delegate: Names of the delegates that run the function.
        share: Estimated FLOPs on the neural engine, from 0 to 1 of those of the function.
        operations: Number of operations.
        elsewhere: Kinds of the other operations, each with its number, most frequent first.
        rules: Names of the rules that say so.
    """

    delegate: str
    function: str
    share: float
    operations: int
    elsewhere: tuple[tuple[str, int], ...]
    rules: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.delegate}: {self.share:.1%} of the work can run on the {_ENGINE}"
        if not self.elsewhere:
            return f"{head}, with all {self.operations} operations"
        kinds = [f"{kind} {count}" for kind, count in self.elsewhere[:_LISTED]]
        count = sum(count for _, count in self.elsewhere[_LISTED:])
        listed = ", ".join([*kinds, *([f"{count} others"] if count else [])])
        return f"{head}; not there: {listed} ({', '.join(self.rules)})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "delegate": self.delegate,
            "function": self.function,
            "share": self.share,
            "operations": self.operations,
            "elsewhere": dict(self.elsewhere),
            "rules": list(self.rules),
        }


_ENGINE = Device.NEURAL_ENGINE.text


def processor_shares(
    models: Iterable[CheckedModel], findings: Sequence[Finding]
) -> list[ProcessorShare]:
    """Return the shares of the functions that may run on the neural engine, in order."""
    leaving = [f for f in findings if f.rule.consequence is Consequence.LEAVES_NEURAL_ENGINE]
    eligible = (model.on_neural_engine() for model in models)
    return [_share(view, leaving) for model in eligible for view in model.views]


def _share(view: FunctionView, leaving: Iterable[Finding]) -> ProcessorShare:
    rules_by_op: dict[Op, list[str]] = {}
    for finding, ops in _ops_of_findings(view, leaving):
        for op in ops:
            rules_by_op.setdefault(op, []).append(finding.rule.name)
    total = sum(view.flops.get(op) or 0 for op in view.ops)
    lost = sum(view.flops.get(op) or 0 for op in rules_by_op)
    # Without FLOPs, as of operations that only move data, operations count.
    share = 1 - (lost / total if total else len(rules_by_op) / max(len(view.ops), 1))
    kinds = Counter(op.type for op in rules_by_op)
    rules = dict.fromkeys(name for names in rules_by_op.values() for name in names)
    return ProcessorShare(
        view.delegate,
        view.function.name,
        share,
        len(view.ops),
        tuple(kinds.most_common()),
        tuple(rules),
    )


def _ops_of_findings(
    view: FunctionView, leaving: Iterable[Finding]
) -> Iterator[tuple[Finding, Sequence[Op]]]:
    """Yield each finding in a function with its operations; all for one without operations."""
    for finding in leaving:
        if finding.details.is_in(view):
            yield finding, finding.details.ops_in(view) or view.ops

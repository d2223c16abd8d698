"""Static checks of a program's MIL for documented causes of trouble on a device.

``RULES`` has one record per cause, with the source that documents it; ``check`` applies the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from coreml_delegate.device_check import deployment, operations, precision, shapes, weights
from coreml_delegate.device_check.records import (
    CheckedModel,
    Consequence,
    Details,
    Evidence,
    Finding,
    MeasuredProgram,
    Place,
    Rule,
    Source,
    Use,
)
from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.runtime.diagnosis import Diagnosis

__all__ = [
    "RULES",
    "CheckedModel",
    "Consequence",
    "Finding",
    "MeasuredProgram",
    "Place",
    "Rule",
    "Source",
    "Use",
    "check",
    "rule_named",
]

_SEVERITY = {consequence: rank for rank, consequence in enumerate(Consequence)}

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            rule
            for module in (shapes, operations, precision, weights, deployment)
            for rule in module.RULES
        ),
        key=lambda rule: _SEVERITY[rule.consequence],
    )
)
"""Rules, the most severe consequence first."""


def rule_named(name: str) -> Rule:
    """Return the rule with a name.

    Raises:
        OptionError: There is no such rule.
    """
    for rule in RULES:
        if rule.name == name:
            return rule
    raise OptionError(
        "unknown rule", got=repr(name), expected=near_matches(name, (r.name for r in RULES))
    )


def check(
    models: Sequence[CheckedModel],
    diagnoses: Sequence[tuple[str, Diagnosis]] = (),
    measurements: Sequence[MeasuredProgram] = (),
    *,
    ignore: Collection[str] = (),
) -> list[Finding]:
    """Apply the rules to the models of one program.

    Args:
        models: The models without duplicates, each with all delegates that run it.
        diagnoses: Runs on the user's data, each with the name of its delegate; rules on values
            need them.
        measurements: Accuracies on the user's data; ``fp16-accuracy`` needs them.
        ignore: Names of rules to leave out.

    Returns:
        Findings, the most severe consequence first, then in the order of rules, models and places.
        Rules on the neural engine skip delegates whose compute unit excludes it.

    Raises:
        OptionError: There is no rule of a name in ``ignore``.
    """
    ignored = {rule_named(name) for name in ignore}
    everything = Evidence(tuple(models), tuple(diagnoses), tuple(measurements))
    eligible = replace(
        everything,
        models=tuple(
            model for model in map(CheckedModel.on_neural_engine, everything.models) if model.uses
        ),
    )
    return [
        Finding(rule, details, _obstacle(rule, details, everything))
        for rule in RULES
        if rule not in ignored
        for details in rule.examine(eligible if rule.neural_engine else everything)
    ]


def _obstacle(rule: Rule, details: Details, evidence: Evidence) -> str | None:
    """Return why the rule's rewrite leaves all places as they are; None if it changes one."""
    if rule.rewrite is None:
        return None
    views = (view for model in evidence.models for view in model.views if details.is_in(view))
    obstacles = [rule.rewrite.obstacle(view, op) for view in views for op in details.ops_in(view)]
    return None if None in obstacles else next(iter(obstacles), None)

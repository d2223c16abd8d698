"""All rules, and the check of a program by them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from coreml_delegate.device_check import deployment, operations, precision, shapes, weights
from coreml_delegate.device_check.records import (
    CheckedModel,
    Consequence,
    Evidence,
    Finding,
    Rule,
)
from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.runtime.diagnosis import Diagnosis

_GRAVITY = {consequence: place for place, consequence in enumerate(Consequence)}

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            rule
            for module in (shapes, operations, precision, weights, deployment)
            for rule in module.RULES
        ),
        key=lambda rule: _GRAVITY[rule.consequence],
    )
)
"""Gravest consequence first."""


def rule_named(name: str) -> Rule:
    """Return the rule of a name.

    Raises:
        OptionError: There is none.
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
    *,
    ignore: Collection[str] = (),
) -> list[Finding]:
    """Apply the rules to the models of one program.

    Args:
        models: Each model once, with all delegates that run it.
        diagnoses: Runs on the user's data, each with the name of its delegate; without them the
            rules on values find nothing.
        ignore: Names of rules to leave out.

    Returns:
        Findings, gravest consequence first, then in the order of rules, models and places. Rules on
        the neural engine find nothing in delegates whose compute unit leaves it out.

    Raises:
        OptionError: There is no rule of a name in ``ignore``.
    """
    left_out = {rule_named(name) for name in ignore}
    everything = Evidence(tuple(models), tuple(diagnoses))
    eligible = replace(
        everything,
        models=tuple(
            kept for model in everything.models if (kept := model.on_neural_engine()).uses
        ),
    )
    return [
        Finding(rule, found)
        for rule in RULES
        if rule not in left_out
        for found in rule.examine(eligible if rule.neural_engine else everything)
    ]

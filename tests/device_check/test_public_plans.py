"""The rules beside placements that other people published."""

from __future__ import annotations

from device_check import public_plans
from device_check.public_plans import OBSERVATIONS


def test_the_page_has_the_table():
    text = public_plans.PAGE.read_text()
    assert public_plans.page(text) == text, "run python -m tests.device_check.public_plans"


def test_no_rule_predicts_too_much():
    on_the_engine = [o for o in OBSERVATIONS if not o.leaves]
    assert on_the_engine
    assert not any(rules for o in on_the_engine for rules in o.predictions().values())

"""Checks of a program before it is on a device: documented causes of trouble, found in its MIL.

``RULES`` has one record for each cause, with the source that documents it; ``check`` applies them.
"""

from coreml_delegate.device_check.records import (
    CheckedModel,
    Consequence,
    Finding,
    Place,
    Rule,
    Source,
    Use,
)
from coreml_delegate.device_check.rules import RULES, check, rule_named

__all__ = [
    "RULES",
    "CheckedModel",
    "Consequence",
    "Finding",
    "Place",
    "Rule",
    "Source",
    "Use",
    "check",
    "rule_named",
]

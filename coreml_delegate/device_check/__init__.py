"""Static checks of a program's MIL for documented causes of trouble on a device.

``RULES`` has one record per cause, with the source that documents it; ``check`` applies the rules.
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

"""Cases of every MIL op, to be run by every engine."""

from __future__ import annotations

from support.op_cases import elementwise, layers, movement, network, recurrent, resizing, selection
from support.op_cases.case import OpCase

CASES: list[OpCase] = [
    case
    for family in (elementwise, layers, movement, network, recurrent, resizing, selection)
    for case in family.CASES
]

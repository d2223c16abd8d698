"""Cases of every MIL op, to be run by every engine."""

from __future__ import annotations

from support.op_cases import elementwise, movement, network, special
from support.op_cases.case import OpCase

CASES: list[OpCase] = [
    *elementwise.CASES,
    *movement.CASES,
    *network.CASES,
    *special.CASES,
]

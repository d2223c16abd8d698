"""Damaged programs that can be read can be checked: rules believe nothing that an op says."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from support import damage

from coreml_delegate.device_check import CheckedModel, Use, check
from coreml_delegate.errors import CoreMLDelegateError

CORPUS = sorted((Path(__file__).parents[1] / "fuzz" / "corpus").iterdir())


def examine(sample: bytes) -> int:
    """Check a program; return how many findings can be written down."""
    program = damage.read(sample)
    model = CheckedModel(program, tuple(Use("delegate", name) for name in program.functions))
    return len([(finding.as_dict(), finding.where) for finding in check([model])])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_damaged_programs_are_checked_or_refused(path):
    choose = random.Random(0)
    sample = path.read_bytes()
    assert examine(sample) >= 0
    for _ in range(20):
        with contextlib.suppress(CoreMLDelegateError):
            examine(damage.damage(sample, choose.randrange, times=2))

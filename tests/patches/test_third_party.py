"""Imports of other people's code."""

from __future__ import annotations

import subprocess
import sys

_LEFT_OUT = """
import sys
from coreml_delegate.patches import third_party

third_party.leave_out_unused_packages()
third_party.transformers()
third_party.coremltools()
print(sorted({"sklearn", "scipy.optimize", "xgboost"} & set(sys.modules)))

import scipy.optimize
import sklearn.base

print(scipy.optimize.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist())
"""


def test_commands_skip_unused_packages_which_can_be_imported_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LEFT_OUT],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[]", "[1, 0]"]

"""Latency, load time and memory of Core ML programs here, beside other ways to run the model.

``python -m tests.benchmarks`` prints the tables; docs/benchmarks.md has those of a full run.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
"""The folder of the tests, whose other packages the benchmarks use."""

if str(TESTS) not in sys.path:  # pytest has put it there, `python -m tests.benchmarks` has not
    sys.path.insert(0, str(TESTS))

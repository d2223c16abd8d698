"""Writes ``docs/jax-support.md``: ``python -m tests.jax_suite.support_table RESULTS``."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from tests.jax_suite import harnesses as suite

PAGE = Path(__file__).parents[2] / "docs" / "jax-support.md"
_COUNTED = (suite.PASSED, suite.REFUSED, suite.WRONG, suite.CRASHED)
_INTRODUCTION = """\
# JAX primitives

Written by `make jax-suite`; do not edit.

Every call of a primitive in JAX's own test harnesses (JAX {jax}, {all} calls) is lowered to
StableHLO, compiled, run on the reference engine and on OpenVINO, and compared with JAX on the CPU.

- {excluded} are left out: their arguments have element types that Core ML does not have (complex
  numbers, bfloat16, 8-bit floats, 64 bits) or are keys, or JAX has no kernel for the CPU.
- Of the other {run}, {passed} pass ({share:.1f} %), {refused} are refused with a reason, {wrong}
  are wrong on an engine, and {crashed} end in another error.
- OpenVINO declines {declined} of the calls that pass; they pass on the reference engine.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the document."""
    counts = Counter(str(found["outcome"]) for found in results.values())
    run = sum(counts[outcome] for outcome in _COUNTED)
    introduction = _INTRODUCTION.format(
        jax=jax.__version__,
        all=f"{len(results):,}",
        excluded=f"{counts[suite.EXCLUDED]:,}",
        run=f"{run:,}",
        passed=f"{counts[suite.PASSED]:,}",
        share=100 * counts[suite.PASSED] / max(run, 1),
        refused=counts[suite.REFUSED],
        wrong=counts[suite.WRONG],
        crashed=counts[suite.CRASHED],
        declined=sum("declined" in found["engines"].values() for found in results.values()),
    )
    return "\n".join([introduction, *_rows(results), "", *_reasons(results), ""])


def _rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for found in results.values():
        counts[found["primitive"]][found["outcome"]] += 1
    yield "| primitive | passed | refused | wrong | other errors |"
    yield "|---|---|---|---|---|"
    for primitive, found in sorted(counts.items()):
        if any(found[outcome] for outcome in _COUNTED):
            cells = (str(found[outcome] or "") for outcome in _COUNTED)
            yield f"| `{primitive}` | {' | '.join(cells)} |"


def _reasons(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the reasons why harnesses do not pass, without locations in the source."""
    reasons: Counter[tuple[str, str]] = Counter()
    for found in results.values():
        if found["outcome"] in (suite.REFUSED, suite.WRONG, suite.CRASHED):
            text = str(found["reason"]).partition(": ")[2].partition(" (at ")[0]
            reasons[found["primitive"], text.rstrip(".").replace("|", "\\|")] += 1
    yield "| primitive | calls | why it does not pass |"
    yield "|---|---|---|"
    for (primitive, reason), count in sorted(reasons.items()):
        yield f"| `{primitive}` | {count} | {reason} |"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(Path(sys.argv[1]).read_text())))

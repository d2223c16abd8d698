"""Two runs of the suite side by side: with our backend, and with ExecuTorch's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NO_CASE: Mapping[str, Any] = {"outcome": "missing", "delegated": {}, "undelegated": {}}


@dataclass(frozen=True)
class Pair:
    """One case in both runs.

    Attributes:
        name: The case.
        ours: What became of it with our backend.
        upstream: With ExecuTorch's own.
    """

    name: str
    ours: Mapping[str, Any]
    upstream: Mapping[str, Any]

    @property
    def behind(self) -> bool:
        """Whether upstream passes and we do not, or delegates more nodes than we do.

        A composite op that is kept whole counts as one node, and as several decomposed; so fewer
        nodes are less only if some are left over.
        """
        if self.upstream["outcome"] != "passed":
            return False
        if self.ours["outcome"] != "passed":
            return True
        fewer = _count(self.ours, "delegated") < _count(self.upstream, "delegated")
        return fewer and _count(self.ours, "undelegated") > 0

    @property
    def ahead(self) -> bool:
        """Whether we pass and upstream does not, or leave fewer nodes to the CPU.

        Nothing is known of a case that upstream did not run.
        """
        if self.ours["outcome"] != "passed" or self.upstream is _NO_CASE:
            return False
        if self.upstream["outcome"] != "passed":
            return True
        return _count(self.ours, "undelegated") < _count(self.upstream, "undelegated")

    def row(self) -> str:
        """One line of the table."""
        return f"  {self.name:<78} {_cell(self.ours)}  {_cell(self.upstream)}"


@dataclass(frozen=True)
class Comparison:
    """Every case of either run."""

    pairs: tuple[Pair, ...]

    @property
    def behind(self) -> tuple[Pair, ...]:
        """Where ours is worse."""
        return tuple(pair for pair in self.pairs if pair.behind)

    @property
    def ahead(self) -> tuple[Pair, ...]:
        """Where ours is better."""
        return tuple(pair for pair in self.pairs if pair.ahead)

    def to_table(self) -> str:
        """Counts of outcomes, nodes delegated, and the cases that differ."""
        lines = []
        for label in ("ours", "upstream"):
            cases = [getattr(pair, label) for pair in self.pairs]
            counts = Counter(case["outcome"] for case in cases)
            outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
            inside = sum(_count(case, "delegated") for case in cases)
            outside = sum(_count(case, "undelegated") for case in cases)
            lines.append(f"{label:<9} {outcomes}; {inside} nodes delegated, {outside} not")
        for title, pairs in (("behind upstream", self.behind), ("ahead of upstream", self.ahead)):
            lines.append(f"{title}: {len(pairs)} (delegated + not, ours and upstream's)")
            lines += [pair.row() for pair in pairs]
        return "\n".join(lines)


def compare(ours: Path, upstream: Path) -> Comparison:
    """Read two files that ``--results`` wrote."""
    runs = [json.loads(path.read_text())["cases"] for path in (ours, upstream)]
    names = sorted({*runs[0], *runs[1]})
    return Comparison(
        tuple(Pair(name, *(run.get(name, _NO_CASE) for run in runs)) for name in names)
    )


def _count(case: Mapping[str, Any], side: str) -> int:
    return sum(case[side].values())


def _cell(case: Mapping[str, Any]) -> str:
    counts = f"{_count(case, 'delegated')}+{_count(case, 'undelegated')}"
    return f"{case['outcome']:>10} {counts:<7}"

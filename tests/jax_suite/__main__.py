"""Run JAX's harnesses, several at a time; ``make jax-suite`` runs all of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.jax_suite import harnesses as suite
from tests.jax_suite.workers import run_all


def _chosen(options: argparse.Namespace) -> list[str]:
    return [
        name
        for name, harness in suite.harnesses().items()
        if suite.in_sample(name, options.sample)
        and (not options.primitive or harness.group_name in options.primitive)
        and (not options.name or options.name in name)
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the harnesses.

    Returns:
        0 if none is wrong or crashed.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.jax_suite", description=__doc__)
    parser.add_argument("-n", type=int, default=1, help="processes")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the harnesses (0 to 1)")
    parser.add_argument("--primitive", nargs="*", help="only these primitives")
    parser.add_argument("--name", help="only harnesses whose name has this part")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one harness")
    parser.add_argument("--results", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    names = _chosen(options)
    results: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for name, found in run_all(names, options.n, options.seconds):
        results[name] = found
        counts[found["outcome"]] += 1
        if found["outcome"] in (suite.WRONG, suite.CRASHED):
            print(f"{found['outcome']} {name}: {found['reason']}", flush=True)  # noqa: T201
        if options.results is not None and len(results) % 100 == 0:
            _write(options.results, results)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))  # noqa: T201
    if options.results is not None:
        _write(options.results, results)
    return int(counts[suite.WRONG] + counts[suite.CRASHED] > 0)


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())

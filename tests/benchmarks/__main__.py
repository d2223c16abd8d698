"""Print what running a model costs here, on our engines and beside them.

Latencies are medians of interleaved rounds; load times and peak memory come from fresh processes.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

warnings.filterwarnings("ignore")

from rich.console import Console  # noqa: E402 - after the filter above

from benchmarks import report  # noqa: E402
from benchmarks.contenders import CONTENDERS, EAGER, Contender  # noqa: E402
from benchmarks.measuring import Bench  # noqa: E402
from benchmarks.models import WORKLOADS  # noqa: E402

_WIDTH = 110  # columns, where there is no terminal
_PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=30, help="of timing (default: 30)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each (default: 2)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows whose name has TEXT in it"
    )
    parser.add_argument(
        "--no-footprints", action="store_true", help="latencies alone: no load times, no memory"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument(
        "--markdown", action="store_true", help="also put the tables into docs/benchmarks.md"
    )
    parser.add_argument("--verbose", action="store_true", help="show why a contender failed")
    return parser


def _confine(threads: int) -> None:
    """Leave the process as many cores as it may use threads: XLA knows no other limit."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _chosen(parts: Sequence[str]) -> list[Contender]:
    wanted = [part.casefold() for part in parts] or [""]
    return [
        contender
        for contender in CONTENDERS
        if contender.name == EAGER or any(part in contender.name.casefold() for part in wanted)
    ]


def main() -> None:
    """Run the benchmark."""
    parser = _parser()
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.models) - set(WORKLOADS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    if arguments.markdown and (arguments.models or arguments.only):
        parser.error("--markdown writes all tables: leave MODEL and --only out")
    if not arguments.verbose:
        logging.disable(logging.WARNING)
    _confine(arguments.threads)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    line = report.machine(arguments.threads, arguments.rounds)
    console.print(line)
    results: list[report.Result] = []
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
        for name in arguments.models or WORKLOADS:
            workload = WORKLOADS[name]()
            bench = Bench(workload, _chosen(arguments.only), Path(folder, name), arguments.threads)
            rows = bench.run(arguments.rounds, footprints=not arguments.no_footprints)
            results.append(report.Result(workload.title, rows))
            console.print(report.table(results[-1]))
            del bench
            gc.collect()
    if arguments.json is not None:
        arguments.json.write_text(report.as_json(results, line))
    if arguments.markdown:
        report.write_markdown(_PAGE, report.markdown(results, line))


if __name__ == "__main__":
    main()

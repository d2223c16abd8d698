"""Calls a second of one program, from one thread and from eight at once.

Each call computes on one thread (``EngineOptions(threads=1)``); the Python host runs as many calls
at the same time as there are CPUs. One thread and eight take turns. As a program:
``python -m tests.benchmarks.concurrency [--rounds N] [--seconds S] [WORKLOAD ...]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.exports import EXPORTS
from benchmarks.models import WORKLOADS, Workload

_THREADS = 8
_DEFAULT = ("mlp", "mobilenet_v2", "resnet18")


def _rate(program: Any, inputs: tuple[Any, ...], threads: int, seconds: float) -> float:
    """Calls a second of ``threads`` threads together."""
    counts = [0] * threads
    gate = threading.Barrier(threads + 1)
    end = [0.0]

    def work(number: int) -> None:
        gate.wait()
        while time.perf_counter() < end[0]:
            program.run("forward", inputs)
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    begin = time.perf_counter()
    end[0] = begin + seconds
    gate.wait()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - begin)


def measure(workload: Workload, folder: Path, rounds: int, seconds: float) -> tuple[float, float]:
    """Median calls a second of one thread and of eight."""
    from coreml_delegate.runtime import EngineOptions, load_program

    path = folder / f"{workload.name}.pte"
    EXPORTS["float32.pte"](workload, path)
    program = load_program(path, engine="openvino", options=EngineOptions(threads=1, cache=None))
    inputs = workload.inputs
    for threads in (1, _THREADS):
        _rate(program, inputs, threads, seconds / 4)
    pairs = [
        tuple(_rate(program, inputs, threads, seconds) for threads in (1, _THREADS))
        for _ in range(rounds)
    ]
    one, several = zip(*pairs, strict=True)
    return statistics.median(one), statistics.median(several)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.concurrency", description=__doc__
    )
    parser.add_argument("workloads", nargs="*", default=_DEFAULT, help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table("program", "calls/s, one thread", "eight threads", "ratio")
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name]()
            one, several = measure(workload, Path(folder), arguments.rounds, arguments.seconds)
            table.add_row(workload.title, f"{one:.0f}", f"{several:.0f}", f"{several / one:.2f}")
    Console(width=None if sys.stdout.isatty() else 80).print(table)


if __name__ == "__main__":
    main()

"""Latency of ten CPU nodes between delegates, on each host, at several thread settings.

Torch and OpenVINO have threads of their own, which compete for the same cores. Each setting is
measured in processes of its own that take turns. As a program:
``python -m tests.benchmarks.alternations [--rounds N] [--busy]``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

_ALTERNATIONS = 10
_CHANNELS = 64
_SIDE = 56  # pixels
_RUNS = 15  # of each process, after three that do not count
_HOSTS = ("python", "stock")
_SETTINGS = {
    "one thread in all": (1, True),
    "torch one, OpenVINO all": (None, True),  # what the runtime does
    "all threads each": (None, False),
}


class Alternating(nn.Module):
    """Convolutions for the delegates, ``tanh`` for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1) for _ in range(_ALTERNATIONS + 1)
        )

    def forward(self, x):
        first, *others = self.convolutions
        x = first(x)
        for convolution in others:
            x = convolution(torch.tanh(x))
        return x


def _input() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(1, _CHANNELS, _SIDE, _SIDE)


def export(path: Path) -> None:
    """Write the program."""
    from executorch.exir import to_edge_transform_and_lower

    from coreml_delegate import CoreMLPartitioner

    partitioner = CoreMLPartitioner(skip_ops_for_coreml_delegation=["aten.tanh.default"])
    exported = torch.export.export(Alternating().eval(), (_input(),))
    program = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    path.write_bytes(program.to_executorch().buffer)
    assert len(partitioner.report.partitions) == _ALTERNATIONS + 1


def _measure(path: Path, host: str, threads: int | None, *, limited: bool) -> None:
    """Print the median time of a call in seconds."""
    from coreml_delegate.runtime import EngineOptions, load_program
    from coreml_delegate.runtime.program import host as python_host
    from coreml_delegate.runtime.program import shim

    if threads is not None:
        torch.set_num_threads(threads)
    if not limited:
        python_host.one_torch_thread = nullcontext
        shim.Shim._call = shim.Shim._call.__wrapped__
    program = load_program(path, host=host, options=EngineOptions(threads=threads, cache=None))
    inputs = [_input()]
    times: list[float] = []
    for _ in range(_RUNS + 3):
        begin = time.perf_counter()
        program.run("forward", inputs)
        times.append(time.perf_counter() - begin)
    print(statistics.median(times[3:]))


def _time(path: Path, host: str, setting: str) -> float:
    command = [sys.executable, __file__, "--measure", str(path), host, setting]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _spin() -> None:
    while True:
        pass


@contextmanager
def _neighbour() -> Generator[None]:
    """Keep one core busy."""
    process = multiprocessing.Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.alternations", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=5, help="processes of each (default: 5)")
    parser.add_argument("--busy", action="store_true", help="while another process keeps a core")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.measure:
        path, host, setting = arguments.measure
        threads, limited = _SETTINGS[setting]
        _measure(Path(path), host, threads, limited=limited)
        return
    cases = tuple(itertools.product(_HOSTS, _SETTINGS))
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
        path = Path(folder, "alternating.pte")
        export(path)
        with _neighbour() if arguments.busy else nullcontext():
            rounds = [[_time(path, *case) for case in cases] for _ in range(arguments.rounds)]
    table = Table("host", "threads", "ms a call", "of one thread")
    medians = dict(zip(cases, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    for (host, setting), seconds in medians.items():
        ratio = seconds / medians[host, next(iter(_SETTINGS))]
        table.add_row(host, setting, f"{seconds * 1e3:.1f}", f"{ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 80).print(table)


if __name__ == "__main__":
    main()

"""Recurrent layers beside torch and XNNPACK: latency, and time to lower by the number of steps.

XNNPACK is given what ExecuTorch makes of a layer, every step unrolled. Calls take turns. As a
program: ``python -m tests.benchmarks.recurrent [--rounds N] [--steps N ...]``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.contenders import CONTENDERS, EAGER
from benchmarks.exports import EXPORTS
from benchmarks.measuring import Bench, Row
from benchmarks.models import Workload

_ROWS = {
    EAGER: "torch eager",
    "XNNPACK .pte": "XNNPACK",
    "ours float32, openvino": "ours float32, python host",
    "ours float32, openvino, stock host": "ours float32, stock host",
    "ours float16, openvino": "ours float16, python host",
}
_THREADS = 2
_FEATURES, _UNITS = 64, 128
_LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Sequences(nn.Module):
    """Two bidirectional layers, of which only what they say of each step is returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = _LAYERS[kind](
            _FEATURES, _UNITS, num_layers=2, bidirectional=True, batch_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [1, steps, features]."""
        return self.layers(x)[0]


def _workload(kind: str, steps: int) -> Workload:
    torch.manual_seed(0)
    module = Sequences(kind).eval().requires_grad_(False)
    inputs = (torch.randn(1, steps, _FEATURES),)
    return Workload(f"{kind}_{steps}", f"{kind}, {steps} steps", module, inputs)


def _lower(workload: Workload, folder: Path) -> dict[str, float]:
    """Write each contender's file; seconds by the file's name, export included."""
    folder.mkdir()
    seconds: dict[str, float] = {}
    for contender in CONTENDERS:
        if contender.name in _ROWS and contender.file not in seconds:
            begin = time.perf_counter()
            EXPORTS[contender.file](workload, folder / contender.file)
            seconds[contender.file] = time.perf_counter() - begin
    return seconds


def _measure(workload: Workload, folder: Path, rounds: int) -> list[tuple[str, Row, float]]:
    """Return label, measurements and seconds to lower of each contender."""
    seconds = _lower(workload, folder)
    contenders = [contender for contender in CONTENDERS if contender.name in _ROWS]
    rows = Bench(workload, contenders, folder, _THREADS).run(rounds, footprints=False)
    return [
        (_ROWS[row.name], row, seconds[contender.file])
        for contender, row in zip(contenders, rows, strict=True)
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recurrent")
    parser.add_argument("--rounds", type=int, default=15, help="of timing (default: 15)")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 200])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    table = Table("layers", "steps", "", "ms", "of torch", "dB", "s to lower")
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
        _lower(_workload("RNN", 1), Path(folder, "imports"))
        for kind in _LAYERS:
            for steps in options.steps:
                workload = _workload(kind, steps)
                rows = _measure(workload, Path(folder, workload.name), options.rounds)
                base = rows[0][1].seconds
                for label, row, seconds in rows:
                    if row.seconds is None or base is None:
                        table.add_row(kind, str(steps), label, row.note)
                        continue
                    eager = label == _ROWS[EAGER]
                    table.add_row(
                        kind,
                        str(steps),
                        label,
                        f"{row.seconds * 1e3:.2f}",
                        f"{row.seconds / base:.2f}",
                        "" if eager else f"{row.sqnr:.0f}",
                        "" if eager else f"{seconds:.1f}",
                    )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()

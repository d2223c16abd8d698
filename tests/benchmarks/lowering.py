"""Time and memory of lowering, beside ExecuTorch's own Core ML backend.

Each lowering is in a process of its own, the two backends taking turns; imports and export do not
count. Ours is measured with empty caches, again with what that has left in them, and once more with
another bias in the last layer. As a program:
``python -m tests.benchmarks.lowering [MODEL ...] [--rounds N]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from benchmarks import TESTS
from benchmarks.footprint import resident

Model = tuple[nn.Module, tuple[torch.Tensor, ...]]
OURS, UPSTREAM = "ours", "ExecuTorch's own"
AGAIN, CHANGED = "ours, second time", "ours, one layer changed"
_SECONDS = 1800.0  # beyond this a lowering hangs


def _vision(name: str) -> Callable[[], Model]:
    def make() -> Model:
        from support.torchvision_models import build

        module, image = build(name, 224)
        return module, (image,)

    return make


def _decoder() -> Model:
    from benchmarks.models import Decoder

    return Decoder(layers=12).eval(), (torch.tensor([[1]]), torch.tensor([0]))


def _parts() -> Model:
    """ResNet-18 in five partitions: Core ML has no float64."""

    class Asinh(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.asinh(x.double()).float()

    module, inputs = _vision("resnet18")()
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        setattr(module, stage, nn.Sequential(getattr(module, stage), Asinh()))
    return module, inputs


def _stack() -> Model:
    """500 MB of weights and little else."""
    layers = [nn.Linear(2048, 2048) for _ in range(30)]
    return nn.Sequential(*layers).eval(), (torch.rand(1, 2048),)


MODELS: Mapping[str, Callable[[], Model]] = MappingProxyType(
    {
        "mobilenet_v2": _vision("mobilenet_v2"),
        "vit_b_16": _vision("vit_b_16"),
        "swin_t": _vision("swin_t"),
        "resnet18_in_5_parts": _parts,
        "decoder_12_layers": _decoder,
        "linear_500_mb": _stack,
    }
)


def _partitioner(source: str) -> Any:
    import coremltools as ct

    if source != UPSTREAM:
        from coreml_delegate import CoreMLBackend, CoreMLPartitioner
    else:
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=ct.target.iOS18)
    return CoreMLPartitioner(compile_specs=specs)


def measure(source: str, name: str) -> dict[str, Any]:
    """Lower in this process, in which nothing else may have happened.

    Returns:
        Seconds, and bytes: of weights, and of resident memory at most beyond what was held before.
    """
    torch.manual_seed(0)  # each process lowers the same weights
    module, inputs = MODELS[name]()
    if source == CHANGED:
        with torch.no_grad():
            list(module.parameters())[-1].add_(1)
    from executorch.exir import to_edge_transform_and_lower

    with torch.no_grad():
        exported = torch.export.export(module, inputs)
    partitioner = _partitioner(source)
    weights = sum(t.nbytes for t in module.state_dict().values())
    before = resident(reset=True)
    start = time.perf_counter()
    program = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
    seconds = time.perf_counter() - start
    delegates = program.executorch_program.execution_plan[0].delegates
    return {
        "seconds": seconds,
        "weight_bytes": weights,
        "peak_bytes": resident() - before,
        "partitions": len(delegates),
    }


def _probe(source: str, name: str, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lowering", "--child", source, name]
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "COREML_DELEGATE_CACHE": str(cache),
    }
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return {"why": lines[-1] if lines else f"exit code {result.returncode}"}
    return json.loads(result.stdout.splitlines()[-1])


def _rows(name: str, rounds: int) -> Mapping[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {OURS: [], AGAIN: [], CHANGED: [], UPSTREAM: []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
            for row in (OURS, UPSTREAM, AGAIN, CHANGED):
                rows[row].append(_probe(row, name, Path(folder)))
    return rows


def _table(name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    table = Table(title=name, title_justify="left")
    for header in ("", "s", "of upstream", "peak MB", "of weights", "partitions"):
        table.add_column(header, justify="right" if header else "left")
    medians = {
        row: {key: statistics.median(m[key] for m in found) for key in found[0]}
        for row, found in rows.items()
        if not any("why" in m for m in found)
    }
    base = medians.get(UPSTREAM, {}).get("seconds")
    for row, found in rows.items():
        if row not in medians:
            table.add_row(row, escape(next(m["why"] for m in found if "why" in m)))
            continue
        m = medians[row]
        table.add_row(
            row,
            f"{m['seconds']:.1f}",
            "" if base is None else f"{m['seconds'] / base:.2f}",
            f"{m['peak_bytes'] / 1e6:.0f}",
            f"{m['peak_bytes'] / m['weight_bytes']:.2f}",
            f"{m['partitions']:.0f}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.lowering")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = sorted(set(options.models) - set(MODELS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if options.child is not None:
        print(json.dumps(measure(options.child, options.models[0])))
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    for name in options.models or MODELS:
        console.print(_table(name, _rows(name, options.rounds)))


if __name__ == "__main__":
    main()

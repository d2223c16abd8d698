"""Time and memory of compressed weights: a decoder of 12 layers in several forms, on OpenVINO.

Peak memory is that of a process of its own that loads a program and runs it once; latencies are
medians of interleaved rounds in one process. All compute in fp32. As a program:
``python -m tests.benchmarks.compressed [FORM ...] [--rounds N] [--layers N]``.
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
from rich.table import Table
from torch import nn

from benchmarks import TESTS
from benchmarks.footprint import resident
from benchmarks.models import Decoder

PREFILL = 128  # tokens
CALLS: Mapping[str, int] = MappingProxyType({"step": 1, "prefill": PREFILL})
"""Tokens by call."""
_SECONDS = 1800.0  # beyond this a process hangs


def _is_weight(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Embedding | nn.Linear)


def _integers(bits: int, group: int | None) -> Callable[[nn.Module], None]:
    def compress(module: nn.Module) -> None:
        from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

        granularity = PerAxis(0) if group is None else PerGroup(group)
        dtype = getattr(torch, f"int{bits}")
        quantize_(module, IntxWeightOnlyConfig(dtype, granularity), _is_weight)

    return compress


def _codebook(bits: int) -> Callable[[nn.Module], None]:
    def compress(module: nn.Module) -> None:
        from torchao.prototype.quantization.codebook_coreml import CodebookWeightOnlyConfig
        from torchao.quantization import quantize_

        dtype = getattr(torch, f"uint{bits}")
        quantize_(module, CodebookWeightOnlyConfig(dtype, [64, -1]), _is_weight)

    return compress


FORMS: Mapping[str, Callable[[nn.Module], None]] = MappingProxyType(
    {
        "fp32": lambda _: None,
        "int8": _integers(8, None),
        "int4-group32": _integers(4, 32),
        "codebook4": _codebook(4),
    }
)
"""By name what is done to the weights of the model."""


def lower(form: str, call: str, file: Path, layers: int) -> None:
    """Write the program of one form for one call."""
    from executorch.exir import to_edge_transform_and_lower

    from coreml_delegate import CoreMLBackend, CoreMLPartitioner
    from coreml_delegate.options.compile_specs import Precision

    torch.manual_seed(0)
    module = Decoder(layers=layers).eval()
    FORMS[form](module)
    inputs = torch.zeros(1, CALLS[call], dtype=torch.long), torch.tensor([0])
    with torch.no_grad():
        exported = torch.export.export(module, inputs)
    specs = CoreMLBackend.generate_compile_specs(compute_precision=Precision.FLOAT32)
    partitioner = CoreMLPartitioner(compile_specs=specs)
    program = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
    file.write_bytes(program.buffer)


def _loaded(file: Path, call: str) -> Callable[[], Any]:
    from coreml_delegate import runtime

    program = runtime.load_program(file, host="python", engine="openvino")
    inputs = [torch.zeros(1, CALLS[call], dtype=torch.long), torch.tensor([0])]
    return lambda: program.run("forward", inputs)


def footprint(file: Path, call: str) -> int:
    """Peak resident memory of loading and one call, beyond what imports hold, in bytes."""
    from coreml_delegate.runtime.engines.openvino import OPENVINO  # noqa: F401 - imports

    before = resident(reset=True)
    _loaded(file, call)()
    return resident() - before


def latencies(files: Mapping[str, Path], call: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of a call by form, in turns."""
    calls = {form: _loaded(file, call) for form, file in files.items()}
    taken: dict[str, list[float]] = {form: [] for form in calls}
    for number in range(rounds + 2):
        for form, run in calls.items():
            start = time.perf_counter()
            run()
            if number > 1:  # the first two warm up
                taken[form].append(time.perf_counter() - start)
    return {form: 1e3 * statistics.median(times) for form, times in taken.items()}


def _child(*arguments: str) -> Any:
    """Run this module in a new process, and return its output."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compressed", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "COREML_DELEGATE_COMPILED_CACHE": "off"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def _answer(request: Sequence[str]) -> object:
    """Return the result of a task that ``_child`` was given."""
    task, call, *rest = request
    if task == "lower":
        form, file, layers = rest
        lower(form, call, Path(file), int(layers))
        return None
    if task == "footprint":
        return footprint(Path(rest[0]), call)
    rounds, *files = rest
    return latencies({Path(f).stem: Path(f) for f in files}, call, int(rounds))


def measure(forms: Sequence[str], folder: Path, rounds: int, layers: int) -> list[list[str]]:
    """The rows of the table."""
    columns: dict[str, list[str]] = {form: [] for form in forms}
    for call in CALLS:
        files = {form: folder / call / f"{form}.pte" for form in forms}
        (folder / call).mkdir()
        for form, file in files.items():
            _child("--child", "lower", call, form, str(file), str(layers))
        times = _child("--child", "latencies", call, str(rounds), *map(str, files.values()))
        for form, file in files.items():
            if call == "step":
                columns[form].append(f"{file.stat().st_size / 1e6:.0f}")
            peak = _child("--child", "footprint", call, str(file))
            columns[form] += [f"{times[form]:.1f}", f"{peak / 1e6:.0f}"]
    return [[form, *cells] for form, cells in columns.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compressed")
    parser.add_argument("forms", nargs="*", metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        print(json.dumps(_answer(options.child)))
        return
    unknown = sorted(set(options.forms) - set(FORMS))
    if unknown:
        parser.error(f"no such form: {', '.join(unknown)}; there are {', '.join(FORMS)}")
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-benchmarks-") as folder:
        rows = measure(options.forms or list(FORMS), Path(folder), options.rounds, options.layers)
    title = f"decoder of {options.layers} layers, openvino, fp32 arithmetic"
    table = Table(title=title, title_justify="left")
    headers = ["", "MB of .pte"]
    headers += [f"{call} {what}" for call in CALLS for what in ("ms", "peak MB")]
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()

"""Print latency tables: our ``.pte`` on each engine and host against torch eager and XNNPACK.

Every model's contenders are timed in turn within one loop, so that a disturbance of the machine
falls on all of them alike; the table gives medians, and ratios to torch eager.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
warnings.filterwarnings("ignore")

import torch  # noqa: E402 - after the path above
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from support.tolerances import sqnr_db  # noqa: E402
from support.torchvision_models import build  # noqa: E402

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime  # noqa: E402
from coreml_delegate.compile_options import Precision  # noqa: E402
from coreml_delegate.runtime import EngineOptions  # noqa: E402

Run = Callable[[], torch.Tensor]
MODELS = ("mobilenet_v2", "resnet18")
SIZE = 224
SLOW = "reference"  # timed on fewer rounds: it is the faithful engine, not the fast one


def _coreml(model: torch.nn.Module, example: torch.Tensor, precision: Precision) -> bytes:
    from executorch.exir import to_edge_transform_and_lower

    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision)
    )
    exported = torch.export.export(model, (example,))
    return to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer


def _xnnpack(model: torch.nn.Module, example: torch.Tensor) -> Run:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    exported = torch.export.export(model, (example,))
    buffer = (
        to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        .to_executorch()
        .buffer
    )
    program = Runtime.get().load_program(buffer)
    method = program.load_method("forward")
    kept = (program, buffer)  # the runtime reads from the bytes
    return lambda: (kept, method.execute([example])[0])[1]


def _ours(buffer: bytes, example: torch.Tensor, host: str, engine: str, threads: int) -> Run:
    options = EngineOptions(threads=threads)
    program = runtime.load_program(buffer, host=host, engine=engine, options=options)
    return lambda: program.run("forward", [example])[0]


def _contenders(name: str, threads: int) -> dict[str, Run]:
    model, example = build(name, SIZE)
    contenders: dict[str, Run] = {"torch eager": lambda: model(example)}
    contenders["XNNPACK .pte, stock runtime"] = _xnnpack(model, example)
    for precision in (Precision.FLOAT32, Precision.FLOAT16):
        buffer = _coreml(model, example, precision)
        for engine in ("openvino", "reference"):
            for host in ("python", "stock"):
                label = f"ours {precision.value}, {engine}, {host} host"
                contenders[label] = _ours(buffer, example, host, engine, threads)
    return contenders


def measure(contenders: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Time every contender once a round, in seconds; the first rounds warm up and are dropped."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(-3, rounds):
        for name, run in contenders.items():
            if SLOW in name and index >= rounds // 5:
                continue
            start = time.perf_counter()
            run()
            if index >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def _table(name: str, rounds: int, threads: int) -> Table:
    contenders = _contenders(name, threads)
    with torch.no_grad():
        eager = contenders["torch eager"]().numpy()
        error = {label: sqnr_db(eager, run().detach().numpy()) for label, run in contenders.items()}
        times = {k: statistics.median(v) for k, v in measure(contenders, rounds).items()}
    title = f"{name} 1x3x{SIZE}x{SIZE}, {threads} threads, medians of {rounds} interleaved rounds"
    table = Table(title=title, title_justify="left")
    for header in ("", "ms", "of torch eager", "SQNR dB"):
        table.add_column(header, justify="right" if header else "left")
    for label, seconds in times.items():
        ratio = seconds / times["torch eager"]
        table.add_row(label, f"{seconds * 1e3:.2f}", f"{ratio:.2f}", f"{error[label]:.0f}")
    return table


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    for name in arguments.models:
        console.print(_table(name, arguments.rounds, arguments.threads))


if __name__ == "__main__":
    main()

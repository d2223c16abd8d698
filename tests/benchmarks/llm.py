"""A language model here: tokens per second, prefill time, memory, and size of the file.

The decoder of ``export-llm`` with random weights, called the same way by all: one token, or a chunk
of them, behind caches that hold some. Peak memory is that of a process of its own that loads and
calls each once; latencies are medians of interleaved rounds in one process. As a program:
``python -m tests.benchmarks.llm [CONTENDER ...] [--rounds N] [--markdown]``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import TESTS
from benchmarks.footprint import resident
from benchmarks.timing import Turn, race
from coreml_delegate.llm.layout import DECODE, PREFILL, CacheKind, Layout

CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 16384,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
)
"""Configuration of a Llama of 88 million parameters."""
LAYOUT = Layout(CONFIG["vocab_size"], 1024, 64, CacheKind.IO)
POSITION = 128
"""Tokens in the caches when a call is timed."""

_SECONDS = 1800.0  # beyond this a process hangs
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run the decoder.

    Attributes:
        file: What it loads, see ``FILES``; empty for the module itself.
        load: From the file and the threads to a call for each method.
        share: Rounds it takes part in, of all.
    """

    file: str
    load: Callable[[Path, int], Mapping[str, Call]]
    share: float = 1.0


def decoder() -> Any:
    """The model, the same every time."""
    from coreml_delegate.llm.checkpoint import random_decoder
    from coreml_delegate.patches.third_party import transformers

    config = transformers().AutoConfig.for_model("llama", **CONFIG)
    return random_decoder(config, 0, context=LAYOUT.context)


def inputs() -> Mapping[str, list[torch.Tensor]]:
    """Inputs of the timed call of each method."""
    random = torch.Generator().manual_seed(0)
    width = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    shape = (1, CONFIG["num_key_value_heads"], LAYOUT.context, width)
    caches = [torch.zeros(shape) for _ in range(2 * CONFIG["num_hidden_layers"])]
    for cache in caches:
        cache[:, :, :POSITION].normal_(generator=random)
    tokens = torch.randint(LAYOUT.vocabulary, (1, LAYOUT.chunk), generator=random)
    at, last = torch.tensor([POSITION]), torch.tensor([LAYOUT.chunk - 1])
    return {DECODE: [tokens[:, :1], at, *caches], PREFILL: [tokens, at, last, *caches]}


def modules() -> Mapping[str, Any]:
    """The methods as modules, as exported."""
    from coreml_delegate.llm.export import export_methods

    return {name: made.module() for name, made in export_methods(decoder(), LAYOUT).items()}


def _eager(_: Path, threads: int, change: Callable[[Any], Any] = lambda m: m) -> dict[str, Call]:
    torch.set_num_threads(threads)
    calls: dict[str, Call] = {}
    for name, module in modules().items():
        count = len(inputs()[name]) - 2 * CONFIG["num_hidden_layers"]
        run, given = change(module), inputs()[name]
        args = (*given[:count], given[count:])
        calls[name] = torch.no_grad()(lambda run=run, args=args: run(*args))
    return calls


def _inductor(path: Path, threads: int) -> dict[str, Call]:
    from torch._inductor import config

    config.freezing = True
    return _eager(path, threads, torch.compile)


def _stock(path: Path, threads: int) -> dict[str, Call]:
    from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
    from executorch.runtime import Runtime

    _unsafe_reset_threadpool(threads)
    program = Runtime.get().load_program(path)
    methods = {name: program.load_method(name) for name in (DECODE, PREFILL)}
    given = inputs()

    def call(name: str) -> Any:
        return methods[name].execute(given[name]), program  # which the methods read from

    return {name: lambda name=name: call(name) for name in methods}


def _ours(engine: str, **chosen: bool) -> Callable[[Path, int], dict[str, Call]]:
    def load(path: Path, threads: int) -> dict[str, Call]:
        torch.set_num_threads(threads)
        from coreml_delegate import runtime

        options = runtime.EngineOptions(threads=threads, cache=None, **chosen)
        program = runtime.load_program(path, engine=engine, options=options)
        for name in (DECODE, PREFILL):
            program.load_method(name)
        return {
            name: lambda name=name, given=given: program.run(name, given)
            for name, given in inputs().items()
        }

    return load


_SLOW = 0.2  # of the rounds: the reference engine is the faithful one, not the fast one
CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "torch eager": Contender("", _eager),
        "torch.compile, freezing": Contender("", _inductor),
        "XNNPACK .pte": Contender("xnnpack.pte", _stock),
        "ours float32, openvino": Contender("float32.pte", _ours("openvino")),
        "ours float16, openvino": Contender("float16.pte", _ours("openvino")),
        "ours int4, openvino": Contender("int4.pte", _ours("openvino")),
        "ours int4, openvino, dynamic quantization": Contender(
            "int4.pte", _ours("openvino", dynamic_quantization=True)
        ),
        "ours float32, reference": Contender("float32.pte", _ours("reference"), _SLOW),
        "ours float16, reference": Contender("float16.pte", _ours("reference"), _SLOW),
    }
)
"""In the order of the table."""


def _core_ml(
    path: Path, precision: str, *, linear: str = "none", strategy: str | None = None
) -> None:
    from support.lowering import fp32_specs
    from support.multimethod import specs
    from support.quantization import few_bits

    from coreml_delegate import CoreMLPartitioner
    from coreml_delegate.llm.export import export_methods, lower, quantize_weights
    from coreml_delegate.options.compile_specs import Precision
    from coreml_delegate.targets import Opset

    model = decoder()
    if linear != "none":
        quantize_weights(model, **few_bits(linear, "int8", group=32))
    options = {
        "compute_precision": Precision(precision),
        "minimum_deployment_target": Opset.iOS18,
    }
    given = fp32_specs(**options) if strategy is None else specs(strategy, **options)
    program = lower(export_methods(model, LAYOUT), LAYOUT, CoreMLPartitioner(compile_specs=given))
    path.write_bytes(program.buffer)


def _xnnpack(path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    from coreml_delegate.llm.export import export_methods

    edge = to_edge_transform_and_lower(
        export_methods(decoder(), LAYOUT), partitioner=[XnnpackPartitioner()]
    )
    path.write_bytes(edge.to_executorch().buffer)


FILES: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        "float32.pte": lambda path: _core_ml(path, "float32"),
        "float16.pte": lambda path: _core_ml(path, "float16"),
        "float16, not shared.pte": lambda path: _core_ml(path, "float16", strategy="DISABLED"),
        "int4.pte": lambda path: _core_ml(path, "float16", linear="int4"),
        "xnnpack.pte": _xnnpack,
    }
)
"""Writers by file name. That of the methods that share no weights is there for its size."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one contender; None where there is none.

    Attributes:
        decode: Median seconds of a token.
        prefill: Median seconds of a chunk.
        peak_bytes: Most resident memory of loading and one call of each method, beyond imports.
        file_bytes: Size of the file.
        note: Why it does not take part.
    """

    decode: float | None = None
    prefill: float | None = None
    peak_bytes: int | None = None
    file_bytes: int | None = None
    note: str = ""


def _child(*arguments: str) -> str:
    """Last line that this program prints with ``arguments``.

    Raises:
        RuntimeError: It fails; the message is the last line of what it says.
    """
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-m", "benchmarks.llm", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [str(done.returncode)])[-1])
    return done.stdout.splitlines()[-1]


def _probe(name: str, folder: Path, threads: int) -> int:
    """Peak bytes of loading a contender here and calling each method once."""
    contender = CONTENDERS[name]
    _imports(contender)
    before = resident(reset=True)
    for call in contender.load(folder / contender.file, threads).values():
        call()
    return resident() - before


def _imports(contender: Contender) -> None:
    """Import the modules that loading needs: importing is not measured."""
    names = ["coreml_delegate.llm.checkpoint", "coreml_delegate.llm.export"]
    if contender.file == "xnnpack.pte":
        names.append("executorch.runtime")
    elif contender.file:
        names += ["coreml_delegate.runtime", "openvino"]
    for name in names:
        importlib.import_module(name)


def measure(names: Sequence[str], folder: Path, threads: int, rounds: int) -> dict[str, Row]:
    """Measure contenders; those that fail get a row that says why."""
    rows: dict[str, Row] = {}
    loaded: dict[str, Mapping[str, Call]] = {}
    for name in names:
        contender = CONTENDERS[name]
        path = folder / contender.file
        try:
            if contender.file and not path.exists():
                _child("--write", str(path))
            peak = int(_child("--probe", name, "--folder", str(folder), "--threads", str(threads)))
            loaded[name] = contender.load(path, threads)
            for call in loaded[name].values():
                call()
        except Exception as error:  # noqa: BLE001 - whatever a contender fails with is its result
            loaded.pop(name, None)
            rows[name] = Row(note=(str(error).splitlines() or [type(error).__name__])[0])
            continue
        size = path.stat().st_size if contender.file else None
        rows[name] = Row(peak_bytes=peak, file_bytes=size)
    for method in (DECODE, PREFILL):
        turns = {n: Turn(calls[method], CONTENDERS[n].share) for n, calls in loaded.items()}
        for name, seconds in race(turns, rounds).items() if turns else ():
            rows[name] = replace(rows[name], **{method: seconds})
    return rows


_HEADINGS = ("", "tokens/s", "prefill ms", "peak MB", "file MB")


def cells(rows: Mapping[str, Row]) -> list[list[str]]:
    """The table's body."""

    def shown(value: float | None, format_: str) -> str:
        return "" if value is None else format(value, format_)

    return [
        [
            name,
            row.note or shown(None if row.decode is None else 1 / row.decode, ".1f"),
            shown(None if row.prefill is None else 1e3 * row.prefill, ".1f"),
            shown(None if row.peak_bytes is None else row.peak_bytes / 1e6, ".0f"),
            shown(None if row.file_bytes is None else row.file_bytes / 1e6, ".1f"),
        ]
        for name, row in rows.items()
    ]


def _write_table(rows: Mapping[str, Row], *, markdown: bool) -> None:
    body = cells(rows)
    if markdown:
        lines = [_HEADINGS, ["---", *["---:"] * (len(_HEADINGS) - 1)], *body]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table()
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for line in body:
        table.add_row(*map(escape, line))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def main() -> None:
    """Run the benchmark, or one step of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.llm", description=__doc__)
    parser.add_argument("contenders", nargs="*", metavar="CONTENDER", help=", ".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=20, help="of timing (default: 20)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each (default: 2)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.contenders) - set(CONTENDERS))
    if unknown:
        parser.error(f"no such contender: {', '.join(unknown)}")
    if arguments.write is not None:
        FILES[arguments.write.name](arguments.write)
        print("written")
        return
    if arguments.probe is not None:
        print(_probe(arguments.probe, arguments.folder, arguments.threads))
        return
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-llm-") as name:
        names = arguments.contenders or list(CONTENDERS)
        rows = measure(names, Path(name), arguments.threads, arguments.rounds)
        unshared = Path(name, "float16, not shared.pte")
        if not arguments.contenders:
            _child("--write", str(unshared))
            rows["float16, weights not shared"] = Row(file_bytes=unshared.stat().st_size)
    _write_table(rows, markdown=arguments.markdown)


if __name__ == "__main__":
    main()

"""Tables of what was measured: for a terminal, for documentation, for programs."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import EAGER
from benchmarks.measuring import Row

_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_NOTABLE = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_NOTABLE += ("asimddp", "i8mm", "bf16")  # of Arm
_PACKAGES = ("torch", "openvino", "executorch", "coremltools", "onnxruntime", "jax")


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of one workload."""

    title: str
    rows: Sequence[Row]

    @property
    def eager_seconds(self) -> float | None:
        """Median of eager torch, which ratios refer to."""
        return next((row.seconds for row in self.rows if row.name == EAGER), None)


def _number(value: float | None, format_: str) -> str:
    if value is None:
        return ""
    return "exact" if math.isinf(value) and value > 0 else format(value, format_)


def _milliseconds(seconds: float | None) -> str:
    """Three digits, all of them before the point if need be."""
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _ratio(row: Row, result: Result) -> float | None:
    if row.seconds is None or result.eager_seconds is None:
        return None
    return row.seconds / result.eager_seconds


_COLUMNS: Mapping[str, Callable[[Row, Result], str]] = {
    "": lambda row, _: row.name,
    "ms": lambda row, _: row.note or _milliseconds(row.seconds),
    "of eager": lambda row, result: _number(_ratio(row, result), ".2f"),
    "SQNR dB": lambda row, _: _number(row.sqnr, ".0f"),
    "load s": lambda row, _: _number(row.cold_seconds, ".2f"),
    "cached s": lambda row, _: _number(row.cached_seconds, ".2f"),
    "peak MB": lambda row, _: _number(row.peak_bytes and row.peak_bytes / 1e6, ".0f"),
}


def _cells(result: Result) -> list[list[str]]:
    return [[cell(row, result) for cell in _COLUMNS.values()] for row in result.rows]


def machine(threads: int, rounds: int) -> str:
    """One line that says where and how the numbers came about."""
    versions = [f"{name} {version}" for name in _PACKAGES if (version := _version(name))]
    return (
        f"{_processor()}, {threads} threads each, batch 1, medians of {rounds} interleaved rounds; "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Model name and notable instruction sets. Source: proc(5), ``cpuinfo``."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(part for line in lines if len(part := line.split("\t: ", 1)) == 2)
    fields = {name.strip(): value for name, value in fields.items()}
    flags = fields.get("flags", fields.get("Features", "")).split()
    notable = [flag for flag in _NOTABLE if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(notable)})"


def table(result: Result) -> Table:
    """For a terminal."""
    made = Table(title=result.title, title_justify="left")
    for header in _COLUMNS:
        made.add_column(header, justify="right" if header else "left", no_wrap=not header)
    for cells in _cells(result):
        made.add_row(*map(escape, cells))
    return made


def as_json(results: Sequence[Result], line: str) -> str:
    """Everything, in seconds and bytes."""
    workloads = {result.title: [asdict(row) for row in result.rows] for result in results}
    return json.dumps({"machine": line, "workloads": workloads}, indent=2)


def markdown(results: Sequence[Result], line: str) -> str:
    """For documentation."""
    parts = [f"Measured on: {line}."]
    for result in results:
        rows = [list(_COLUMNS), ["---", *["---:"] * (len(_COLUMNS) - 1)], *_cells(result)]
        lines = [f"| {' | '.join(cells)} |" for cells in rows]
        parts.append("\n".join([f"### {result.title}", "", *lines]))
    compared = _beside_xnnpack(results)
    return "\n\n".join([*parts, compared] if compared else parts)


# Ours that stand beside XNNPACK in the last table, by its columns.
_OURS = {
    "python host": "ours float32, openvino",
    "stock host": "ours float32, openvino, stock host",
}


def _beside_xnnpack(results: Sequence[Result]) -> str:
    """A table of our times by XNNPACK's; empty if no model has been run by all of them."""
    found: dict[str, list[float]] = {}
    for result in results:
        seconds = {row.name: row.seconds for row in result.rows}
        base, *ours = (seconds.get(name) for name in ("XNNPACK .pte", *_OURS.values()))
        times = [time for time in ours if time is not None]
        if base is not None and len(times) == len(_OURS):
            found[result.title] = [time / base for time in times]
    if not found:
        return ""
    found["geometric mean"] = [
        statistics.geometric_mean(c) for c in zip(*found.values(), strict=True)
    ]
    rows = [[title, *(f"{ratio:.2f}" for ratio in ratios)] for title, ratios in found.items()]
    lines = [["ours float32", *_OURS], ["---", *["---:"] * len(_OURS)], *rows]
    return "\n".join(["### Of XNNPACK's time", "", *(f"| {' | '.join(c)} |" for c in lines)])


def write_markdown(page: Path, text: str) -> None:
    """Put ``text`` between the two marks of ``page``.

    Raises:
        ValueError: The page lacks them.
    """
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {_BEGIN} and {_END}")
    page.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")

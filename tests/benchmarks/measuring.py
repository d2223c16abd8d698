"""From a workload to the rows of its table."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from support.tolerances import sqnr_db

from benchmarks.contenders import (
    EAGER,
    Arrays,
    Call,
    Contender,
    NotAvailableError,
    Settings,
)
from benchmarks.exports import EXPORTS
from benchmarks.footprint import probe
from benchmarks.models import Tensors, Workload
from benchmarks.timing import Turn, race

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one contender; None where there is none.

    Attributes:
        name: The contender's.
        seconds: Median of a call.
        sqnr: Signal over error of the result against eager fp32, dB.
        cold_seconds: From the file to the first result.
        cached_seconds: The same, with what an earlier process left in its cache.
        peak_bytes: Peak resident memory of loading and one call, beyond imports.
        note: Why it does not take part.
    """

    name: str
    seconds: float | None = None
    sqnr: float | None = None
    cold_seconds: float | None = None
    cached_seconds: float | None = None
    peak_bytes: int | None = None
    note: str = ""


@dataclass(slots=True)
class Bench:
    """One workload on a set of contenders.

    Attributes:
        workload: What runs.
        contenders: Eager must be among them: it gives the right answer.
        folder: For files and caches.
        threads: CPU threads of each.
    """

    workload: Workload
    contenders: Sequence[Contender]
    folder: Path
    threads: int
    rows: dict[str, Row] = field(init=False, default_factory=dict[str, Row])
    _calls: dict[str, Call] = field(init=False, default_factory=dict[str, Call])

    def run(self, rounds: int, *, footprints: bool = True) -> list[Row]:
        """Measure everything; rows in the order of the contenders."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for contender in self.contenders:
            self.rows[contender.name] = self._prepared(contender, footprints)
        self._compare()
        shares = {contender.name: contender.share for contender in self.contenders}
        medians = race({n: Turn(call, shares[n]) for n, call in self._calls.items()}, rounds)
        for name, seconds in medians.items():
            self.rows[name] = replace(self.rows[name], seconds=seconds)
        return list(self.rows.values())

    def _prepared(self, contender: Contender, footprints: bool) -> Row:
        row = Row(contender.name, note=contender.unavailable(self.workload.name) or "")
        if row.note:
            return row
        settings = Settings(self.threads, self.folder / "caches" / _slug(contender.name))
        settings.cache.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # converters are chatty
                file = self._file(contender.file)
                if footprints and contender.probed:
                    row = self._with_footprint(row, contender, file, settings)
                self._calls[contender.name] = self._loaded(contender, file, settings)
        except NotAvailableError as error:
            return replace(row, note=str(error))
        except Exception as error:
            _logger.warning("%s cannot run %s", row.name, self.workload.name, exc_info=True)
            return replace(row, note=_brief(error))
        return row

    def _loaded(self, contender: Contender, file: Path, settings: Settings) -> Call:
        bind = contender.load(file, settings)
        for inputs in self.workload.history:
            bind(_arrays(inputs))()
        call = bind(_arrays(self.workload.inputs))
        call()
        return call

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            EXPORTS[name](self.workload, path)
        return path

    def _with_footprint(
        self, row: Row, contender: Contender, file: Path, settings: Settings
    ) -> Row:
        inputs = self.folder / "inputs.npz"
        np.savez(inputs, *_arrays(self.workload.inputs))
        cold = probe(contender, file, inputs, settings)
        row = replace(row, cold_seconds=cold.seconds, peak_bytes=cold.peak_bytes)
        if not contender.caches:
            return row
        return replace(row, cached_seconds=probe(contender, file, inputs, settings).seconds)

    def _compare(self) -> None:
        expected = np.asarray(self._calls[EAGER]()).copy()
        for name, call in self._calls.items():
            error = sqnr_db(expected, np.asarray(call()))
            self.rows[name] = replace(self.rows[name], sqnr=error)


def _arrays(inputs: Tensors) -> Arrays:
    return [tensor.numpy() for tensor in inputs]


def _slug(name: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in name)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:100]

"""The folder of a sweep: a record for each job, addressed by the job's key.

Layout of the folder::

    records/KEY.json     how the job ended, and what was measured; written once it is known, whole
    programs/KEY.pte     the program, until its latency has been measured
    results.jsonl        the records of the last sweep, a line each, with names and options
    index.html           the same as a page

Records do not have names: a job that has another name, in another file, finds its record.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.files import new_file, new_path
from coreml_delegate.formats.text import to_json
from coreml_delegate.scripts import console
from coreml_delegate.scripts.sweeping.job_process import Ending, Status
from coreml_delegate.scripts.sweeping.jobs import Job
from coreml_delegate.scripts.sweeping.sweep_file import Limits

SCHEMA_VERSION: Final = 1
RESULTS: Final = "results.jsonl"
PAGE: Final = "index.html"
_RECORDS: Final = "records"
_PROGRAMS: Final = "programs"


@dataclass(frozen=True, slots=True)
class Record:
    """The record of an ended job.

    Attributes:
        key: Digest of all that its result depends on.
        reason: The error; empty if it is done.
        result: The numbers that equal jobs share; empty unless it is done. See
            ``measuring.measure``.
        cost: Cost of this run: ``seconds``, and if it is done ``lower_seconds`` and ``peak_bytes``.
        latency: See ``measuring.measure_latency``; None until it has been measured, and
            ``{"reason": ...}`` if that failed.
    """

    key: str
    status: Status
    reason: str
    result: Mapping[str, Any]
    cost: Mapping[str, Any]
    latency: Mapping[str, Any] | None
    limits: Limits

    @classmethod
    def of(cls, key: str, ending: Ending, limits: Limits) -> Record:
        """Return the record of a job that has just ended."""
        document = dict(ending.document)
        result: Mapping[str, Any] = document.pop("result", {})
        return cls(
            key,
            ending.status,
            ending.reason,
            result,
            {"seconds": ending.seconds, **document},
            None,
            limits,
        )

    @property
    def is_done(self) -> bool:
        """Whether there is a result."""
        return self.status is Status.DONE

    @property
    def missing_kernels(self) -> Sequence[str]:
        """The operators that neither Core ML nor ExecuTorch's runtime runs."""
        return self.result.get("missing_kernels", ())

    def stands(self, limits: Limits) -> bool:
        """Whether the job would end in the same way under ``limits``."""
        if self.status is Status.TIMED_OUT:
            return _as_tight(limits.seconds, self.limits.seconds)
        if self.status is Status.OUT_OF_MEMORY and self.limits.memory is not None:
            return _as_tight(limits.memory, self.limits.memory)
        return True

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schema_version": SCHEMA_VERSION,
            **asdict(self),
            "status": self.status.value,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Record:
        """Decode the result of ``as_dict``.

        Raises:
            OptionError: The document is not a record of this version.
        """
        try:
            if document["schema_version"] != SCHEMA_VERSION:
                raise OptionError(
                    "a record has another version",
                    got=str(document["schema_version"]),
                    expected=str(SCHEMA_VERSION),
                )
            return cls(
                document["key"],
                Status(document["status"]),
                document["reason"],
                document["result"],
                document["cost"],
                document["latency"],
                Limits(**document["limits"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError("not the record of a job", got=str(error)) from error


def _as_tight(now: float | None, then: float | None) -> bool:
    return now is not None and then is not None and now <= then


@dataclass(frozen=True, slots=True)
class Row:
    """A record with the names that one sweep gives it."""

    name: str
    label: str
    options: Mapping[str, str]
    record: Record

    @classmethod
    def of(cls, job: Job, record: Record) -> Row:
        """Return the row of a job."""
        return cls(job.name, job.label, asdict(job.options), record)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        names = {"name": self.name, "model": self.label, "options": dict(self.options)}
        return names | self.record.as_dict()


class ResultFolder:
    """The folder of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, key: str) -> Record | None:
        """Return the record of a key, or None.

        Raises:
            OptionError: The file is no record.
        """
        path = self._record(key)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return _decode(text, str(path))

    def write(self, record: Record) -> None:
        """Write a record, in place of another of its key."""
        path = self._record(record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(f"{console.as_json(record.as_dict())}\n".encode())

    def keep_program(self, key: str, program: Path) -> None:
        """Keep the ``.pte`` of a job; ``program`` is moved if it lies on the same disk."""
        target = self.program(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_path(target) as unfinished:
            shutil.move(program, unfinished)

    def program(self, key: str) -> Path:
        """Return where the ``.pte`` of a job is kept."""
        return self.path / _PROGRAMS / f"{key}.pte"

    def drop_program(self, key: str) -> None:
        """Remove the ``.pte`` of a job, and the folder of programs once it is empty."""
        path = self.program(key)
        path.unlink(missing_ok=True)
        if path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()

    def write_results(self, rows: Iterable[Row], page: str) -> None:
        """Write the rows of a sweep, and its page."""
        self.path.mkdir(parents=True, exist_ok=True)
        with new_file(self.path / RESULTS) as lines, new_file(self.path / PAGE) as html:
            for row in rows:
                lines.write(f"{to_json(row.as_dict())}\n".encode())
            html.write(page.encode())

    def _record(self, key: str) -> Path:
        return self.path / _RECORDS / f"{key}.json"


def read_results(folder: Path) -> list[Row]:
    """Read the rows that a sweep has written.

    Raises:
        OptionError: The folder has no results, or they cannot be read.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise OptionError(
            "no results of a sweep", got=str(folder), expected=f"a folder with {RESULTS}"
        )
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = _decode(line, f"{path}, line {number}")
        fields = json.loads(line)
        rows.append(Row(fields["name"], fields["model"], fields["options"], record))
    return rows


def with_latency(record: Record, ending: Ending) -> Record:
    """Return the record with the latency that a process measured, or the reason why it failed."""
    if ending.status is Status.DONE:
        return replace(record, latency=ending.document)
    return replace(record, latency={"reason": f"{ending.status.value}: {ending.reason}"})


def _decode(text: str, where: str) -> Record:
    try:
        return Record.from_dict(json.loads(text))
    except (OptionError, ValueError) as error:
        what = error.what if isinstance(error, OptionError) else "no JSON"
        got = error.got if isinstance(error, OptionError) else str(error)
        raise OptionError(f"{where}: {what}", got=got, remedy="Remove it") from error

"""Run the jobs that the folder of a sweep lacks; write each record as soon as a job has ended.

First all jobs are lowered and compared, several at a time if requested. Then latencies are
measured one by one on this machine, wherever the jobs ran: latencies of programs that run beside
each other, or on several machines, could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from coreml_delegate.scripts import console
from coreml_delegate.scripts.sweeping.contents import key, machine
from coreml_delegate.scripts.sweeping.fronts import LATENCY, SIZE, SQNR
from coreml_delegate.scripts.sweeping.job_process import Ending, Status, Task, run_all
from coreml_delegate.scripts.sweeping.jobs import Job
from coreml_delegate.scripts.sweeping.records import Record, ResultFolder, with_latency
from coreml_delegate.scripts.sweeping.sweep_file import SweepFile

Finished: TypeAlias = Callable[[int, Ending, Path], None]
"""Gets the number of an ended task, its ending, and the path of its ``.pte``."""

Runner: TypeAlias = Callable[[Sequence[Task], Finished], None]
"""Runs tasks, and reports each when it has ended."""

TO_RUN: Final = "to run"
TO_TIME: Final = "to measure the latency of"


class Sweep:
    """Jobs, and the folder with their records.

    Args:
        jobs: The chosen jobs of the file.
        keep_programs: Whether the ``.pte`` of each job remains in the folder.

    Raises:
        OptionError: A file that a job reads does not exist.
    """

    def __init__(
        self,
        file: SweepFile,
        jobs: Sequence[Job],
        folder: ResultFolder,
        *,
        keep_programs: bool = False,
    ) -> None:
        self._file = file
        self._folder = folder
        self._keep_programs = keep_programs
        self._jobs = [(job, key(job, file.folder)) for job in jobs]

    def missing(self, *, retry: bool = False) -> Iterator[tuple[Job, str]]:
        """Yield each job with its missing work: ``TO_RUN``, ``TO_TIME`` or an empty text."""
        for job, digest in self._jobs:
            yield job, self._missing(digest, retry=retry)

    def run(self, runner: Runner, *, retry: bool = False) -> list[Record]:
        """Run the missing work.

        Args:
            runner: Runs the jobs; latencies are measured here.
            retry: Whether to run jobs again that did not end well.
        """
        missing = {
            digest: job
            for job, digest in self._jobs
            if self._missing(digest, retry=retry) == TO_RUN
        }
        self._run_jobs(missing, runner)
        self._measure_latencies()
        if not self._keep_programs:
            for _, digest in self._jobs:
                self._folder.drop_program(digest)
        return [self._record(digest) for _, digest in self._jobs]

    def _missing(self, digest: str, *, retry: bool) -> str:
        record = self._folder.find(digest)
        if record is None or not record.stands(self._file.limits):
            return TO_RUN
        if not record.is_done:
            return TO_RUN if retry else ""
        has_program = self._folder.program(digest).is_file()
        if self._keep_programs and not has_program:
            return TO_RUN
        if not self._lacks_latency(record, retry=retry):
            return ""
        return TO_TIME if has_program else TO_RUN

    def _lacks_latency(self, record: Record, *, retry: bool) -> bool:
        if not record.is_done or self._file.repeat == 0:
            return False
        if record.latency is None:
            return True
        if "reason" in record.latency:
            return retry
        return record.latency["machine"] != machine()

    def _run_jobs(self, missing: dict[str, Job], runner: Runner) -> None:
        digests = list(missing)
        tasks = [Task(missing[digest]) for digest in digests]
        ended = 0

        def finished(number: int, ending: Ending, program: Path) -> None:
            nonlocal ended
            ended += 1
            record = Record.of(digests[number], ending, self._file.limits)
            if record.is_done and (self._keep_programs or self._file.repeat):
                self._folder.keep_program(record.key, program)
            self._folder.write(record)
            _note_progress(ended, len(tasks), tasks[number].job, _describe(record))

        runner(tasks, finished)

    def _measure_latencies(self) -> None:
        jobs = {
            digest: job
            for job, digest in self._jobs
            if self._folder.program(digest).is_file()
            and self._lacks_latency(self._record(digest), retry=True)
        }
        digests = list(jobs)
        tasks = [
            Task(job, self._folder.program(digest).resolve(), self._file.repeat)
            for digest, job in jobs.items()
        ]

        def finished(number: int, ending: Ending, _: Path) -> None:
            record = with_latency(self._record(digests[number]), ending)
            self._folder.write(record)
            if not self._keep_programs:
                self._folder.drop_program(record.key)
            latency = LATENCY.value(record)
            text = f"no latency: {ending.reason}" if latency is None else LATENCY.text(latency)
            _note_progress(number + 1, len(tasks), tasks[number].job, text)

        run_all(tasks, self._file.folder, self._file.limits, 1, finished)

    def _record(self, digest: str) -> Record:
        record = self._folder.find(digest)
        if record is None:
            raise FileNotFoundError(f"the record of {digest} has been removed meanwhile")
        return record


def run_here(file: SweepFile, parallel: int) -> Runner:
    """Return a runner on this machine."""
    return lambda tasks, finished: run_all(tasks, file.folder, file.limits, parallel, finished)


def _note_progress(number: int, total: int, job: Job, text: str) -> None:
    console.note(f"[{number}/{total}] {job.name}: {text}")


def _describe(record: Record) -> str:
    if record.status is not Status.DONE:
        return f"{record.status.value}: {record.reason}"
    values = ((measure, measure.value(record)) for measure in (SQNR, SIZE))
    texts = [measure.text(value) for measure, value in values if value is not None]
    return ", ".join([*texts, f"{record.cost['seconds']:.1f} s"])

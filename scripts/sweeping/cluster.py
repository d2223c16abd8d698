"""Jobs on the workers of a ``dask.distributed`` scheduler.

A worker runs a job as this machine would: in a process of its own (``job_process``), in a folder
that has the files that the job reads. Files are sent to each worker once, by a plugin that the
scheduler keeps for workers that come later, and are found by their digests. Before a job begins its
worker computes the job's key anew: another version of any package, or another file, is refused.

A worker that is lost costs the work in hand, which the scheduler gives to another worker.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import dask.config
from distributed import Client, Event, KilledWorker, LocalCluster, as_completed, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from coreml_delegate.errors import EngineUnavailableError, ProgramError
from coreml_delegate.formats.files import new_file
from coreml_delegate.scripts import interruption
from coreml_delegate.scripts.sweeping import contents
from coreml_delegate.scripts.sweeping.job_process import Ending, Status, Task, run_all
from coreml_delegate.scripts.sweeping.jobs import Job
from coreml_delegate.scripts.sweeping.sweep_file import Limits

_CONNECT: Final = 10  # seconds to find the scheduler in
_WORKERS: Final = 60  # seconds to wait for the first worker in
_ASK: Final = 1.0  # seconds between two questions whether to stop
_FAILURES: Final = 1  # local workers that a job may crash before it is given up
_FOLDER: Final = "coreml-delegate-files"
_SENT: Final = "_sent"  # folder for files outside of the sweep's folder


@dataclass(frozen=True, slots=True)
class Request:
    """A job with all that its worker needs.

    Attributes:
        files: Digests of the files, by their paths in the job's folder.
        environment: Versions that the worker must have.
        stop: Name of the event that ends the job.
    """

    job: Job
    key: str
    files: Mapping[str, str]
    environment: Mapping[str, str]
    limits: Limits
    wants_program: bool
    stop: str


class SentFile(WorkerPlugin):
    """Puts a file on the disk of each worker."""

    idempotent = True

    def __init__(self, digest: str, content: bytes) -> None:
        self.name = f"coreml-delegate-{digest}"
        self._digest = digest
        self._content = content

    def setup(self, worker: Any) -> None:
        """Write the file."""
        path = _path_on_worker(worker, self._digest)
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            with new_file(path) as file:
                file.write(self._content)

    def teardown(self, worker: Any) -> None:
        """Remove the file."""
        _path_on_worker(worker, self._digest).unlink(missing_ok=True)


def _path_on_worker(worker: Any, digest: str) -> Path:
    return Path(worker.local_directory) / _FOLDER / digest


class _Stopped(Exception):
    """The sweep ended while a job ran."""


def run_on_worker(request: Request) -> tuple[Ending, bytes | None]:
    """Run a job on this worker.

    Returns:
        How it ended, and the ``.pte`` if it is to be sent back and exists.

    Raises:
        ProgramError: This worker has other versions or files.
    """
    worker = get_worker()
    _require_same(request.environment, str(worker.address))
    stop = Event(request.stop)
    checked_at = time.monotonic()
    results: list[tuple[Ending, bytes | None]] = []

    def check() -> None:
        nonlocal checked_at
        if time.monotonic() - checked_at > _ASK:
            checked_at = time.monotonic()
            if stop.is_set():
                raise _Stopped

    def finished(_: int, ending: Ending, program: Path) -> None:
        is_sent_back = request.wants_program and ending.status is Status.DONE
        results.append((ending, program.read_bytes() if is_sent_back else None))

    with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as temporary:
        folder = Path(temporary)
        for name, digest in request.files.items():
            _link(_path_on_worker(worker, digest), folder / name)
        if contents.key(request.job, folder) != request.key:
            raise ProgramError(
                "a worker has other files than this machine",
                got=f"{worker.address} for {request.job.name}",
                remedy="Install the same packages there",
            )
        run_all([Task(request.job)], folder, request.limits, 1, finished, check)
    return results[0]


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or a system without links
        target.write_bytes(source.read_bytes())


def _require_same(expected: Mapping[str, str], address: str) -> None:
    """Refuse this process if its versions differ from ``expected``.

    Raises:
        ProgramError: Names the first version that differs.
    """
    own = contents.environment()
    for name, version in expected.items():
        if own[name] != version:
            raise ProgramError(
                f"a worker has another version of {name}",
                got=f"{own[name]} on {address}",
                expected=version,
                remedy="Install the same packages there",
            )


class Cluster:
    """Runs jobs on the workers of a scheduler."""

    def __init__(
        self, client: Client, folder: Path, limits: Limits, *, wants_programs: bool
    ) -> None:
        self._client = client
        self._folder = folder
        self._limits = limits
        self._wants_programs = wants_programs
        self._sent: set[str] = set()

    def run(self, tasks: Sequence[Task], finished: Callable[[int, Ending, Path], None]) -> None:
        """Run tasks; see ``job_process.run_all``.

        Raises:
            ProgramError: A worker has other versions or files.
        """
        if not tasks:
            return
        stop = Event(f"coreml-delegate-{uuid.uuid4().hex}", client=self._client)
        numbers: dict[Any, int] = {}
        try:
            for number, task in enumerate(tasks):
                request = self._request(task.job, stop.name)
                future = self._client.submit(run_on_worker, request, pure=False)
                numbers[future] = number
            ended = as_completed(list(numbers), loop=self._client.loop)
            for future in ended:
                interruption.check()
                ending, program = _result(future)
                _report(finished, numbers.pop(future), ending, program)
        finally:
            if numbers:
                stop.set()
                self._client.cancel(list(numbers))
            self._remove_sent_files()

    def _request(self, job: Job, stop: str) -> Request:
        """Send the files that a job reads; return the request for its worker."""
        files: dict[str, str] = {}
        paths: dict[str, str] = {}
        for name, content in contents.read_by(job, self._folder).items():
            if content.root is None:
                ((last, path),) = content.files.items()
                paths[name] = f"{_SENT}/{name}/{last}"
                files |= self._send(paths[name], path)
            elif content.root == self._folder:  # other modules are installed, there as here
                for relative, path in content.files.items():
                    files |= self._send(relative, path)
        return Request(
            contents.with_paths(job, paths),
            contents.key(job, self._folder),
            files,
            contents.environment(),
            self._limits,
            self._wants_programs,
            stop,
        )

    def _send(self, name: str, path: Path) -> dict[str, str]:
        """Send a file, or all files of a folder; return digests by name."""
        if path.is_dir():
            digests: dict[str, str] = {}
            for file in contents.files_below(path):
                digests |= self._send(f"{name}/{file.relative_to(path).as_posix()}", file)
            return digests
        digest = contents.digest(path)
        if digest not in self._sent:
            self._client.register_plugin(SentFile(digest, path.read_bytes()))
            self._sent.add(digest)
        return {name: digest}

    def _remove_sent_files(self) -> None:
        for digest in self._sent:
            self._client.unregister_worker_plugin(f"coreml-delegate-{digest}")
        self._sent.clear()


def _result(future: Any) -> tuple[Ending, bytes | None]:
    try:
        return future.result()
    except KilledWorker as error:
        reason = f"every worker that ran it ended, the last at {error.last_worker.address}"
        return Ending(Status.CRASHED, reason, {}, 0.0), None


def _report(
    finished: Callable[[int, Ending, Path], None],
    number: int,
    ending: Ending,
    program: bytes | None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as temporary:
        path = Path(temporary) / "program.pte"
        if program is not None:
            path.write_bytes(program)
        finished(number, ending, path)


@contextmanager
def connected(scheduler: str | None, workers: int) -> Generator[Client]:
    """Connect to a scheduler, or start one with workers on this machine.

    Args:
        scheduler: The scheduler's address, ``tcp://HOST:PORT``; None to start a scheduler.
        workers: Number of workers to start, each for one job at a time.

    Raises:
        EngineUnavailableError: There is no scheduler at the address, or it has no workers.
        ProgramError: A worker has other versions than this machine.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with _cluster(scheduler, workers) as address:
        try:
            client = Client(address, timeout=_CONNECT, set_as_default=False)
        except (OSError, ValueError) as error:
            raise EngineUnavailableError(
                "cannot connect to the scheduler",
                got=f"{address}: {error}",
                expected="tcp://HOST:PORT of a running dask scheduler",
            ) from error
        with client:
            _require_workers(client)
            yield client


@contextmanager
def _cluster(scheduler: str | None, workers: int) -> Generator[str]:
    if scheduler is not None:
        yield scheduler
        return
    # Its stubs do not take None, and say that it is a coroutine.
    start: Any = LocalCluster
    settings = {"distributed.scheduler.allowed-failures": _FAILURES}
    with (
        dask.config.set(settings),
        start(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit=0,  # jobs have limits of their own
            silence_logs=logging.CRITICAL,
        ) as cluster,
    ):
        yield cluster.scheduler_address


def _require_workers(client: Client) -> None:
    try:
        client.wait_for_workers(1, timeout=_WORKERS)
    except TimeoutError as error:
        raise EngineUnavailableError(
            "the scheduler has no workers", got=f"no worker in {_WORKERS} s"
        ) from error
    answers: Any = client.run(_check_worker, dict(contents.environment()), on_error="return")
    for address, answer in answers.items():
        if isinstance(answer, ProgramError):
            raise answer
        if isinstance(answer, BaseException):
            raise ProgramError(
                "a worker cannot run this version of coreml-delegate",
                got=f"{type(answer).__name__} {answer} on {address}",
                remedy="Install the same packages there",
            )


def _check_worker(expected: Mapping[str, str], dask_worker: Any) -> None:
    _require_same(expected, str(dask_worker.address))

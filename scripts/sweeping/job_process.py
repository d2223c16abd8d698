"""Run a job in a process of its own: a crash, too much memory or too much time costs one job.

The process gets its task as a JSON file and writes its result as another. It runs in the folder of
the sweep's file, in a session of its own, so that Ctrl-C on a terminal reaches only the sweep. The
pipe to its standard input is never written: when it closes, because the sweep was killed, the
process ends.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.formats.files import new_file
from coreml_delegate.patches.third_party import leave_out_unused_packages
from coreml_delegate.scripts import console, failures, interruption
from coreml_delegate.scripts.sweeping.jobs import Job
from coreml_delegate.scripts.sweeping.sweep_file import Limits

_POLL: Final = 0.05  # seconds between two looks at running processes
_GRACE: Final = 5.0  # seconds to remove temporary files in, before a process is killed
_MAX_LETTERS: Final = 400  # of a line that is shown
_PROCESSES: Final = Path("/proc")
_ONE_THREAD: Final = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
}


class Status(enum.Enum):
    """The ways in which a job ends; the value is shown to the user."""

    DONE = "done"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended.

    Attributes:
        reason: The error, for a reader; empty if it is done.
        document: Its measurements; empty unless it is done.
    """

    status: Status
    reason: str
    document: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one process.

    Attributes:
        program: The ``.pte`` whose latency is measured; None to lower and compare.
    """

    job: Job
    program: Path | None = None
    repeat: int = 0


class JobProcess:
    """A running task.

    Attributes:
        program: Where it writes the ``.pte``, until ``close``.
    """

    def __init__(self, task: Task, folder: Path, limits: Limits) -> None:
        self.task = task
        self._limits = limits
        self._temporary = Path(tempfile.mkdtemp(prefix="coreml-delegate-"))
        self.program = self._temporary / "program.pte"
        self._result = self._temporary / "result"
        self._printed = self._temporary / "printed"
        self._started = time.monotonic()
        try:
            self._process = self._start(folder)
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        task_file = self._temporary / "task"
        task = {
            "job": self.task.job.as_dict(),
            "program": str(self.task.program or self.program),
            "repeat": self.task.repeat,
        }
        task_file.write_text(json.dumps(task), encoding="utf-8")
        own = self._temporary / "tmp"
        own.mkdir()
        environment = {
            **os.environ,
            **({} if self.task.program is not None else _ONE_THREAD),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
            "TMPDIR": str(own),
        }
        with self._printed.open("wb") as printed:
            return subprocess.Popen(
                # Without the current folder on the path, whose modules could hide others.
                [sys.executable, "-P", "-m", __spec__.name, task_file, self._result],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )

    def poll(self) -> Ending | None:
        """Return how the process has ended, None while it runs; end it at a limit."""
        seconds = time.monotonic() - self._started
        code = self._process.poll()
        if code is not None:
            return Ending(*self._outcome(code), seconds)
        allowed = self._limits.seconds
        if allowed is not None and seconds > allowed:
            self._end()
            return Ending(Status.TIMED_OUT, f"took more than {allowed:g} s", {}, seconds)
        memory = self._limits.memory
        if memory is not None and (used := _resident_bytes(self._process.pid)) > memory:
            self._end()
            reason = f"used {console.size(used)} of memory; the limit is {console.size(memory)}"
            return Ending(Status.OUT_OF_MEMORY, reason, {}, seconds)
        return None

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process.poll() is None:
            _signal_all(self._process, signal.SIGTERM)

    def close(self) -> None:
        """End the process if it runs, and remove its files."""
        try:
            self._end()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _end(self) -> None:
        if self._process.poll() is None:
            self.terminate()
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                _signal_all(self._process, getattr(signal, "SIGKILL", signal.SIGTERM))
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _outcome(self, code: int) -> tuple[Status, str, Mapping[str, Any]]:
        if code == 0 and self._result.is_file():
            document = json.loads(self._result.read_bytes())
            return Status(document["status"]), document["reason"], document["document"]
        printed = self._printed.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        last_line = f": {lines[-1][:_MAX_LETTERS]}" if lines else ""
        return Status.CRASHED, f"{_ending(code)}{last_line}", {}


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"ended by {name}{cause}"


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a process and its child processes."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return  # it has ended meanwhile
    else:
        process.send_signal(number)


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 once it has ended."""
    try:
        pages = (_PROCESSES / str(pid) / "statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def require_limits(limits: Limits) -> None:
    """Refuse a limit that cannot be enforced on this machine.

    Raises:
        EngineUnavailableError: Memory is limited, but the system reports no process's memory.
    """
    if limits.memory is not None and not (_PROCESSES / "self" / "statm").exists():
        raise EngineUnavailableError(
            "memory can be limited on Linux only",
            got=sys.platform,
            remedy="Leave memory out of the file",
        )


def run_all(
    tasks: Sequence[Task],
    folder: Path,
    limits: Limits,
    parallel: int,
    finished: Callable[[int, Ending, Path], None],
    check: Callable[[], None] = interruption.check,
) -> None:
    """Run tasks, several at a time; whatever happens, no process is left.

    Args:
        tasks: The tasks, started in this order.
        folder: The folder that all run in.
        limits: Time and memory that each may take.
        parallel: Tasks at a time.
        finished: Gets the number of an ended task, its ending, and the path of its ``.pte``, which
            it may move away.
        check: Called repeatedly; raises to end all tasks.
    """
    waiting = list(enumerate(tasks))[::-1]
    running: dict[int, JobProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                number, task = waiting.pop()
                running[number] = JobProcess(task, folder, limits)
            for number, process in list(running.items()):
                ending = process.poll()
                if ending is not None:
                    finished(number, ending, process.program)
                    running.pop(number).close()
            check()
            time.sleep(_POLL)
    finally:
        for process in running.values():
            process.terminate()  # all at once, before waiting for each
        for process in running.values():
            process.close()


def main(task_file: str, result_file: str) -> int:
    """Run a task in this process; return the exit code."""
    _end_with_parent()
    leave_out_unused_packages()
    task = json.loads(Path(task_file).read_bytes())
    status, reason, document = Status.DONE, "", {}
    with interruption.handled(), console.session(0):
        try:
            document = _run_task(task)
        except failures.KINDS as error:
            message = failures.message(error)
            if message is None:
                raise
            status = Status.OUT_OF_MEMORY if failures.is_out_of_memory(error) else Status.FAILED
            reason = message
        with new_file(Path(result_file)) as file:
            result = {"status": status.value, "reason": reason, "document": document}
            file.write(console.as_json(result).encode())
    return 0


def _run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    from coreml_delegate.scripts.sweeping.measuring import measure, measure_latency

    job, program = Job.from_dict(task["job"]), Path(task["program"])
    if task["repeat"]:
        return measure_latency(job, program, task["repeat"])
    return measure(job, program) | {"peak_bytes": _peak_bytes()}


def _peak_bytes() -> int | None:
    """Return the largest resident memory of this process so far; None if it is not known."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _end_with_parent() -> None:
    """End this process, and all that it starts, when its parent does."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        if hasattr(os, "killpg"):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

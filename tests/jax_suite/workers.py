"""Processes that run harnesses, which may end them or never return."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.jax_suite import harnesses as suite

# A process keeps what JAX and coremltools cache of every program.
_PER_PROCESS = 150


def _serve(connection: Connection) -> None:
    logging.disable(logging.WARNING)
    while True:
        name = connection.recv()
        if name is None:
            return
        started = time.monotonic()
        outcome = suite.run(name).as_json()
        connection.send({**outcome, "seconds": round(time.monotonic() - started, 2)})


class _Worker:
    """A process that runs one harness after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.name = ""
        self.done = 0
        self.until = 0.0

    def give(self, name: str, seconds: float) -> None:
        # The first one waits for the imports.
        self.until = time.monotonic() + seconds + (0 if self.done else 120)
        self.name = name
        self.connection.send(name)

    def result(self) -> dict[str, Any] | None:
        """Return the outcome of its harness, or None while it runs."""
        crashed = {"outcome": suite.CRASHED, "primitive": "", "engines": {}}
        if self.connection.poll():
            try:
                found = self.connection.recv()
            except (EOFError, OSError):
                self.stop()
                return {**crashed, "reason": f"the process ended: {self.process.exitcode}"}
            self.done += 1
            return found
        if time.monotonic() > self.until:
            self.stop()
            return {**crashed, "reason": "it takes too long"}
        return None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.done = _PER_PROCESS


def run_all(
    names: Sequence[str], count: int, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run harnesses in several processes; yield name and outcome of each as it ends."""
    pending = list(reversed(names))
    workers: list[_Worker] = []
    while pending or workers:
        while pending and len(workers) < count:
            worker = _Worker()
            worker.give(pending.pop(), seconds)
            workers.append(worker)
        wait([worker.connection for worker in workers], timeout=1.0)
        for worker in list(workers):
            found = worker.result()
            if found is None:
                continue
            found["primitive"] = found["primitive"] or suite.harnesses()[worker.name].group_name
            yield worker.name, found
            if pending and worker.done < _PER_PROCESS:
                worker.give(pending.pop(), seconds)
            else:
                worker.stop()
                workers.remove(worker)

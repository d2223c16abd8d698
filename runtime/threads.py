"""Torch's threads next to an engine with its own threads.

After a parallel kernel torch's idle threads spin for milliseconds before they sleep, on the cores
that OpenVINO's threads need for the next delegate. So while a program with delegates runs, torch
computes on the calling thread, and on all threads only for long calls. Ten convolutions on OpenVINO
with ten ``tanh`` of torch between them take 32 ms a call on two cores, 49 ms without this module
and 51 ms on a single thread (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

_logger = logging.getLogger(__name__)

_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0, section 3.2.44


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _OpenMp:
    """The OpenMP runtime that torch was built with.

    Its thread count applies to the calling thread, while ``torch.set_num_threads`` also sets the
    initial count of later threads.
    """

    library: Any  # ctypes.CDLL

    def use(self, threads: int) -> None:
        self.library.omp_set_num_threads(threads)

    def release(self) -> None:
        """End the idle threads of the calling thread's pool, which would spin."""
        pause = getattr(self.library, "omp_pause_resource_all", None)
        if pause is not None:
            pause(_PAUSE_SOFT)


@functools.cache
def _openmp() -> _OpenMp | None:
    """Return the loaded OpenMP runtime that torch uses; None if torch was built without OpenMP."""
    threads = torch.get_num_threads()
    for library in ThreadpoolController().lib_controllers:
        if library.user_api != "openmp":
            continue
        openmp = _OpenMp(library.dynlib)
        openmp.use(threads + 1)
        is_of_torch = torch.get_num_threads() == threads + 1
        openmp.use(threads)
        if is_of_torch:
            return openmp
    _logger.debug("torch uses no OpenMP runtime; its threads are unchanged")
    return None


class _Caller(threading.local):
    threads: int | None = None
    """Torch threads to restore at the end of ``one_torch_thread``; None outside of it."""


_CALLER = _Caller()


@contextmanager
def one_torch_thread() -> Generator[None]:
    """Let torch compute only on the calling thread; settings of other threads are unchanged."""
    openmp = _openmp()
    threads = torch.get_num_threads()
    if openmp is None or threads == 1:
        yield
        return
    _CALLER.threads = threads
    openmp.use(1)
    try:
        yield
    finally:
        openmp.use(threads)
        _CALLER.threads = None


@contextmanager
def all_torch_threads() -> Generator[None]:
    """Within ``one_torch_thread``, let torch use as many threads as outside of it."""
    openmp = _openmp()
    threads = _CALLER.threads
    if openmp is None or threads is None:
        yield
        return
    openmp.use(threads)
    try:
        yield
    finally:
        openmp.use(1)
        openmp.release()

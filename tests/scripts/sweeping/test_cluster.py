"""Sweeps on the workers of a real scheduler, in processes of their own, on the loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.command import MODELS, leftovers

from coreml_delegate.errors import ProgramError
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.sweeping.records import Row, read_results

pytest.importorskip("distributed")

from coreml_delegate.scripts.sweeping import cluster, contents

pytestmark = pytest.mark.xdist_group("cli-processes")

_PATIENCE = 240  # seconds
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
_NET = """
import layers

def net():
    return layers.net()
"""
_LAYERS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), torch.zeros(2, 3, 2, 2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(_NET)
    (tmp_path / "layers.py").write_text(_LAYERS)
    return tmp_path


def _wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


@contextmanager
def _started(module: str, *args: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.{module}", *args],
        cwd="/",  # where no model lies
        env=_ENVIRONMENT | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_PATIENCE)


@contextmanager
def _scheduler(folder: Path, workers: int, *args: str, **environment: str) -> Iterator[str]:
    """The address of a scheduler with this many workers, each for one job at a time."""
    file = folder / "scheduler.json"
    with ExitStack() as processes:
        loopback = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        start = processes.enter_context
        start(_started("dask_scheduler", *loopback, "--scheduler-file", str(file)))
        _wait_until(file.exists)
        for number in range(workers):
            local = folder / f"worker-{number}"
            own = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory")
            known = ("--scheduler-file", str(file))
            start(_started("dask_worker", *known, *own, str(local), *args, **environment))
        yield json.loads(file.read_text())["address"]


def _sweep(text: str, *args: str) -> int:
    Path("s.toml").write_text(text)
    return main(["sweep", "s.toml", *args])


def _sweep_until(stalled: Path, scheduler: str) -> subprocess.Popen[bytes]:
    """A sweep of ``s.toml`` in a process of its own, with a job that has begun to stall."""
    command = [sys.executable, "-m", "coreml_delegate.scripts", "sweep", "s.toml"]
    sweep = subprocess.Popen(
        [*command, "--scheduler", scheduler], stderr=subprocess.PIPE, env=_ENVIRONMENT
    )
    _wait_until(lambda: sweep.poll() is not None or (stalled.exists() and stalled.stat().st_size))
    assert sweep.poll() is None, sweep.communicate()
    return sweep


def _same(row: Row) -> tuple[object, ...]:
    record = row.record
    return row.name, record.key, record.status, record.reason, record.result


@pytest.mark.slow
def test_records_are_those_of_this_machine(tmp_path, tmp_path_factory, capsys):
    data = tmp_path_factory.mktemp("data") / "set.npz"
    pixels = np.random.default_rng(0).standard_normal((9, 3, 2, 2)).astype(np.float32)
    np.savez(data, input=pixels, labels=np.arange(9) % 8)
    text = f"""
repeat = 0
[models.net]
source = "net:net"
data = "{data}"
[models.failing]
source = "{MODELS}:failing"
options = {{ precision = ["float16"] }}
[options]
precision = ["float16", "float32"]
"""
    with _scheduler(tmp_path, 2) as address:
        remote = ("--scheduler", address, "-o", "remote", "--keep-programs")
        assert _sweep(text, *remote) == 1
        assert capsys.readouterr().err.count("[3/3]") == 1
        # Each file was sent to each worker, and removed at the end.
        for worker in tmp_path.glob("worker-*"):
            assert not [path for path in worker.rglob("coreml-delegate-files/*") if path.is_file()]
    assert _sweep(text, "-o", "local", "--keep-programs") == 1
    assert list(map(_same, read_results(Path("remote")))) == list(
        map(_same, read_results(Path("local")))
    )
    local, remote = (sorted(Path(name, "programs").iterdir()) for name in ("local", "remote"))
    assert [path.name for path in local] == [path.name for path in remote]
    assert [path.read_bytes() for path in local] == [path.read_bytes() for path in remote]
    assert len(local) == 2
    # What others have run is known here.
    assert _sweep(text, "-o", "remote", "--list", "--keep-programs") == 0
    assert capsys.readouterr().out.count("nothing to do") == 3


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(tmp_path):
    stalled = tmp_path / "stalled"
    text = f"""
repeat = 0
[models.slow]
source = "{MODELS}:stalling_once"
[models.net]
source = "net:net"
"""
    Path("s.toml").write_text(text)
    with _scheduler(tmp_path, 2, STALLED=str(stalled)) as address:
        sweep = _sweep_until(stalled, address)
        os.kill(int(stalled.read_text()), signal.SIGKILL)
        _, err = sweep.communicate(timeout=_PATIENCE)
    assert sweep.returncode == 0, err.decode()
    assert [row.record.status.value for row in read_results(Path("s_sweep"))] == ["done", "done"]


@pytest.mark.slow
def test_a_job_that_ends_its_workers_is_reported(capsys):
    text = f"""
repeat = 0
[models.ending]
source = "{MODELS}:ending_its_parent"
[models.net]
source = "net:net"
"""
    assert _sweep(text, "--workers", "2") == 1
    found = {row.name: row.record for row in read_results(Path("s_sweep"))}
    assert {name: record.status.value for name, record in found.items()} == {
        "ending": "crashed",
        "net": "done",
    }
    assert "ending: crashed: every worker that ran it ended, the last at" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupt_ends_jobs_on_workers(tmp_path):
    stalled = tmp_path / "stalled"
    Path("s.toml").write_text(f'[models.slow]\nsource = "{MODELS}:stalling_once"\n')
    with _scheduler(tmp_path, 1, STALLED=str(stalled)) as address:
        sweep = _sweep_until(stalled, address)
        worker = int(stalled.read_text())
        assert len(_children(worker)) == 1
        sweep.send_signal(signal.SIGINT)
        _, err = sweep.communicate(timeout=_PATIENCE)
        assert (sweep.returncode, err) == (130, b"coreml-delegate: error: interrupted\n")
        _wait_until(lambda: _children(worker) == [])
    assert "s_sweep" not in leftovers(Path())


def _children(pid: int) -> list[str]:
    """The processes that a process has started, in any of its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


def test_a_worker_with_another_version_is_refused(tmp_path, capsys):
    preload = tmp_path / "another.py"
    preload.write_text(
        "from coreml_delegate.scripts.sweeping import contents\n"
        "own = contents.environment()\n"
        "contents.environment = lambda: {**own, 'coreml_delegate': 'another'}\n"
    )
    with _scheduler(tmp_path, 1, "--preload", str(preload)) as address:
        text = '[models.net]\nsource = "net:net"\n'
        assert _sweep(text, "--scheduler", address) == 1
    err = capsys.readouterr().err
    assert "a worker has another version of coreml_delegate: got another on tcp://127.0.0." in err
    assert err.count("\n") == 1
    assert not Path("s_sweep").exists()


def test_a_worker_that_came_later_is_refused_as_well():
    expected = dict(contents.environment())
    cluster._require_same(expected, "tcp://here")
    with pytest.raises(ProgramError, match=r"another version of torch: got .* on tcp://here"):
        cluster._require_same({**expected, "torch": "0.1"}, "tcp://here")


def test_no_scheduler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "_CONNECT", 1)
    assert _sweep('[models.net]\nsource = "net:net"\n', "--scheduler", "tcp://127.0.0.1:9") == 1
    err = capsys.readouterr().err
    assert "cannot connect to the scheduler: got tcp://127.0.0.1:9" in err
    assert err.count("\n") == 1

"""Load time and peak memory of a contender, in a process of its own.

As a program: ``python -m benchmarks.footprint CONTENDER FILE INPUTS THREADS CACHE`` prints both as
JSON. What importing costs counts in neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import TESTS
from benchmarks.contenders import CONTENDERS, Contender, NotAvailableError, Settings

_SECONDS = 600.0  # beyond this a probe hangs


@dataclass(frozen=True, slots=True)
class Footprint:
    """Time and memory of loading and the first call.

    Attributes:
        seconds: From the file to the first result.
        peak_bytes: Most resident memory beyond what imports and inputs hold, mapped files included.
    """

    seconds: float
    peak_bytes: int


def probe(contender: Contender, file: Path, inputs: Path, settings: Settings) -> Footprint:
    """Measure in a fresh process.

    Args:
        contender: Who loads.
        file: What it loads.
        inputs: An ``npz`` file of the call's inputs, in order.
        settings: How it loads.

    Raises:
        NotAvailableError: It fails there; the message is the last line of what it says.
    """
    command = [sys.executable, "-m", "benchmarks.footprint", contender.name, str(file)]
    command += [str(inputs), str(settings.threads), str(settings.cache)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env=_environment(), check=False
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        raise NotAvailableError(lines[-1] if lines else f"exit code {result.returncode}")
    return Footprint(**json.loads(result.stdout.splitlines()[-1]))


def _environment() -> Mapping[str, str]:
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def measure(contender: Contender, file: Path, inputs: Path, settings: Settings) -> Footprint:
    """Measure in this process, in which nothing else may have happened.

    Raises:
        NotAvailableError: The contender cannot run here.
    """
    with np.load(inputs) as stored:
        arrays = [stored[name] for name in stored.files]
    contender.imports()
    before = resident(reset=True)
    start = time.perf_counter()
    np.asarray(contender.load(file, settings)(arrays)())
    seconds = time.perf_counter() - start
    return Footprint(seconds, resident() - before)


def resident(*, reset: bool = False) -> int:
    """Peak resident memory in bytes; ``reset`` makes it what is resident now.

    Source: proc(5), ``clear_refs`` and ``status``.
    """
    process = Path("/proc/self")
    if reset:
        (process / "clear_refs").write_text("5")
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise NotAvailableError("the kernel does not say how much memory a process holds")


def _main(name: str, file: str, inputs: str, threads: str, cache: str) -> None:
    contender = next(c for c in CONTENDERS if c.name == name)
    settings = Settings(int(threads), Path(cache))
    print(json.dumps(asdict(measure(contender, Path(file), Path(inputs), settings))))


if __name__ == "__main__":
    _main(*sys.argv[1:])

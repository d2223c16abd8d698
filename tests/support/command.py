"""Running ``coreml-delegate``, in this process or in a separate process."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from coreml_delegate.scripts.cli import main

MODELS = "support.cli_models"
TINY = (f"{MODELS}:tiny", "--skip-op", "sin")
_SUPPORT = Path(__file__).parent.parent


@functools.cache
def tiny_pte() -> bytes:
    """``support.cli_models:tiny``, exported by the command itself, in two partitions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.pte"
        with contextlib.redirect_stdout(io.StringIO()):  # not among the output of the first test
            code = main(["export", *TINY, "-o", str(path)])
        if code != 0:
            raise RuntimeError("the command cannot export its test model")
        return path.read_bytes()


def start(*args: object, stdin: int | None = None, **environment: object) -> subprocess.Popen[str]:
    """Start the command in a separate process, with its output piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "coreml_delegate.scripts", *map(str, args)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            # Unbuffered, argparse meets a closed pipe itself and hides it.
            **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            "PYTHONPATH": str(_SUPPORT),
            **{name: str(value) for name, value in environment.items()},
        },
    )


def leftovers(folder: Path) -> set[str]:
    """Return the files in a folder, apart from the caches that torch keeps there."""
    return {p.name for p in folder.iterdir() if not p.name.startswith("torchinductor_")}

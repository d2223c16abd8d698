"""Native calls from several threads, watched by ThreadSanitizer."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as ops
from support.gates import needs_compiler

from coreml_delegate.runtime import native
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE
from coreml_delegate.runtime.engines.openvino.session import native_calls

_OPENVINO = Path(ov.__file__).parent
_DRIVER = Path(__file__).with_name("native_threads.cpp")

# TBB opens a library of its own in a way that a sanitizer does not bear.
_PRELOADED = """
#define _GNU_SOURCE
#include <dlfcn.h>
void* dlopen(const char* file, int mode) {
  void* (*next)(const char*, int) = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  return next(file, mode & ~RTLD_DEEPBIND);
}
"""
# OpenVINO and TBB are not built for the sanitizer, which does not see how they wait.
_SUPPRESSED = "race:libopenvino\nrace:libtbb\n"


def _source() -> str:
    folder = importlib.resources.files(native_calls._PACKAGE)
    return folder.joinpath(native_calls._SOURCE).read_text()


def _export(path: Path) -> None:
    x, n = ops.parameter([2, 300], np.float32), ops.parameter([3], np.int32)
    weight = np.linspace(0, 1, 300 * 6000, dtype=np.float32).reshape(300, 6000)
    product = ops.matmul(x, ops.constant(weight), False, False)
    following = ops.add(n, ops.constant(np.int32(1)))
    model = ov.Model([product.output(0), following.output(0)], [x, n])
    compiled = ov.Core().compile_model(model, DEVICE, {"INFERENCE_PRECISION_HINT": "f32"})
    path.write_bytes(compiled.export_model().getvalue())


def _run(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the driver around a source of native calls, and run it under ThreadSanitizer."""
    compiler = str(shutil.which("g++"))
    (folder / "calls.cpp").write_text(source)
    (folder / native.HEADER).write_bytes(native.header())
    (folder / "preloaded.c").write_text(_PRELOADED)
    (folder / "suppressed").write_text(_SUPPRESSED)
    _export(folder / "model.blob")
    (library,) = (_OPENVINO / "libs").glob("libopenvino_c.so*")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "preloaded.c", "-o", "preloaded.so"]
    subprocess.run(command, cwd=folder, check=True)
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-g", "-O1", "-fsanitize=thread", "-pthread"),
            *(f"-I{_OPENVINO / 'include'}", f'-DNATIVE_CALLS="{folder / "calls.cpp"}"'),
            *(str(_DRIVER), str(library), f"-Wl,-rpath,{_OPENVINO / 'libs'}", "-o", "driver"),
        ],
        cwd=folder,
        check=True,
    )
    runtime = subprocess.run(
        [compiler, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    options = f"suppressions={folder / 'suppressed'} ignore_noninstrumented_modules=1"
    environment = {
        "LD_PRELOAD": f"{folder / 'preloaded.so'} {runtime}",
        "LD_LIBRARY_PATH": str(_OPENVINO / "libs"),
        "TSAN_OPTIONS": options,
    }
    return subprocess.run(
        ["./driver", "model.blob"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, whose ThreadSanitizer is used")
def test_eight_threads_race_for_nothing(tmp_path: Path) -> None:
    done = _run(_source(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"thread {n}: 0 wrong" for n in range(8)]


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, whose ThreadSanitizer is used")
def test_a_race_is_noticed(tmp_path: Path) -> None:
    """Without the locks around models and idle requests."""
    lock = "const std::lock_guard<std::mutex> lock(mutex_);"
    assert _source().count(lock) == 6
    done = _run(_source().replace(lock, ""), tmp_path)
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr

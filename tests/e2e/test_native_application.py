"""The example of docs/native.md: an application without Python that runs programs."""

from __future__ import annotations

import functools
import os
import random
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gates import needs_cmake, needs_compiler
from support.kept_and_flexible import (
    Counting,
    Scaled,
    counting_steps,
    lower_scaled,
    lower_stateful,
)
from support.lowering import Function, lower
from support.multimethod import IOS18, Layers, linear, lower_methods, specs, two
from support.tolerances import ATOL_RTOL

from coreml_delegate import CoreMLBackend, runtime
from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE, CacheOptions, EntryCache
from coreml_delegate.runtime import native_files
from coreml_delegate.scripts.cli import main

# On one worker, so that the application is built once.
pytestmark = [needs_compiler, needs_cmake, pytest.mark.xdist_group("native application")]

ATOL, RTOL = ATOL_RTOL["fp32"]
_EXAMPLE = Path(__file__).parents[2] / "docs" / "native"


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The application, built as docs/native.md says."""
    build = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={runtime.cmake_prefix_path()}"
    for command in (["cmake", "-S", _EXAMPLE, "-B", build, prefix], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "run_pte"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, switched on."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    return tmp_path / "cache"


def _compiled(pte: bytes, folder: Path) -> Path:
    path = folder / "model.pte"
    path.write_bytes(pte)
    assert main(["compile", str(path)]) == 0
    return path


def _run(
    application: Path,
    program: Path,
    inputs: Sequence[torch.Tensor],
    *,
    method: str = "forward",
    times: int = 1,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the application with an environment that has nothing but the cache's folder."""
    files = []
    for number, tensor in enumerate(inputs):
        path = program.with_name(f"input{number}.bin")
        path.write_bytes(tensor.contiguous().numpy().tobytes())
        files.append(f"{path}:{','.join(map(str, tensor.shape))}")
    return subprocess.run(
        [application, program, method, str(times), *files],
        env=environment or {CACHE_VARIABLE: os.environ[CACHE_VARIABLE]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _outputs(done: subprocess.CompletedProcess[str]) -> list[torch.Tensor]:
    assert done.returncode == 0, done.stderr
    return [torch.tensor([float(x) for x in line.split()]) for line in done.stdout.splitlines()]


def _assert_close(
    results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], limits: str = "fp32"
) -> None:
    atol, rtol = ATOL_RTOL[limits]
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted.detach().flatten().float(), atol=atol, rtol=rtol)


def test_the_application_has_no_python(application: Path) -> None:
    linked = subprocess.run(["ldd", application], capture_output=True, text=True, check=True)
    assert "libopenvino_c" in linked.stdout
    assert "libpython" not in linked.stdout
    assert "not found" not in linked.stdout


def test_delegates_between_operators(application: Path, cache: Path, tmp_path: Path) -> None:
    module = Function(lambda x, n: (torch.asinh(torch.tanh(x) * 2) + x, n * 3 + 1))
    inputs = torch.randn(300, 40), torch.tensor([[5], [-7]])
    program = _compiled(lower(module, inputs).pte, tmp_path)
    results = _outputs(_run(application, program, inputs, times=2))
    _assert_close(results, module(*inputs) * 2)
    too_wide = inputs[0], torch.tensor([[5], [2**40]])
    done = _run(application, program, too_wide)
    assert done.returncode == 1
    assert "Core ML delegate of method forward: a tensor has a dtype" in done.stderr
    assert "integers beyond 32 bits" in done.stderr


def test_half_precision(application: Path, cache: Path, tmp_path: Path) -> None:
    """The default: what a delegate gives in half precision, the program has in single."""
    module = Function(lambda x: torch.softmax(x @ x.mT, -1))
    x = torch.randn(1, 300, 20)
    lowered = lower(module, (x,), compile_specs=CoreMLBackend.generate_compile_specs())
    program = _compiled(lowered.pte, tmp_path)
    _assert_close(_outputs(_run(application, program, [x])), [module(x)], "fp16")


@pytest.mark.slow
def test_more_than_64_tensors(application: Path, cache: Path, tmp_path: Path) -> None:
    module = Function(lambda *xs: tuple(torch.tanh(x) for x in xs))
    inputs = tuple(torch.randn(2, 3) for _ in range(40))
    program = _compiled(lower(module, inputs).pte, tmp_path)
    _assert_close(_outputs(_run(application, program, inputs)), module(*inputs))


def test_a_file_displaces_no_other(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _compiled(_small()[2], tmp_path)
    (first,) = cache.glob("native/*.entry")
    monkeypatch.setenv(LIMIT_VARIABLE, str(first.stat().st_size + 1000))
    _compiled(_small()[2], tmp_path)  # again, in its own place
    capsys.readouterr()
    _compiled(lower(Function(torch.tanh), (torch.randn(7),)).pte, tmp_path)
    assert "not for applications without Python: the cache has no room for it" in (
        capsys.readouterr().out
    )
    assert list(cache.glob("native/*.entry")) == [first]


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_files_are_found_where_they_are_written(
    variable: str, application: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    _, x, pte = _small()
    program = _compiled(pte, tmp_path)
    done = _run(application, program, [x], environment={variable: str(tmp_path / "home")})
    assert len(_outputs(done)) == 1


def test_states_are_the_applications(application: Path, cache: Path, tmp_path: Path) -> None:
    program = _compiled(lower_stateful(Counting()), tmp_path)
    step, eager = counting_steps()[0], Counting()
    for _ in range(2):  # each process begins with zeros
        done = _run(application, program, step, times=3)
        eager = Counting()
        expected = [value.clone() for _ in range(3) for value in eager(*step)]
        _assert_close(_outputs(done), expected, "fp16")


_DIM = torch.export.Dim


def test_dynamic_shapes(application: Path, cache: Path, tmp_path: Path) -> None:
    rows = _DIM("rows", min=2, max=900)
    program = _compiled(lower_scaled(({0: rows}, {0: rows})), tmp_path)
    for size in (2, 900, 7):
        inputs = torch.randn(size, 30), torch.randn(size, 4)
        _assert_close(_outputs(_run(application, program, inputs)), Scaled()(*inputs))
    for sizes in ((7, 8), (1, 1)):
        inputs = torch.randn(sizes[0], 30), torch.randn(sizes[1], 4)
        assert _run(application, program, inputs).returncode == 1


def test_enumerated_shapes(application: Path, cache: Path, tmp_path: Path) -> None:
    listed = {"x": [[n, 30] for n in range(2, 12)], "y": [[n, 4] for n in range(2, 12)]}
    sizes = ({0: _DIM.AUTO(min=2, max=11)}, {0: _DIM.AUTO(min=2, max=11)})
    program = _compiled(lower_scaled(sizes, listed=listed), tmp_path)
    for size in (2, 11, 6):
        inputs = torch.randn(size, 30), torch.randn(size, 4)
        _assert_close(_outputs(_run(application, program, inputs)), Scaled()(*inputs))
    inputs = torch.randn(5, 30), torch.randn(6, 4)
    assert _run(application, program, inputs).returncode == 1


def test_several_methods_that_share_weights(application: Path, cache: Path, tmp_path: Path) -> None:
    methods = two(Layers(linear(1024)), 1024)
    program = _compiled(lower_methods(methods, specs("POSITIONAL", **IOS18)).pte, tmp_path)
    for name, (module, inputs) in methods.items():
        done = _run(application, program, inputs, method=name)
        _assert_close(_outputs(done), [module(*inputs)])


def test_the_reason_why_a_delegate_needs_python_is_told(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _DIM("rows", min=2, max=90)
    _compiled(lower_scaled(({0: rows}, {0: 2 * rows}), others=12), tmp_path)
    assert "calls in Python, because sizes of its inputs are given by formulas" in (
        capsys.readouterr().out
    )
    assert not list(cache.glob("native/*.entry"))


@functools.cache
def _small() -> tuple[Function, torch.Tensor, bytes]:
    module, x = Function(lambda x: torch.tanh(x) * 2), torch.randn(3, 5)
    return module, x, lower(module, (x,)).pte


def test_without_a_compiled_program_it_says_what_to_do(
    application: Path, cache: Path, tmp_path: Path
) -> None:
    _, x, pte = _small()
    program = _compiled(pte, tmp_path)
    for entry in cache.glob("native/*.entry"):
        entry.unlink()
    done = _run(application, program, [x])
    assert done.returncode == 1
    assert "run `coreml-delegate compile` on this machine" in done.stderr


_DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another magic": (lambda content: b"?" + content[1:], "no entry of this version"),
    "a byte of the models": (
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        "its checksum is wrong",
    ),
    "the last byte": (
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        "its checksum is wrong",
    ),
    "cut off": (lambda content: content[:5000], "it is cut off"),
    "cut off in the header": (lambda content: content[:100], "no entry"),
    "empty": (lambda _: b"", "it is not compiled"),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_files_are_refused(
    damage: str, application: Path, cache: Path, tmp_path: Path
) -> None:
    _, x, pte = _small()
    program = _compiled(pte, tmp_path)
    (entry,) = cache.glob("native/*.entry")
    change, message = _DAMAGES[damage]
    entry.write_bytes(change(entry.read_bytes()))
    done = _run(application, program, [x])
    assert done.returncode == 1
    assert message in done.stderr


def _dynamic() -> tuple[bytes, tuple[torch.Tensor, ...]]:
    rows = _DIM("rows", min=2, max=90)
    return lower_scaled(({0: rows}, {0: rows})), (torch.randn(7, 30), torch.randn(7, 4))


_DESCRIBED = {
    "fixed": lambda: (_small()[2], (_small()[1],)),
    "dynamic": _dynamic,
    "states": lambda: (lower_stateful(Counting()), counting_steps()[0]),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", _DESCRIBED)
def test_descriptions_of_anything_end_no_process(
    kind: str, application: Path, cache: Path, tmp_path: Path
) -> None:
    """Numbers that describe a delegate are replaced, and the checksum made right."""
    pte, inputs = _DESCRIBED[kind]()
    program = _compiled(pte, tmp_path)
    (path,) = cache.glob("native/*.entry")
    key = bytes.fromhex(path.stem)
    entries = EntryCache(CacheOptions(cache / native_files.FOLDER))
    entry = entries.read(key)
    assert entry is not None
    payload, choose = bytes(entry.payload), random.Random(0)
    text, _, function, _ = struct.unpack_from("<4q", payload)
    start = 32 + text
    (model,) = struct.unpack_from("<q", payload, start + 8 * function)
    words = function + 3 + model
    for _ in range(30):
        damaged = bytearray(payload)
        place = choose.choice([8 * choose.randrange(4), start + 8 * choose.randrange(words)])
        value = choose.choice([-1, 0, 1, 2, 7, 64, 1 << 20, 1 << 40, -(1 << 62), -(1 << 63)])
        struct.pack_into("<q", damaged, place, value)
        assert entries.write(key, {}, bytes(damaged))
        done = _run(application, program, inputs)
        assert done.returncode in (0, 1), (place, value, done.stderr)
    assert entries.write(key, {}, payload)
    assert _run(application, program, inputs).returncode == 0


def test_the_key_is_the_same_for_any_length(application: Path, cache: Path, tmp_path: Path) -> None:
    """Blobs end at any place of a block of the digest."""
    lengths = set()
    for count in range(1, 5):
        module = Function(lambda x, count=count: torch.cat([torch.tanh(x)] * count, 1) * 2)
        x = torch.from_numpy(np.linspace(-1, 1, 15, dtype=np.float32)).reshape(3, 5)
        pte = lower(module, (x,)).pte
        program = _compiled(pte, tmp_path)
        (delegate,) = runtime.load_program(pte).program.methods[0].delegates
        lengths.add(len(delegate.processed) % 128)
        _assert_close(_outputs(_run(application, program, [x])), [module(x)])
    assert len(lengths) > 1

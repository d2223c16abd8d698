"""The cache of compiled programs: what is found, what is not trusted, what is dropped."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.mil import Opset, builder_program, mb
from support.packages import (
    long_accumulator,
    long_chain,
    long_chain_of_rows,
    package_files,
)

from coreml_delegate.errors import OptionError
from coreml_delegate.formats import entry_cache
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE, EntryCache
from coreml_delegate.formats.files import write_folder
from coreml_delegate.runtime import CacheOptions, EngineOptions
from coreml_delegate.runtime.engines.openvino import engine, translate
from coreml_delegate.runtime.engines.openvino.session import compilation, compiled_cache
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.model import Model

X = {"x": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
_TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def chain():
    return long_chain()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def translations(monkeypatch):
    """Names of the functions translated, as they are."""
    names: list[str] = []
    original = translate.translate

    def spy(function, **options):
        names.append(function.name)
        return original(function, **options)

    monkeypatch.setattr(translate, "translate", spy)
    return names


def _load(files, folder, **options):
    cache = None if folder is None else CacheOptions(folder)
    return Model.from_files(files, engine="openvino", options=EngineOptions(cache=cache, **options))


def _output(model, inputs=X):
    (result,) = model.predict(inputs).values()
    return result


def _entry(folder):
    (file,) = EntryCache(CacheOptions(folder)).files()
    return file.path


def test_a_second_load_translates_nothing(chain, folder, translations):
    expected = _output(_load(chain, folder))
    actual = _output(_load(chain, folder))
    np.testing.assert_array_equal(actual, expected)
    assert translations == ["main"]


def test_without_a_folder_nothing_is_kept(chain, translations):
    for _ in range(2):
        _load(chain, None)
    assert len(translations) == 2


@pytest.mark.slow
def test_another_process_finds_what_this_one_has_made(chain, folder, tmp_path):
    expected = _output(_load(chain, folder))
    package = tmp_path / "chain.mlpackage"
    write_folder(chain, package)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from coreml_delegate import runtime\n"
        "from coreml_delegate.runtime.engines.openvino import translate\n"
        "translate.translate = None\n"
        f"options = runtime.EngineOptions(cache=runtime.CacheOptions(Path({str(folder)!r})))\n"
        f"model = runtime.load_mlpackage({str(package)!r}, engine='openvino', options=options)\n"
        "x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)\n"
        "sys.stdout.buffer.write(next(iter(model.predict({'x': x}).values())).tobytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == expected.tobytes()


def test_states_and_run_time_shapes_survive(folder, translations):
    accumulator, rows = long_accumulator(), long_chain_of_rows()
    for _ in range(2):
        model = _load(accumulator, folder)
        state = model.make_state()
        for step in range(3):
            before, after = model.predict({"x": np.arange(3)}, state).values()
            np.testing.assert_array_equal(before, np.arange(3) * step)
            np.testing.assert_array_equal(after, np.arange(3) * (step + 1))
        assert {array.dtype for array in state.snapshot().values()} == {np.dtype(np.float16)}
    for _ in range(2):
        model = _load(rows, folder)
        for count in (1, 5):
            result = _output(model, {"x": np.zeros((count, 4), np.float32)})
            np.testing.assert_allclose(result, np.full((count, 4), 0.25))
    assert len(translations) == 2


# Keys


def _parts(files, **changes):
    core = engine._core()
    program = read_files(files)
    function = program.functions[program.default_function]
    options = EngineOptions(cache=None, **changes)
    mode = compilation._MODES[options.precision]
    config = compilation._config(options, mode, function)
    source = ProgramSource.of_files(files)
    return compiled_cache.key_parts(core, function, source, config, exact_nan=options.exact_nan)


def test_every_part_of_the_key_counts(chain):
    parts = _parts(chain)
    keys = [compiled_cache.entry_key(parts, {})]
    keys += [compiled_cache.entry_key({**parts, name: "another"}, {}) for name in parts]
    keys += [compiled_cache.entry_key(parts, {"x": (1, rows)}) for rows in (1, 2)]
    assert len(set(keys)) == len(parts) + 3
    assert {len(key) for key in keys} == {32}
    assert compiled_cache.entry_key(_parts(chain), {}) == keys[0]


def test_options_are_parts_of_the_key(chain):
    variants = [
        {},
        {"threads": 1},
        {"threads": 2},
        {"precision": "bf16"},
        {"exact_nan": True},
        {"dynamic_quantization": True},
    ]
    assert len({compiled_cache.entry_key(_parts(chain, **v), {}) for v in variants}) == 6


def test_an_exact_program_is_not_found_as_a_fast_one(folder, translations):
    def rectified(x):
        for _ in range(30):
            x = mb.relu(x=x)
        return x

    x = {"x": np.array([1, np.nan, -1], np.float32)}
    files = package_files(builder_program(rectified, x, Opset.iOS18))
    for _ in range(2):  # compiled, then found
        np.testing.assert_array_equal(_output(_load(files, folder), x), [1, 0, 0])
        exact = _load(files, folder, exact_nan=True)
        np.testing.assert_array_equal(_output(exact, x), [1, np.nan, 0])
    assert len(translations) == 2


def test_a_source_is_known_by_its_bytes_alone():
    spec, weights = b"spec", {"weights/weight.bin": bytes(9 << 20)}
    first = ProgramSource(spec, weights).digest
    assert ProgramSource(bytearray(spec), weights).digest == first
    changed = bytearray(weights["weights/weight.bin"])
    changed[-1] = 1
    others = [
        ProgramSource(b"Spec", weights),
        ProgramSource(spec, {"weights/weight.bin": changed}),
        ProgramSource(spec, {"weights/other.bin": changed}),
        ProgramSource(spec, {"weights/weight.bin": bytes((9 << 20) + 1)}),
        ProgramSource(spec, {}),
    ]
    assert len({first, *(other.digest for other in others)}) == 6


def test_small_programs_and_bulky_ones_are_not_kept(folder):
    _load(long_chain(length=10), folder)
    assert not folder.exists()


# Entries that are not what they were


def _damages(size):
    yield from ((f"cut to {n}", lambda d, n=n: d[:n]) for n in (0, 1, 63, 4095, 4096, size - 1))
    yield "longer", lambda d: d + b"\0"
    yield "garbage", lambda d: bytes(np.random.default_rng(0).integers(0, 256, len(d), np.uint8))
    places = (0, 9, 13, 17, 25, 33, 60, 70, 4000, 4096, 4200, size // 2, size - 2)
    yield from ((f"bit at {p}", lambda d, p=p: _flipped(d, p)) for p in places)


def _flipped(data, place):
    changed = bytearray(data)
    changed[place] ^= 4
    return bytes(changed)


def test_damaged_entries_are_made_again(chain, folder, translations, caplog):
    expected = _output(_load(chain, folder))
    path = _entry(folder)
    original = path.read_bytes()
    for name, damage in _damages(len(original)):
        path.write_bytes(damage(original))
        caplog.clear()
        translations.clear()
        np.testing.assert_array_equal(_output(_load(chain, folder)), expected, err_msg=name)
        assert translations == ["main"], name
        (record,) = caplog.records
        assert "is made again" in record.getMessage(), name
        caplog.clear()
        _load(chain, folder)  # the entry has been replaced
        assert translations == ["main"], name
        assert not caplog.records, name


def test_an_entry_under_the_name_of_another_is_not_trusted(chain, folder, caplog):
    _load(chain, folder)
    path = _entry(folder)
    content = path.read_bytes()
    path.unlink()
    other = long_chain(3.0)
    expected = _output(_load(other, folder))
    _entry(folder).write_bytes(content)
    np.testing.assert_array_equal(_output(_load(other, folder)), expected)
    assert "it belongs to another program" in caplog.text


def test_an_entry_that_openvino_refuses_is_made_again(chain, folder, translations, caplog):
    expected = _output(_load(chain, folder))
    key = bytes.fromhex(_entry(folder).stem)
    cache = EntryCache(CacheOptions(folder))
    for metadata, payload in (
        ({"inputs": ["x"], "outputs": ["y"], "states": []}, b"no model"),
        ({"inputs": ["x"]}, bytes(cache.read(key).payload)),
        ({"inputs": ["x"], "outputs": [], "states": []}, bytes(cache.read(key).payload)),
    ):
        cache.write(key, metadata, payload)
        np.testing.assert_array_equal(_output(_load(chain, folder)), expected)
    assert len(translations) == 4
    assert len(caplog.records) == 3


# Several processes


_WRITER = """
import sys, types
from pathlib import Path
import coreml_delegate
# The module alone: its package would import torch, which takes far longer than the test.
for name in ("runtime", "runtime.engines"):
    package = types.ModuleType(f"coreml_delegate.{name}")
    package.__path__ = [str(Path(coreml_delegate.__path__[0], *name.split(".")))]
    sys.modules[package.__name__] = package
from coreml_delegate.formats.entry_cache import CacheOptions, EntryCache

cache = EntryCache(CacheOptions(Path(sys.argv[1])))
print("ready", flush=True)
for turn in range(int(sys.argv[2])):
    for number in range(4):
        key = bytes([number]) * 32
        cache.write(key, {"number": number}, bytes([number]) * (1 << 20))
        entry = cache.read(key)
        if entry is not None and set(entry.payload[:: 1 << 16]) != {number}:
            sys.exit("read something else than was written")
"""


def _writer(folder, turns):
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), str(turns)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_four_processes_on_one_folder(folder):
    writers = [_writer(folder, 20) for _ in range(4)]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert (writer.returncode, errors) == (0, "")
    assert len(EntryCache(CacheOptions(folder)).files()) == 4


def test_a_killed_writer_leaves_nothing_that_is_read(folder, monkeypatch):
    cache = EntryCache(CacheOptions(folder))
    writer = _writer(folder, 10**6)
    writer.stdout.readline()
    left = []
    deadline = time.monotonic() + 60
    while not left and time.monotonic() < deadline:
        # Held still, it cannot finish between the look and the kill.
        writer.send_signal(signal.SIGSTOP)
        left = list(folder.glob(f"*{entry_cache.UNFINISHED}"))
        if not left:
            writer.send_signal(signal.SIGCONT)
            time.sleep(0.0001)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert left, "no writer was killed while it wrote"
    for file in cache.files():
        assert cache.read(bytes.fromhex(file.path.stem)) is not None
    # A later start leaves what may still be written alone, and sweeps what is an hour old.
    entry_cache._sweep_unfinished.cache_clear()
    cache.write(bytes(32), {}, b"")
    assert left[0].exists()
    long_ago = time.time() - 2 * entry_cache._ABANDONED_SECONDS
    os.utime(left[0], (long_ago, long_ago))
    entry_cache._sweep_unfinished.cache_clear()
    cache.write(bytes(32), {}, b"")
    assert not left[0].exists()


# Limits


def _key(number):
    return number.to_bytes(32, "big")


def test_the_least_recently_used_goes_first(folder):
    cache = EntryCache(CacheOptions(folder, limit_bytes=4 * 8192))
    for number in range(4):
        cache.write(_key(number), {}, bytes(4000))
        os.utime(cache._path(_key(number)), ns=(number, number))
    assert cache.read(_key(0)) is not None  # used now
    cache.write(_key(4), {}, bytes(4000))
    assert [number for number in range(5) if cache.read(_key(number))] == [0, 2, 3, 4]
    cache.write(_key(5), {}, bytes(20000))
    assert sum(file.size for file in cache.files()) <= 4 * 8192
    assert cache.read(_key(5)) is not None


def test_an_entry_beyond_the_limit_drops_no_other(folder):
    cache = EntryCache(CacheOptions(folder, limit_bytes=8192))
    cache.write(_key(0), {}, bytes(100))
    cache.write(_key(1), {}, bytes(8192))
    assert cache.read(_key(1)) is None
    assert cache.read(_key(0)) is not None


def test_clearing(folder):
    cache = EntryCache(CacheOptions(folder))
    assert cache.clear() == 0
    cache.write(_key(0), {}, b"1")
    (folder / f"x{entry_cache.UNFINISHED}").touch()
    (folder / "mine.txt").touch()
    assert cache.clear() == 1
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_written_is_logged_once(chain, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        _output(_load(chain, blocked / "cache"))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "the cache is not used: cannot write" in record.getMessage()


def test_a_full_disk_fails_no_load(chain, folder, monkeypatch, caplog):
    def full(path, permissions):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(entry_cache, "new_file", full)
    _output(_load(chain, folder))
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("off", None),
        ("0", None),
        ("123456", 123456),
        ("500m", 500 << 20),
        ("2G", 2 << 30),
        ("", 2 << 30),
    ],
)
def test_the_environment_decides_by_default(said, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("COREML_DELEGATE_CACHE", str(tmp_path))
    monkeypatch.setenv(LIMIT_VARIABLE, said)
    cache = EngineOptions().cache
    assert (cache and cache.limit_bytes) == expected
    assert cache is None or cache.folder == tmp_path / "compiled"


@pytest.mark.parametrize("said", ["no", "-1", "2T", "1.5G"])
def test_an_invalid_environment_variable_is_refused(said, monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, said)
    with pytest.raises(OptionError, match="expected off, or bytes such as"):
        EngineOptions()


# One compilation for all


def test_threads_share_one_compilation(chain, translations):
    barrier = threading.Barrier(4)

    def load(_):
        barrier.wait()
        return _load(chain, None)

    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(load, range(4)))
    assert translations == ["main"]
    assert len({id(model.compiled) for model in models}) == 1
    del models
    _load(chain, None)  # nobody held it any more
    assert len(translations) == 2


def test_options_are_not_shared(chain, translations):
    kept = [_load(chain, None), _load(chain, None, threads=1), _load(long_chain(), None)]
    assert len(translations) == len(kept)


def test_states_are_not_shared(folder):
    files = long_accumulator()
    first, second = _load(files, None), _load(files, None)
    assert first.compiled is second.compiled
    state = first.make_state()
    first.predict({"x": np.ones(3)}, state)
    assert second.make_state().snapshot()["total"].tolist() == [0, 0, 0]

"""Commands on StableHLO files: convert, run, inspect, trace and verify."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from coreml_delegate.scripts.cli import main

jax = pytest.importorskip("jax")


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


Run = Callable[..., Outcome]


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one program in each form; the export has a symbolic size."""

    def function(x, scale):
        return jax.numpy.tanh(x) * scale, x > 0

    folder = tmp_path_factory.mktemp("stablehlo")
    scalar = jax.ShapeDtypeStruct((), np.float32)
    fixed = jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct((2, 4), np.float32), scalar)
    (folder / "f.mlir").write_text(fixed.mlir_module())
    (folder / "f.stablehlo").write_bytes(fixed.mlir_module_serialized)
    shape = jax.export.symbolic_shape("rows, 4")
    open_ended = jax.export.export(jax.jit(function))(
        jax.ShapeDtypeStruct(shape, np.float32), scalar
    )
    (folder / "f.jax").write_bytes(open_ended.serialize())
    return folder


@pytest.mark.parametrize("name", ["f.mlir", "f.stablehlo", "f.jax"])
def test_run_takes_every_form(run_main: Run, files: Path, tmp_path: Path, name: str) -> None:
    x, scale = np.float32([[1, -2, 3, -4]] * 2), np.float32(2)
    np.savez(tmp_path / "in.npz", x=x, scale=scale)
    run = run_main(
        "run", files / name, "--input", tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--json"
    )
    assert run.code == 0, run.stderr
    out = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(out["result_0"], np.tanh(x) * 2, rtol=1e-5)
    assert out["result_1"].tolist() == (x > 0).tolist()


def test_sizes_may_be_multiples_of_others(run_main: Run, tmp_path: Path) -> None:
    specs = [
        jax.ShapeDtypeStruct((size,), np.float32) for size in jax.export.symbolic_shape("2*b, b")
    ]
    exported = jax.export.export(jax.jit(lambda x, y: (x + x, y + y)))(*specs)
    (tmp_path / "f.jax").write_bytes(exported.serialize())
    run = run_main("run", tmp_path / "f.jax", "--json")
    assert run.code == 0, run.stderr


@pytest.mark.parametrize("suffix", [".mlpackage", ".pte"])
@pytest.mark.parametrize("name", ["f.mlir", "f.jax"])
def test_converted_programs_verify_against_xla(
    run_main: Run, files: Path, tmp_path: Path, name: str, suffix: str
) -> None:
    target = tmp_path / f"f{suffix}"
    converted = run_main("convert", files / name, "-o", target, "--json")
    assert converted.code == 0, converted.stderr
    assert set(json.loads(converted.stdout)["inputs"]) == {"x", "scale"}
    verified = run_main("verify", files / name, target, "--min-sqnr", "100")
    assert verified.code == 0, verified.stderr


def test_inspect_and_trace_show_the_model_that_a_file_becomes(run_main: Run, files: Path) -> None:
    inspected = run_main("inspect", files / "f.jax")
    assert "x fp32[1..16384, 4]" in inspected.stdout
    assert "tanh 1" in inspected.stdout
    traced = run_main("trace", files / "f.mlir")
    assert "tanh" in traced.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "missing.mlir", "-o", "f.pte"), "no such StableHLO file: got missing.mlir"),
        (("convert", "f.mlir", "-o", "f.onnx"), "unknown kind of output: got f.onnx"),
        (("convert", "f.mlir", "-o", "nowhere/f.pte"), "no such folder for the output"),
        (("convert", "f.mlir", "-o", "f.jax"), "unknown kind of output"),
        (("convert", "f.mlir", "-o", "f.pte", "--state", "y=1"), "y"),
        (("convert", "broken.mlir", "-o", "f.pte"), "malformed MLIR text"),
        (("run", "f.mlir", "--method", "other"), "method is for a .pte"),
        (("run", "f.mlir", "--host", "stock"), "host is for a .pte"),
        (("export", "f.mlir", "-o", "f.pte"), "Use coreml-delegate convert"),
        (("verify", "f.mlir", "f.stablehlo", "--input-shape", "2,4"), "is for a PyTorch model"),
    ],
)
def test_wrong_arguments_are_one_line_and_leave_nothing(
    run_main: Run,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    for file in files.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "broken.mlir").write_text("module {")
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    run = run_main(*arguments)
    assert run.code == 1
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_is_replaced_by_force_only(run_main: Run, files: Path, tmp_path: Path) -> None:
    target = tmp_path / "f.pte"
    target.write_text("kept")
    refused = run_main("convert", files / "f.mlir", "-o", target)
    assert refused.code == 1
    assert target.read_text() == "kept"
    assert run_main("convert", files / "f.mlir", "-o", target, "--force").code == 0
    assert target.stat().st_size > 1000


def test_an_input_becomes_a_state(run_main: Run, tmp_path: Path) -> None:
    def step(total, x):
        total = total + x
        return total * 2, total

    row = jax.ShapeDtypeStruct((4,), np.float16)
    exported = jax.export.export(jax.jit(step))(row, row)
    (tmp_path / "step.jax").write_bytes(exported.serialize())
    target = tmp_path / "step.mlpackage"
    converted = run_main(
        "convert", tmp_path / "step.jax", "-o", target, "--state", "total=1", "--json"
    )
    assert converted.code == 0, converted.stderr
    summary = json.loads(converted.stdout)
    assert list(summary["states"]) == ["total"]
    assert list(summary["inputs"]) == ["x"]


# precision


@pytest.fixture
def lossy(tmp_path: Path) -> Path:
    """A folder with a program whose sum overflows in fp16, and an input as arrays by name."""

    def score(x, n):
        return jax.numpy.log((jax.numpy.exp(x) * 5000).sum(-1)), n + 1

    specs = jax.ShapeDtypeStruct((2, 16), np.float32), jax.ShapeDtypeStruct((3,), np.int32)
    exported = jax.export.export(jax.jit(score))(*specs)
    (tmp_path / "score.jax").write_bytes(exported.serialize())
    x = np.linspace(-2, 2, 32, dtype=np.float32).reshape(2, 16)
    np.savez(tmp_path / "in.npz", x=x, n=np.arange(3, dtype=np.int32))
    return tmp_path


@pytest.mark.parametrize("option", ["--input", "--calibration"])
@pytest.mark.parametrize("suffix", [".mlpackage", ".pte"])
def test_convert_keeps_in_fp32_what_the_inputs_need(
    run_main: Run, lossy: Path, option: str, suffix: str
) -> None:
    source, target = lossy / "score.jax", lossy / f"score{suffix}"
    command = ("convert", source, "-o", target, "--precision", "auto", option, lossy / "in.npz")
    converted = run_main(*command, "--json")
    assert (converted.code, converted.stderr) == (0, "")
    precision = json.loads(converted.stdout)["precision"]
    assert precision["before_db"] == "-inf"
    assert precision["is_reached"]
    assert {call["operation"] for call in precision["islands"]} == {"reduce_sum", "log"}
    for engine in ("reference", "openvino"):
        verified = run_main(
            *("verify", source, target, "--engine", engine, "--min-sqnr", "40"),
            *("--data", lossy / "in.npz"),
        )
        assert verified.code == 0, verified.stderr


def test_convert_prints_the_operations_in_fp32_with_their_places(
    run_main: Run, lossy: Path
) -> None:
    target = lossy / "score.mlpackage"
    command = ("convert", lossy / "score.jax", "-o", target, "--precision", "auto")
    converted = run_main(*command, "--input", lossy / "in.npz")
    assert "with 2 operation(s) in fp32" in converted.stdout
    assert "(stablehlo.reduce)" in converted.stdout


def test_convert_in_fp16_warns_of_what_the_inputs_lose(run_main: Run, lossy: Path) -> None:
    command = ("convert", lossy / "score.jax", "--precision", "float16", "-o")
    data = ("--input", lossy / "in.npz", "--json")
    warned = run_main(*command, lossy / "a.mlpackage", *data)
    assert warned.code == 0
    assert "-inf dB on the example inputs; --precision auto keeps 2 operations" in warned.stderr
    precision = json.loads(warned.stdout)["precision"]
    assert precision["islands"] == []
    assert {call["operation"] for call in precision["lossy"]} == {"reduce_sum", "log"}
    silent = run_main(*command, lossy / "b.mlpackage", *data, "--no-verify")
    assert (silent.code, silent.stderr) == (0, "")
    assert json.loads(silent.stdout)["precision"] is None
    unmeasured = run_main(*command, lossy / "c.mlpackage", "--json")
    assert json.loads(unmeasured.stdout)["precision"] is None


def test_convert_writes_nothing_below_the_target(run_main: Run, tmp_path: Path) -> None:
    def squares(x):  # the operations of a loop stay in fp16
        return jax.lax.fori_loop(0, 3, lambda _, y: y * y * 1e-3, x * 1000)

    exported = jax.export.export(jax.jit(squares))(jax.ShapeDtypeStruct((4,), np.float32))
    (tmp_path / "squares.jax").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", np.float32([0.5, 1, 1.5, 2]))
    target = tmp_path / "squares.pte"
    command = ("convert", tmp_path / "squares.jax", "-o", target, "--precision", "auto")
    missed = run_main(*command, "--input", tmp_path / "x.npy")
    assert missed.code == 1
    assert "expected at least 40 dB" in missed.stderr
    assert not target.exists()
    forced = run_main(*command, "--input", tmp_path / "x.npy", "--force")
    assert forced.code == 0
    assert target.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--precision", "auto"), "got no example inputs. Pass --input or --calibration"),
        (("--input", "in.npz"), "there is nothing to measure: got --precision float32"),
        (
            ("--precision", "auto", "--input", "in.npz", "--calibration", "in.npz"),
            "--input and --calibration exclude each other",
        ),
        (("--precision", "auto", "--input", "none.npz"), "no such input file"),
        (("--precision", "auto", "--calibration", "none.npz"), "no such calibration file"),
        (("--precision", "auto", "--calibration", "few.npz"), "as many tensors as the model has"),
        (("--precision", "auto", "--input", "few.npz"), "the files hold too few inputs"),
    ],
)
def test_wrong_inputs_of_convert_are_one_line(
    run_main: Run,
    lossy: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    np.savez(lossy / "few.npz", x=np.zeros((2, 16), np.float32))
    monkeypatch.chdir(lossy)
    before = sorted(lossy.iterdir())
    refused = run_main("convert", "score.jax", "-o", "score.pte", *options)
    assert refused.code == 1
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert sorted(lossy.iterdir()) == before

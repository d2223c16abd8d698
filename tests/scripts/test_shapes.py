"""``coreml-delegate export`` with dynamic and enumerated shapes, and ``inspect`` of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import sized_models
from support.command import MODELS, leftovers
from support.tolerances import ATOL_RTOL
from torch.utils._sympy.value_ranges import ValueRanges

from coreml_delegate import runtime
from coreml_delegate.errors import InputError
from coreml_delegate.partition import export as exporting
from coreml_delegate.patches.third_party import describe_error
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")

SIZED = "support.sized_models"
ATOL, RTOL = ATOL_RTOL["fp32"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def export(*options: str, model: str = f"{MODELS}:tiny") -> int:
    return main(["export", model, "-o", "a.pte", *options])


def export_sized(name: str, *options: str) -> int:
    return export(*options, "--precision", "float32", model=f"{SIZED}:{name}")


def equals_eager(name: str, *shapes: tuple[int, ...]) -> None:
    """Run ``a.pte`` on both hosts."""
    inputs = [torch.randn(shape) for shape in shapes]
    for host in ("python", "stock"):
        module, _ = getattr(sized_models, name)()
        (actual,) = runtime.load_program("a.pte", host=host).run("forward", inputs)
        torch.testing.assert_close(actual, module(*inputs), atol=ATOL, rtol=RTOL)


def test_dynamic(capsys):
    assert export("--dynamic", "x:2=8..24", "--skip-op", "sin") == 0
    assert "takes x [1, 3, 8..24, 16]" in capsys.readouterr().out
    assert main(["inspect", "a.pte"]) == 0
    assert "inputs: x fp32[1, 3, 8..24, 16]" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["one_row", "many_rows"])
def test_a_range_does_not_depend_on_the_example(name, capsys):
    assert export_sized(name, "--dynamic", "x:0=1..8") == 0
    assert "takes x [1..8, 4]" in capsys.readouterr().out
    assert main(["inspect", "a.pte"]) == 0
    shown = capsys.readouterr().out
    assert "  inputs: x float32[8, 4] at most\n" in shown
    assert "inputs: x fp32[1..8, 4]" in shown
    for rows in (1, 2, 8):
        equals_eager(name, (rows, 4))
    with pytest.raises(InputError, match="9 in dimension 0, at most 8"):
        runtime.load_program("a.pte").run("forward", [torch.randn(9, 4)])


@pytest.mark.parametrize(("name", "multiple"), [("shared", 1), ("twice", 2)])
def test_ranges_of_sizes_that_depend_on_each_other(name, multiple):
    other = f"y:0={multiple}..{8 * multiple}"
    assert export_sized(name, "--dynamic", "x:0=1..8", "--dynamic", other) == 0
    for rows in (1, 2, 8):
        equals_eager(name, (rows, 4), (rows * multiple, 4))


def test_warns_of_sizes_at_which_the_model_fails(capsys):
    assert export_sized("pairs", "--dynamic", "x:0=2..8") == 0
    assert capsys.readouterr().err.endswith(
        "coreml-delegate: warning: the model fails at some sizes of --dynamic: x:0=3\n"
    )
    for rows in (2, 8):
        equals_eager("pairs", (rows, 4))


def test_the_comparison_does_not_change_buffers():
    assert export_sized("counting", "--dynamic", "x:0=1..8") == 0
    for rows in (1, 8):
        equals_eager("counting", (rows, 4))


def test_a_quantized_model_keeps_its_range(capsys):
    np.save("x.npy", np.ones((2, 3, 6, 6), np.float32))
    quantize = ("--quantize", "int8-static", "--calibration", "x.npy")
    assert export_sized("convolving", "--dynamic", "input:0=1..8", *quantize) == 0
    assert "[1..8, 3, 6, 6]" in capsys.readouterr().out
    program = runtime.load_program("a.pte")
    for rows in (1, 2, 8):
        (result,) = program.run("forward", [torch.ones(rows, 3, 6, 6)])
        assert result.shape == (rows, 4, 4, 4)


NOT_CAPTURED = (
    "torch.export does not capture what the model computes for every size of --dynamic: "
    "got other results at x:0={}, expected one computation for the whole range. "
    "Give a range without this size, and export another program for it"
)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("otherwise_for_one", "x:0=1..8", NOT_CAPTURED.format(1)),
        ("otherwise_for_odd", "x:0=2..8", NOT_CAPTURED.format(3)),
        ("of_another_rank_for_one", "x:0=1..8", NOT_CAPTURED.format(1)),
        (
            "otherwise_beyond_five",
            "x:0=1..8",
            "the model does not compute the same way in the whole range of --dynamic: got "
            "x:0=1..8, expected x:0=1..5. Give the range that it accepts, or export several "
            "programs",
        ),
        (
            "pairs",
            "x:0=1..8",
            "the model fails at a bound of --dynamic, x:0=1: got RuntimeError: shape '[-1, 2, 4]' "
            "is invalid for input of size 4. Begin and end the range with sizes that it takes",
        ),
        (
            "four",
            "x:0=1..8",
            "torch.export cannot capture the model: got UserError: Constraints violated "
            "(L['x'].size()[0])! For more information, run with TORCH_LOGS=\"+dynamic\". "
            "- You marked L['x'].size()[0] as dynamic but your code specialized it to be a "
            "constant (4). ",
        ),
    ],
)
def test_ranges_that_cannot_be_exported_are_refused(name, sizes, message, tmp_path, capsys):
    assert export_sized(name, "--dynamic", sizes) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"coreml-delegate: error: {message}")
    assert error.count("\n") == 1
    assert leftovers(tmp_path) == set()


@pytest.mark.slow
def test_sizes_that_executorch_fixes_are_an_error(monkeypatch, tmp_path, capsys):
    """A decomposition of ExecuTorch may fix a size; a patched lowering does so here."""
    lower = exporting.to_edge_transform_and_lower

    def narrow(*args, **kwargs):
        edge = lower(*args, **kwargs)
        ranges = edge.exported_program().range_constraints
        ranges.update((symbol, ValueRanges(1, 2)) for symbol in list(ranges))
        return edge

    monkeypatch.setattr(exporting, "to_edge_transform_and_lower", narrow)
    assert export_sized("recurrent", "--dynamic", "input:0=1..8") == 1
    assert capsys.readouterr().err == (
        "coreml-delegate: error: an operator of the model lets ExecuTorch take fewer sizes than "
        "were asked for: got [1..2, 5, 4], expected [1..8, 5, 4]. "
        "Export a program for each size\n"
    )
    assert leftovers(tmp_path) == set()


@pytest.mark.slow
def test_recurrent_layers_take_a_range():
    """ExecuTorch's decomposition fixes the batch where gradients are recorded."""
    assert export_sized("recurrent", "--dynamic", "input:0=1..8") == 0
    module, _ = sized_models.recurrent()
    program = runtime.load_program("a.pte")
    for rows in (1, 2, 8):
        x = torch.randn(rows, 5, 4)
        actual = program.run("forward", [x])
        torch.testing.assert_close(tuple(actual), module(x), atol=ATOL, rtol=RTOL)


def test_errors_of_torch_are_described_with_their_cause():
    """The first line of some only announces it."""
    announced = ValueError("Found conflicts from tracing:\n- x is 1.\n- y is 2.\n")
    assert describe_error(announced) == "ValueError: Found conflicts from tracing: - x is 1"
    assert describe_error(ValueError("Because:\n  x\nmore")) == "ValueError: Because: x"
    assert describe_error(ValueError("One.\nTwo.")) == "ValueError: One"
    assert describe_error(ValueError()) == "ValueError"


def test_enumerated_shapes_whose_first_is_the_example(capsys):
    assert export_sized("one_row", "--enumerated-shapes", "x=1,4/6,4") == 0
    assert "takes x [1, 4] | [6, 4]" in capsys.readouterr().out
    for rows in (1, 6):
        equals_eager("one_row", (rows, 4))


def test_enumerated(capsys):
    assert export("--enumerated-shapes", "x=1,3,8,16/1,3,24,16", "--skip-op", "sin") == 0
    assert "takes x [1, 3, 8, 16] | [1, 3, 24, 16]" in capsys.readouterr().out
    assert main(["inspect", "a.pte"]) == 0
    shown = capsys.readouterr().out
    assert "x fp32[1, 3, 8, 16] | [1, 3, 24, 16]" in shown
    assert "enumerated_shapes x [1, 3, 8, 16] | x [1, 3, 24, 16]" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dynamic", "x=1..3"], "'x=1..3' is not a range such as x:0=1..8"),
        (["--dynamic", "x:0=3..1"], "is not a range"),
        (["--dynamic", "x:0=3..3"], "is not a range"),
        (["--enumerated-shapes", "x"], "is not shapes such as x=1,8/1,16"),
    ],
)
def test_malformed_shapes_are_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        export(*options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dynamic", "y:0=1..3"], "no such input: got 'y', expected x"),
        (["--dynamic", "x:4=1..3"], "has no such dimension: got 4, expected 0 to 3"),
        (["--dynamic", "x:2=8..24", "--dynamic", "x:2=8..9"], "given twice for a dimension"),
        (["--enumerated-shapes", "x=1,3,8,16"], "wrong number of enumerated shapes: got 1"),
        (["--enumerated-shapes", "z=1,3,8,16/1,3,9,16"], "no such input: got 'z'"),
    ],
)
def test_shapes_that_do_not_fit_the_model_are_refused(options, message, capsys):
    assert export(*options) == 1
    assert message in capsys.readouterr().err

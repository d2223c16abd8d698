"""The commands on models whose example inputs are, in part, keyword inputs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.cli_models import keyworded
from support.command import MODELS
from support.tolerances import ATOL_RTOL, SQNR_INT8

from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("cli")

KEYWORDED = f"{MODELS}:keyworded"
BERT = f"{MODELS}:bert"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def export(source: str, *options: str) -> int:
    return main(["export", source, "-o", "a.pte", "--precision", "float32", *options])


def shapes() -> list[tuple[int, ...]]:
    (method,) = PteProgram.open("a.pte").methods
    return [spec.shape for spec in method.input_specs]


def test_inputs_are_in_the_order_of_the_example(capsys):
    assert export(KEYWORDED) == 0
    assert shapes() == [(2, 8), (5, 4), (2, 8)]
    assert main(["verify", KEYWORDED, "a.pte", "--min-sqnr", "100"]) == 0
    torch.manual_seed(0)
    module, (x,), keywords = keyworded()
    np.savez("in.npz", x, keywords["rows"], keywords["factor"])
    assert main(["run", "a.pte", "--input", "in.npz", "-o", "out.npz", "--repeat", "1"]) == 0
    expected = module(x, **keywords).detach().numpy()
    atol, rtol = ATOL_RTOL["fp32"]
    np.testing.assert_allclose(np.load("out.npz")["output_0"], expected, atol=atol, rtol=rtol)


def test_dynamic_dimensions_are_given_by_input_name(capsys):
    assert export(KEYWORDED, "--dynamic", "rows:0=1..9") == 0
    assert shapes() == [(2, 8), (9, 4), (2, 8)]
    assert main(["verify", KEYWORDED, "a.pte", "--min-sqnr", "100"]) == 0


@pytest.mark.slow
def test_static_quantization_keeps_dynamic_sizes(capsys):
    options = ("--quantize", "int8-static", "--calibration", f"{MODELS}:keyword_samples")
    assert export(KEYWORDED, "--dynamic", "rows:0=1..9", *options) == 0
    assert shapes() == [(2, 8), (9, 4), (2, 8)]
    assert main(["verify", KEYWORDED, "a.pte", "--min-sqnr", str(SQNR_INT8)]) == 0


def test_quantize_report_takes_keyword_inputs(capsys):
    assert main(["quantize-report", KEYWORDED, "--quantize", "int8-weight", "--json"]) == 0
    ranking = json.loads(capsys.readouterr().out)["layers"]
    assert {layer["path"] for layer in ranking} == {"before", "after"}


def test_a_transformers_model_is_exported_and_verified(capsys):
    assert export(BERT) == 0
    assert main(["verify", BERT, "a.pte", "--min-sqnr", "80"]) == 0
    assert main(["trace", "a.pte"]) == 0

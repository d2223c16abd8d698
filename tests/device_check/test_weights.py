"""Rules about weights: what could be saved, by coremltools, and what is left alone."""

from __future__ import annotations

import functools
import tempfile

import numpy as np
import pytest
from device_check.rule_cases import (
    CASES,
    DISTINCT,
    INDICES,
    findings,
    integers,
    looked_up,
    with_table,
    with_weight,
)
from support.mil import Opset, builder_program, ct, mb
from support.packages import package_files

from coreml_delegate.device_check import (
    CheckedModel,
    Use,
    check,
    weights,
)
from coreml_delegate.quantization.weight_inventory import weights_of
from coreml_delegate.runtime.mil.reader import read_mlpackage


def test_bytes_that_could_be_saved():
    (wide,) = findings(CASES["fp32-weights"][0](), "fp32-weights")
    assert wide.details.saved_bytes == 64 * 64 * 2
    (few,) = findings(CASES["few-values"][0](), "few-values")
    assert few.details.saved_bytes == 64 * 64 * 2 - (64 * 64 // 8 + 2 * 2)
    (twice,) = findings(CASES["duplicate-weights"][0](), "duplicate-weights")
    assert twice.details.saved_bytes == 64 * 64 * 2


@pytest.mark.parametrize(
    ("opset", "low", "high", "narrow"),
    [
        (Opset.iOS17, -3, 100, "int8"),
        (Opset.iOS17, 0, 200, "uint8"),
        (Opset.iOS17, 0, 5, None),  # a byte each, as varints
        (Opset.iOS17, -1, 200, None),  # varints, in int16 too
        (Opset.iOS18, -1, 200, "int16"),
        (Opset.iOS18, 30000, 40000, "uint16"),
        (Opset.iOS18, 10000, 70000, None),  # fits none
    ],
)
def test_integers_are_measured_as_they_are_stored(opset, low, high, narrow):
    """By serializing the program with coremltools in both types."""
    found = findings(with_table(np.int32, low, high, opset), "wide-integers")
    if narrow is None:
        assert found == []
        return
    saved = [table_bytes(dtype, low, high, opset) for dtype in (np.int32, np.dtype(narrow).type)]
    # A weight file has a header, and a line in the manifest.
    assert found[0].details.saved_bytes == pytest.approx(saved[0] - saved[1], abs=1000)


def table_bytes(dtype: type, low: int, high: int, opset: Opset) -> int:
    """Bytes that a program takes with a table."""
    table = functools.partial(looked_up, integers(dtype, low, high))
    files = package_files(builder_program(table, INDICES, opset), opset)
    return sum(len(content) for content in files.values())


def test_small_weights_and_savings_are_left_alone(monkeypatch):
    small = np.zeros((64, 2), np.float16)
    assert findings(with_weight(small), "equal-values") == []
    zeros = np.zeros((64, 64), np.float16)
    assert len(findings(with_weight(zeros, DISTINCT), "equal-values")) == 1
    monkeypatch.setattr(weights, "WORTH", 0.6)
    assert findings(with_weight(zeros, DISTINCT), "equal-values") == []
    assert findings(with_weight(DISTINCT, DISTINCT.copy()), "duplicate-weights") == []


@pytest.mark.parametrize("colours", [2, 3, 16, 17, 64, 256])
def test_few_values_fit_a_table(colours):
    values = np.arange(4096).reshape(64, 64) % colours
    (finding,) = findings(with_weight(values.astype(np.float16)), "few-values")
    bits = next(bits for bits in (1, 2, 4, 6, 8) if 2**bits >= colours)
    assert finding.details.got == f"{colours} different values, {bits} bits with a table"


def test_the_remedy_for_few_values_saves_what_it_says():
    """By coremltools, which changes no value."""
    weight = np.resize(np.arange(17), (64, 64)).astype(np.float16)
    (finding,) = findings(with_weight(weight), "few-values")
    function = lambda x: mb.matmul(x=x, y=weight)  # noqa: E731
    program = builder_program(function, {"x": np.zeros((2, 64), np.float16)}, Opset.iOS17)
    model = ct.convert(program, minimum_deployment_target=ct.target.iOS17, skip_model_load=True)
    unique = ct.optimize.coreml.OpPalettizerConfig(mode="unique", weight_threshold=0)
    config = ct.optimize.coreml.OptimizationConfig(global_config=unique)
    smaller = ct.optimize.coreml.palettize_weights(model, config)
    with tempfile.TemporaryDirectory() as folder:
        smaller.save(f"{folder}/small.mlpackage")
        (stored,) = weights_of(read_mlpackage(f"{folder}/small.mlpackage"))
    assert stored.scheme == "lut"
    assert weight.nbytes - stored.stored_bytes == finding.details.saved_bytes


def test_weights_of_several_models_are_compared():
    models = [CheckedModel(with_weight(DISTINCT), (Use(name, "main"),)) for name in ("a_0", "b_0")]
    (finding,) = [f for f in check(models) if f.rule.name == "duplicate-weights"]
    assert finding.details.delegate == "a_0, b_0"
    assert [place.name.split(": ")[0] for place in finding.details.places] == ["a_0", "b_0"]
    assert "weight_sharing" in finding.remedy


def test_a_model_that_delegates_share_is_looked_at_once():
    model = CheckedModel(with_weight(DISTINCT), (Use("a_0", "main"), Use("b_0", "main")))
    found = check([model])
    assert [f for f in found if f.rule.name == "duplicate-weights"] == []
    assert {f.details.delegate for f in found} <= {"a_0, b_0"}


def test_a_file_of_two_gigabytes(monkeypatch):
    found = with_weight(DISTINCT)
    assert findings(found, "large-file") == []
    monkeypatch.setattr(weights, "LARGEST_WEIGHTS", 64 * 64 * 2)
    assert findings(found, "large-file")[0].details.got == "8,192 bytes"

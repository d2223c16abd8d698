"""The table of quantization modes, and assignments of modes to modules with their files."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.quantization import LinearQuantizerConfig

from coreml_delegate.errors import OptionError
from coreml_delegate.options.weight_compression import OPTION
from coreml_delegate.quantization import FORMS, Method, QuantizationAssignment, mode_of
from coreml_delegate.quantization.configs import (
    compile_keywords,
    linear_quantizer_config,
    quantizer_config_of,
    torchao_config,
)
from coreml_delegate.quantizer.config import read_config
from coreml_delegate.targets import Opset


@pytest.mark.parametrize("form", FORMS)
def test_every_mode_has_a_configuration_of_one_method(form):
    family = form.partition("-")[0]
    number = {"codebook": "4", "palettize": "4", "prune": "50"}.get(family, "32")
    name = form.replace("N", number).replace("M", "16")
    mode = mode_of(name)
    assert mode.name == name
    keywords = compile_keywords(QuantizationAssignment(mode), None)
    made = {
        Method.PT2E: lambda: read_config(linear_quantizer_config(mode)),
        Method.MODULES: lambda: torchao_config(mode),
        Method.CONVERSION: lambda: keywords[OPTION],
    }
    assert made[mode.method]()
    if mode.method is not Method.CONVERSION:
        assert keywords == {"minimum_deployment_target": mode.lowering_target}
    if mode.relief is not None:
        assert mode_of(mode.relief).method is mode.method
        assert mode_of(mode.relief).bits >= mode.bits


def test_numbers_in_names_set_attributes():
    assert mode_of("int4-group64").group_size == 64
    assert mode_of("codebook-3").bits == 3
    assert mode_of("palettize-6").bits == 6
    assert mode_of("prune-75").sparsity == 0.75
    assert torchao_config(mode_of("int8-group16")).granularity.group_size == 16
    assert torchao_config(mode_of("codebook-3")).dtype is torch.uint3
    grouped = mode_of("codebook-4-group16")
    assert (grouped.bits, grouped.rows_per_table, grouped.group_size) == (4, 16, None)
    assert torchao_config(grouped).block_size == [16, -1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4-grup32", "got 'int4-grup32', expected perhaps int4-groupN"),
        ("int8-statik", "perhaps int8-static"),
        ("zip", "unknown quantization mode: got 'zip', expected int8-static, int8-weight"),
        (
            "int4-group0",
            "int4-groupN does not take this number: got int4-group0, expected 2 to",
        ),
        ("palettize-5", "expected 1, 2, 3, 4, 6, 8"),
        ("codebook-9", "expected 1 to 8"),
        ("codebook-4-group1", "codebook-N-groupM does not take this number"),
        ("prune--5", "expected 1 to 99"),
        ("int4-groupN", "unknown quantization mode"),
    ],
)
def test_unknown_modes_are_refused(name, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        mode_of(name)


def test_targets_are_required_or_defaulted():
    mode = mode_of("int8-static")
    mode.require_target(None, "target")
    mode.require_target(Opset.iOS26, "target")
    assert mode.lowering_target is None
    assert mode_of("int4-group32").lowering_target is Opset.iOS18
    with pytest.raises(
        OptionError, match="target must be iOS17 or higher for int8-static: got iOS16"
    ):
        mode.require_target(Opset.iOS16, "target")


def test_the_longest_path_counts():
    fine = mode_of("int8-weight")
    assignment = QuantizationAssignment(mode_of("int4-weight"), {"a": None, "a.b": fine})
    assert assignment.mode_for("a.c") is None
    assert assignment.mode_for("a.b.c") is fine
    assert assignment.mode_for("ab") is assignment.mode
    assert assignment.newest is assignment.mode
    assert not assignment.activations
    assert QuantizationAssignment(mode_of("int8-static")).activations


def test_paths_with_stars_apply_to_the_modules_of_every_layer():
    int4, int8, table = map(mode_of, ("int4-channel", "int8-channel", "codebook-4"))
    assignment = QuantizationAssignment(
        int4, {"layers.*.down": int8, "layers.0": None, "layers.1*.down": table, "layers.*": int4}
    )
    assert assignment.mode_for("layers.0.up") is None
    assert assignment.mode_for("layers.0.down") is int8  # more names than layers.0
    assert assignment.mode_for("layers.12.down.part") is table  # more characters than layers.*.down
    assert assignment.mode_for("layers.2.inner.down") is int4  # a star is a part of one name
    assert assignment.mode_for("layers") is int4


def test_paths_with_stars_choose_modules_for_pt2e():
    modes = {"block.*": None, "*.output": mode_of("int8-weight")}
    settings = read_config(
        quantizer_config_of(QuantizationAssignment(mode_of("int4-weight"), modes))
    )
    first, second = settings.by_name
    assert re.fullmatch(first, "block.output")
    assert not re.fullmatch(first, "block.inner.output")
    assert re.fullmatch(second, "block.output")
    assert settings.by_name[second] is None  # it has fewer characters, so it comes last


def test_assignments_round_trip_through_files(tmp_path):
    path = tmp_path / "config.json"
    given = QuantizationAssignment(
        mode_of("int4-group32"), {"b": None, "a": mode_of("int8-channel")}
    )
    path.write_text(given.to_json())
    read = QuantizationAssignment.read(path)
    assert read == given
    assert read.to_json() == given.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"),
        ("[]", "not a quantization config: expected a JSON object"),
        ('{"mode": "int8-weight", "layers": {}}', "unknown key: got 'layers'"),
        ('{"schema_version": 2, "mode": "int8-weight"}', "schema_version: got 2, expected 1"),
        ('{"schema_version": 1}', "mode: got None, expected the name of a quantization mode"),
        ('{"schema_version": 1, "mode": "int5"}', "unknown quantization mode: got 'int5'"),
        ('{"schema_version": 1, "mode": "int8-weight", "modules": []}', "modules: got []"),
        (
            '{"schema_version": 1, "mode": "int8-weight", "modules": {"a": 4}}',
            "modules['a']: got 4",
        ),
        (
            '{"schema_version": 1, "mode": "int8-weight", "modules": {"a": "int4-channel"}}',
            "int4-channel and int8-weight cannot be combined",
        ),
        (
            '{"schema_version": 1, "mode": "palettize-4", "modules": {"a": null}}',
            "palettize-4 is applied to converted weights, which belong to no module",
        ),
    ],
)
def test_invalid_files_are_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=re.escape(message)) as raised:
        QuantizationAssignment.read(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot read"):
        QuantizationAssignment.read(tmp_path / "none.json")


def test_module_paths_are_no_regular_expressions():
    config = quantizer_config_of(
        QuantizationAssignment(mode_of("int4-weight"), {"a.0": None, "b": mode_of("int8-weight")})
    )
    assert isinstance(config, LinearQuantizerConfig)
    settings = read_config(config)
    assert settings.by_name[r"a\.0"] is None
    assert settings.by_name["b"].weight_bits == 8
    assert settings.everywhere.weight_bits == 4
    assert (
        read_config(linear_quantizer_config(None, {"b": mode_of("int8-weight")})).everywhere is None
    )


def test_configurations_refuse_modes_of_other_methods():
    with pytest.raises(OptionError, match="int8-weight has another method"):
        torchao_config(mode_of("int8-weight"))
    with pytest.raises(OptionError, match="int8-channel has another method"):
        linear_quantizer_config(mode_of("int8-channel"))


def test_the_document_is_plain_data():
    document = QuantizationAssignment(mode_of("int8-weight")).as_dict()
    assert json.loads(json.dumps(document)) == {
        "schema_version": 1,
        "mode": "int8-weight",
        "modules": {},
    }

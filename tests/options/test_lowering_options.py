import enum

import numpy as np
import pytest
from executorch.exir.backend.compile_spec_schema import CompileSpec

from coreml_delegate import (
    MULTIMETHOD_WEIGHT_SHARING_STRATEGY,
    CompileOptions,
    CoreMLBackend,
)
from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_specs import ModelType, Precision
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import ComputeUnit, Opset

ct = coremltools()


def _wire(specs):
    return {s.key: bytes(s.value).decode() for s in specs}


def test_defaults_are_the_documented_ones():
    assert _wire(CoreMLBackend.generate_compile_specs()) == {
        "compute_units": "all",
        "min_deployment_target": "",
        "model_compute_precision": "float16",
        "model_type": "model",
    }


def test_every_upstream_keyword_is_accepted():
    specs = CoreMLBackend.generate_compile_specs(
        compute_unit=ct.ComputeUnit.CPU_AND_NE,
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        model_type=CoreMLBackend.MODEL_TYPE.COMPILED_MODEL,
        op_linear_quantizer_config={"mode": "linear_symmetric", "dtype": "int8"},
        pass_names=["common::const_elimination"],
    )
    assert _wire(specs) == {
        "compute_units": "cpu_and_ne",
        "min_deployment_target": "8",
        "model_compute_precision": "float32",
        "model_type": "compiled_model",
        "op_linear_quantizer_config": '{"dtype": "int8", "mode": "linear_symmetric"}',
        "pass_pipeline": '["common::const_elimination"]',
    }


@pytest.mark.parametrize("name", ["POSITIONAL", "DISABLED"])
def test_every_strategy_to_share_weights_round_trips(name):
    # ExecuTorch's own enum takes seconds to import; it is told by its names.
    theirs = enum.Enum("MULTIMETHOD_WEIGHT_SHARING_STRATEGY", {name: name.lower()})[name]
    ours = MULTIMETHOD_WEIGHT_SHARING_STRATEGY[name]
    generate = CoreMLBackend.generate_multimethod_weight_sharing_strategy_compile_spec
    for strategy in (ours, theirs):
        specs = [*CoreMLBackend.generate_compile_specs(), generate(strategy)]
        assert _wire(specs)["multimethod_weight_sharing_strategy"] == name.lower()
        assert CompileOptions.from_specs(specs).weight_sharing is ours
    with pytest.raises(OptionError, match="strategy has an unknown value: got 'positional'"):
        generate("positional")


@pytest.mark.parametrize("unit", list(ct.ComputeUnit))
def test_every_compute_unit_of_coremltools_is_accepted(unit):
    (options,) = {
        CompileOptions.from_specs(CoreMLBackend.generate_compile_specs(compute_unit=u))
        for u in (unit, ComputeUnit[unit.name])
    }
    assert options.compute_unit.name == unit.name


@pytest.mark.parametrize(
    ("old", "unit"),
    [
        ("cpu", ComputeUnit.CPU_ONLY),
        ("gpu", ComputeUnit.CPU_AND_GPU),
        ("ane", ComputeUnit.CPU_AND_NE),
        ("all", ComputeUnit.ALL),
    ],
)
def test_values_of_the_oldest_documents_are_read_and_rewritten(old, unit):
    options = CompileOptions.from_specs([CompileSpec("compute_units", old.encode())])
    assert options.compute_unit is unit
    assert _wire(options.to_specs())["compute_units"] == unit.value


def test_no_specs_mean_the_defaults():
    assert CompileOptions.from_specs([]) == CompileOptions()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("compute_unit", b"all", "unknown compile spec: got 'compute_unit'"),
        ("compute_units", b"npu", "unknown value: got 'npu'"),
        ("compute_units", b"\xff", "not UTF-8"),
        ("min_deployment_target", b"5", "not a specification version"),
        ("min_deployment_target", b"iOS17", "not a specification version"),
        ("model_compute_precision", b"float64", "unknown value"),
        ("model_type", b"", "unknown value"),
        ("op_linear_quantizer_config", b"{", "not JSON"),
        ("op_linear_quantizer_config", b"[]", "expected a JSON object"),
        ("pass_pipeline", b"[1]", "expected a JSON list of strings"),
    ],
)
def test_unknown_keys_and_values_are_errors(key, value, message):
    with pytest.raises(OptionError, match=message):
        CompileOptions.from_specs([CompileSpec(key, value)])


def test_duplicate_keys_are_an_error():
    spec = CompileSpec("compute_units", b"all")
    with pytest.raises(OptionError, match="given twice: got 'compute_units'"):
        CompileOptions.from_specs([spec, spec])


@pytest.mark.parametrize(
    "keywords",
    [
        {"compute_unit": "all"},
        {"compute_precision": ct.ComputeUnit.ALL},
        {"model_type": None},
        {"minimum_deployment_target": ct.target.iOS14},
        {"minimum_deployment_target": "iOS17"},
        {"pass_names": "common::const_elimination"},
        {"pass_names": ["nope"]},
        {"pass_names": [3]},
        {"pass_names": 3},
        {"keep_fp32": 3},
        {"keep_fp32": [3]},
        {"keep_fp32": {"ops": ["nope"]}},
        {"op_linear_quantizer_config": 3},
        {"op_linear_quantizer_config": {"mode": 3}},
        {"op_linear_quantizer_config": {"weight_threshold": np.int64(3)}},
        {"weight_compression": 3},
        {
            "weight_compression": {
                "config_type": "OpPalettizerConfig",
                "global_config": {"nbits": 9},
            }
        },
    ],
)
def test_keywords_of_the_wrong_kind_are_an_error(keywords):
    with pytest.raises(OptionError):
        CoreMLBackend.generate_compile_specs(**keywords)


def test_options_carry_our_own_types():
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=ct.target.macOS15)
    assert CompileOptions.from_specs(specs) == CompileOptions(
        ComputeUnit.ALL, Opset.iOS18, Precision.FLOAT16, ModelType.MODEL
    )

"""Every setting of a ``LinearQuantizerConfig`` takes effect, or is refused with the reason."""

from __future__ import annotations

import logging

import attrs
import pytest
import torch
from support.quantization import LinearQuantizerConfig, annotated, config, layer
from torch import nn

import coreml_delegate
from coreml_delegate import quantizer
from coreml_delegate.errors import OptionError
from coreml_delegate.quantizer.config import Milestones, read_config


def test_the_quantizer_is_exported_at_both_places():
    assert coreml_delegate.CoreMLQuantizer is quantizer.CoreMLQuantizer


def test_the_default_quantizes_weights_and_activations():
    settings = read_config(LinearQuantizerConfig()).everywhere
    assert settings is not None
    assert settings.weight is torch.int8
    assert settings.activation is torch.uint8
    assert settings.per_channel
    assert settings.symmetric
    assert settings.milestones is None


@pytest.mark.parametrize(
    ("given", "dtype", "bits"),
    [
        (torch.qint8, torch.int8, 8),
        (torch.quint8, torch.uint8, 8),
        ("qint4", torch.int8, 4),
        ("quint4", torch.uint8, 4),
        (torch.float32, None, 8),
    ],
)
def test_weight_dtypes(given, dtype, bits):
    settings = read_config(config(weight_dtype=given)).everywhere
    assert settings is not None
    assert (settings.weight, settings.weight_bits) == (dtype, bits)


def test_signed_activations_where_coremltools_lets_them_through():
    with attrs.validators.disabled():
        settings = read_config(config(activation_dtype=torch.qint8)).everywhere
    assert settings is not None
    assert settings.activation is torch.int8


def test_milestones_are_read():
    settings = read_config(config(milestones=[0, -1, 7, 9])).everywhere
    assert settings is not None
    assert settings.milestones == Milestones(0, None, 7, 9)


def _wrong_activation():
    with attrs.validators.disabled():
        return config(activation_dtype=torch.float16)


REFUSED = {
    "none": (lambda: None, "got NoneType, expected coremltools.optimize"),
    "dict": (dict, "got dict"),
    "learnable": (lambda: config(algorithm="learnable"), "global_config: algorithm"),
    "weight observer": (
        lambda: config(weight_observer="ema_min_max"),
        "global_config: weight_observer is not available for exported programs: got 'ema_min_max'",
    ),
    "activation observer": (
        lambda: config(activation_observer="ema_min_max"),
        "global_config: activation_observer is not available",
    ),
    "activation dtype": (_wrong_activation, "activation_dtype: got torch.float16"),
    "traced modules": (
        lambda: LinearQuantizerConfig(non_traceable_module_names=["conv"]),
        r"non_traceable_module_names has no effect on an exported program: got \['conv'\]",
    ),
    "attributes": (
        lambda: LinearQuantizerConfig(preserved_attributes=["version"]),
        "preserved_attributes has no effect",
    ),
    "name": (
        lambda: LinearQuantizerConfig(module_name_configs={"conv(": None}),
        r"not a regular expression: got 'conv\('",
    ),
    "layer by name": (
        lambda: LinearQuantizerConfig(
            module_name_configs={"a": layer(weight_observer="ema_min_max")}
        ),
        r"module_name_configs\['a'\]: weight_observer",
    ),
    "negative milestone": (
        lambda: config(milestones=[0, -2, 1, 1]),
        r"milestones: got \[0, -2, 1, 1\], expected four steps",
    ),
    "nothing is observed": (lambda: config(milestones=[-1, 0, 1, 1]), "never enable observers"),
    "observed for no step": (lambda: config(milestones=[3, 0, 3, 1]), "never enable observers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        quantizer.CoreMLQuantizer(make())


def test_a_wrong_type_key_is_refused():
    given = LinearQuantizerConfig()
    given.set_module_type(7, None)
    with pytest.raises(OptionError, match="neither a class nor a function: got 7"):
        quantizer.CoreMLQuantizer(given)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

    def forward(self, x):
        return self.first(x) + self.second(x)


X = (torch.linspace(-1, 1, 8).reshape(2, 4),)
WEIGHTS = {"activation_dtype": torch.float32}


def _patterns(settings):
    report = annotated(Branches(), X, settings)[0].report
    return {n.name: n.pattern or n.reason for n in report.nodes}


def test_a_name_covers_what_is_inside():
    found = _patterns(LinearQuantizerConfig(layer(), module_name_configs={"first": None}))
    assert found["linear"] == "module_name_configs['first'] leaves it in float"
    assert found["linear_1"] == "linear-act"


def test_the_innermost_name_counts():
    names = {"second": None, "second.0": layer(**WEIGHTS)}
    given = LinearQuantizerConfig(layer(), module_name_configs=names)
    quantizer, _ = annotated(Branches(), X, given)
    record = quantizer.report.node("linear_1")
    assert record.config == "module_name_configs['second.0']"
    assert record.weight is not None
    assert record.output is None
    # What is fused behind must not be excluded by an entry of its own.
    assert (
        quantizer.report.node("sigmoid").reason
        == "module_name_configs['second'] leaves it in float"
    )


def test_names_are_regular_expressions():
    found = _patterns(LinearQuantizerConfig(layer(), module_name_configs={r"\w+\.0": None}))
    assert "leaves it in float" in found["linear"]
    assert "leaves it in float" in found["linear_1"]


@pytest.mark.parametrize("kind", [nn.Linear, "Linear", nn.functional.linear])
def test_types_cover_their_modules(kind):
    found = _patterns(LinearQuantizerConfig(layer(), module_type_configs={kind: None}))
    assert found["linear"].endswith("leaves it in float")
    assert found["add"] == "add"


@pytest.mark.parametrize("function", [torch.add, "operator.iadd"])
def test_functions_cover_their_calls(function):
    found = _patterns(LinearQuantizerConfig(layer(), module_type_configs={function: None}))
    assert found["add"].endswith("leaves it in float")
    assert found["linear"] == "linear-act"


def test_a_name_precedes_a_type():
    given = LinearQuantizerConfig(
        module_type_configs={nn.Linear: None}, module_name_configs={"first": layer()}
    )
    found = _patterns(given)
    assert found["linear"] == "linear-act"
    assert found["linear_1"] == "module_type_configs['Linear'] leaves it in float"
    assert found["add"] == "global_config leaves it in float"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"module_name_configs": {"third": None}}, "got 'third', expected modules such as 'first'"),
        (
            {"module_type_configs": {nn.Conv2d: None}},
            "module_type_configs names nothing .*'Conv2d'",
        ),
        ({"module_type_configs": {torch.matmul: None}}, "'matmul'"),
    ],
)
def test_entries_that_name_nothing_in_the_model_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        annotated(Branches(), X, LinearQuantizerConfig(layer(), **given))


def test_warns_if_nothing_is_quantized(caplog):
    with caplog.at_level(logging.WARNING, "coreml_delegate.quantizer"):
        quantizer, _ = annotated(
            Branches(), X, config(weight_dtype=torch.float32, activation_dtype=torch.float32)
        )
    assert "nothing was quantized" in caplog.text
    reasons = {n.reason for n in quantizer.report.unquantized}
    assert reasons == {"global_config leaves weights and activations in float32"}

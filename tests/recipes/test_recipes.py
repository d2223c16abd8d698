"""Recipes for ``executorch.export``: their parts, and the keywords they refuse."""

from __future__ import annotations

import re

import pytest
import torch
from executorch.export import ExportRecipe, export, recipe_registry
from support.tolerances import SQNR_INT8, sqnr_db
from torch import nn

from coreml_delegate import CoreMLQuantizer, runtime
from coreml_delegate.errors import OptionError
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.recipes import COREML_BACKEND, CoreMLRecipeProvider, CoreMLRecipeType
from coreml_delegate.targets import ComputeUnit, Opset

pytestmark = pytest.mark.filterwarnings(
    "ignore:This API and all of its related functionality:Warning"  # of all recipes
)
ct = coremltools()
R = CoreMLRecipeType
REQUIRED = {R.CODEBOOK_WEIGHT_ONLY: {"bits": 4, "block_size": [-1, 16]}}


def _recipe(kind, **keywords):
    return CoreMLRecipeProvider().create_recipe(kind, **REQUIRED.get(kind, {}) | keywords)


def _partitioner(recipe):
    (partitioner,) = recipe.lowering_recipe.partitioners
    return partitioner


def _options(recipe):
    return CompileOptions.from_specs(_partitioner(recipe).delegation_spec.compile_specs)


def test_recipes_are_registered_under_our_backend_name():
    assert COREML_BACKEND != "coreml"
    assert COREML_BACKEND in recipe_registry.list_backends()
    assert set(recipe_registry.get_supported_recipes(COREML_BACKEND)) == set(R)
    assert ExportRecipe.get_recipe(R.FP16).name == "coreml_fp16"


@pytest.mark.parametrize("kind", list(R))
def test_every_recipe_is_made_by_default(kind):
    recipe = _recipe(kind)
    assert recipe.name == kind.value
    options = _options(recipe)
    in_float = {R.FP32: Precision.FLOAT32, R.FP16: Precision.FLOAT16, R.AUTO: Precision.AUTO}
    assert options.precision is in_float.get(kind, Precision.FLOAT16)
    quantization = recipe.quantization_recipe
    assert (quantization is None) == (kind in in_float)
    if "PT2E" in kind.name:
        (quantizer,) = quantization.quantizers
        assert isinstance(quantizer, CoreMLQuantizer)


def test_recipe_types_of_other_backends_give_none():
    other = type("Other", (), {})()
    assert CoreMLRecipeProvider().create_recipe(other) is None


@pytest.mark.parametrize(
    ("kind", "oldest"),
    [
        (R.PT2E_INT8_STATIC, "iOS17"),
        (R.PT2E_INT8_WEIGHT_ONLY, "iOS17"),
        (R.TORCHAO_INT4_WEIGHT_ONLY_PER_CHANNEL, "iOS18"),
        (R.TORCHAO_INT4_WEIGHT_ONLY_PER_GROUP, "iOS18"),
        (R.TORCHAO_INT8_WEIGHT_ONLY_PER_CHANNEL, "iOS16"),
        (R.TORCHAO_INT8_WEIGHT_ONLY_PER_GROUP, "iOS18"),
        (R.CODEBOOK_WEIGHT_ONLY, "iOS18"),
    ],
)
def test_a_target_is_kept_or_refused(kind, oldest):
    with pytest.raises(OptionError, match=f"minimum_deployment_target must be {oldest} or higher"):
        _recipe(kind, minimum_deployment_target=ct.target.iOS15)
    for target in (Opset[oldest], Opset.iOS26):
        recipe = _recipe(kind, minimum_deployment_target=ct.target[target.name])
        assert _options(recipe).deployment_target is target
    by_default = _options(_recipe(kind)).deployment_target
    assert by_default in (None, Opset[oldest])


def test_keywords_reach_the_lowering():
    recipe = _recipe(
        R.FP32, compute_unit=ct.ComputeUnit.CPU_ONLY, skip_ops_for_coreml_delegation=["add"]
    )
    assert _options(recipe).compute_unit is ComputeUnit.CPU_ONLY
    with pytest.raises(OptionError, match="names an unknown operator"):
        _recipe(R.FP32, skip_ops_for_coreml_delegation=["aten.nothing_of_this_name"])


def _only_first(_module, path):
    return path == "0"


def test_keywords_reach_the_quantization():
    for kind in R:
        if "TORCHAO" in kind.name or kind is R.CODEBOOK_WEIGHT_ONLY:
            (config,) = _recipe(
                kind, filter_fn=_only_first
            ).quantization_recipe.ao_quantization_configs
            assert config.filter_fn is _only_first
    (config,) = _recipe(
        R.TORCHAO_INT8_WEIGHT_ONLY_PER_GROUP, group_size=8
    ).quantization_recipe.ao_quantization_configs
    assert config.ao_base_config.granularity.group_size == 8
    (config,) = _recipe(R.CODEBOOK_WEIGHT_ONLY).quantization_recipe.ao_quantization_configs
    assert config.ao_base_config.block_size == [-1, 16]
    assert config.filter_fn(nn.Embedding(3, 2), "")
    assert not config.filter_fn(nn.Conv2d(1, 1, 1), "")
    assert not config.filter_fn(nn.MultiheadAttention(4, 1).out_proj, "")


GROUP = R.TORCHAO_INT4_WEIGHT_ONLY_PER_GROUP
CODEBOOK = R.CODEBOOK_WEIGHT_ONLY


@pytest.mark.parametrize(
    ("kind", "keywords", "message"),
    [
        (
            R.FP16,
            {"compute_units": 1},
            "coreml_fp16 has no such keyword: got 'compute_units', expected perhaps compute_unit",
        ),
        (R.FP16, {"group_size": 32}, "no such keyword: got 'group_size'"),
        (R.FP16, {"compute_unit": "all"}, "compute_unit must be a coremltools.ComputeUnit"),
        (R.FP16, {"minimum_deployment_target": 8}, "must be a coremltools.target: got int 8"),
        (R.FP16, {"lower_full_graph": 1}, "lower_full_graph must be a bool: got int 1"),
        (R.FP16, {"take_over_constant_data": None}, "take_over_constant_data must be a bool"),
        (R.FP16, {"skip_ops_for_coreml_delegation": "add"}, "must be a list of operator names"),
        (GROUP, {"group_size": "32"}, "group_size must be an integer: got str '32'"),
        (GROUP, {"group_size": True}, "group_size must be an integer"),
        (GROUP, {"group_size": -1}, "group_size must be positive"),
        (GROUP, {"group_size": 1}, "int4-groupN does not take this number"),
        (GROUP, {"filter_fn": 3}, "filter_fn must be a function of a module and its path"),
        (CODEBOOK, {"bits": 9}, "bits must be between 1 and 8: got int 9"),
        (CODEBOOK, {"bits": 3.0}, "bits must be an integer"),
        (CODEBOOK, {"block_size": (-1, 8)}, "block_size must be a list"),
        (CODEBOOK, {"block_size": [8]}, "block_size must be a list of rows and columns"),
        (CODEBOOK, {"block_size": [0, -1]}, "block_size must be a list of rows and columns"),
        (CODEBOOK, {"block_size": [4, 4]}, "block_size must have -1 for rows or columns"),
    ],
)
def test_invalid_keywords_are_refused(kind, keywords, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        _recipe(kind, **keywords)


def test_the_codebook_requires_its_keywords():
    with pytest.raises(OptionError, match="coreml_codebook_weight_only requires block_size"):
        CoreMLRecipeProvider().create_recipe(CODEBOOK, bits=3)


@pytest.mark.parametrize(
    "kind", [R.FP32, R.PT2E_INT8_STATIC, R.TORCHAO_INT8_WEIGHT_ONLY_PER_CHANNEL]
)
def test_executorch_exports_by_a_recipe(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    inputs = (torch.randn(2, 16),)
    expected = model(*inputs).detach()
    session = export(model, [inputs], ExportRecipe.get_recipe(kind))
    program = runtime.load_program(session.get_pte_buffer())
    (actual,) = program.run("forward", list(inputs))
    assert sqnr_db(expected.numpy(), actual.numpy()) > SQNR_INT8

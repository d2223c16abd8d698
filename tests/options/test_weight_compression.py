"""Compression of weights after conversion: its options, targets and bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from support.compressed import stored_sizes
from support.lowering import build_blob, fp32_specs, lower
from support.partitioned import delegate_functions
from threadpoolctl import threadpool_limits
from torch import nn

from coreml_delegate import CompileOptions, CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import OptionError
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset

SIZE = 64 * 64
X = (torch.linspace(-1, 1, 128).reshape(2, 64),)


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def _stage(kind, **config):
    return {"config_type": f"Op{kind}Config", "global_config": config}


LINEAR = {"mode": "linear_symmetric", "dtype": "int8"}
BLOCKS = {"dtype": "int4", "granularity": "per_block", "block_size": 32}
PALETTE = _stage("Palettizer", nbits=4)
GROUPS = _stage("Palettizer", nbits=2, granularity="per_grouped_channel", group_size=16)
SPARSE = _stage("MagnitudePruner", target_sparsity=0.5)

# name -> (options, MIL ops, bytes of the largest weight, target)
TAKEN = {
    "int8": ({"op_linear_quantizer_config": LINEAR}, {"affine_dequantize"}, SIZE, "iOS16"),
    "int4 blocks": (
        {"op_linear_quantizer_config": BLOCKS},
        {"blockwise_shift_scale"},
        SIZE // 2,
        "iOS18",
    ),
    "affine": (
        {"weight_compression": _stage("LinearQuantizer", mode="linear", dtype="uint8")},
        {"affine_dequantize"},
        SIZE,
        "iOS16",
    ),
    "palette": ({"weight_compression": PALETTE}, {"lut_to_dense"}, SIZE // 2, "iOS16"),
    "palettes": ({"weight_compression": GROUPS}, {"lut_to_dense"}, SIZE // 4, "iOS18"),
    "sparse": ({"weight_compression": SPARSE}, {"sparse_to_dense"}, SIZE * 2, "iOS16"),
    "threshold": (
        {
            "weight_compression": _stage(
                "ThresholdPruner", threshold=0.06, minimum_sparsity_percentile=0.2
            )
        },
        {"sparse_to_dense"},
        None,
        "iOS16",
    ),
    "sparse int8": (
        {"weight_compression": [SPARSE, _stage("LinearQuantizer", dtype="int8")]},
        {"sparse_blockwise_shift_scale", "sparse_to_dense"},
        SIZE // 2,
        "iOS18",
    ),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", TAKEN)
def test_weights_are_compressed(name):
    options, ops, largest, target = TAKEN[name]
    lowered = lower(_network(), X, compile_specs=fp32_specs(**options))
    (function,) = delegate_functions(lowered.edge)
    assert {op.type for op in function.block.ops if op.type.startswith("constexpr")} == {
        f"constexpr_{op}" for op in ops
    }
    assert lowered.report.partitions[0].target == target
    sizes = stored_sizes(lowered.edge)
    assert largest in (None, sizes[0])
    pte = lowered.pte
    first, second = (
        runtime.load_program(pte, engine=engine).run("forward", list(X))[0]
        for engine in ("reference", "openvino")
    )
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


def test_the_report_names_the_option_that_needs_the_target():
    def demanded(**options):
        specs = fp32_specs(**options)
        report = lower(nn.Linear(64, 64), X, compile_specs=specs).report
        return report.partitions[0].demanded_by

    assert demanded(op_linear_quantizer_config=BLOCKS) == (
        "op_linear_quantizer_config with weights of 4 bits",
    )
    assert demanded(weight_compression=PALETTE) == ("weight_compression",)


def test_single_ops_may_be_left_out():
    config = {**PALETTE, "op_type_configs": {"linear": None}}
    lowered = lower(_network(), X, compile_specs=fp32_specs(weight_compression=config))
    assert stored_sizes(lowered.edge)[0] == SIZE * 4


class Tied(nn.Module):
    """A table of embeddings that is the output layer too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 64)
        self.out = nn.Linear(64, 64, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(self.table(ids))


IDS = (torch.tensor([[0, 7, 63]]),)
ASIDE = {"op_type_configs": {"gather": None}}


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"op_linear_quantizer_config": LINEAR}, SIZE),
        ({"op_linear_quantizer_config": BLOCKS}, SIZE // 2),
        ({"weight_compression": {**PALETTE, **ASIDE}}, SIZE // 2),
        ({"weight_compression": [{**SPARSE, **ASIDE}, _stage("LinearQuantizer")]}, SIZE // 2),
        ({"weight_compression": [SPARSE, {**_stage("LinearQuantizer"), **ASIDE}]}, SIZE // 2),
    ],
)
def test_a_table_that_is_the_output_layer_too_is_compressed(options, largest):
    lowered = lower(Tied(), IDS, compile_specs=fp32_specs(**options))
    assert lowered.operators == ()
    assert stored_sizes(lowered.edge)[0] == largest
    first, second = (
        runtime.load_program(lowered.pte, engine=engine).run("forward", list(IDS))[0]
        for engine in ("reference", "openvino")
    )
    torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)


def test_a_compressed_table_is_read_by_both_ops():
    model = Tied()
    specs = fp32_specs(op_linear_quantizer_config=LINEAR)
    pte = lower(model, IDS, compile_specs=specs).pte
    with torch.no_grad():
        scale = model.table.weight.abs().amax(1, keepdim=True) / 127
        model.table.weight.copy_((model.table.weight / scale).round() * scale)
        expected = model(*IDS)
    result = runtime.load_program(pte, engine="reference").run("forward", list(IDS))[0]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_a_table_of_embeddings_alone_is_not_quantized():
    model = Tied()
    model.out = nn.Linear(64, 64, bias=False)
    lowered = lower(model, IDS, compile_specs=fp32_specs(op_linear_quantizer_config=LINEAR))
    assert stored_sizes(lowered.edge)[:2] == [SIZE * 4, SIZE]


def test_two_compressions_of_one_weight_are_refused():
    config = {**PALETTE, "op_type_configs": {"gather": {"nbits": 2}}}
    text = "different compressions of one weight: got 'p_out_weight', which is read by linear"
    with pytest.raises(OptionError, match=text):
        lower(Tied(), IDS, compile_specs=fp32_specs(weight_compression=config))
    config["op_name_configs"] = {"p_out_weight": {"nbits": 1}}
    lowered = lower(Tied(), IDS, compile_specs=fp32_specs(weight_compression=config))
    assert stored_sizes(lowered.edge)[0] == SIZE // 8


def test_weights_too_small_to_compress_may_be_asked_twice():
    config = _stage("Palettizer", nbits=4, weight_threshold=SIZE)
    config["op_type_configs"] = {"gather": {"nbits": 2, "weight_threshold": SIZE}}
    lowered = lower(Tied(), IDS, compile_specs=fp32_specs(weight_compression=config))
    assert lowered.operators == ()
    assert stored_sizes(lowered.edge)[0] == SIZE * 4


def test_a_weight_whose_channels_do_not_fit_the_groups_is_left_as_it_is():
    groups = {"granularity": "per_grouped_channel", "group_size": 16}
    config = _stage("Palettizer", nbits=4, enable_per_channel_scale=True, **groups)
    specs = fp32_specs(weight_compression=config)
    torch.manual_seed(0)
    model = nn.Linear(64, 120)
    lowered = lower(model, X, compile_specs=specs)
    assert stored_sizes(lowered.edge)[0] == 64 * 120 * 4
    result = runtime.load_program(lowered.pte, engine="reference").run("forward", list(X))[0]
    torch.testing.assert_close(result, model(*X), atol=1e-5, rtol=1e-5)
    (function,) = delegate_functions(lower(nn.Linear(64, 128), X, compile_specs=specs).edge)
    assert "constexpr_lut_to_dense" in {op.type for op in function.block.ops}


@pytest.mark.parametrize("size", [1, 2], ids=["numbers", "vectors"])
def test_scales_of_channels_are_in_the_table(size):
    config = {"nbits": 4, "enable_per_channel_scale": True, "cluster_dim": size}
    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    with torch.no_grad():
        model.weight *= torch.arange(1, 65)
    lowered = lower(
        model, X, compile_specs=fp32_specs(weight_compression=_stage("Palettizer", **config))
    )
    (function,) = delegate_functions(lowered.edge)
    found = [op.type for op in function.block.ops if op.type.startswith("constexpr")]
    assert found == ["constexpr_lut_to_dense"]
    result = runtime.load_program(lowered.pte, engine="reference").run("forward", list(X))[0]
    assert _relative(result, model) < 0.2 * size
    if size == 1:  # coremltools alone fails with vectors
        weight = torch.tensor(_palettized(model.weight.detach().numpy(), config))
        torch.testing.assert_close(result, X[0] @ weight.T + model.bias, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [{}, {"mode": "linear"}, {"granularity": "per_tensor"}],
    ids=["rows", "offset", "whole"],
)
def test_weights_of_eight_bits_have_no_sign_below_ios18(config):
    model = _network()
    results = []
    for target, expected in ((Opset.iOS17, "uint8"), (Opset.iOS18, "int8")):
        given = {"op_linear_quantizer_config": {**LINEAR, **config}}
        specs = fp32_specs(minimum_deployment_target=target, **given)
        lowered = lower(model, X, compile_specs=specs)
        (function,) = delegate_functions(lowered.edge)
        assert {_stored_type(op) for op in function.block.ops} == {None, expected}
        results += [
            runtime.load_program(lowered.pte, engine=engine).run("forward", list(X))[0]
            for engine in ("reference", "openvino")
        ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["linear", "linear_symmetric"])
@pytest.mark.parametrize("target", [Opset.iOS17, Opset.iOS18], ids=str)
def test_a_row_of_zeros_stays_one(mode, target):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight[3] = 0.0
    specs = fp32_specs(
        minimum_deployment_target=target, op_linear_quantizer_config={**LINEAR, "mode": mode}
    )
    result = runtime.load_program(lower(model, X, compile_specs=specs).pte, engine="reference").run(
        "forward", list(X)
    )[0]
    torch.testing.assert_close(result[:, 3], model.bias[3].expand(2))
    assert _relative(result, model) < 0.02


def _stored_type(op):
    """The type of a weight of 64 x 64 that an op dequantizes."""
    given = [*op.attributes.values(), *(one for each in op.inputs.values() for one in each)]
    types = [one.type for one in given if op.type.startswith("constexpr") and hasattr(one, "type")]
    return next((t.dtype.label for t in types if getattr(t, "shape", ()) == (64, 64)), None)


def _relative(result, model):
    return (result - model(*X)).norm() / model(*X).norm()


def _palettized(weight, config):
    """The weight of a layer that coremltools palettizes on its own."""
    ct = coremltools()
    spec = [ct.converters.mil.Builder.TensorSpec((2, weight.shape[1]))]

    @ct.converters.mil.Builder.program(input_specs=spec, opset_version=ct.target.iOS18)
    def program(x):
        return ct.converters.mil.Builder.linear(x=x, weight=weight)

    model = ct.convert(
        program,
        compute_precision=ct.precision.FLOAT32,
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    optimize = ct.optimize.coreml
    config = optimize.OptimizationConfig(global_config=optimize.OpPalettizerConfig(**config))
    dense = optimize.decompress_weights(optimize.palettize_weights(model, config))
    operations = dense._mil_program.functions["main"].operations
    return next(op.weight.val for op in operations if op.op_type == "linear")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op_linear_quantizer_config": BLOCKS}, "weights of 4 bits"),
        ({"weight_compression": GROUPS}, "a table per group of channels"),
        ({"weight_compression": _stage("Palettizer", nbits=3)}, "indices of 3 bits"),
        ({"weight_compression": _stage("Palettizer", nbits=4, cluster_dim=2)}, "tables of vectors"),
        (
            {"weight_compression": _stage("Palettizer", nbits=4, enable_per_channel_scale=True)},
            "a scale per channel",
        ),
        ({"weight_compression": [SPARSE, PALETTE]}, "several kinds for one weight"),
    ],
)
def test_a_target_that_is_too_low_is_refused(options, text):
    specs = fp32_specs(minimum_deployment_target=Opset.iOS17, **options)
    with pytest.raises(OptionError, match=f"got iOS17, expected iOS18 or later.*{text}"):
        CoreMLPartitioner(compile_specs=specs)
    program = torch.export.export(_network(), X).run_decompositions()
    with pytest.raises(OptionError, match=text):
        build_blob(program, CompileOptions.from_specs(specs))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"config": "x", **PALETTE}, "unknown key: got 'config', expected perhaps"),
        (_stage("Palettizer", nbit=4), "unknown key: got 'nbit', expected perhaps nbits"),
        (_stage("Paletizer", nbits=4), "not a kind of compression.*perhaps OpPalettizerConfig"),
        (_stage("Palettizer", lut_function="f"), "unknown key: got 'lut_function'"),
        ({"config_type": "OpPalettizerConfig"}, "nothing to do"),
        ({**PALETTE, "op_type_configs": {"conv": {"nbit": 2}}}, "perhaps nbits"),
        ({**PALETTE, "op_type_configs": ["conv"]}, "'op_type_configs' is a dictionary"),
        (
            {**PALETTE, "op_type_configs": {"conv": {**_stage("LinearQuantizer"), "dtype": "x"}}},
            "unknown key: got 'global_config'",
        ),
        (
            {**PALETTE, "op_type_configs": {"conv": {"config_type": "OpLinearQuantizerConfig"}}},
            "does one thing.*linear_quantize_weights, palettize_weights",
        ),
        ([], "no stage"),
        (["OpPalettizerConfig"], "a dictionary, or a list of them"),
    ],
)
def test_invalid_configurations_are_refused(value, text):
    with pytest.raises(OptionError, match=text):
        CoreMLBackend.generate_compile_specs(weight_compression=value)


def test_an_unknown_key_of_the_linear_quantizer_is_refused():
    with pytest.raises(OptionError, match="got 'granulraity', expected perhaps granularity"):
        CoreMLBackend.generate_compile_specs(op_linear_quantizer_config={"granulraity": "x"})


def test_a_value_that_coremltools_refuses_is_an_error():
    refused = _stage("Palettizer", nbits=5)
    specs = [CompileSpec("weight_compression", json.dumps([refused]).encode())]
    for make in (
        lambda: CoreMLBackend.generate_compile_specs(weight_compression=refused),
        lambda: CoreMLPartitioner(compile_specs=specs),
    ):
        with pytest.raises(
            OptionError, match=r"coremltools does not accept weight_compression.*nbits"
        ):
            make()


def test_the_compile_spec_format_is_stable():
    (spec,) = (
        s
        for s in CoreMLBackend.generate_compile_specs(weight_compression=PALETTE)
        if s.key == "weight_compression"
    )
    assert bytes(spec.value) == (
        b'[{"config_type": "OpPalettizerConfig", "global_config": {"nbits": 4}}]'
    )
    assert CompileOptions.from_specs([spec]).weight_compression == (PALETTE,)
    with pytest.raises(OptionError, match="a JSON list"):
        CompileOptions.from_specs([CompileSpec("weight_compression", b"{}")])


_EXPORT = """
import hashlib, sys, torch
from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from executorch.exir import to_edge_transform_and_lower

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
exported = torch.export.export(model.eval(), (torch.rand(2, 64),))
for config in (
    {"config_type": "OpPalettizerConfig", "global_config": {"mode": "kmeans", "nbits": 3}},
    {"config_type": "OpMagnitudePrunerConfig", "global_config": {"target_sparsity": 0.5}},
):
    specs = CoreMLBackend.generate_compile_specs(weight_compression=config)
    program = to_edge_transform_and_lower(
        exported, partitioner=[CoreMLPartitioner(compile_specs=specs)]
    ).to_executorch()
    sys.stdout.write(hashlib.sha256(program.buffer).hexdigest())
"""


def test_palettes_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("COREML_DELEGATE_COMPILED_CACHE", "off")
    torch.manual_seed(0)
    # About one of four tables of this size differs by a bit between one and two threads.
    layers = [layer for _ in range(8) for layer in (nn.Linear(88, 24), nn.Linear(24, 88))]
    specs = CoreMLBackend.generate_compile_specs(
        weight_compression=_stage("Palettizer", mode="kmeans", nbits=6)
    )

    def pte(threads):
        with threadpool_limits(threads, user_api="openmp"):
            return lower(nn.Sequential(*layers), (torch.ones(2, 88),), compile_specs=specs).pte

    assert pte(2) == pte(1)  # the first call loads the library whose threads are limited


@pytest.mark.slow
@pytest.mark.xdist_group("reproducible")
def test_two_processes_write_equal_bytes():
    def export(seed):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _EXPORT],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": str(seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = export(1)
    assert len(first) == 2 * len(hashlib.sha256().hexdigest())
    assert first == export(2)

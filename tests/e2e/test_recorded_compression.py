"""Programs with weights that ``coremltools.optimize.torch`` compressed, and recorded how."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.compressed import sizes_in, stored_sizes
from support.lowering import Lowered, fp32_specs, lower_core_aten, lower_unchecked
from support.partitioned import delegate_functions
from support.tolerances import SQNR_FP16, SQNR_FP32, SQNR_HALF, sqnr_db
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.ops.call import RECORDED_WEIGHT, target_name
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.patches.third_party import coremltools, quiet_import
from coreml_delegate.targets import Opset

ct = coremltools()
with quiet_import():
    from coremltools.optimize.torch.layerwise_compression import (
        LayerwiseCompressor,
        LayerwiseCompressorConfig,
    )
    from coremltools.optimize.torch.palettization import (
        DKMPalettizer,
        DKMPalettizerConfig,
        PostTrainingPalettizer,
        PostTrainingPalettizerConfig,
        SKMPalettizer,
        SKMPalettizerConfig,
    )
    from coremltools.optimize.torch.pruning import MagnitudePruner, MagnitudePrunerConfig
    from coremltools.optimize.torch.quantization import (
        PostTrainingQuantizer,
        PostTrainingQuantizerConfig,
    )

ENGINES = ("openvino", "reference")


class Net(nn.Module):
    """A convolution, and two linear layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.linear, self.tied = nn.Linear(16, 32), nn.Linear(16, 32, bias=False)
        self.tied.weight = self.linear.weight

    def forward(self, x):
        x = self.conv(x).relu().mean((2, 3))
        return self.linear(x) + self.tied(x).sigmoid()


def images():
    return (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)),)


def palettized(model, **options):
    config = PostTrainingPalettizerConfig.from_dict({"global_config": options})
    return PostTrainingPalettizer(model, config).compress()


def quantized(model, **options):
    config = PostTrainingQuantizerConfig.from_dict({"global_config": options})
    return PostTrainingQuantizer(model, config).compress()


def pruned(model):
    options = {"scheduler": {"begin_step": 0}, "target_sparsity": 0.5}
    pruner = MagnitudePruner(model, MagnitudePrunerConfig.from_dict({"global_config": options}))
    pruner.prepare(inplace=True)
    pruner.step()
    return pruner.finalize(inplace=True)


def by_sensitivity(model):
    model.tied = nn.Linear(16, 32, bias=False)  # coremltools fails at weights with two names
    options = {"n_bits": 4, "granularity": "per_grouped_channel", "group_size": 8}
    palettizer = SKMPalettizer(model, SKMPalettizerConfig.from_dict({"global_config": options}))
    data = [images()] * 2
    return palettizer.compress(data, loss_fn=lambda model, inputs: model(*inputs).square().mean())


def by_training(model):
    options = {"n_bits": 2, "milestone": 0, "weight_threshold": 0}
    palettizer = DKMPalettizer(model, DKMPalettizerConfig.from_dict({"global_config": options}))
    palettizer.prepare(inplace=True)
    model.train()
    palettizer.step()
    model(*images()).sum().backward()
    return palettizer.finalize(inplace=True)


def layer_by_layer(model, algorithm="gptq", **options):
    settings = {
        "layers": ["layers"],
        "global_config": {"algorithm": algorithm, **options},
        "calibration_nsamples": 8,
    }
    compressor = LayerwiseCompressor(model, LayerwiseCompressorConfig.from_dict(settings))
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(16, 16, generator=generator) for _ in range(8)]
    return compressor.compress(data, device="cpu")


class Layers(nn.Module):
    """Two linear layers, for compression layer by layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))

    def forward(self, x):
        return self.layers(x).tanh()


def finalized(compress, model=Net):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.ao, which coremltools uses
        return compress(model().eval()).eval()


def exported(model, inputs):
    return torch.export.export(model, inputs)


def lowered(model, inputs, target=Opset.iOS18, precision=Precision.FLOAT32, **options):
    specs = fp32_specs(minimum_deployment_target=target, compute_precision=precision)
    return lower_unchecked(model, inputs, compile_specs=specs, **options)


def constexprs(edge):
    return [
        op.type
        for main in delegate_functions(edge)
        for op in main.block.ops
        if op.type.startswith("constexpr_")
    ]


def converted(model, inputs, target, folder):
    """The decompressing ops of ``coremltools.convert``, and the sizes of its stored weights."""
    package = folder / "converted.mlpackage"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of coremltools, about itself
        converted = ct.convert(
            exported(model, inputs).run_decompositions({}),
            minimum_deployment_target=ct.target(int(target)),
            compute_precision=ct.precision.FLOAT32,
            package_dir=str(package),
            skip_model_load=True,
        )
    ops = converted._mil_program.functions["main"].operations
    (weights,) = Path(package).rglob("weight.bin")
    sizes = sizes_in("weight.bin", memoryview(weights.read_bytes()))
    names = [op.op_type for op in ops if op.op_type.startswith("constexpr_")]
    return names, sorted(sizes, reverse=True)


def assert_equals_eager(model, inputs, edge, sqnr=SQNR_FP32):
    with torch.no_grad():
        expected = model(*inputs).float().numpy()
    pte = edge.to_executorch().buffer
    for engine in ENGINES:
        (actual,) = runtime.load_program(pte, engine=engine).run("forward", list(inputs))
        assert sqnr_db(expected, actual.float().numpy()) > sqnr


def uncompressed(caplog):
    """The weights that warnings name, with the reasons."""
    text = " is not stored with its recorded compression: "
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return dict(message.split(text) for message in messages if text in message)


COMPRESSORS = {
    "palettes": lambda m: palettized(m, n_bits=4),
    "palettes of 3 bits": lambda m: palettized(m, n_bits=3),
    "palettes of 6 bits": lambda m: palettized(m, n_bits=6),
    "palettes of groups": lambda m: palettized(
        m, n_bits=2, granularity="per_grouped_channel", group_size=8
    ),
    "palettes with scales": lambda m: palettized(m, n_bits=4, enable_per_channel_scale=True),
    "palettes of integers": lambda m: palettized(m, n_bits=4, lut_dtype="int8"),
    "palettes of vectors": lambda m: palettized(m, n_bits=2, cluster_dim=2),
    "palettes by sensitivity": by_sensitivity,
    "palettes by training": by_training,
    "int8": lambda m: quantized(m, weight_dtype="int8"),
    "int8, one scale": lambda m: quantized(m, weight_dtype="int8", granularity="per_tensor"),
    "uint8, affine": lambda m: quantized(m, weight_dtype="uint8", quantization_scheme="affine"),
    "int4": lambda m: quantized(m, weight_dtype="int4"),
    "int4 of blocks": lambda m: quantized(
        m, weight_dtype="int4", granularity="per_block", block_size=8
    ),
    "sparse": pruned,
    "sparse palettes": lambda m: palettized(pruned(m), n_bits=4),
    "sparse int8": lambda m: quantized(pruned(m), weight_dtype="int8"),
}
BEFORE_IOS18 = ("palettes", "palettes of 6 bits", "int8", "int8, one scale", "sparse")
SAMPLE = {
    ("int4 of blocks", Opset.iOS18),
    ("sparse palettes", Opset.iOS18),
    ("palettes", Opset.iOS16),
}


def _cases():
    cases = [(name, Opset.iOS18) for name in COMPRESSORS]
    cases += [(name, Opset.iOS16) for name in BEFORE_IOS18]
    for name, target in cases:
        marks = [] if (name, target) in SAMPLE else [pytest.mark.slow]
        yield pytest.param(name, target, id=f"{name}, {target.name}", marks=marks)


@pytest.mark.parametrize(("name", "target"), list(_cases()))
def test_weights_are_stored_as_by_coremltools(name, target, tmp_path, caplog):
    model, inputs = finalized(COMPRESSORS[name]), images()
    edge = lowered(model, inputs, target).edge
    ops, sizes = converted(model, inputs, target, tmp_path)
    assert ops
    assert constexprs(edge) == ops
    assert stored_sizes(edge) == sizes
    assert uncompressed(caplog) == {}
    assert_equals_eager(model, inputs, edge)


BLOCKS = {"granularity": "per_block", "block_size": 8}
LAYERWISE = {
    "uint3": {"weight_dtype": "uint3"},
    "uint4": {"weight_dtype": "uint4"},
    "uint4 of blocks": {"weight_dtype": "uint4", **BLOCKS},
    "sparse": {"algorithm": "sparse_gpt", "target_sparsity": 0.5},
    "sparse uint4": {"algorithm": "sparse_gpt", "target_sparsity": 0.5, "weight_dtype": "uint4"},
}


@pytest.mark.share(5)
@pytest.mark.parametrize("name", LAYERWISE)
def test_compression_layer_by_layer(name, tmp_path, caplog):
    model = finalized(lambda m: layer_by_layer(m, **LAYERWISE[name]), Layers)
    inputs = (torch.randn(4, 16),)
    edge = lowered(model, inputs).edge
    ops, sizes = converted(model, inputs, Opset.iOS18, tmp_path)
    assert ops
    assert constexprs(edge) == ops
    assert stored_sizes(edge) == sizes
    assert uncompressed(caplog) == {}
    assert_equals_eager(model, inputs, edge)


@pytest.mark.slow
def test_tables_with_scales_of_blocks():
    """``coremltools.convert`` fails at them."""
    options = {"weight_dtype": "uint4", "enable_normal_float": True, **BLOCKS}
    model = finalized(lambda m: layer_by_layer(m, **options), Layers)
    inputs = (torch.randn(4, 16),)
    edge = lowered(model, inputs).edge
    assert constexprs(edge).count("constexpr_lut_to_dense") == 2
    assert_equals_eager(model, inputs, edge)


@pytest.mark.slow
def test_three_stages_of_one_weight():
    """``coremltools.convert`` fails at them."""
    model = finalized(lambda m: palettized(pruned(m), n_bits=4, lut_dtype="int8"))
    edge = lowered(model, images()).edge
    stages = ("lut_to_sparse", "sparse_blockwise_shift_scale", "sparse_to_dense")
    assert constexprs(edge) == [f"constexpr_{stage}" for stage in stages] * 2
    assert_equals_eager(model, images(), edge)


@pytest.mark.parametrize(
    ("compress", "target", "feature"),
    [
        pytest.param(COMPRESSORS["int4"], Opset.iOS17, "weights of 4 bits", id="int4"),
        pytest.param(
            COMPRESSORS["palettes of groups"],
            Opset.iOS17,
            "several lookup tables of a weight",
            id="groups",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            COMPRESSORS["sparse int8"],
            Opset.iOS17,
            "weights compressed twice",
            id="twice",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            COMPRESSORS["int8"],
            Opset.iOS15,
            "compressed weights",
            id="iOS15",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_target_that_is_too_old_is_a_warning(compress, target, feature, caplog):
    model = finalized(compress)
    edge = lowered(model, images(), target).edge
    reasons = uncompressed(caplog)
    assert len(reasons) == 2
    assert "conv.weight" in reasons
    assert all(reason.startswith(f"Core ML has {feature}") for reason in reasons.values())
    assert constexprs(edge) == []
    assert_equals_eager(model, images(), edge)


def test_without_a_target_the_oldest_is_chosen():
    for name, target in (("int8", Opset.iOS16), ("int4", Opset.iOS18)):
        model = finalized(COMPRESSORS[name])
        edge = lower_unchecked(model, images(), compile_specs=fp32_specs()).edge
        assert len(constexprs(edge)) == 2
        is_new = "constexpr_blockwise_shift_scale" in constexprs(edge)
        assert is_new == (target is Opset.iOS18)


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.FLOAT32])
def test_models_in_half_precision(precision, caplog):
    model = finalized(COMPRESSORS["palettes"])
    half, inputs = copy.deepcopy(model).half(), tuple(x.half() for x in images())
    edge = lowered(half, inputs, precision=precision).edge
    assert constexprs(edge) == ["constexpr_lut_to_dense"] * 2
    assert uncompressed(caplog) == {}
    with torch.no_grad():
        expected = copy.deepcopy(half).float()(*(x.float() for x in inputs)).numpy()
    for engine in ENGINES:
        program = runtime.load_program(edge.to_executorch().buffer, engine=engine)
        (actual,) = program.run("forward", list(inputs))
        bound = SQNR_HALF[torch.float16] if precision is Precision.FLOAT32 else SQNR_FP16
        assert sqnr_db(expected, actual.float().numpy()) > bound


class Words(nn.Module):
    """An embedding whose weight is the output layer too."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.words(tokens).tanh())


def test_an_embedding_that_is_the_output_layer_is_stored_once(caplog):
    model = finalized(COMPRESSORS["palettes"], Words)
    inputs = (torch.tensor([[0, 5, 63]]),)
    edge = lowered(model, inputs).edge
    assert set(constexprs(edge)) == {"constexpr_lut_to_dense"}
    sizes = stored_sizes(edge)
    assert max(sizes) == 64 * 16 // 2
    assert sizes.count(max(sizes)) == 1
    assert uncompressed(caplog) == {}
    assert_equals_eager(model, inputs, edge)


class Branches(nn.Module):
    """Linear layers in both branches, one of them outside as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = torch.cond(x.sum() > 0, self.first, self.second, (x,))
        return self.first(y)


def test_weights_of_branches(caplog):
    model = finalized(COMPRESSORS["int8"], Branches)
    for sign in (1, -1):
        inputs = (sign * torch.rand(2, 16),)
        edge = lowered(model, inputs).edge
        assert constexprs(edge).count("constexpr_blockwise_shift_scale") == 2
        assert stored_sizes(edge)[0] == 16 * 16
        assert_equals_eager(model, inputs, edge)
    assert uncompressed(caplog) == {}


def test_a_weight_that_was_changed_stays_as_it_is(caplog):
    model = finalized(COMPRESSORS["int8"])
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] += 0.1
    edge = lowered(model, images()).edge
    assert list(uncompressed(caplog)) == ["conv.weight"]
    assert "changed" in uncompressed(caplog)["conv.weight"]
    assert len(constexprs(edge)) == 1
    assert_equals_eager(model, images(), edge)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("int8", {"quantization_scale": None}, "its record lacks quantization_scale"),
        ("int8", {"compression_type": None}, "its record lacks compression_type"),
        ("int8", {"compression_type": torch.tensor([9])}, "9 is not a valid Stage"),
        ("int8", {"quantization_n_bits": torch.tensor(16)}, "integers of 16 bits"),
        ("int8", {"quantization_scale": torch.ones(5, 1, 1, 1)}, r"\[5, 1, 1, 1\] does not fit"),
        ("palettes", {"lut": torch.ones(1, 1, 1, 1, 512, 1)}, "lookup table"),
        ("palettes", {"lut": torch.ones(16)}, "lookup table"),
        ("palettes", {"lut": torch.ones(1, 1, 1, 1, 16, 5)}, "lookup table"),
        (
            "palettes",
            {"lut": torch.ones(1, 1, 1, 1, 16, 2), "vector_axis": torch.tensor(4)},
            "lookup table",
        ),
    ],
)
def test_a_record_that_does_not_fit_is_a_warning(name, changes, reason, caplog):
    model = finalized(COMPRESSORS[name])
    for key, value in changes.items():
        buffer = f"_COREML_/weight/{key}"
        if value is None:
            del model.conv._buffers[buffer]
        else:
            model.conv.register_buffer(buffer, value)
    partitioner = CoreMLPartitioner()
    program = partitioner.transform_for_pre_decomposition(exported(model, images()))
    assert list(uncompressed(caplog)) == ["conv.weight"]
    assert re.search(reason, uncompressed(caplog)["conv.weight"])
    calls = [target_name(node.target) for node in program.graph.nodes]
    assert calls.count(RECORDED_WEIGHT) == 2, "both uses of the other weight"


def test_a_decomposed_program_is_a_warning(caplog):
    model = finalized(COMPRESSORS["int8"])
    edge = lower_core_aten(model, images()).edge
    assert set(uncompressed(caplog)) == {"conv.weight", "linear.weight", "tied.weight"}
    assert constexprs(edge) == []


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x):
        return nn.functional.conv2d(x, self.conv.weight * 2)


def test_a_weight_that_is_only_computed_with_is_a_warning(caplog):
    model = finalized(COMPRESSORS["int8"], Computed)
    edge = lowered(model, images()).edge
    assert list(uncompressed(caplog)) == ["conv.weight"]
    assert_equals_eager(model, images(), edge)


def test_weights_as_inputs_are_a_warning(caplog):
    model = finalized(COMPRESSORS["int8"])
    edge = lowered(model, images(), take_over_constant_data=False).edge
    assert len(uncompressed(caplog)) == 2
    assert constexprs(edge) == []
    assert_equals_eager(model, images(), edge)


class OnTheCpu(nn.Module):
    """A weight that an op without a counterpart in Core ML reads, beside a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x) + torch.nextafter(x, self.linear.weight)


def test_calls_on_the_cpu_read_floats():
    model = finalized(COMPRESSORS["int8"], OnTheCpu)
    inputs = (torch.randn(16, 16),)
    result = lowered(model, inputs)
    assert result.operators == ("aten.nextafter.default",)
    assert constexprs(result.edge) == ["constexpr_blockwise_shift_scale"]
    assert_equals_eager(model, inputs, result.edge)


def test_layers_that_the_user_leaves_out_read_floats(caplog):
    model = finalized(COMPRESSORS["int8"])
    result = lowered(model, images(), skip_modules=["linear"])
    assert "aten.linear.default" in result.operators
    assert not any("recorded" in operator for operator in result.operators)
    assert len(constexprs(result.edge)) == 2
    assert uncompressed(caplog) == {}
    assert_equals_eager(model, images(), result.edge)


def test_the_program_has_no_records():
    model = finalized(COMPRESSORS["palettes"])
    program = exported(model, images())
    names = set(program.state_dict)
    partitioner = CoreMLPartitioner(
        compile_specs=fp32_specs(minimum_deployment_target=Opset.iOS18), lower_full_graph=True
    )
    config = EdgeCompileConfig(_check_ir_validity=True)
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=config)
    assert set(program.state_dict) == names, "the exported program is unchanged"
    assert edge.exported_program().state_dict.keys() == set()
    assert Lowered.of(edge, partitioner).operators == ()

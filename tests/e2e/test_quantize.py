"""Models compressed by torchao's ``quantize_``, lowered, stored and run."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.compressed import (
    CodebookWeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    compressed,
    quantize_,
    stored_sizes,
    tokens,
    words,
)
from support.lowering import fp32_specs, lower, reasons
from support.partitioned import delegate_functions
from support.tolerances import ATOL_RTOL, SQNR_FP16, sqnr_db
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import OptionError
from coreml_delegate.ops.call import DEQUANTIZE_AFFINE, DEQUANTIZE_CODEBOOK
from coreml_delegate.targets import Opset

ENGINES = ("reference", "openvino")
ATOL, RTOL = ATOL_RTOL["fp32"]
WEIGHTS = 64 * 128
SCALE = torch.float32.itemsize


def _assert_runs(lowered, module, inputs):
    expected = module(*inputs).detach()
    pte = lowered.pte
    for engine in ENGINES:
        (actual,) = runtime.load_program(pte, engine=engine).run("forward", list(inputs))
        torch.testing.assert_close(actual, expected, atol=ATOL, rtol=RTOL)


def _int(bits, granularity, mapping=MappingType.SYMMETRIC, **options):
    dtype = getattr(torch, f"int{bits}")
    return IntxWeightOnlyConfig(dtype, granularity, mapping, **options)


def _table(bits, block_size):
    return CodebookWeightOnlyConfig(getattr(torch, f"uint{bits}"), block_size)


GROUPS, ROWS = PerGroup(32), PerAxis(0)
# name -> (configuration, bits stored, target)
TAKEN = {
    "int4 groups": (_int(4, GROUPS), 4, "iOS18"),
    "int4 rows": (_int(4, ROWS), 4, "iOS18"),
    "int4 groups, zero points": (_int(4, GROUPS, MappingType.ASYMMETRIC), 4, "iOS18"),
    "int8 groups": (_int(8, GROUPS), 8, "iOS18"),
    "int8 rows": (_int(8, ROWS), 8, "iOS16"),
    "int8 rows, zero points": (_int(8, ROWS, MappingType.ASYMMETRIC), 8, "iOS16"),
    "int8 rows, no clipping": (
        _int(8, ROWS, MappingType.SYMMETRIC_NO_CLIPPING_ERR),
        8,
        "iOS16",
    ),
    "int8 rows, bfloat16 scales": (_int(8, ROWS, scale_dtype=torch.bfloat16), 8, "iOS16"),
    # Tables of the products, where they take less than the bits that they save.
    "int2 rows": (_int(2, ROWS), 2, "iOS18"),
    "int2 rows, zero points": (_int(2, ROWS, MappingType.ASYMMETRIC), 2, "iOS18"),
    # Core ML has integers of 4 and 8 bits.
    "int2 groups": (_int(2, GROUPS), 4, "iOS18"),
    "int3 rows": (_int(3, ROWS), 4, "iOS18"),
    "int5 groups": (_int(5, GROUPS), 8, "iOS18"),
    "int7 rows, zero points": (_int(7, ROWS, MappingType.ASYMMETRIC), 8, "iOS16"),
    **{f"uint{b} tables": (_table(b, [16, -1]), b, "iOS18") for b in (1, 2, 3, 4, 6, 8)},
    # ... and indices of 1, 2, 3, 4, 6 and 8.
    "uint5 tables": (_table(5, [32, -1]), 6, "iOS18"),
    "uint7 tables": (_table(7, [32, -1]), 8, "iOS18"),
    "uint3 tables of columns": (_table(3, [-1, 16]), 3, "iOS18"),
    "uint3 one table": (_table(3, [-1, -1]), 3, "iOS18"),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("name", TAKEN)
def test_weights_stay_compressed(name):
    config, bits, target = TAKEN[name]
    module = compressed(config)
    lowered = lower(module, tokens())
    assert lowered.operators == ()
    (partition,) = lowered.report.partitions
    assert partition.target == target
    _assert_runs(lowered, module, tokens())
    sizes = stored_sizes(lowered.edge)
    assert sizes[:2] == [WEIGHTS * bits // 8] * 2
    # Nothing else is of that size: what is left are scales, zero points, tables and the bias.
    assert sum(sizes[2:]) < 2 * WEIGHTS


@pytest.mark.slow
def test_the_report_names_the_op_that_needs_the_target():
    lowered = lower(compressed(_int(4, GROUPS)), tokens())
    assert lowered.report.partitions[0].demanded_by == (
        f"{DEQUANTIZE_AFFINE} with weights of 4 bits",
    )
    lowered = lower(compressed(_int(8, GROUPS)), tokens())
    assert lowered.report.partitions[0].demanded_by == (
        f"{DEQUANTIZE_AFFINE} with a scale per block of [1, 32]",
    )
    lowered = lower(compressed(_table(2, [16, -1])), tokens())
    assert lowered.report.partitions[0].demanded_by == (DEQUANTIZE_CODEBOOK,)


def test_a_later_target_is_kept():
    specs = fp32_specs(minimum_deployment_target=Opset.iOS26)
    module = compressed(_int(8, ROWS))
    lowered = lower(module, tokens(), compile_specs=specs)
    assert lowered.report.partitions[0].target == "iOS26"
    _assert_runs(lowered, module, tokens())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (_int(4, ROWS), "with weights of 4 bits needs iOS18, the deployment target is iOS17"),
        (_int(8, GROUPS), "with a scale per block of [1, 32] needs iOS18"),
        (_table(2, [16, -1]), f"{DEQUANTIZE_CODEBOOK} needs iOS18"),
    ],
)
def test_a_target_that_is_too_low_is_an_error_with_a_remedy(config, text):
    specs = fp32_specs(minimum_deployment_target=Opset.iOS17)
    with pytest.raises(OptionError) as caught:
        lower(compressed(config), tokens(), compile_specs=specs)
    for part in (text, "minimum_deployment_target=ct.target.iOS18", "CoreMLPartitioner"):
        assert part in str(caught.value)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_half_precision_models_are_lowered(dtype, kept):
    module = compressed(_int(4, GROUPS), words().to(dtype))
    lowered = lower(module, tokens())
    assert stored_sizes(lowered.edge)[:2] == [WEIGHTS // 2] * 2
    (actual,) = runtime.load_program(lowered.pte).run("forward", list(tokens()))
    expected = module(*tokens()).detach().float()
    assert actual.dtype is dtype
    # Each result is rounded to so many bits, worth 6 dB each, and so are the parameters of eager.
    assert sqnr_db(expected.numpy(), actual.float().numpy()) > 6 * (kept - 2)


def test_fp16_arithmetic():
    module = compressed(_int(4, GROUPS))
    lowered = lower(module, tokens(), compile_specs=CoreMLBackend.generate_compile_specs())
    assert stored_sizes(lowered.edge)[:2] == [WEIGHTS // 2] * 2
    for engine in ENGINES:
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", list(tokens()))
        assert sqnr_db(module(*tokens()).detach().numpy(), actual.numpy()) > SQNR_FP16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 128)
        self.head = nn.Linear(128, 64, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight
        return self

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


@pytest.mark.share(2)
@pytest.mark.parametrize("config", [_int(8, ROWS), _int(4, GROUPS), _table(4, [16, -1])])
@pytest.mark.parametrize("again", [False, True], ids=["as torchao leaves them", "tied again"])
def test_tied_weights_are_stored_once(config, again):
    module = compressed(config, Tied().eval())
    if again:
        module.tie()
    lowered = lower(module, tokens())
    assert lowered.operators == ()
    _assert_runs(lowered, module, tokens())
    sizes = stored_sizes(lowered.edge)
    assert sizes[0] >= WEIGHTS // 2
    assert sum(sizes[1:]) < WEIGHTS // 2


def test_dequantization_on_the_cpu_is_decomposed():
    module = compressed(_int(4, GROUPS, MappingType.ASYMMETRIC))
    lowered = lower(module, tokens(), skip_modules=["1"])
    assert DEQUANTIZE_AFFINE not in lowered.operators
    assert "aten.linear.default" not in {op for p in lowered.report.partitions for op, _ in p.ops}
    assert "skip_modules" in " ".join(reasons(lowered.report).values())
    _assert_runs(lowered, module, tokens())


def test_partition_limits_keep_ops_that_only_core_ml_runs():
    module = compressed(_int(4, GROUPS))
    lowered = lower(module, tokens(), min_partition_nodes=100, skip_modules=["1"])
    assert [p.tag for p in lowered.report.partitions]
    _assert_runs(lowered, module, tokens())


@pytest.mark.slow
def test_constants_outside():
    for config in (_int(8, ROWS), _table(4, [16, -1])):
        module = compressed(config)
        _assert_runs(lower(module, tokens(), take_over_constant_data=False), module, tokens())


def test_the_first_example_of_the_documentation():
    eager_model = words()
    # Quantize embeddings with 8-bits, per channel
    embedding_config = IntxWeightOnlyConfig(
        weight_dtype=torch.int8,
        granularity=PerAxis(0),
    )
    quantize_(
        eager_model,
        embedding_config,
        lambda m, fqn: isinstance(m, torch.nn.Embedding),
    )

    # Quantize linear layers with 4-bits, per-group
    linear_config = IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=PerGroup(32),
    )
    quantize_(
        eager_model,
        linear_config,
    )
    lowered = lower(eager_model, tokens())
    _assert_runs(lowered, eager_model, tokens())
    assert stored_sizes(lowered.edge)[:2] == [WEIGHTS, WEIGHTS // 2]


def test_the_second_example_of_the_documentation():
    eager_model = words()
    quant_config = CodebookWeightOnlyConfig(
        dtype=torch.uint3,
        # There is one LUT per 16 rows
        block_size=[16, -1],
    )

    quantize_(
        eager_model,
        quant_config,
        lambda m, fqn: isinstance(m, torch.nn.Embedding) or isinstance(m, torch.nn.Linear),  # noqa: SIM101 - as printed
    )
    lowered = lower(eager_model, tokens())
    _assert_runs(lowered, eager_model, tokens())


def test_an_explicit_target_as_the_documentation_has_it():
    module = compressed(_int(4, GROUPS))
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(
            minimum_deployment_target=ct.target.iOS18
        )
    )
    edge = to_edge_transform_and_lower(
        torch.export.export(module, tokens()), partitioner=[partitioner]
    )
    (function,) = delegate_functions(edge)
    assert "constexpr_blockwise_shift_scale" in {op.type for op in function.block.ops}

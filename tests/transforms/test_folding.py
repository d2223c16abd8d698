"""Constant folding: PyTorch computes calls on constants that Core ML cannot compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs, lower_unchecked
from support.partitioned import assert_equal_eager, delegate_functions
from torch import nn
from torch.export import ExportedProgram
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.transforms import constant_folding
from coreml_delegate.transforms.constant_folding import compute_sizes, fold_constants


class Standardized(nn.Conv2d):
    """Weight standardization, as in normalizer-free networks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) / (variance + 1e-5).sqrt()
        return nn.functional.conv2d(x, weight, self.bias)


class Normalized(nn.Conv2d):
    """The same by a normalization, whose results are several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(flat, None, None, training=True, eps=1e-6)
        return nn.functional.conv2d(x, weight.reshape_as(self.weight), self.bias)


class Reshaped(nn.Conv1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv1d(x, self.weight.flatten(1).unsqueeze(1), groups=4)


class Shared(nn.Module):
    """One computed weight for two calls, and for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(4, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.direction / self.direction.norm()
        y = nn.functional.conv1d(nn.functional.conv1d(x, weight), weight)
        return y + weight.sum()


LINE, IMAGE = (2, 4, 9), (2, 4, 9, 8)
MODULES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "weight norm": (lambda: weight_norm(nn.Conv1d(4, 6, 3)), LINE),
    "of positions": (lambda: weight_norm(nn.Conv1d(4, 6, 3), dim=2), LINE),
    "transposed": (lambda: weight_norm(nn.ConvTranspose1d(4, 6, 4, 2)), LINE),
    "spectral norm": (lambda: spectral_norm(nn.Conv2d(4, 6, 3)), IMAGE),
    "standardized": (lambda: Standardized(4, 6, 3), IMAGE),
    "normalized": (lambda: Normalized(4, 6, 3), IMAGE),
    "reshaped": (lambda: Reshaped(1, 4, 3), LINE),
    "shared": (Shared, LINE),
}


def lowered(module: nn.Module, x: torch.Tensor, **options: Any) -> tuple[CoreMLPartitioner, Any]:
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), **options)
    exported = torch.export.export(module, (x,))
    return partitioner, to_edge_transform_and_lower(exported, partitioner=[partitioner])


@pytest.mark.share(3)
@pytest.mark.parametrize("name", MODULES)
def test_weights_computed_from_parameters_are_folded(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(shape)
    partitioner, edge = lowered(module, x)
    assert partitioner.report.undelegated == ()
    assert_equal_eager(edge.to_executorch().buffer, module, (x,))
    (function,) = delegate_functions(edge)
    # Nothing computes them when the program runs.
    convolutions = {"conv", "conv_transpose", "const", "add", "expand_dims", "squeeze"}
    assert {op.type for op in function.block.ops} <= convolutions


def test_lowering_does_not_change_the_parameters() -> None:
    torch.manual_seed(0)
    module, x = weight_norm(nn.Conv1d(4, 6, 3)).eval(), torch.randn(LINE)
    exported = torch.export.export(module, (x,))
    blobs = [
        to_edge_transform_and_lower(exported, partitioner=[CoreMLPartitioner()])
        .to_executorch()
        .buffer
        for _ in range(2)
    ]
    assert blobs[0] == blobs[1]
    torch.testing.assert_close(exported.module()(x), module(x))


def test_convolutions_with_weights_computed_from_inputs_stay_on_the_cpu() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv1d(x, self.weight * x.mean())

    partitioner, _ = lowered(Dynamic(), torch.randn(LINE))
    (left,) = partitioner.report.undelegated
    assert left.op == "aten.convolution.default"
    assert str(left.reason) == "'weight' is computed, Core ML takes a constant"


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "ops", [["aten.mul.Tensor"], ["aten.conv1d.default", "aten.convolution.default"]]
)
def test_a_convolution_kept_on_the_cpu_takes_the_folded_weight(ops: list[str]) -> None:
    """The calls that made it are gone; a convolution on the CPU takes the constant."""
    torch.manual_seed(0)
    module, x = weight_norm(nn.Conv1d(4, 6, 3)).eval(), torch.randn(LINE)
    partitioner, edge = lowered(module, x, skip_ops_for_coreml_delegation=ops)
    left = {node.op for node in partitioner.report.undelegated}
    assert left == set(ops) & {"aten.conv1d.default"}
    assert_equal_eager(edge.to_executorch().buffer, module, (x,))


def test_parameters_without_users_are_not_stored() -> None:
    torch.manual_seed(0)
    plain, x = nn.Conv1d(32, 64, 9).eval(), torch.randn(1, 32, 32)
    stored = len(lowered(plain, x)[1].to_executorch().buffer)
    normed = len(lowered(weight_norm(plain), x)[1].to_executorch().buffer)
    assert normed < 1.05 * stored


class Tables(nn.Module):
    """Constants by ops that Core ML lacks, of which ExecuTorch has no kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 2, 5, 5))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.generator = nn.Parameter(torch.randn(9, 9) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = tuple(x.shape[-2:])
        resized = nn.functional.interpolate(self.positions, size, mode="bicubic", antialias=True)
        table = (torch.arange(9, dtype=torch.float64) / 10000**0.5).sin().float()
        window = torch.zeros(9)
        window[1:] = torch.hamming_window(8)
        hashed = (torch.arange(9) * 2654435761 % 1000).float() / 1000
        spectrum = torch.fft.fft(window).abs()
        x = x * self.scale.erf() + resized + table * window + hashed + spectrum
        rows, columns = torch.tril_indices(7, 9, -1)
        return (x @ torch.matrix_exp(self.generator))[..., rows, columns]


def test_whatever_the_op_constants_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module, x = Tables().eval(), torch.randn(1, 2, 7, 9)
    partitioner, edge = lowered(module, x)
    assert partitioner.report.undelegated == ()
    assert partitioner.report.folds == ()
    # The scalar is folded by coremltools, in Python's floats.
    assert not any("Saving value type" in text for text in caplog.messages)
    assert_equal_eager(edge.to_executorch().buffer, module, (x,))


def test_constants_are_computed_in_the_dtype_of_the_model() -> None:
    torch.manual_seed(0)
    module, x = orthogonal(nn.Linear(6, 6, dtype=torch.float64)), torch.randn(2, 6)

    def function(x: torch.Tensor) -> torch.Tensor:
        half = torch.arange(2048, 2054, dtype=torch.float16) * torch.hamming_window(6).half()
        return x @ module.weight.float() + half.float()

    program = CoreMLPartitioner().transform_for_pre_decomposition(exported(function, x))
    weight, half = sorted(folded(program).values(), key=torch.Tensor.dim, reverse=True)
    assert torch.equal(weight, module.weight.float())
    rounded = torch.arange(2048, 2054, dtype=torch.float16) * torch.hamming_window(6).half()
    assert torch.equal(half, rounded.float())


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, **dict(self.named_buffers()))


def exported(
    function: Callable[..., Any], *inputs: torch.Tensor, **buffers: torch.Tensor
) -> ExportedProgram:
    return torch.export.export(Function(function, **buffers).eval(), inputs)


def folded(program: ExportedProgram) -> dict[str, torch.Tensor]:
    prefix = "coreml_delegate_folded_"
    names = program.graph_signature.lifted_tensor_constants
    return {n.removeprefix(prefix): program.constants[n] for n in names if n.startswith(prefix)}


def all_folded(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Fold as if Core ML took no op at all."""
    return folded(fold_constants(program, lambda calls, _: calls))


X, TABLE = torch.ones(2, 4), torch.arange(4.0)


def test_what_does_not_follow_from_constants_is_not_folded() -> None:
    def function(x: torch.Tensor, state: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        read = state * 2
        state.add_(1)
        scales = (0.5, 0, -128, 127, torch.int8)
        weight = torch.ops.quantized_decomposed.dequantize_per_tensor(codes.flip(0), *scales)
        # A call that unpacks what is dequantized is no value of its own.
        return x + torch.rand(4).abs() + read + weight.neg() + torch.dropout(x, 0.5, True)

    codes = torch.ones(4, dtype=torch.int8)
    assert all_folded(exported(function, X, state=TABLE.clone(), codes=codes)) == {}


def test_only_results_are_stored_and_sources_that_nothing_else_uses_are_not() -> None:
    def function(x: torch.Tensor, table: torch.Tensor, kept: torch.Tensor) -> Any:
        inner = torch.dropout((table + kept).exp(), 0.5, False)
        return x * inner.sum(), x + inner.neg().double().float(), x - kept

    program = exported(function, X, table=TABLE, kept=TABLE + 1)
    whole = fold_constants(program, lambda calls, _: calls)
    values = folded(whole)
    inner = (2 * TABLE + 1).exp()
    assert len(values) == 2
    assert any(torch.equal(value, inner.sum()) for value in values.values())
    assert any(torch.equal(value, -inner) for value in values.values())
    assert whole.state_dict.keys() == {"kept"}
    assert program.state_dict.keys() == {"table", "kept"}  # the program itself is left as it is
    for got, want in zip(whole.module()(X), program.module()(X), strict=True):
        assert torch.equal(got, want)


def test_a_result_that_is_an_output_keeps_its_name() -> None:
    program = exported(lambda x, table: (x + 1, torch.logcumsumexp(table, 0)), X, table=TABLE)
    whole = fold_constants(program, lambda calls, _: calls)
    assert whole.graph_signature.user_outputs == program.graph_signature.user_outputs
    assert torch.equal(whole.module()(X)[1], torch.logcumsumexp(TABLE, 0))


def test_what_core_ml_computes_stays_a_call() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        rows, _ = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        wide = table.double().exp().float().expand(2, 4)  # only what is fp64 is folded
        return (x.unsqueeze(1) + rows.type_as(x) + table.neg().half()).where(mask, 0) + wide[0]

    program = CoreMLPartitioner().transform_for_pre_decomposition(
        exported(function, X, table=TABLE)
    )
    (value,) = folded(program).values()
    assert torch.equal(value, TABLE.double().exp().float())


def test_numbers_beyond_fp32_are_those_of_pytorch() -> None:
    """Infinite or zero in fp32, and of all their digits where the program computes in fp64."""

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("wide", torch.tensor([1e300, 1e-300, 0.1], dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scaled = x * 1e300, x * 1e-50, x < 1e39, x == 0.1
            near_one = (self.wide * torch.tensor([1e-300, 1e300, 10.0])).float()
            return (*scaled, x + self.wide.float(), x * near_one, x.double() * self.wide)

    module, x = Numbers(), torch.tensor([0.1, -2.0, 3e5])
    partitioner, edge = lowered(module, x)
    assert [node.op for node in partitioner.report.undelegated] == ["aten.mul.Tensor"]
    results = runtime.load_program(edge.to_executorch().buffer).run("forward", [x])
    torch.testing.assert_close(tuple(results), module(x), rtol=1e-6, atol=0.0)


def test_large_values_are_told_and_larger_ones_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Windows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            twice = torch.cat((x, x), 1) * torch.hamming_window(16)
            return twice[:, 8:] + torch.hamming_window(8)

    monkeypatch.setattr(constant_folding, "_NOTED_GROWTH", 31)
    monkeypatch.setattr(constant_folding, "_MAX_GROWTH", 63)
    with caplog.at_level(logging.WARNING, "coreml_delegate.transforms"):
        report = CoreMLPartitioner().plan(torch.export.export(Windows(), (torch.randn(2, 8),)))
    (fold,) = report.folds
    assert (fold.tensor, fold.growth) == ("float32[8]", 32)
    assert f"{fold.name}  float32[8]  32 B more" in str(report)
    assert any("makes the program 0.0 MB larger" in text for text in caplog.messages)
    (left,) = report.undelegated
    assert "depends only on constants, but would make the program" in str(left.reason)


def test_what_pytorch_cannot_compute_says_so() -> None:
    program = exported(lambda x: x @ torch.linalg.eigh(torch.full((4, 4), torch.nan))[1], X)
    report = CoreMLPartitioner().plan(program)
    (reason,) = {str(node.reason) for node in report.undelegated if "eigh" in node.op}
    assert "it depends only on constants, but PyTorch fails: linalg.eigh" in reason


def _sizes_of_values(x: torch.Tensor) -> dict[str, torch.Tensor]:
    flags = torch.tensor([1, 0, 1, 1, 0, 0])
    numbers = torch.tensor([1, 1, 5, 0, 2, 4, 3])
    mask = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 1, 0]]) > 0
    return {
        "nonzero": x[:, torch.nonzero(flags).flatten()] * 2,
        "mask": x[:, flags > 0],
        "mask of rank 2": x[mask] + 1,
        "masked_select": torch.masked_select(x, flags > 0) * 2,
        "bincount": x * torch.bincount(numbers),
        "unique": x * torch.unique(numbers).float(),
        "of another": x[:, torch.unique(torch.nonzero(flags) // 2)],
        "repeat_interleave": x.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 1]), 1),
        "constant": torch.nonzero(flags),
    }


def test_sizes_that_depend_on_values_of_constants() -> None:
    module, x = Function(_sizes_of_values), torch.linspace(-1.0, 1.0, 12).reshape(2, 6)
    lowered = lower_unchecked(module, (x,))
    assert not lowered.report.undelegated
    for engine in ("reference", "openvino"):
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", [x])
        for result, (name, expected) in zip(results, module(x).items(), strict=True):
            torch.testing.assert_close(result, expected, msg=name)


def test_sizes_that_depend_on_values_of_inputs_stay() -> None:
    program = torch.export.export(Function(lambda x: torch.nonzero(x)), (torch.eye(3),))
    assert compute_sizes(program) is program

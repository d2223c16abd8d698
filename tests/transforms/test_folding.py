"""Arguments that Core ML wants constant, where a model computes them of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs
from support.partitioned import assert_equal_eager, delegate_functions
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from coreml_delegate import CoreMLPartitioner


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


@pytest.mark.parametrize(
    "ops", [["aten.mul.Tensor"], ["aten.conv1d.default", "aten.convolution.default"]]
)
def test_a_convolution_kept_on_the_cpu_takes_the_folded_weight(ops: list[str]) -> None:
    """The calls that made it are gone; a convolution on the CPU takes the constant."""
    torch.manual_seed(0)
    module, x = weight_norm(nn.Conv1d(4, 6, 3)).eval(), torch.randn(LINE)
    partitioner, edge = lowered(module, x, skip_ops_for_coreml_delegation=ops)
    left = {node.op for node in partitioner.report.undelegated}
    assert left == set(ops) & {"aten.convolution.default"}
    assert_equal_eager(edge.to_executorch().buffer, module, (x,))


def test_parameters_without_users_are_not_stored() -> None:
    torch.manual_seed(0)
    plain, x = nn.Conv1d(32, 64, 9).eval(), torch.randn(1, 32, 32)
    stored = len(lowered(plain, x)[1].to_executorch().buffer)
    normed = len(lowered(weight_norm(plain), x)[1].to_executorch().buffer)
    assert normed < 1.05 * stored

"""Random numbers drawn inside a delegate: their distribution, and that they are drawn anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.lowering import fp32_specs
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime

SIZE = 20_000


class Draws(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.draw(x) + x, self.draw(x) + x


@pytest.mark.parametrize("engine", ["openvino", "reference"])
@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda x: torch.randn(x.shape), 0.0, 1.0),
        (torch.randn_like, 0.0, 1.0),
        (torch.rand_like, 0.5, 12**-0.5),
        (lambda x: torch.randn(x.shape, generator=None), 0.0, 1.0),
        (lambda x: torch.rand(x.shape, generator=None), 0.5, 12**-0.5),
    ],
    ids=["randn", "randn_like", "rand_like", "randn of None", "rand of None"],
)
def test_distribution(
    draw: Callable[[torch.Tensor], torch.Tensor], mean: float, deviation: float, engine: str
) -> None:
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), strict=True)
    edge = to_edge_transform_and_lower(
        torch.export.export(Draws(draw), (torch.zeros(SIZE),)),
        partitioner=[partitioner],
        # The ops that take a tensor for its shape are not in core ATen, nor do they decompose.
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    program = runtime.load_program(edge.to_executorch().buffer, engine=engine)
    one, two = program.run("forward", [torch.zeros(SIZE)])
    (three, _) = program.run("forward", [torch.zeros(SIZE)])
    for sample in (one, two, three):
        # Five standard errors.
        assert abs(sample.mean().item() - mean) < 5 * deviation / SIZE**0.5
        assert sample.std().item() == pytest.approx(deviation, rel=0.03)
    assert not torch.equal(one, two)
    assert not torch.equal(one, three)

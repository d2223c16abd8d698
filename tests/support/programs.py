"""Small programs in ``.pte`` form, exported by ExecuTorch itself, with their modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from torch import nn

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A module, the inputs it is exported with, and further inputs to run it on."""

    name: str
    module: Callable[[], nn.Module]
    example: Tensors
    runs: tuple[Tensors, ...] = ()
    dynamic: tuple[dict[int, torch.export.Dim], ...] | None = None
    config: ExecutorchBackendConfig | None = None

    @property
    def inputs(self) -> tuple[Tensors, ...]:
        return (self.example, *self.runs)


class Arithmetic(nn.Module):
    def forward(self, x, y):
        return x + 2 * y, x > y, (x @ y.T).sum(dim=1)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.linear = nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.linear(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)).softmax(-1)


class SeveralOutputs(nn.Module):
    def forward(self, x):
        values, indices = torch.topk(x, 3, dim=-1)
        first, second = torch.split(x, [2, 4], dim=1)
        return values, indices, first, second, x.max(dim=1)[0]


class Branches(nn.Module):
    def forward(self, x):
        def double(x):
            return (x * 2).sin()

        def shift(x):
            return x + 10

        return torch.cond(x.sum() > 0, double, shift, (x,)) - 1


class Rows(nn.Module):
    def forward(self, xs, y):
        from torch._higher_order_ops.map import map as map_rows

        return map_rows(lambda x, y: x * y + 1, xs, y)


class DynamicShapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        length = x.shape[1]
        y = self.linear(x).view(x.shape[0], length * 2, 3)
        return torch.cat([y, y * length], dim=1), x.reshape(-1)


class DynamicLists(nn.Module):
    def forward(self, x):
        first, second = torch.split(x, [1, 1], dim=1)
        return first + 1, second, x.transpose(0, 1) + 1, x.shape[0] * 2


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor([3.0, 4.0]))

    def forward(self, x):
        self.count.add_(x)
        return self.count * 2


class ZeroCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count.add_(x)
        return self.count.clone()


class KeyCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 8, 4))

    def forward(self, position, key):
        self.cache.index_put_((torch.zeros_like(position), position), key)
        return self.cache.sum(dim=-1), self.cache @ key.T


class Views(nn.Module):
    def forward(self, x):
        y = x.view(2, 6).t().unsqueeze(0)
        return y.expand(2, 6, 2).flip(1), x.select(1, 1), y.squeeze(0)[1:4]


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.to(memory_format=torch.channels_last)
        return self.conv(x).to(memory_format=torch.contiguous_format) + 1


class Casts(nn.Module):
    def forward(self, x):
        return x.to(torch.float16), x.to(torch.int64), (x > 0).to(torch.uint8)


class DataDependent(nn.Module):
    def forward(self, x):
        n = x.max().item()
        torch._check(n >= 1)
        torch._check(n <= 6)
        return torch.ones(n) * 3


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


_INITIALISED = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["count"])])
_UNPLANNED_IO = ExecutorchBackendConfig(
    memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
)
_LENGTH = torch.export.Dim("length", min=2, max=8)

CASES = {
    case.name: case
    for case in (
        Case("arithmetic", Arithmetic, (_floats(2, 3), _floats(2, 3, seed=1))),
        Case(
            "unplanned_io",
            Arithmetic,
            (_floats(2, 3), _floats(2, 3, seed=1)),
            runs=((_floats(2, 3, seed=2), _floats(2, 3, seed=3)),),
            config=_UNPLANNED_IO,
        ),
        Case("convolutions", Convolutions, (_floats(2, 3, 12, 12),)),
        Case("several_outputs", SeveralOutputs, (_floats(3, 6),)),
        Case("branches", Branches, (_floats(4).abs(),), runs=((-_floats(4).abs(),),)),
        Case("rows", Rows, (_floats(3, 4), _floats(4)), runs=((_floats(3, 4), _floats(4)),)),
        Case(
            "dynamic_shapes",
            DynamicShapes,
            (_floats(2, 5, 4),),
            runs=tuple((_floats(2, n, 4, seed=n),) for n in (2, 8, 3)),
            dynamic=({1: _LENGTH},),
        ),
        Case(
            "dynamic_lists",
            DynamicLists,
            (_floats(6, 2),),
            runs=((_floats(7, 2),), (_floats(3, 2),)),
            dynamic=({0: _LENGTH},),
        ),
        Case(
            "dynamic_rows",
            Rows,
            (_floats(4, 2), _floats(2)),
            runs=((_floats(2, 2), _floats(2)), (_floats(3, 2), _floats(2))),
            dynamic=({0: _LENGTH}, None),
        ),
        Case(
            "counter",
            Counter,
            (torch.ones(2),),
            runs=((torch.ones(2),), (_floats(2),)),
            config=_INITIALISED,
        ),
        Case("zero_counter", ZeroCounter, (torch.ones(2),), runs=((_floats(2),),)),
        Case(
            "key_cache",
            KeyCache,
            (torch.tensor([0]), _floats(1, 4)),
            runs=tuple((torch.tensor([n]), _floats(1, 4, seed=n)) for n in (1, 2, 1)),
        ),
        Case("views", Views, (_floats(3, 4),)),
        Case("channels_last", ChannelsLast, (_floats(1, 3, 6, 6),)),
        Case("casts", Casts, (_floats(3, 4) * 4,)),
        Case("data_dependent", DataDependent, (torch.tensor([1, 4]),), ((torch.tensor([2, 1]),),)),
    )
}


@functools.cache
def export_case(name: str) -> tuple[nn.Module, bytes]:
    """The module of a case, in eval mode, and the program of an identical module."""
    case = CASES[name]
    torch.manual_seed(0)
    module = case.module().eval()
    torch.manual_seed(0)
    return module, export(case.module().eval(), case.example, case.dynamic, case.config)


def export(
    module: nn.Module,
    example: Tensors,
    dynamic: tuple[dict[int, torch.export.Dim], ...] | None = None,
    config: ExecutorchBackendConfig | None = None,
) -> bytes:
    """An undelegated program of ``module``'s forward."""
    exported = torch.export.export(module, example, dynamic_shapes=dynamic, strict=False)
    edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    return edge.to_executorch(config or ExecutorchBackendConfig()).buffer

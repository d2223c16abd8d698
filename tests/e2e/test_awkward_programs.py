"""Programs of unusual form: each lowers, and the program gives what eager PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.lowering import fp32_specs, lower
from support.tolerances import ATOL_RTOL
from torch import nn
from torch._higher_order_ops.map import map as torch_map

from coreml_delegate import CoreMLPartitioner, runtime

Tensors = tuple[torch.Tensor, ...]
ATOL, RTOL = ATOL_RTOL["fp32"]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        forward: What it computes.
        inputs: Sets of inputs to run it with; it is exported with the first.
        dynamic: Dynamic shapes for ``torch.export``.
        delegated: Whether Core ML takes a part of it.
        buffers: Its buffers and parameters by name.
    """

    forward: Callable[..., Any]
    inputs: tuple[Tensors, ...]
    dynamic: Any = None
    delegated: bool = True
    buffers: tuple[tuple[str, torch.Tensor], ...] = ()


class Computing(nn.Module):
    """A module that computes a function of itself and its inputs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._forward = program.forward
        for name, value in program.buffers:
            self.register_buffer(name, value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._forward(self, *inputs)


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values from -1 to 1 in a fixed order; for integers 0, 1, 2 and so on."""
    count = torch.Size(shape).numel()
    if not dtype.is_floating_point:
        return torch.arange(count, dtype=dtype).reshape(shape)
    return torch.linspace(-1.0, 1.0, count, dtype=dtype).reshape(shape)


# A custom op, which no backend knows; ExecuTorch wants its out variant.
_LIBRARY = torch.library.Library("coreml_delegate_tests", "DEF")
_LIBRARY.define("doubled(Tensor x) -> Tensor")
_LIBRARY.define("doubled.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
_LIBRARY.impl("doubled.out", lambda x, out: torch.mul(x, 2, out=out), "CompositeExplicitAutograd")
doubled = torch.ops.coreml_delegate_tests.doubled


def _cond(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda v: v.sin() * 2, lambda v: v.cos() - 1, (x,)) + 1


def _map(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda row: row.sin() + 1, x * 2)


_WEIGHT = (("weight", ramp(4, 4)),)
_TWO = ramp(2, 4)
_BATCH = {"inputs": ({0: torch.export.Dim("batch", min=1, max=8)},)}

PROGRAMS: dict[str, Program] = {
    "cond": Program(_cond, ((ramp(4) + 1,), (ramp(4) - 1,))),
    "map": Program(_map, ((ramp(3, 4),),)),
    "custom op": Program(lambda _, x: doubled(x.sin()).cos(), ((_TWO,),)),
    "symbolic sizes": Program(
        lambda _, x: x.reshape(x.shape[0] * 2, 2).sin() * x.shape[0],
        ((ramp(3, 4),), (ramp(5, 4),)),
        _BATCH,
    ),
    "dynamic batch": Program(
        lambda m, x: (x @ m.weight).relu().sum(-1),
        ((ramp(3, 4),), (ramp(7, 4),)),
        _BATCH,
        True,
        _WEIGHT,
    ),
    "symbolic result": Program(
        lambda _, x: (x.sin(), torch.arange(x.shape[0]) * 2), ((ramp(3, 4),), (ramp(6, 4),)), _BATCH
    ),
    "empty input": Program(lambda _, x, e: (x.sin(), e + 1), ((_TWO, torch.zeros(0, 4)),)),
    "empty result": Program(lambda _, x: (x.sin(), x[:0].cos()), ((_TWO,),)),
    "joined with empty": Program(
        lambda _, x, e: torch.cat([x.sin(), e]), ((_TWO, torch.zeros(0, 4)),)
    ),
    "scalars": Program(
        lambda _, x, y: (x * y, x > y, (x + 1).reshape(1), x.sum()),
        ((torch.tensor(0.5), torch.tensor(-2.0)),),
    ),
    "duplicate outputs": Program(lambda _, x: (y := x.sin(), y, y + 1, y), ((_TWO,),)),
    "equal outputs": Program(lambda _, x: (x.sin(), x.sin()), ((_TWO,),)),
    "constant output": Program(lambda m, x: (x.sin(), m.weight), ((_TWO,),), buffers=_WEIGHT),
    "computed constant": Program(lambda m, x: (x.sin(), m.weight * 2), ((_TWO,),), buffers=_WEIGHT),
    "full output": Program(lambda _, x: (x.sin(), torch.ones(3)), ((_TWO,),)),
    "input returned": Program(lambda _, x: (x, x.sin()), ((_TWO,),)),
    "nothing computed": Program(lambda _, x: x, ((_TWO,),), delegated=False),
    "input viewed": Program(lambda _, x: (x.view(4, 2), x.t()), ((_TWO,),)),
    "unused input": Program(lambda _, x, y: x.sin(), ((_TWO, ramp(3)),)),
    "one input twice": Program(lambda _, x, y: x @ y.t() + x @ x.t(), ((_TWO, _TWO),)),
    "shared weight": Program(
        lambda m, x: (x @ m.weight) @ m.weight.t() + m.weight[0], ((_TWO,),), buffers=_WEIGHT
    ),
    "views of views": Program(
        lambda _, x: x.view(2, 2, 2).transpose(0, 2)[1:].unsqueeze(0).expand(3, -1, -1, -1).sin(),
        ((_TWO,),),
    ),
    "aliases": Program(lambda _, x: (y := x.cos(), y.detach(), y.view_as(y), y[:]), ((_TWO,),)),
    "written in place": Program(
        lambda _, x: x.clone().add_(1).mul_(2).relu_().clamp_(max=1.5), ((_TWO,),)
    ),
    "slice assigned": Program(lambda _, x, y: _assigned(x, y), ((ramp(4, 4), ramp(4)),)),
    "booleans": Program(lambda _, x, m: (x > 0) & m | ~m, ((_TWO, _TWO > 0.3),)),
    "integers": Program(
        lambda _, n: (n * 3 - 1, n % 4, n.max(), n.argmax(), n.float() / 2),
        ((ramp(2, 4, dtype=torch.int64),),),
    ),
    "nested outputs": Program(lambda _, x: {"a": x.sin(), "b": [x.cos(), (x + 1,)]}, ((_TWO,),)),
    "data dependent": Program(lambda _, x: x.sin()[x > 0].sum(), ((_TWO,),)),
    "circular padding": Program(
        lambda _, x: nn.functional.pad(x, (1, 2, 1, 1), mode="circular"), ((ramp(1, 2, 3, 4),),)
    ),
    "rank 6": Program(
        lambda _, x: x.reshape(1, 2, 1, 2, 1, 2).sin().permute(5, 4, 3, 2, 1, 0),
        ((_TWO,),),
        delegated=False,
    ),
    "spectrum": Program(lambda _, x: torch.fft.rfft(x.sin()).abs(), ((_TWO,),)),
}


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    copy[1] = y
    copy[:, 2] = 0.5
    copy[2:, :2] = y[:2]
    return copy


@pytest.mark.share(4)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_program(program: Program) -> None:
    module = Computing(program).eval()
    exported = torch.export.export(module, program.inputs[0], dynamic_shapes=program.dynamic)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    loaded = runtime.load_program(edge.to_executorch().buffer, engine="reference")
    delegated = any(report.delegated for report in partitioner.reports)
    assert delegated is program.delegated
    for inputs in program.inputs:
        expected = torch.utils._pytree.tree_leaves(module(*inputs))
        actual = loaded.run("forward", list(inputs))
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=ATOL, rtol=RTOL)


class Appending(nn.Module):
    """Rows behind a cache that begins as an empty tensor of one dimension."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.tensor([])
        rows = torch.cat([cache, *[x.sin()] * self._count], dim=-2)
        return rows, rows.sum()


@pytest.mark.parametrize("host", ["python", "stock"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_empty_tensor_of_a_concatenation_is_left_out(host: str, count: int) -> None:
    module = Appending(count)
    lowered = lower(module, (_TWO,))
    assert not lowered.operators
    actual = runtime.load_program(lowered.pte, host=host).run("forward", [_TWO])
    for mine, theirs in zip(actual, module(_TWO), strict=True):
        torch.testing.assert_close(mine, theirs, atol=ATOL, rtol=RTOL)

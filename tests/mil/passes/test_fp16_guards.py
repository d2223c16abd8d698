"""Guards of angles, coordinates, bounds and means in fp16, compared with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lowering import Function, lower_unchecked
from support.partitioned import delegate_functions
from support.tolerances import SQNR_FP16_GUARDED, sqnr_db
from torch.nn import functional as F

from coreml_delegate import CoreMLBackend, runtime
from coreml_delegate.targets import Opset

Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]

torch.manual_seed(0)
_FREQUENCIES = 10000.0 ** (-torch.arange(0, 32, 2) / 32)
_POSITIONS = torch.arange(4000, 4005)
_GAUSSIAN = torch.randn(2, 16) * 10
_CONVOLUTION = torch.randn(4, 4, 3).half().float()


def _rotary(positions: torch.Tensor) -> torch.Tensor:
    angles = (_FREQUENCIES[None, :, None] @ positions[None, None, :].float()).transpose(1, 2)
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * 0.7 + angles.sin()


def _smooth(x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, _CONVOLUTION, padding=1)


ANGLES: dict[str, Case] = {
    "rotary": (_rotary, (_POSITIONS,)),
    "positions from a start": (
        lambda start: ((torch.arange(6) + start)[:, None] * _FREQUENCIES).sin(),
        (torch.tensor([30000]),),
    ),
    "diffusion, integer time": (
        lambda t: torch.cat(
            [f(t[:, None].float() * _FREQUENCIES) for f in (torch.sin, torch.cos)], -1
        ),
        (torch.tensor([3, 981]),),
    ),
    "quotient": (lambda t: torch.sin(t / _FREQUENCIES.flip(0)), (torch.rand(3, 16) * 100,)),
    "Gaussian features": (
        lambda x: torch.sin((2 * x - 1) @ _GAUSSIAN * (2 * math.pi)),
        (torch.rand(7, 2),),
    ),
    "first layer of a SIREN": (
        lambda x: torch.sin(30 * F.linear(x, _GAUSSIAN.T, _GAUSSIAN[0])),
        (torch.rand(7, 2),),
    ),
    "sine of an input": (lambda x: torch.sin(x), (torch.rand(100) * 1000,)),
    "vocoder": (
        lambda f: torch.sin(torch.cumsum(f / 24000, -1) * (2 * math.pi)),
        (torch.rand(1, 4000) * 400,),
    ),
    "vocoder, wrapped phase": (
        lambda f: torch.sin(torch.cumsum(f / 24000, -1) % 1 * (2 * math.pi)),
        (torch.rand(1, 4000) * 400,),
    ),
    "running sum of a convolution": (
        lambda x: torch.sin(torch.cumsum(_smooth(x).abs() * 0.25, -1)),
        (torch.randn(1, 4, 500).half().float(),),
    ),
    "table": (
        lambda x: x * (torch.arange(3000, 3016)[:, None] * _FREQUENCIES).cos(),
        (torch.ones(16, 16),),
    ),
}

_IMAGE = torch.randn(1, 2, 96, 300)


def _pixel_grid(height: int, width: int) -> torch.Tensor:
    rows, columns = torch.meshgrid(
        torch.arange(height, dtype=torch.float32),
        torch.arange(width, dtype=torch.float32),
        indexing="ij",
    )
    return torch.stack([columns, rows], -1)


def _warp(image: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    size = torch.tensor([299.0, 95.0])
    grid = 2 * (_pixel_grid(96, 300) + flow.permute(0, 2, 3, 1)) / size - 1
    return F.grid_sample(image, grid, align_corners=True)


COORDINATES: dict[str, Case] = {
    "flow": (_warp, (_IMAGE, torch.randn(1, 2, 96, 300) * 4)),
    "flow of a convolution": (
        lambda x: _warp(x, F.conv2d(x, torch.eye(2)[:, :, None, None].flip(0)) * 4),
        (_IMAGE,),
    ),
    "grid": (
        lambda x, g: F.grid_sample(x, g, "nearest", "border", align_corners=False),
        (_IMAGE, torch.rand(1, 40, 200, 2) * 2.2 - 1.1),
    ),
    "affine grid": (
        lambda x, m: F.grid_sample(
            x, F.affine_grid(m, [1, 2, 96, 300], align_corners=False), align_corners=False
        ),
        (_IMAGE, torch.tensor([[[0.9, 0.1, 0.01], [-0.1, 1.1, 0.02]]])),
    ),
    "floor to an index": (
        lambda x, p: x[(p * 7.3).floor().long()],
        (torch.randn(8192), torch.rand(200) * 1100),
    ),
    "round integers to an index": (
        lambda x, i: x[(i.float() * 1.5).round().long()],
        (torch.randn(8192), torch.arange(4001, 5001, 9)),
    ),
    "interpolated by hand": (
        lambda x, p: (lambda i: torch.lerp(x[i.long()], x[i.long() + 1], p - i))(p.floor()),
        (torch.randn(5000), torch.rand(200) * 4990),
    ),
    "fraction": (lambda x: (x * 31.7).frac() + 0.5, (torch.rand(200) * 100,)),
    "remainder": (lambda x: torch.remainder(x * 31.7, 3), (torch.rand(200) * 100,)),
    "logarithmic bucket": (
        lambda x, i: x[(torch.log(i.float() / 16) / math.log(8) * 160).to(torch.long)],
        (torch.randn(512), torch.arange(17, 900, 7)),
    ),
}

_PROBABILITIES = torch.tensor([0.0, 1e-9, 1e-6, 0.001, 0.5, 0.9, 0.999, 0.99999, 1.0])
_LOGITS = torch.tensor([-25.0, -15.0, -9.0, -1.0, 0.0, 2.0, 8.0, 12.0])
_ENTROPY_ROWS = torch.randn(4, 16) * 8

BOUNDS: dict[str, Case] = {
    "log of a clamp": (lambda p: p.clamp(1e-7, 1 - 1e-7).log(), (_PROBABILITIES,)),
    "log odds": (
        lambda p: (lambda q: torch.log(q / (1 - q)))(p.clamp(1e-7, 1 - 1e-7)),
        (_PROBABILITIES,),
    ),
    "logit": (lambda p: torch.logit(p, eps=1e-6), (_PROBABILITIES,)),
    "logit of a sigmoid": (
        lambda x: torch.logit(_of_work(x).sigmoid(), eps=1e-6),
        (_LOGITS.clamp(-12, 12),),
    ),
    "log plus one": (
        lambda p: torch.log1p(-p.clamp(max=1 - 1e-6)),
        (_PROBABILITIES,),
    ),
    "log of a sum with epsilon": (lambda x: (x + 1e-12).log(), (_PROBABILITIES,)),
    "epsilon first": (lambda x: torch.log(1e-10 + x.square()), (_PROBABILITIES - 0.5,)),
    "decibels": (
        lambda x: 10 * torch.log10(torch.clamp(_of_work(x).relu(), min=1e-10)),
        (_LOGITS,),
    ),
    "cross entropy of a sigmoid": (
        lambda x: (lambda p: -(0.3 * torch.log(p + 1e-7) + 0.7 * torch.log(1 - p + 1e-7)))(
            _of_work(x).sigmoid()
        ),
        (_LOGITS,),
    ),
    "squashed Gaussian": (
        lambda x: torch.log(1 - _of_work(x).tanh().pow(2) + 1e-6),
        (_LOGITS / 2,),
    ),
    "entropy": (
        lambda x: (lambda p: -(p * torch.log(p + 1e-12)).sum(-1))(x.softmax(-1)),
        (_ENTROPY_ROWS,),
    ),
    "log of a softmax": (lambda x: x.softmax(-1).log(), (_ENTROPY_ROWS,)),
    "log of a sigmoid": (lambda x: _of_work(x).sigmoid().log(), (_LOGITS,)),
    "Gumbel": (
        lambda u: -torch.log(-torch.log(u + 1e-20) + 1e-20),
        (torch.tensor([1e-6, 0.1, 0.5, 0.99, 0.9999, 0.999999]),),
    ),
    "inverse hyperbolic tangent": (
        lambda x: torch.atanh(x.clamp(-1 + 1e-6, 1 - 1e-6)),
        (torch.tensor([-1.0, -0.9999, 0.0, 0.5, 0.999, 1.0]),),
    ),
    "distance from an edge": (
        lambda x: torch.log(1 + 1e-6 - x),
        (_PROBABILITIES,),
    ),
    "distance in steps": (lambda x: torch.log(1 - x + 1e-6), (_PROBABILITIES,)),
    "odds": (
        lambda p: p.clamp(1e-7, 1 - 1e-7) / (1 - p.clamp(1e-7, 1 - 1e-7)),
        (torch.tensor([0.0, 0.5, 0.999, 0.99995]),),
    ),
    "root of a small sum": (lambda x: torch.rsqrt(x + 1e-12), (torch.tensor([3e-9, 1e-8, 1e-3]),)),
    "quotient of small numbers": (
        lambda x, y: x / (y + 1e-12),
        (torch.tensor([1e-9, 2e-8, 0.0]), torch.tensor([2e-9, 1e-8, 0.0])),
    ),
    "times a reciprocal": (
        lambda x: x * torch.rsqrt(x * x + 1e-12),
        (torch.tensor([0.0, 1e-5, 1e-3]),),
    ),
    "power": (lambda x: (x + 1e-10) ** -0.5, (torch.tensor([3e-9, 1e-8, 1e-3]),)),
    "shifted floor": (
        lambda x: torch.floor(x * 4 + 1e-6),
        (torch.tensor([0.2499999, 0.4999999, 0.7499, 1.0]),),
    ),
    "shifted edge": (
        lambda x: torch.where(x > 1 + 1e-6, x, -x),
        (torch.tensor([0.9999, 1.0, 1.0001]),),
    ),
    "between two edges": (
        lambda x: torch.floor((x + 1 + 1e-6) * 0.5),
        (torch.tensor([0.9999995, 1.0, 0.9999]),),
    ),
}


def _of_work(x: torch.Tensor) -> torch.Tensor:
    """The result of a layer, which fp16 rounds."""
    weight = torch.eye(len(x)) * 1.0
    return F.linear(F.relu(x[None]), weight)[0] - F.linear(F.relu(-x[None]), weight)[0]


_SERIES = torch.rand(2, 64, 5) * 500 + 20000
_MASK = (torch.arange(64) < 40).float()[None, :, None].expand(2, 64, 1).contiguous()
_MASK[1, 20:] = 0
_QUERIES, _KEYS, _VALUES = (torch.randn(1, 2, 96, 16) * s for s in (1, 1, 300))
_LENGTHS = torch.tensor([40, 20])


def _features(x: torch.Tensor) -> torch.Tensor:
    return F.elu(x) + 1


def _linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = _features(q), _features(k)
    return (q @ (k.mT @ v)) / (q @ k.sum(-2, keepdim=True).mT + 1e-6)


def _linear_attention_by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = _features(q), _features(k)
    state = torch.einsum("bhnd,bhne->bhde", k, v)
    scale = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(2)) + 1e-6)
    return torch.einsum("bhnd,bhde,bhn->bhne", q, state, scale)


MEANS: dict[str, Case] = {
    "count": (lambda x: x.sum(1) / 64, (_SERIES,)),
    "inverse of the count": (lambda x: x.sum((0, 1)) * (1 / 128), (_SERIES,)),
    "another count": (lambda x: x.sum(1) / 50, (_SERIES,)),
    "array of counts": (lambda x: x.sum(1) / torch.full((5,), 64.0), (_SERIES,)),
    "product with ones": (lambda x: (x.mT @ torch.ones(64, 1)) / 64, (_SERIES,)),
    "product with ones first": (lambda x: torch.ones(1, 64) @ x / 64, (_SERIES,)),
    "product with ones, a row of it": (lambda x: (torch.ones(1, 64) @ x)[0] / 64, (_SERIES,)),
    "masked": (lambda x, m: (x * m).sum(1) / m.sum(1).clamp(min=1), (_SERIES, _MASK)),
    "masked, small bound": (
        lambda x, m: (x * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1e-9),
        (_SERIES, _MASK),
    ),
    "masked by truths": (
        lambda x, m: (x * m.float()).sum(1) / (m.float().sum(1) + 1e-6),
        (_SERIES, _MASK > 0),
    ),
    "masked by integers": (
        lambda x, m: (x * m[..., None]).sum(1) / m.sum(1)[:, None],
        (_SERIES, _MASK[..., 0].int()),
    ),
    "masked by a product": (
        lambda x, m: (m.mT @ x)[:, 0] / m.sum(1),
        (_SERIES, _MASK),
    ),
    "lengths": (lambda x, n: x.sum(1) / n[:, None], (_SERIES, _LENGTHS)),
    "selected": (
        lambda x, m: torch.where(m > 0, x, 0.0).sum(1) / (m > 0).float().sum(1),
        (_SERIES, _MASK),
    ),
    "linear attention": (_linear_attention, (_QUERIES, _KEYS, _VALUES)),
    "linear attention by einsum": (_linear_attention_by_einsum, (_QUERIES, _KEYS, _VALUES)),
}

_READING = torch.randn(3, 64).half().float()

DEVIATIONS: dict[str, Case] = {
    "by variance": (
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt(),
        (_SERIES,),
    ),
    "by deviation": (
        lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6),
        (_SERIES,),
    ),
    "only the mean": (lambda x: x - x.mean(1, keepdim=True), (_SERIES,)),
    "mean of all": (lambda x: x - x.mean(), (_SERIES,)),
    "layer norm": (lambda x: F.layer_norm(x.mT, (64,)), (_SERIES,)),
    "batch norm": (
        lambda x: F.batch_norm(x, torch.full((64,), 2e4), torch.full((64,), 2e4)),
        (_SERIES,),
    ),
    "constant": (lambda x: (x - 20000) / 250, (_SERIES,)),
    "kelvin": (lambda x: (x / 60 - 273.15) * 0.1, (_SERIES,)),
    "last value": (lambda x: F.linear((x - x[:, -1:]).mT, _READING), (_SERIES,)),
    "differences": (lambda x: x[:, 1:] - x[:, :-1], (_SERIES,)),
    "range": (
        lambda x: (x - x.amin(1, True)) / (x.amax(1, True) - x.amin(1, True)),
        (_SERIES,),
    ),
    "variance of squares": (
        lambda x: x.square().mean(1) - x.mean(1).square(),
        (_SERIES[..., :2] / 2000,),
    ),
}

GROUPS = {
    "angle": ANGLES,
    "coordinate": COORDINATES,
    "bound": BOUNDS,
    "mean": MEANS,
    "deviation": DEVIATIONS,
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}


def decibels(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], **options: Any):
    """Return the SQNR of a function in fp16 on each engine, and the lowered program."""
    specs = CoreMLBackend.generate_compile_specs(**options)
    lowered = lower_unchecked(Function(function), inputs, compile_specs=specs)
    expected = function(*inputs).numpy()
    ratios: list[float] = []
    for engine in ("reference", "openvino"):
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", [*inputs])
        ratios.append(sqnr_db(expected, actual.numpy()))
    return ratios, lowered


@pytest.mark.parametrize("name", CASES)
def test_values_that_fp16_would_lose(name: str) -> None:
    ratios, lowered = decibels(*CASES[name])
    assert lowered.operators == ()
    assert min(ratios) > SQNR_FP16_GUARDED


TARGETS = (Opset.iOS15, Opset.iOS16, Opset.iOS18)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["flow", "affine grid"])
def test_pixels_are_fp16_beside_coordinates_in_fp32(name: str, target: Opset) -> None:
    ratios, lowered = decibels(*COORDINATES[name], minimum_deployment_target=target)
    assert min(ratios) > SQNR_FP16_GUARDED
    (function,) = delegate_functions(lowered.edge)
    (resample,) = (op for op in function.block.ops if op.type == "resample")
    dtypes = {t.name: t.type.dtype.label for op in function.block.ops for t in op.outputs}
    dtypes |= {t.name: t.type.dtype.label for t in function.inputs}
    read = {name: dtypes[operand.name] for name, (operand,) in resample.inputs.items()}
    assert (read["x"], read["coordinates"]) == ("fp16", "fp32")
    assert dtypes[resample.outputs[0].name] == "fp16"


HELD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (16,)),
    "layer norm, small epsilon": lambda x: F.layer_norm(x, (16,), eps=1e-12),
    "written layer norm": lambda x: (
        (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()
    ),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(16), torch.ones(16)),
    "norm of rows": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "normalized softmax": lambda x: (lambda a: a / (a.sum(-1, True) + 1e-9))(x.softmax(-1)),
    "gelu": lambda x: F.gelu(x) + F.silu(x),
    "softplus": lambda x: F.softplus(x).tanh() * x,
    "quotient": lambda x: x / (x.abs().sum(-1, True) + 1e-8),
    "snake": lambda x: x + torch.sin(3 * x).square() / 3,
    "bounded angle": lambda x: torch.sin(x.tanh() * math.pi),
    "mean": lambda x: x.sum(-1) / 16,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("name", HELD)
def test_what_fp16_holds_stays_in_fp16(name: str) -> None:
    """Only the output is fp32."""
    weight = torch.randn(16, 96) / 4
    function = HELD[name]
    ratios, lowered = decibels(lambda x: function(F.linear(x, weight)), (torch.randn(4, 96),))
    assert min(ratios) > SQNR_FP16_GUARDED
    (main,) = delegate_functions(lowered.edge)
    in_fp32 = [op for op in main.block.ops for t in op.outputs if t.type.dtype.label == "fp32"]
    assert [op.type for op in in_fp32 if op.type != "const"] == ["cast"]


def test_islands_of_the_user_are_kept() -> None:
    """The angle of a named op is an island already."""
    function, inputs = ANGLES["vocoder"]
    keep = {"ops": ["cumsum", "sin"]}
    ratios, lowered = decibels(function, inputs, keep_fp32=keep)
    (main,) = delegate_functions(lowered.edge)
    labels = {op.type: op.outputs[0].type.dtype.label for op in main.block.ops}
    assert (labels["cumsum"], labels["sin"]) == ("fp32", "fp32")
    assert min(ratios) > SQNR_FP16_GUARDED

"""Programs that resemble a pattern which a pass rewrites, and values at the edges of a type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import coremltools as ct
import pytest
import torch
from support.lowering import Function, fp32_specs, lower_unchecked
from support.tolerances import SQNR_FP16, SQNR_FP32, sqnr_db
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

from coreml_delegate import CoreMLBackend, runtime
from coreml_delegate.targets import Device

ENGINES = ("reference", "openvino")
MINIMUM = {"float32": SQNR_FP32, "float16": SQNR_FP16}
PRECISIONS = {"float32": ct.precision.FLOAT32, "float16": ct.precision.FLOAT16}

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]

torch.manual_seed(0)
_MATRIX, _BIAS = torch.randn(4, 4), torch.randn(4)
_ROWS = torch.randn(3, 4)
_SCORES, _VALUES = torch.randn(2, 5, 5), torch.randn(2, 5, 4)
_MASK = torch.zeros(2, 5, 5)
_MASK[:, 2] = _MASK[:, 1, 3] = -math.inf
_QUERY = torch.randn(1, 2, 5, 8)
_ZEROS = torch.tensor([0.0, 1e-4, 0.01, 1.0, 3.0, 1000.0])
_WEIGHT, _OFFSET = torch.randn(3, 6), torch.randn(3)
_CHANNELS = torch.arange(1.0, 4).reshape(3, 1, 1)
_KERNEL = torch.randn(1, 1, 3, 3)


def _branch(x: torch.Tensor) -> torch.Tensor:
    sums = x.sum(1)
    return torch.cond(x.sum() > 0, lambda s: s / 4, lambda s: s * 1.0, (sums,))


def _loop(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product = x @ _MATRIX
    start = torch.tensor(0), x * 1
    return while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + (product + _BIAS)), start)


def _steps(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    product = x @ _MATRIX
    return scan(lambda total, row: (total + row + product[0] * 2, total * row), x[0], x)


def _views_that_change_places(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = torch.tensor(0), x, y
    return while_loop(lambda i, p, q: i < 3, lambda i, p, q: (i + 1, q.t() + 0, p.t() * 1), start)


CASES: dict[str, Case] = {
    "root of a square": (lambda x: (x**2).sqrt() * 2, (_ROWS,)),
    "square of a root": (lambda x: x.sqrt() ** 2, (_ROWS,)),
    "broadcast exponents": (
        lambda x: (x ** torch.full((3,), 2.0)).sum(-1).sqrt(),
        (torch.randn(3, 1),),
    ),
    "broadcast root": (
        lambda x: (x * x).sum(-1, keepdim=True) ** torch.full((3,), 0.5),
        (_ROWS,),
    ),
    "bias of a sum that is divided": (
        lambda x, m: F.linear((x * m).sum(1), _WEIGHT, _OFFSET) / m.sum(1),
        (torch.randn(4, 32, 6), torch.ones(4, 32, 1)),
    ),
    "small product of ones": (
        lambda x: (x @ torch.full((64, 1), 1e-3)) * 1e-5,
        (torch.rand(4, 64) * 2.5e4,),
    ),
    "scores of a tensor with itself": (
        lambda x: F.softmax(x @ x.transpose(1, 2) * 1e-4, -1),
        (torch.randn(2, 6, 8) * 200,),
    ),
    "rows that NaN marks": (
        lambda s, m, v: F.softmax(s + m, -1).nan_to_num(0) @ v,
        (_SCORES, _MASK, _VALUES),
    ),
    "mask of logarithms": (lambda x: F.softmax(x + (x > 0.5).float().log(), -1), (_SCORES,)),
    "norm of single elements": (
        lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * torch.arange(1.0, 6.0),
        (torch.randn(3, 1),),
    ),
    "norm along another axis": (
        lambda x: x / ((x**2).mean(-1) + 1e-5).sqrt(),
        (torch.randn(8, 8),),
    ),
    "only channel, repeated": (
        lambda x: x * _CHANNELS + torch.ones(3, 1, 1) * 2,
        (torch.randn(1, 1, 6, 6),),
    ),
    "summand with more channels": (
        lambda x: F.conv2d(x, _KERNEL, _BIAS[:1]) * _CHANNELS + _CHANNELS,
        (torch.randn(1, 1, 6, 6),),
    ),
    "branch": (_branch, (_ROWS,)),
    "loop": (_loop, (_ROWS,)),
    "scan": (_steps, (_ROWS,)),
    "loop of views": (_views_that_change_places, (torch.randn(1, 4), torch.randn(4, 1))),
}
EXACT: dict[str, Case] = {
    "logarithms": (lambda x: (x.log(), x.log2(), x.log10(), x.log1p(), x.rsqrt()), (_ZEROS,)),
    "quotients": (
        lambda x: (x // x, torch.floor(x / x), (x / x) == 1, (x / x).int(), torch.round(x / 7 * 3)),
        (torch.randn(1000),),
    ),
    "more corrections than elements": (lambda x: torch.var(x, 1, correction=5), (_ROWS,)),
    "reductions of nothing": (
        lambda x: (torch.any(x > 0, dim=[]), torch.all(x > 0, dim=[])),
        (_ROWS,),
    ),
    "padding of integers": (
        lambda x: F.pad(x, (1, 1), value=16777217),
        (torch.arange(4, dtype=torch.int32),),
    ),
    "promotion by an empty part": (
        lambda x: torch.cat([torch.zeros(0), (x * 3).int()]),
        (torch.arange(4.0),),
    ),
    "median of nothing": (lambda x: x[:0].median(), (_ZEROS,)),
    "histogram of nothing": (lambda x: x[:0].histc(4), (_ZEROS,)),
    "selected rows of no columns": (lambda x: x[:, :0][x[:, 0] > 0].sum(), (_ROWS,)),
    "wide integers in a branch": (
        lambda x: torch.cond(
            x.sum() > 0, lambda x: (x * 3_000_000_000) // 1_000_000_000, torch.clone, (x,)
        ),
        (torch.tensor([1, 2, 3, 4]),),
    ),
    "floats as wide integers": (
        lambda x: (torch.full((2,), 3e9, dtype=torch.long) + x, x.masked_fill(x > 0, 3e9)),
        (torch.arange(2),),
    ),
    "complex infinities": (
        lambda x: (
            torch.complex(x, x / 0) == torch.complex(x, x / 0),
            torch.complex(x, x) == 0.5 + 0.5j,
            torch.complex(x, x) != torch.complex(x, x).flip(0),
        ),
        (torch.tensor([0.5, 1.0, 2.0]),),
    ),
}
SHAPED: dict[str, Case] = {
    "mask that is a result": (
        lambda q, m: (F.scaled_dot_product_attention(q, q, q, attn_mask=m), m + 1),
        (_QUERY, _MASK[:1, None]),
    ),
    "causal": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (_QUERY,)),
    "stride of a volume": (
        lambda x: F.conv3d(x, torch.ones(2, 1, 5, 5, 5) / 125, stride=5),
        (torch.randn(1, 1, 10, 10, 10),),
    ),
}


def _results(case: Case) -> Sequence[torch.Tensor]:
    function, inputs = case
    results = function(*inputs)
    return results if isinstance(results, tuple) else (results,)


def _run(case: Case, precision: str, engine: str, device: Device | None = None) -> Any:
    function, inputs = case
    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=PRECISIONS[precision], minimum_deployment_target=ct.target.iOS18
    )
    options = {} if device is None else {"device": device}
    lowered = lower_unchecked(Function(function), inputs, compile_specs=specs, **options)
    results = runtime.load_program(lowered.pte, engine=engine, host="python").run(
        "forward", list(inputs)
    )
    return lowered.report, results


def _compare(case: Case, results: Any, minimum: float) -> None:
    for result, expected in zip(results, _results(case), strict=True):
        assert result.shape == expected.shape
        assert torch.equal(result.isnan(), expected.isnan())
        known = ~expected.isnan()
        assert sqnr_db(expected[known].numpy(), result[known].numpy()) >= minimum


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_patterns(name: str, precision: str, engine: str) -> None:
    report, results = _run(CASES[name], precision, engine)
    assert not report.undelegated
    _compare(CASES[name], results, MINIMUM[precision])


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", EXACT)
def test_edges(name: str, engine: str) -> None:
    _, results = _run(EXACT[name], "float32", engine)
    for result, expected in zip(results, _results(EXACT[name]), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SHAPED)
def test_for_the_neural_engine(name: str, engine: str) -> None:
    _, results = _run(SHAPED[name], "float16", engine, Device.NEURAL_ENGINE)
    for result, expected in zip(results, _results(SHAPED[name]), strict=True):
        assert torch.equal(result.isinf(), expected.isinf())
        finite = expected.isfinite()
        assert sqnr_db(expected[finite].numpy(), result[finite].numpy()) >= SQNR_FP16


class _TakesOver(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((3,), 2.0))
        self.register_buffer("next", torch.full((3,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.value + x
        self.value.copy_(self.next)
        return total


@pytest.mark.parametrize("take_over", [True, False])
def test_a_buffer_takes_the_value_of_another(take_over: bool) -> None:
    x = torch.zeros(3)
    lowered = lower_unchecked(
        _TakesOver(), (x,), compile_specs=fp32_specs(), take_over_mutable_buffer=take_over
    )
    program = runtime.load_program(lowered.pte, engine="reference", host="python")
    assert [program.run("forward", [x])[0][0].item() for _ in range(3)] == [2, 3, 3]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("engine", ENGINES)
def test_resizing_of_dynamic_images(engine: str, mode: str) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode=mode)

    sizes = {2: torch.export.Dim("h", min=3, max=20), 3: torch.export.Dim("w", min=3, max=20)}
    images = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 5)
    lowered = lower_unchecked(
        Function(resize), images[:1], compile_specs=fp32_specs(), dynamic_shapes=((sizes,),)
    )
    program = runtime.load_program(lowered.pte, engine=engine)
    for image in images:
        (result,) = program.run("forward", [image])
        torch.testing.assert_close(result, resize(image))

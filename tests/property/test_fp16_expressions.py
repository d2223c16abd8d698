"""Random expressions that fp16 would lose keep 40 dB: angles, bounds, quotients, norms, grids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lowering import Function, lower_unchecked
from support.tolerances import SQNR_FP16_GUARDED, sqnr_db
from torch.nn import functional as F

from coreml_delegate import CoreMLBackend, runtime

pytestmark = pytest.mark.property

Expression = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]
Draw = Callable[[st.SearchStrategy[Any]], Any]

SIZES = st.sampled_from([1, 2, 3, 5, 16, 33])


def magnitude(draw: Draw, least: float, most: float) -> float:
    """Draw a number between powers of 10."""
    return 10 ** draw(st.floats(least, most))


def angle(draw: Draw) -> Expression:
    count, width = draw(SIZES), draw(SIZES)
    largest = magnitude(draw, 0, 4)
    frequencies = torch.exp(-torch.arange(width) * draw(st.floats(0, 0.5)))
    positions = draw(
        st.sampled_from(
            [
                (torch.rand(count) * 2 - 1) * largest,
                torch.randint(0, int(largest) + 1, (count,)),
                torch.randint(0, int(largest) + 1, (count,), dtype=torch.int32),
            ]
        )
    )
    form = draw(
        st.sampled_from(
            [
                lambda p: p[:, None] * frequencies,
                lambda p: p[:, None] / frequencies.reciprocal(),
                lambda p: torch.outer(p, frequencies),
                lambda p: (p[:, None] @ frequencies[None]) + 0.5,
                lambda p: torch.stack([p, p + 1]) * frequencies[0],
                lambda p: torch.cumsum(p[:, None] * frequencies, 1) / width,
                lambda p: (p[:, None] * frequencies) % (2 * math.pi),
                lambda p: p[:, None] * (frequencies * (2 * math.pi)) - largest,
            ]
        )
    )
    wave = draw(st.sampled_from([torch.sin, torch.cos]))
    return lambda p: wave(form(p.float())) + 0.25, [positions]


def bound(draw: Draw) -> Expression:
    epsilon = magnitude(draw, -12, -2)
    is_given = draw(st.booleans())
    # Kernels of sigmoid differ in the last bit of fp32, which is 1e-7 next to 1.
    distance = magnitude(draw, -7 if is_given else -5, -2)
    ends = [0.0, epsilon / 3, epsilon, distance, 0.25, 0.5, 0.9, 1 - distance, 1.0]
    logits = torch.randn(7) * 8

    def probability(x: torch.Tensor) -> torch.Tensor:
        return x if is_given else torch.sigmoid(F.linear(x[None], torch.eye(7)))[0]

    form = draw(
        st.sampled_from(
            [
                lambda p: torch.log(p + epsilon),
                lambda p: torch.log(p.clamp(min=epsilon)),
                lambda p: torch.log(p.clamp(distance, 1 - distance)),
                lambda p: torch.log(1 - p + distance),
                lambda p: torch.log(1 + distance - p),
                lambda p: torch.log(1 - p.clamp(max=1 - distance)),
                lambda p: torch.log1p(-p.clamp(max=1 - distance)),
                lambda p: torch.logit(p, eps=distance),
                lambda p: (lambda q: torch.log(q / (1 - q)))(p.clamp(distance, 1 - distance)),
                lambda p: (lambda q: torch.log(q) - torch.log(1 - q))(
                    p.clamp(distance, 1 - distance)
                ),
                lambda p: -(0.3 * torch.log(p + epsilon) + 0.7 * torch.log(1 - p + distance)),
                lambda p: torch.log2(p * p + epsilon) * 0.5,
                lambda p: torch.where(p > 1 - distance, -1.0, 1.0) * 3,
            ]
        )
    )
    return lambda x: form(probability(x)), [torch.tensor(ends) if is_given else logits]


def quotient(draw: Draw) -> Expression:
    count, width = draw(st.sampled_from([2, 7, 64, 100, 768])), draw(SIZES)
    x = (torch.rand(2, count, width) + 0.5) * magnitude(draw, -2, 4.3)
    mask = torch.rand(2, count) < draw(st.floats(0.1, 1))
    mask[:, 0] = True
    convert = draw(st.sampled_from([torch.Tensor.float, torch.Tensor.int, torch.Tensor.clone]))
    least = magnitude(draw, -9, 0)
    form = draw(
        st.sampled_from(
            [
                lambda x, m: x.sum(1) / count + 0 * m.float()[:, :1],
                lambda x, m: x.sum(1) * (1 / count) + 0 * m.float()[:, :1],
                lambda x, m: (torch.ones(1, count) @ x)[:, 0] / count + 0 * m.float()[:, :1],
                lambda x, m: (x * m[..., None]).sum(1) / m.float().sum(1, keepdim=True),
                lambda x, m: (x * m[..., None]).sum(1) / m.sum(1)[:, None].clamp(min=1),
                lambda x, m: (
                    (x * m.float()[..., None]).sum(1) / (m.float().sum(1)[:, None] + least)
                ),
                lambda x, m: (
                    torch.where(m[..., None] > 0, x, 0.0).sum(1)
                    / m.float().sum(1)[:, None].clamp(min=least)
                ),
                lambda x, m: (m.float()[:, None] @ x)[:, 0] / m.float().sum(1)[:, None],
                lambda x, m: x.mT @ (m.float() / m.float().sum(1, keepdim=True))[..., None],
            ]
        )
    )
    return form, [x, convert(mask)]


def norm(draw: Draw) -> Expression:
    count = draw(st.sampled_from([2, 8, 64, 100]))
    offset = draw(st.floats(-30000, 30000))
    x = torch.randn(3, count) * magnitude(draw, 0, 2.5) + offset
    epsilon = draw(st.sampled_from([1e-3, 1e-5, 1e-6]))
    form = draw(
        st.sampled_from(
            [
                lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + epsilon),
                lambda x: (
                    (x - x.mean(-1, keepdim=True))
                    / (x.var(-1, keepdim=True, correction=0) + epsilon).sqrt()
                ),
                lambda x: (
                    (x - x.mean(-1, keepdim=True))
                    * torch.rsqrt((x - x.mean(-1, keepdim=True)).square().mean(-1, True) + epsilon)
                ),
                lambda x: F.layer_norm(x, (count,), eps=epsilon),
                lambda x: x - x.mean(),
                lambda x: (x - x.mean(-1, keepdim=True)) / 100,
                lambda x: x - x[..., -1:],
                lambda x: (x - x.amin(-1, True)) / (x.amax(-1, True) - x.amin(-1, True)),
                lambda x: (x - (offset if abs(offset) > 256 else 0)) * 0.01,
            ]
        )
    )
    return form, [x]


def grid(draw: Draw) -> Expression:
    height, width = draw(st.sampled_from([9, 40, 300])), draw(st.sampled_from([9, 64, 500]))
    options = {
        "mode": "bilinear",
        "padding_mode": draw(st.sampled_from(["zeros", "border"])),
        "align_corners": draw(st.booleans()),
    }
    shift = torch.rand(1, height, width, 2) * magnitude(draw, -1, 1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([columns, rows], -1).float()
    sizes = (width - 1.0, height - 1.0)
    size = torch.tensor(sizes)
    form = draw(
        st.sampled_from(
            [
                lambda s: 2 * (pixels + s) / size - 1,
                lambda s: (pixels + s) * (2 / size) - 1,
                lambda s: (s + pixels) / (size / 2) - 1,
                lambda s: torch.stack(
                    [2 * (pixels[..., i] + s[..., i]) / sizes[i] - 1 for i in (0, 1)], -1
                ),
                lambda s: s / s.amax() * 2 - 1,
            ]
        )
    )
    image = torch.randn(1, 2, height, width)
    return lambda x, s: F.grid_sample(x, form(s), **options), [image, shift]


KINDS = {"angle": angle, "bound": bound, "quotient": quotient, "norm": norm, "grid": grid}


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_expressions_that_fp16_would_lose(kind: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    function, inputs = KINDS[kind](data.draw)
    specs = CoreMLBackend.generate_compile_specs()
    lowered = lower_unchecked(Function(function), tuple(inputs), compile_specs=specs)
    assert lowered.operators == ()
    expected = function(*inputs).numpy()
    for engine in ("reference", "openvino"):
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", inputs)
        assert sqnr_db(expected, actual.numpy()) > SQNR_FP16_GUARDED

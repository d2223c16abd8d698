"""Attention, reductions and convolutions whose dimensions have equal sizes, or size 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import mil
from support.engine_runs import assert_close, run
from support.mil import mb

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO

_RNG = np.random.default_rng(0)
_B, _D = 2, 4
_SWAPPED = [0, 2, 1, 3]


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def _attention(query: Any, key: Any, value: Any) -> Any:
    scores = mb.matmul(x=query, y=key, transpose_x=False, transpose_y=True)
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=value)


def _heads_first(qkv: Any, heads: int) -> Any:
    """Queries, keys and values in one permuted tensor; the result is transposed."""
    batch, tokens, width = qkv.shape
    parts = mb.reshape(x=qkv, shape=[batch, tokens, 3, heads, width // heads // 3])
    parts = mb.split(x=mb.transpose(x=parts, perm=[2, 0, 3, 1, 4]), num_splits=3, axis=0)
    result = _attention(*(mb.squeeze(x=part, axes=[0]) for part in parts))
    return mb.transpose(x=result, perm=_SWAPPED)


def _each_transposed(qkv: Any, heads: int) -> Any:
    """A function of the result lies between the product and its transpose."""
    batch, tokens, width = qkv.shape
    parts = mb.split(x=mb.tanh(x=qkv), num_splits=3, axis=2)
    parts = [mb.reshape(x=x, shape=[batch, tokens, heads, width // heads // 3]) for x in parts]
    result = _attention(*(mb.transpose(x=x, perm=_SWAPPED) for x in parts))
    return mb.transpose(x=mb.tanh(x=result), perm=_SWAPPED)


def _expected_heads_first(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    batch, tokens, width = qkv.shape
    parts = qkv.reshape(batch, tokens, 3, heads, width // heads // 3).permute(2, 0, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(*parts, scale=1.0).transpose(1, 2)


def _expected_each_transposed(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    return _expected_heads_first(qkv.tanh(), heads).tanh()


@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_heads_first, _expected_heads_first),
        (_each_transposed, _expected_each_transposed),
    ],
    ids=["heads first", "each transposed"],
)
def test_attention_of_as_many_heads_as_tokens(
    function: Callable[[Any, int], Any],
    expected: Callable[[torch.Tensor, int], torch.Tensor],
    heads: int,
) -> None:
    qkv = _floats(_B, 6, 3 * heads * _D)
    wanted = expected(torch.from_numpy(qkv), heads).numpy()
    main = mil.main(mil.build(lambda x: function(x, heads), {"x": qkv}))
    compiled = OPENVINO.compile(main, EngineOptions())
    (result,) = compiled({"x": qkv}).values()
    assert_close(result, wanted)
    kernels = Counter(
        node.get_rt_info()["layerType"].astype(str)
        for node in compiled.compiled.get_runtime_model().get_ops()
    )
    assert kernels["Subgraph"] >= 1
    assert kernels["MatMul"] == 0


def test_rewrites_reach_the_bodies_of_branches() -> None:
    qkv, row, flags = _floats(1, 3, 3 * 3 * _D), _floats(1, 3), np.array([1, 0], np.int32)

    def mean(x: Any) -> Any:
        return mb.add(x=mb.reduce_mean(x=x, axes=[2], keep_dims=False), y=row)

    def branches(x: Any, flag: Any) -> Any:
        is_set = mb.equal(x=mb.squeeze(x=flag, axes=[0]), y=np.int32(1))

        def when_set() -> Any:
            x_ = mb.tanh(x=x)
            return _heads_first(x_, 3), mean(x_)

        def otherwise() -> Any:
            x_ = mb.mul(x=x, y=np.float32(0.5))
            return _heads_first(x_, 3), mean(x_)

        return mb.cond(pred=is_set, _true_fn=when_set, _false_fn=otherwise)

    for flag, x in zip(flags, (np.tanh(qkv), qkv / 2), strict=True):
        attended, averaged = run(OPENVINO, branches, {"x": qkv, "flag": flag[None]})
        assert_close(attended, _expected_heads_first(torch.from_numpy(x), 3).numpy())
        assert_close(averaged, x.mean(2) + row)


@pytest.mark.parametrize("axes", [[0], [1], [0, 1], [-1]], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 1, 4), (2, 1, 3, 1), (3, 3, 1, 1)], ids=str)
def test_a_reduction_keeps_the_places_of_dimensions_of_size_1(
    shape: tuple[int, ...], axes: list[int]
) -> None:
    x = _floats(*(size for size in shape if size > 1))

    def function(x: Any) -> Any:
        return mb.reduce_sum(x=mb.reshape(x=x, shape=shape), axes=axes, keep_dims=True)

    (result,) = run(OPENVINO, function, {"x": x})
    assert_close(result, x.reshape(shape).sum(tuple(axes), keepdims=True))


def test_a_transpose_before_two_reductions_keeps_its_place() -> None:
    x = _floats(4, 2, 1, 3)

    def function(x: Any) -> Any:
        rows = mb.transpose(x=mb.tanh(x=x), perm=_SWAPPED)
        means = mb.reduce_mean(x=rows, axes=[1], keep_dims=True)
        return mb.reduce_max(x=means, axes=[0], keep_dims=False)

    (result,) = run(OPENVINO, function, {"x": x})
    assert_close(result, np.tanh(x).transpose(_SWAPPED).mean(1, keepdims=True).max(0))


@pytest.mark.parametrize("axis", [0, 2])
def test_a_batch_norm_behind_a_reduction_has_a_number_for_each_channel(axis: int) -> None:
    x, mean, gamma, beta = _floats(2, 3, 4), *_floats(3, 3)
    variance = np.abs(mean) + 1

    def function(x: Any) -> Any:
        total = mb.reduce_sum(x=mb.tanh(x=x), axes=[axis], keep_dims=True)
        return mb.batch_norm(x=total, mean=mean, variance=variance, gamma=gamma, beta=beta)

    (result,) = run(OPENVINO, function, {"x": x})
    total = torch.from_numpy(np.tanh(x).sum(axis, keepdims=True))
    statistics = (torch.from_numpy(numbers) for numbers in (mean, variance, gamma, beta))
    assert_close(result, torch.nn.functional.batch_norm(total, *statistics, eps=1e-5).numpy())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_direct", [True, False])  # OpenVINO removes what is between
@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 3, 3)], ids=str)
def test_numbers_of_pixels_stay_outside_of_a_padded_kernel(
    shape: tuple[int, ...], is_direct: bool, groups: int
) -> None:
    x, factors, weight = _floats(2, 2, 3, 3), _floats(*shape), _floats(2, 2 // groups, 3, 3)

    def function(x: Any) -> Any:
        scaled = mb.mul(x=mb.tanh(x=x), y=factors)
        pixels = scaled if is_direct else mb.transpose(x=scaled, perm=[0, 1, 2, 3])
        return mb.conv(x=pixels, weight=weight, pad_type="same", groups=groups)

    (result,) = run(OPENVINO, function, {"x": x})
    scaled = torch.from_numpy(np.tanh(x) * factors)
    expected = torch.nn.functional.conv2d(
        scaled, torch.from_numpy(weight), padding="same", groups=groups
    )
    assert_close(result, expected.numpy())

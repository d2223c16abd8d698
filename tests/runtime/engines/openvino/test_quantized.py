"""Quantized networks: the integer kernels' results equal those of the reference engine.

Scales are powers of two and every product a whole number of steps, so that nothing is rounded and
not one step may differ.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
from support import mil
from support.mil import mb

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.targets import Opset


class _Network:
    """Draws the parts of a network; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.kind = self.one_of(np.float32, np.float16)
        self.stored = self.one_of("int8", "uint8")
        self.scale = self.kind(2.0 ** self.random.integers(-3, 1))
        affine = self.stored == "uint8" or self.flip()
        offset = getattr(np, self.stored)(self.random.integers(0, 8))
        self.shift = {"zero_point": offset} if affine else {}

    def one_of(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def flip(self) -> bool:
        return bool(self.random.integers(2))

    def sizes(self, count: int, low: int, high: int) -> list[int]:
        return self.random.integers(low, high + 1, count).tolist()

    def steps(self, *shape: int) -> np.ndarray:
        return (self.random.integers(-5, 8, shape) * float(self.scale)).astype(self.kind)

    def quantized(self, x: Any, scale: float | None = None) -> Any:
        step = self.scale if scale is None else self.kind(scale)
        codes = mb.quantize(input=x, scale=step, output_dtype=self.stored, **self.shift)
        return mb.dequantize(input=codes, scale=step, **self.shift)

    def weight(self, shape: list[int], axis: int) -> Any:
        count, affine = shape[axis], self.one_of(0, 0, 1)
        return mb.constexpr_affine_dequantize(
            quantized_data=self.random.integers(-1, 2, shape).astype(np.int8),
            scale=(2.0 ** self.random.integers(0, 2, count)).astype(self.kind)
            if self.flip()
            else np.ones(count, self.kind),
            zero_point=np.full(count, affine, np.int8),
            axis=axis,
        )

    def bias(self, count: int) -> dict[str, np.ndarray]:
        return {"bias": self.steps(count)} if self.flip() else {}

    def between(self, y: Any) -> Any:
        """Return ``y`` after the ops that stand between a product and the next quantization."""
        again, axis = self.quantized, min(y.rank - 1, 1)
        return self.one_of(
            lambda: y,
            lambda: mb.relu(x=y),
            lambda: mb.relu6(x=y),
            lambda: mb.clip(x=y, alpha=self.kind(-1), beta=self.kind(1)),
            lambda: mb.add(x=again(y), y=again(mb.relu(x=y))),
            lambda: mb.mul(x=again(y), y=self.kind(2)),
            lambda: mb.concat(values=[again(y), again(mb.relu(x=y))], axis=axis),
        )()


def _convolution(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    axes, groups = net.one_of(1, 2, 3), net.one_of(1, 1, 2, 4)
    inputs, outputs = groups * net.one_of(1, 2, 4), groups * net.one_of(1, 2, 3)
    kernel = [1] * axes if net.flip() else net.sizes(axes, 1, 3)
    options = {
        "strides": net.sizes(axes, 1, 2),
        "dilations": net.sizes(axes, 1, 2),
        "groups": groups,
        "pad_type": net.one_of("custom", "valid", "same"),
    }
    if options["pad_type"] == "custom":
        options["pad"] = net.sizes(2 * axes, 0, 1)
    shape = [outputs, inputs // groups, *kernel]

    def network(x: Any) -> Any:
        weight = net.weight(shape, 0)
        y = mb.conv(x=net.quantized(x), weight=weight, **options, **net.bias(outputs))
        return net.quantized(net.between(y))

    return {"x": net.steps(1, inputs, *net.sizes(axes, 5, 7))}, network


def _transposed(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    axes, groups = net.one_of(1, 2, 3), net.one_of(1, 1, 2)
    inputs, outputs = groups * net.one_of(1, 2, 4), groups * net.one_of(1, 2, 3)
    options = {"strides": net.sizes(axes, 1, 2), "groups": groups, "pad_type": "custom"}
    shape = [inputs, outputs // groups, *net.sizes(axes, 2, 3)]
    options["pad"] = net.sizes(2 * axes, 0, 1)

    def network(x: Any) -> Any:
        weight = net.weight(shape, 1) if groups == 1 else np.ones(shape, net.kind)
        y = mb.conv_transpose(x=net.quantized(x), weight=weight, **options, **net.bias(outputs))
        return net.quantized(net.between(y))

    return {"x": net.steps(1, inputs, *net.sizes(axes, 4, 6))}, network


def _linear(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    rank, inputs, outputs = net.one_of(1, 2, 3, 4, 5), *net.sizes(2, 1, 8)

    def network(x: Any) -> Any:
        weight = net.weight([outputs, inputs], 0)
        y = mb.linear(x=net.quantized(x), weight=weight, **net.bias(outputs))
        return net.quantized(net.between(y))

    return {"x": net.steps(*net.sizes(rank - 1, 1, 3), inputs)}, network


def _chained(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    rank, inputs, *widths = net.one_of(2, 2, 3), *net.sizes(net.one_of(3, 4), 1, 8)

    def network(x: Any) -> Any:
        y = net.quantized(x)
        for width in widths:
            weight = net.weight([width, y.shape[-1]], 0)
            y = net.quantized(net.between(mb.linear(x=y, weight=weight, **net.bias(width))))
        return y

    return {"x": net.steps(*net.sizes(rank - 1, 1, 8), inputs)}, network


def _matmul(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    rows, depth, columns, *batch = net.sizes(5, 1, 6)
    first, second = net.flip(), net.flip()
    shapes = [
        [*batch[: net.one_of(0, 1, 2)], *((depth, rows) if first else (rows, depth))],
        [*((columns, depth) if second else (depth, columns))],
    ]

    def network(x: Any, y: Any) -> Any:
        # Steps of one, so that products are whole steps of the other operand.
        right = net.quantized(y, 1.0)
        z = mb.matmul(x=net.quantized(x), y=right, transpose_x=first, transpose_y=second)
        return net.quantized(net.between(z))

    whole = net.random.integers(-3, 4, shapes[1]).astype(net.kind)
    return {"x": net.steps(*shapes[0]), "y": whole}, network


def _residual(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    channels, first, second, stride = net.one_of(2, 4, 8), net.one_of(1, 3), *net.sizes(2, 1, 2)

    def network(x: Any) -> Any:
        a = net.quantized(x)
        weight = net.weight([channels, channels, first, first], 0)
        y = net.quantized(net.between(mb.conv(x=a, weight=weight, pad_type="same")))
        if y.shape == a.shape:
            y = net.quantized(mb.add(x=y, y=a))
        weight = net.weight([channels, y.shape[1], second, second], 0)
        padded = {"pad_type": "custom", "pad": [1] * 4, "strides": [stride] * 2}
        return net.quantized(mb.relu(x=mb.conv(x=y, weight=weight, **padded)))

    return {"x": net.steps(1, channels, 6, 6)}, network


def _pooled(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    # Windows of powers of two, whose means are exact.
    kernel = net.one_of([2], [4], [2, 2], [4, 1], [2, 4])
    axes, counted = len(kernel), net.one_of(True, True, False)
    options = {
        "kernel_sizes": kernel,
        "strides": net.sizes(axes, 1, 2),
        "exclude_padding_from_average": not counted,
        "pad_type": net.one_of("custom", "custom", "same", "same_lower") if counted else "valid",
    }
    if options["pad_type"] == "custom":
        options["pad"] = [net.one_of(0, size // 2) for size in kernel for _ in range(2)]

    def network(x: Any) -> Any:
        a, weight = net.quantized(x), net.weight([4, 2, *([1] * axes)], 0)
        pooled, parts = mb.avg_pool(x=a, **options), 8
        if net.flip():
            pooled, parts = mb.avg_pool(x=pooled, **options), 64
        # Every part of a step that there may be is a code of its own: nothing is rounded.
        y = mb.conv(x=net.quantized(pooled, float(net.scale) / parts), weight=weight)
        # A product of the same values: beside it the plugin takes codes without a sign.
        product = mb.conv(x=a, weight=weight)
        largest = mb.reduce_max(x=product, axes=list(range(2, axes + 2)), keep_dims=True)
        return mb.add(x=y, y=largest)

    return {"x": net.steps(1, 2, *([16] * axes))}, network


def _sums(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    """Results of convolutions between two steps are rounded before they are added, not after."""
    channels, join = net.one_of(4, 8, 16), net.one_of(mb.add, mb.add, mb.sub)
    step = float(net.scale)

    def branch(a: Any, coarser: int) -> Any:
        weight = mb.constexpr_affine_dequantize(
            quantized_data=net.random.integers(-2, 3, [channels, channels, 1, 1]).astype(np.int8),
            scale=net.kind(0.25),
            zero_point=np.int8(0),
            axis=0,
        )
        # Never in the middle of two steps.
        y = mb.conv(x=a, weight=weight, bias=np.full(channels, step / 16, net.kind))
        return net.quantized(y, step * coarser)

    def network(x: Any) -> Any:
        a = net.quantized(x)
        total = join(x=branch(a, 1), y=branch(a, 2) if net.flip() else a)
        return net.quantized(mb.relu(x=total) if net.flip() else total, step / 4)

    return {"x": net.steps(1, channels, 6, 6)}, network


def _extrema(net: _Network) -> tuple[dict[str, np.ndarray], Callable[..., Any]]:
    """A value between two steps is rounded once, after the extremum is found."""
    reduce, axes = net.one_of(mb.reduce_max, mb.reduce_min), net.one_of([1], [3], [2, 3])
    after = net.one_of(lambda y: y, lambda y: mb.relu(x=y), lambda y: mb.mul(x=y, y=net.kind(-0.5)))
    # Never in the middle of two steps, where engines may round to either.
    quarters = net.steps(1, 4, 4, 4) / 4 + net.scale / 32

    def network(x: Any) -> Any:
        given = net.quantized(x, float(net.scale) / 32) if net.flip() else x
        y = net.quantized(after(reduce(x=given, axes=axes, keep_dims=True)))
        return mb.reduce_sum(x=y, axes=[1, 2, 3], keep_dims=True)

    return {"x": quarters.astype(net.kind)}, network


_FAMILIES = (
    _convolution,
    _transposed,
    _linear,
    _chained,
    _matmul,
    _residual,
    _pooled,
    _extrema,
    _sums,
)


def _assert_equal(inputs: mil.Arrays, network: Callable[..., Any]) -> Any:
    """The compiled function, after it gave what the reference engine gives."""
    main = mil.main(mil.build(network, inputs, Opset.iOS17))
    features = mil.features(main, inputs)
    expected = REFERENCE.compile(main, EngineOptions())(features)
    compiled = OPENVINO.compile(main, EngineOptions(cache=None))
    actual = compiled(features)
    for name, wanted in expected.items():
        np.testing.assert_array_equal(actual[name], wanted)
    return compiled


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", _FAMILIES, ids=lambda family: family.__name__[1:])
def test_products_between_quantized_values_are_exact(family: Any, seed: int) -> None:
    _assert_equal(*family(_Network(seed)))


@pytest.mark.parametrize("between", [lambda y: y, lambda y: mb.relu(x=y)], ids=["bare", "relu"])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_layers_without_bias_in_a_row(rows: int, between: Callable[[Any], Any]) -> None:
    net = _Network(0)
    net.kind, net.scale, net.stored, net.shift = np.float32, np.float32(0.25), "int8", {}

    def network(x: Any) -> Any:
        y = net.quantized(x)
        for width in (8, 6, 5):
            weight = mb.constexpr_affine_dequantize(
                quantized_data=net.random.integers(-1, 2, (width, y.shape[-1])).astype(np.int8)
                * np.int8(64),
                scale=np.float32([1 / 64, 1 / 32] * width)[:width],
                zero_point=np.zeros(width, np.int8),
                axis=0,
            )
            y = net.quantized(between(mb.linear(x=y, weight=weight)))
        return y

    _assert_equal({"x": net.steps(rows, 6)}, network)


def test_a_layer_before_products_by_a_stack() -> None:
    net = _Network(0)
    stack = net.steps(3, 5, 2) / net.scale

    def network(x: Any) -> Any:
        y = net.quantized(mb.linear(x=net.quantized(x), weight=net.weight([5, 6], 0)))
        return mb.matmul(x=y, y=stack)

    _assert_equal({"x": net.steps(4, 6)}, network)


_POOL = {"kernel_sizes": [2, 2], "pad_type": "custom", "pad": [1] * 4}
_CHANNELS = [0, 0, 1, 1, 0, 0, 0, 0]
# Of quantized values, a number below zero and one above it; both lie between two steps.
_BETWEEN_CODES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bounds": lambda a, low, high: mb.clip(x=a, alpha=low, beta=high),
    "lower and upper bound": lambda a, low, high: mb.minimum(x=high, y=mb.maximum(x=a, y=low)),
    "upper and lower bound": lambda a, low, high: mb.maximum(x=mb.minimum(x=high, y=a), y=low),
    "shift": lambda a, _, high: mb.add(x=a, y=high),
    "distance": lambda a, low, _: mb.sub(x=low, y=mb.relu(x=a)),
    "padding": lambda a, _, high: mb.pad(x=a, pad=[0, 1], constant_val=high),
    "far padding": lambda a, _, high: mb.pad(x=a, pad=[0, 1], constant_val=128 * high),
    "padded channels": lambda a, low, _: mb.pad(x=a, pad=_CHANNELS, constant_val=0 * low),
    "mean": lambda a, *_: mb.avg_pool(x=a, **_POOL),
    "mean of largest": lambda a, *_: mb.avg_pool(x=mb.max_pool(x=a, **_POOL), **_POOL),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", _BETWEEN_CODES)
def test_values_between_or_beyond_codes_are_not_rounded(name: str, seed: int, size: int) -> None:
    net = _Network(seed)
    low, high = (net.kind(float(net.scale) * steps) for steps in (-1.375, 2.625))

    def network(x: Any) -> Any:
        y = _BETWEEN_CODES[name](net.quantized(x), low, high)
        return mb.conv(x=y, weight=net.weight([4, y.shape[1], size, size], 0), pad_type="same")

    _assert_equal({"x": net.steps(1, 4, 6, 6)}, network)


@pytest.mark.parametrize("scales", [(0.25, 0.25), (0.25, 0.5)], ids=["one step", "two steps"])
def test_concatenated_values_keep_their_scales(scales: tuple[float, float]) -> None:
    net = _Network(0)
    net.stored, net.shift = "int8", {}

    def network(x: Any) -> Any:
        parts = [net.quantized(mb.mul(x=x, y=net.kind(k)), s) for k, s in enumerate(scales, 1)]
        joined = mb.concat(values=parts, axis=1)
        return mb.conv(x=joined, weight=net.weight([4, 8, 3, 3], 0))

    x = (net.random.integers(-8, 8, (1, 4, 6, 6)) / 4).astype(net.kind)
    _assert_equal({"x": x}, network)


def _per_axis(net: _Network, x: Any, axis: int, *, returns_codes: bool = False) -> Any:
    """Quantize and dequantize along ``axis``, in whole steps or parts of one."""
    count = x.shape[axis]
    scales = (net.scale * 2.0 ** net.random.integers(-2, 1, count)).astype(net.kind)
    points = net.random.integers(-9, 10, count).astype(np.int8)
    shared = {"scale": scales, "zero_point": points, "axis": axis}
    codes = mb.quantize(input=x, output_dtype="int8", **shared)
    if returns_codes:
        return mb.dequantize(input=codes, scale=net.kind(1))
    return mb.dequantize(input=codes, **shared)


@pytest.mark.share(2)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("between", [None, mb.abs], ids=["next", "abs"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 3, 4), (0,)),
        ((2, 3, 4), (1,)),
        ((2, 3, 4, 5), (1,)),
        ((3, 3, 3, 3), (0, 3)),
        ((2, 3, 4, 5, 2), (0, 2)),
        ((2, 3, 4, 5, 2), (3, 4)),
    ],
)
def test_values_behind_a_reduction_are_quantized_along_any_axis(
    shape: tuple[int, ...], axes: tuple[int, ...], between: Any, keeps: bool
) -> None:
    net = _Network(0)
    net.kind = np.float32

    def network(x: Any) -> Any:
        results: list[Any] = []
        for reduce in (mb.reduce_sum, mb.reduce_max):
            y = reduce(x=x, axes=axes, keep_dims=keeps)
            y = y if between is None else between(x=y)
            for axis in range(y.rank):
                if y.shape[axis] > 1:
                    results.append(_per_axis(net, y, axis))
                    results.append(_per_axis(net, y, axis, returns_codes=True))
        return results

    _assert_equal({"x": net.steps(*shape)}, network)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_layers_of_values_quantized_along_an_axis(axis: int, seed: int) -> None:
    net = _Network(seed)
    net.kind = np.float32

    def network(x: Any) -> Any:
        y = _per_axis(net, x, axis)
        joined = mb.concat(values=[y, _per_axis(net, mb.relu(x=x), axis)], axis=1)
        image = mb.conv(x=joined, weight=net.weight([3, 8, 3, 3], 0), pad_type="same")
        return image, mb.linear(x=y, weight=net.weight([5, 6], 0)), mb.avg_pool(x=y, **_POOL)

    _assert_equal({"x": net.steps(2, 4, 6, 6)}, network)


def test_a_norm_of_quantized_values_adds_epsilon_to_the_variance_of_the_values():
    """The variance of the values is less than epsilon."""
    net = _Network(0)
    net.kind, net.scale, net.shift = np.float32, np.float32(2**-7), {}
    gamma = np.ones(4, np.float32)

    def network(x: Any) -> Any:
        norm = mb.instance_norm(x=net.quantized(x), gamma=gamma, beta=0 * gamma, epsilon=0.01)
        return net.quantized(norm, 2**-8)

    _assert_equal({"x": net.steps(1, 4, 6, 6)}, network)


def _assert_largest_products_are_summed() -> None:
    """A matrix product and a convolution of the largest 8-bit integers."""
    one, zero, low = np.float32(1), np.uint8(0), np.int8(0)

    def network(x):
        codes = mb.quantize(input=x, scale=one, zero_point=zero, output_dtype="uint8")
        values = mb.dequantize(input=codes, scale=one, zero_point=zero)
        weight = mb.constexpr_affine_dequantize(
            quantized_data=np.full((16, 64), 127, np.int8), scale=one, zero_point=low, axis=0
        )
        pixels = mb.constexpr_affine_dequantize(
            quantized_data=np.full((16, 64, 1, 1), -127, np.int8), scale=one, zero_point=low, axis=0
        )
        product = mb.linear(x=values, weight=weight)
        image = mb.reshape(x=values, shape=(1, 64, 2, 2))
        summed = mb.conv(x=image, weight=pixels, pad_type="valid")
        return mb.add(x=product, y=mb.reshape(x=summed, shape=(4, 16)))

    # Numbers up to 64 * 255 * 127 are exact in fp32.
    values = np.random.default_rng(0).integers(200, 256, (4, 64)).astype(np.float32)
    _assert_equal({"x": values}, network)


@pytest.mark.slow
@pytest.mark.share(8)
# Without a limit, the tests above run where there is VNNI.
@pytest.mark.parametrize(
    "instructions", [pytest.param("ALL", marks=pytest.mark.slow), "AVX512_CORE"]
)
def test_the_largest_products_are_summed_with_and_without_vnni(monkeypatch, instructions):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", instructions)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as new_process:
        new_process.submit(_assert_largest_products_are_summed).result()

"""Convolution, pooling, normalization, products, attention and resizing on OpenVINO, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import mil
from support.engine_runs import assert_close, run
from support.mil import mb
from torch.nn import functional as F

from coreml_delegate.runtime.engines.openvino.engine import OPENVINO
from coreml_delegate.runtime.mil.opset import Opset

_RNG = np.random.default_rng(0)


def _normal(*shape):
    return _RNG.standard_normal(shape).astype(np.float32)


def _check(build, expected, opset=Opset.iOS18, **inputs):
    (actual,) = run(OPENVINO, build, inputs, opset)
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    assert_close(actual, expected(**tensors).numpy())


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_SIZES = (7, 6, 5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_conv(spatial, groups):
    weight, bias = _normal(8, 4 // groups, *(3, 2, 3)[:spatial]), _normal(8)
    stride, dilation, pad = (2, 1, 1)[:spatial], (1, 2, 1)[:spatial], (1, 0, 2)[:spatial]
    _check(
        lambda x: mb.conv(
            x=x,
            weight=weight,
            bias=bias,
            strides=stride,
            dilations=dilation,
            pad_type="custom",
            pad=[amount for amount in pad for _ in "be"],
            groups=groups,
        ),
        lambda x: _CONV[spatial](
            x, torch.from_numpy(weight), torch.from_numpy(bias), stride, pad, dilation, groups
        ),
        x=_normal(2, 4, *_SIZES[:spatial]),
    )


def _same(x, kernel, stride, lower=False, value=0.0):
    """``x`` padded so that strided windows give ceil(size / stride) outputs."""
    pads = []
    for size, reach in zip(reversed(x.shape[2:]), reversed(kernel), strict=True):
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        few, many = total // 2, total - total // 2
        pads += [many, few] if lower else [few, many]
    return F.pad(x, pads, value=value)


@pytest.mark.parametrize("pad_type", ["valid", "same", "same_lower"])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_pad_type(pad_type, stride):
    weight = _normal(5, 3, 2, 4)

    def expected(x):
        padded = x if pad_type == "valid" else _same(x, (2, 4), stride, pad_type == "same_lower")
        return F.conv2d(padded, torch.from_numpy(weight), stride=stride)

    _check(
        lambda x: mb.conv(x=x, weight=weight, strides=[stride] * 2, pad_type=pad_type),
        expected,
        x=_normal(1, 3, 7, 9),
    )


def test_conv_with_run_time_weight_and_uneven_pad():
    _check(
        lambda x, weight: mb.conv(x=x, weight=weight, pad_type="custom", pad=[0, 1, 2, 0]),
        lambda x, weight: F.conv2d(F.pad(x, (2, 0, 0, 1)), weight),
        x=_normal(1, 3, 5, 5),
        weight=_normal(4, 3, 2, 3),
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_conv_transpose(spatial, groups):
    weight, bias = _normal(4, 6 // groups, *(3, 2, 3)[:spatial]), _normal(6)
    stride, dilation, pad = (2, 3, 1)[:spatial], (1, 2, 1)[:spatial], (1, 0, 2)[:spatial]
    _check(
        lambda x: mb.conv_transpose(
            x=x,
            weight=weight,
            bias=bias,
            strides=stride,
            dilations=dilation,
            pad_type="custom",
            pad=[amount for amount in pad for _ in "be"],
            groups=groups,
        ),
        lambda x: _CONV_TRANSPOSE[spatial](
            x, torch.from_numpy(weight), torch.from_numpy(bias), stride, pad, 0, groups, dilation
        ),
        x=_normal(2, 4, *_SIZES[:spatial]),
    )


@pytest.mark.parametrize("output_padding", [0, 1])
def test_conv_transpose_output_shape(output_padding):
    weight = _normal(4, 3, 3, 3)
    size = 2 * 6 + 3 - 2 + output_padding
    _check(
        lambda x: mb.conv_transpose(
            x=x,
            weight=weight,
            strides=[2, 2],
            pad_type="custom",
            pad=[1, 1, 1, 1],
            output_shape=[1, 3, size, size],
        ),
        lambda x: F.conv_transpose2d(
            x, torch.from_numpy(weight), stride=2, padding=1, output_padding=output_padding
        ),
        x=_normal(1, 4, 7, 7),
    )


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_conv_transpose_same(kernel):
    weight = _normal(4, 3, kernel)
    _check(
        lambda x: mb.conv_transpose(x=x, weight=weight, strides=[2], pad_type="same"),
        lambda x: F.conv_transpose1d(x, torch.from_numpy(weight), stride=2)[
            ..., (kernel - 2) // 2 :
        ][..., :10],
        x=_normal(1, 4, 5),
    )


_POOLS = {
    ("max_pool", 1): F.max_pool1d,
    ("max_pool", 2): F.max_pool2d,
    ("max_pool", 3): F.max_pool3d,
    ("avg_pool", 1): F.avg_pool1d,
    ("avg_pool", 2): F.avg_pool2d,
    ("avg_pool", 3): F.avg_pool3d,
}


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("op_type", ["max_pool", "avg_pool"])
def test_pool(op_type, spatial, ceil_mode):
    if spatial == 3 and ceil_mode:
        pytest.skip("MIL has no ceil_mode in three dimensions")
    pad = (1, 0, 1)[:spatial]
    _check(
        lambda x: getattr(mb, op_type)(
            x=x,
            kernel_sizes=[3] * spatial,
            strides=[2] * spatial,
            pad_type="custom",
            pad=[amount for amount in pad for _ in "be"],
            ceil_mode=ceil_mode,
        ),
        lambda x: _POOLS[op_type, spatial](x, 3, 2, pad, ceil_mode=ceil_mode),
        x=_normal(2, 3, *(8, 6, 7)[:spatial]),
    )


@pytest.mark.parametrize("size", [7, 8, 9])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_avg_pool_counts_padding(ceil_mode, exclude, size):
    _check(
        lambda x: mb.avg_pool(
            x=x,
            kernel_sizes=[3, 3],
            strides=[2, 2],
            pad_type="custom",
            pad=[1, 1, 1, 1],
            ceil_mode=ceil_mode,
            exclude_padding_from_average=exclude,
        ),
        lambda x: F.avg_pool2d(
            x, 3, 2, 1, ceil_mode=ceil_mode, count_include_pad=not exclude
        ),
        x=_normal(1, 2, size, size),
    )


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pool_valid(ceil_mode):
    for op_type, expected in (("max_pool", F.max_pool2d), ("avg_pool", F.avg_pool2d)):
        _check(
            lambda x, op_type=op_type: getattr(mb, op_type)(
                x=x, kernel_sizes=[3, 3], strides=[2, 2], pad_type="valid", ceil_mode=ceil_mode
            ),
            lambda x, expected=expected: expected(x, 3, 2, ceil_mode=ceil_mode),
            x=_normal(1, 2, 8, 6),
        )


@pytest.mark.parametrize("pad_type", ["same", "same_lower"])
def test_pool_same(pad_type):
    lower = pad_type == "same_lower"
    keywords = {"kernel_sizes": [2, 4], "strides": [2, 2], "pad_type": pad_type}
    x = _normal(1, 2, 7, 6)
    _check(
        lambda x: mb.max_pool(x=x, **keywords),
        lambda x: F.max_pool2d(_same(x, (2, 4), 2, lower, -torch.inf), (2, 4), 2),
        x=x,
    )
    _check(
        lambda x: mb.avg_pool(x=x, **keywords),
        lambda x: F.avg_pool2d(_same(x, (2, 4), 2, lower), (2, 4), 2),
        x=x,
    )
    _check(
        lambda x: mb.avg_pool(x=x, exclude_padding_from_average=True, **keywords),
        lambda x: (
            F.avg_pool2d(_same(x, (2, 4), 2, lower), (2, 4), 2)
            / F.avg_pool2d(_same(torch.ones_like(x), (2, 4), 2, lower), (2, 4), 2)
        ),
        x=x,
    )


def test_l2_pool():
    _check(
        lambda x: mb.l2_pool(x=x, kernel_sizes=[2, 3], strides=[1, 2], pad_type="valid"),
        lambda x: F.lp_pool2d(x, 2, (2, 3), (1, 2)),
        x=_normal(1, 2, 5, 7),
    )


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_batch_norm(rank, affine):
    mean, variance = _normal(3), np.abs(_normal(3)) + 0.1
    gamma, beta = (_normal(3), _normal(3)) if affine else (None, None)
    keywords = {"gamma": gamma, "beta": beta} if affine else {}
    _check(
        lambda x: mb.batch_norm(x=x, mean=mean, variance=variance, epsilon=np.float32(1e-3), **keywords),
        lambda x: F.batch_norm(
            x,
            torch.from_numpy(mean),
            torch.from_numpy(variance),
            None if gamma is None else torch.from_numpy(gamma),
            None if beta is None else torch.from_numpy(beta),
            eps=1e-3,
        ),
        x=_normal(2, 3, 4, 5, 2)[(...,) + (0,) * (5 - rank)],
    )


@pytest.mark.parametrize("axes", [[-1], [1, 2], [-2, -1], [1], None])
def test_layer_norm(axes):
    x = _normal(2, 3, 4) * 3 + 1
    chosen = range(3) if axes is None else sorted(axis % 3 for axis in axes)
    shape = [x.shape[axis] for axis in chosen]
    keywords = {"gamma": _normal(*shape), "beta": _normal(*shape)}
    if axes is not None:
        keywords["axes"] = axes

    def function(x):
        return mb.layer_norm(x=x, epsilon=np.float32(1e-4), **keywords)

    def expected(x):
        over = tuple(chosen)
        centred = x - x.mean(over, keepdim=True)
        scale = (centred.square().mean(over, keepdim=True) + 1e-4).sqrt()
        full = [x.shape[axis] if axis in over else 1 for axis in range(3)]
        gamma, beta = (torch.from_numpy(keywords[k]).reshape(full) for k in ("gamma", "beta"))
        return centred / scale * gamma + beta

    _check(function, expected, x=x)


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4, 5)])
def test_instance_norm(shape):
    gamma, beta = _normal(3), _normal(3)
    _check(
        lambda x: mb.instance_norm(x=x, gamma=gamma, beta=beta, epsilon=np.float32(1e-3)),
        lambda x: F.instance_norm(
            x, weight=torch.from_numpy(gamma), bias=torch.from_numpy(beta), eps=1e-3
        ),
        x=_normal(*shape),
    )


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5), (2, 2, 3, 4, 5)])
def test_l2_norm(shape):
    inputs = {"x": _normal(*shape)}

    def function(x):
        return mb.l2_norm(x=x, epsilon=np.float32(1e-3))

    (expected,) = mil.infer(function, inputs)
    (actual,) = run(OPENVINO, function, inputs)
    assert_close(actual, expected)


def test_local_response_norm():
    _check(
        lambda x: mb.local_response_norm(
            x=x, size=3, alpha=np.float32(0.3), beta=np.float32(0.6), k=np.float32(1.5)
        ),
        lambda x: F.local_response_norm(x, 3, alpha=0.3, beta=0.6, k=1.5),
        x=_normal(2, 6, 3, 3),
    )


@pytest.mark.parametrize("opset", [Opset.iOS15, Opset.iOS17])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_linear(shape, opset):
    weight, bias = _normal(5, 4), _normal(5)
    _check(
        lambda x: mb.linear(x=x, weight=weight, bias=bias),
        lambda x: F.linear(x, torch.from_numpy(weight), torch.from_numpy(bias)),
        opset,
        x=_normal(*shape),
    )


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((3, 4), (4, 2)),
        ((2, 3, 4), (4, 2)),
        ((5, 1, 3, 4), (2, 4, 3)),
        ((4,), (4,)),
        ((4,), (2, 4, 3)),
        ((2, 3, 4), (4,)),
    ],
)
def test_matmul(x, y):
    _check(
        lambda x, y: mb.matmul(x=x, y=y),
        lambda x, y: torch.matmul(x, y),
        x=_normal(*x),
        y=_normal(*y),
    )


def test_matmul_transposed():
    _check(
        lambda x, y: mb.matmul(x=x, y=y, transpose_x=True, transpose_y=True),
        lambda x, y: x.mT @ y.mT,
        x=_normal(2, 4, 3),
        y=_normal(2, 5, 4),
    )


@pytest.mark.parametrize(
    ("equation", "x", "y"),
    [
        ("nchw,nwhu->nchu", (2, 3, 4, 5), (2, 5, 4, 6)),
        ("abcd, adce -> abce", (1, 3, 4, 5), (2, 5, 1, 6)),
        ("chw,whr->chr", (3, 4, 5), (5, 4, 6)),
    ],
)
def test_einsum(equation, x, y):
    def function(x, y):
        return mb.einsum(values=(x, y), equation=equation.replace(" ", ""))

    inputs = {"x": _normal(*x), "y": _normal(*y)}
    (expected,) = mil.infer(function, inputs)
    (actual,) = run(OPENVINO, function, inputs)
    assert_close(actual, expected)


@pytest.mark.parametrize("mask", ["none", "float", "bool", "shared"])
@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_scaled_dot_product_attention(batch, mask):
    inputs = {
        "query": _normal(*batch, 4, 8),
        "key": _normal(*batch, 5, 8),
        "value": _normal(*batch, 5, 6),
    }
    masks = {
        "float": _normal(*batch, 4, 5),
        "bool": _RNG.random((*batch, 4, 5)) > 0.3,
        "shared": _normal(4, 5),
    }
    if mask in masks:
        inputs["attn_mask"] = masks[mask]
    _check(
        lambda **tensors: mb.scaled_dot_product_attention(**tensors),
        lambda **tensors: F.scaled_dot_product_attention(**tensors),
        **inputs,
    )


_ALIGNMENT = {"STRICT_ALIGN_CORNERS": True, "UNALIGN_CORNERS": False}


@pytest.mark.parametrize("size", [(9, 4), (3, 12)])
@pytest.mark.parametrize("mode", _ALIGNMENT)
def test_resize_bilinear(mode, size):
    _check(
        lambda x: mb.resize_bilinear(
            x=x, target_size_height=size[0], target_size_width=size[1], sampling_mode=mode
        ),
        lambda x: F.interpolate(x, size, mode="bilinear", align_corners=_ALIGNMENT[mode]),
        x=_normal(1, 2, 5, 6),
    )


@pytest.mark.parametrize(
    ("mode", "size", "grid"),
    [
        # The grids that coremltools documents for two inputs, 0 and 1.
        ("UNALIGN_CORNERS", 5, [0, 0.1, 0.5, 0.9, 1]),
        ("ALIGN_CORNERS", 5, [0, 0.25, 0.5, 0.75, 1]),
        ("STRICT_ALIGN_CORNERS", 6, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ("ALIGN_CORNERS", 1, [0.5]),
        ("STRICT_ALIGN_CORNERS", 1, [0]),
        ("DEFAULT", 5, [0, 0.4, 0.8, 1, 1]),
        ("OFFSET_CORNERS", 5, [0.1, 0.3, 0.5, 0.7, 0.9]),
    ],
)
def test_sampling_modes(mode, size, grid):
    x = np.tile(np.array([0, 1], np.float32), (1, 1, 2, 1))
    expected = np.tile(np.array(grid, np.float32), (1, 1, 2, 1))
    (actual,) = run(
        OPENVINO,
        lambda x: mb.resize_bilinear(
            x=x, target_size_height=2, target_size_width=size, sampling_mode=mode
        ),
        {"x": x},
    )
    assert_close(actual, expected)
    (actual,) = run(
        OPENVINO,
        lambda x: mb.resize(
            x=x, shape=[0, size], resized_dims=np.uint32(2), sampling_mode=mode
        ),
        {"x": x},
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("align_corners", [False, True])
def test_upsample_bilinear(align_corners):
    _check(
        lambda x: mb.upsample_bilinear(
            x=x, scale_factor_height=2, scale_factor_width=3, align_corners=align_corners
        ),
        lambda x: F.interpolate(
            x, scale_factor=(2, 3), mode="bilinear", align_corners=align_corners
        ),
        x=_normal(1, 2, 4, 5),
    )


def test_nearest_neighbor():
    _check(
        lambda x: mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, scale_factor_width=3),
        lambda x: F.interpolate(x, scale_factor=(2, 3), mode="nearest"),
        x=_normal(1, 2, 4, 5),
    )
    _check(
        lambda x: mb.resize_nearest_neighbor(x=x, target_size_height=3, target_size_width=10),
        lambda x: F.interpolate(x, (3, 10), mode="nearest"),
        x=_normal(1, 2, 6, 5),
    )

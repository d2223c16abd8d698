"""Windows and grids on OpenVINO: padding, ceiling, masks and sampling modes, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engine_runs import assert_close, run
from support.mil import mb
from torch.nn import functional as F

from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.targets import Opset

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
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=ceil_mode, count_include_pad=not exclude),
        x=_normal(1, 2, size, size),
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


@pytest.mark.parametrize("mask", ["none", "float", "bool", "shared"])
@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_scaled_dot_product_attention(batch, mask):
    inputs = {
        "query": _normal(*batch, 4, 8),
        "key": _normal(*batch, 5, 8),
        "value": _normal(*batch, 5, 6),
    }
    kept = _RNG.random((*batch, 4, 5)) > 0.3
    kept[..., 0] = True  # of a row without any, MIL says nothing
    masks = {
        "float": _normal(*batch, 4, 5),
        "bool": kept,
        "shared": _normal(4, 5),
    }
    if mask in masks:
        inputs["attn_mask"] = masks[mask]
    _check(
        lambda **tensors: mb.scaled_dot_product_attention(**tensors),
        lambda **tensors: F.scaled_dot_product_attention(**tensors),
        **inputs,
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
        lambda x: mb.resize(x=x, shape=[0, size], resized_dims=np.uint32(2), sampling_mode=mode),
        {"x": x},
    )
    assert_close(actual, expected)

"""Convolutions, pooling, normalization, matrix products and attention."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from coreml_delegate.targets import Opset
from support.op_cases.case import OpCase, integers, normal, together, uniform

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_SIZES = (9, 8, 7)


def _conv(rank: int, note: str, expected, groups: int = 1, kernel: int = 3, **attributes) -> OpCase:
    return OpCase(
        "conv",
        f"{rank}d-{note}",
        {"x": normal(2, 4, *_SIZES[:rank])},
        {"weight": normal(6, 4 // groups, *(kernel,) * rank, seed=1), "bias": normal(6, seed=2)},
        {"groups": groups, **attributes},
        expected=lambda x, weight, bias: expected(_CONV[rank], x, weight, bias),
    )


CONV = [
    OpCase(
        "conv_quantized",
        "linear",
        {"x": normal(2, 4, 9, 8)},
        {"quant_scale": uniform(6, seed=1), "quant_bias": normal(6, seed=2)},
        {
            "weight": integers(6, 2, 3, 3, low=0, high=9, seed=3).astype(np.uint8),
            "bias": integers(6, low=0, high=9, seed=4).astype(np.uint8),
            "quantization_type": "linear",
            "groups": 2,
            "pad_type": "same",
        },
        expected=lambda x, quant_scale, quant_bias: F.conv2d(
            x,
            torch.tensor(integers(6, 2, 3, 3, low=0, high=9, seed=3))
            * quant_scale.reshape(-1, 1, 1, 1)
            + quant_bias.reshape(-1, 1, 1, 1),
            torch.tensor(integers(6, low=0, high=9, seed=4), dtype=torch.float32),
            padding="same",
            groups=2,
        ),
    ),
    *(_conv(rank, "valid", lambda f, x, w, b: f(x, w, b)) for rank in (1, 2, 3)),
    *(
        _conv(
            rank,
            "custom",
            lambda f, x, w, b: f(x, w, b, stride=2, padding=1, dilation=2, groups=2),
            groups=2,
            pad_type="custom",
            pad=[1] * 2 * rank,
            strides=[2] * rank,
            dilations=[2] * rank,
        )
        for rank in (1, 2, 3)
    ),
    _conv(
        2,
        "asymmetric",
        lambda f, x, w, b: f(F.pad(x, (3, 0, 1, 2)), w, b),
        pad_type="custom",
        pad=[1, 2, 3, 0],
    ),
    _conv(2, "same-odd", lambda f, x, w, b: f(x, w, b, padding="same"), pad_type="same"),
    # 9 -> 5 and 8 -> 4 with kernel 4, stride 2: 3 and 2 to add, the odd one after or before.
    _conv(
        2,
        "same-even-strided",
        lambda f, x, w, b: f(F.pad(x, (1, 1, 1, 2)), w, b, stride=2),
        kernel=4,
        pad_type="same",
        strides=[2, 2],
    ),
    _conv(
        2,
        "same_lower-even-strided",
        lambda f, x, w, b: f(F.pad(x, (1, 1, 2, 1)), w, b, stride=2),
        kernel=4,
        pad_type="same_lower",
        strides=[2, 2],
    ),
    OpCase(
        "conv",
        "weight-is-an-input",
        {"x": normal(1, 2, 5, 5), "weight": normal(3, 2, 3, 3, seed=1)},
        expected=lambda x, weight: F.conv2d(x, weight),
    ),
]


def _transposed(rank: int, note: str, expected, **attributes) -> OpCase:
    return OpCase(
        "conv_transpose",
        f"{rank}d-{note}",
        {"x": normal(1, 4, *(5, 4, 3)[:rank])},
        {"weight": normal(4, 3, *(3,) * rank, seed=1), "bias": normal(6, seed=2)},
        {"groups": 2, **attributes},
        expected=lambda x, weight, bias: expected(
            lambda **options: _TRANSPOSED[rank](x, weight, bias, groups=2, **options)
        ),
    )


CONV_TRANSPOSE = [
    *(
        _transposed(
            rank,
            "valid",
            lambda f: f(stride=2, dilation=2),
            strides=[2] * rank,
            dilations=[2] * rank,
        )
        for rank in (1, 2, 3)
    ),
    *(
        _transposed(
            rank,
            "custom",
            lambda f: f(stride=2, padding=1),
            strides=[2] * rank,
            pad_type="custom",
            pad=[1] * 2 * rank,
        )
        for rank in (1, 2, 3)
    ),
    _transposed(2, "same", lambda f: f(stride=1, padding=1), pad_type="same"),
    _transposed(
        2,
        "same-strided",
        # Full size 2n + 1, wanted 2n: the surplus element goes at the end.
        lambda f: f(stride=2)[..., :-1, :-1],
        pad_type="same",
        strides=[2, 2],
    ),
    _transposed(
        2,
        "output_shape",
        lambda f: f(stride=2, padding=1, output_padding=1),
        strides=[2, 2],
        pad_type="custom",
        pad=[1, 1, 1, 1],
        output_shape=[1, 6, 10, 8],
    ),
]

_POOLED = {1: normal(2, 3, 11), 2: normal(2, 3, 11, 10), 3: normal(1, 2, 7, 6, 5)}
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pool(op: str, rank: int, note: str, expected, **attributes) -> OpCase:
    return OpCase(
        op,
        f"{rank}d-{note}",
        {"x": _POOLED[rank]},
        {},
        {"kernel_sizes": [3] * rank, "strides": [2] * rank, **attributes},
        expected=expected,
    )


def _padded(rank: int) -> dict:
    return {"pad_type": "custom", "pad": [1] * 2 * rank}


def _both_ends(x: torch.Tensor, value: float) -> torch.Tensor:
    # 11 -> 6 with kernel 3, stride 2: one before, one after; 10 -> 5: one after.
    return F.pad(x, (0, 1, 1, 1), value=value)


POOL = [
    *(
        case
        for rank in (1, 2, 3)
        for case in (
            _pool("max_pool", rank, "valid", lambda x, r=rank: _MAX[r](x, 3, 2), pad_type="valid"),
            _pool(
                "max_pool", rank, "custom", lambda x, r=rank: _MAX[r](x, 3, 2, 1), **_padded(rank)
            ),
            _pool("avg_pool", rank, "valid", lambda x, r=rank: _AVG[r](x, 3, 2), pad_type="valid"),
            *(
                _pool(
                    "avg_pool",
                    rank,
                    f"custom-exclude-{exclude}",
                    lambda x, r=rank, e=exclude: _AVG[r](x, 3, 2, 1, count_include_pad=not e),
                    exclude_padding_from_average=exclude,
                    **_padded(rank),
                )
                for exclude in (True, False)
            ),
        )
    ),
    *(
        case
        for rank in (1, 2)
        for padding, arguments in ((0, {"pad_type": "valid"}), (1, _padded(rank)))
        for case in (
            _pool(
                "max_pool",
                rank,
                f"ceil-pad{padding}",
                lambda x, r=rank, p=padding: _MAX[r](x, 3, 2, p, ceil_mode=True),
                ceil_mode=True,
                **arguments,
            ),
            *(
                _pool(
                    "avg_pool",
                    rank,
                    f"ceil-pad{padding}-exclude-{exclude}",
                    lambda x, r=rank, p=padding, e=exclude: _AVG[r](
                        x, 3, 2, p, ceil_mode=True, count_include_pad=not e
                    ),
                    ceil_mode=True,
                    exclude_padding_from_average=exclude,
                    **arguments,
                )
                for exclude in (True, False)
            ),
        )
    ),
    _pool(
        "max_pool",
        2,
        "same",
        lambda x: F.max_pool2d(_both_ends(x, -torch.inf), 3, 2),
        pad_type="same",
    ),
    _pool("avg_pool", 2, "same", lambda x: F.avg_pool2d(_both_ends(x, 0), 3, 2), pad_type="same"),
    _pool(
        "avg_pool",
        2,
        "same-exclude",
        lambda x: (
            F.avg_pool2d(_both_ends(x, 0), 3, 2)
            / F.avg_pool2d(_both_ends(torch.ones_like(x), 0), 3, 2)
        ),
        pad_type="same",
        exclude_padding_from_average=True,
    ),
    _pool(
        "max_pool",
        2,
        "same_lower",
        lambda x: F.max_pool2d(F.pad(x, (1, 0, 1, 1), value=-torch.inf), 3, 2),
        pad_type="same_lower",
    ),
    *(
        _pool(
            "l2_pool",
            rank,
            "valid",
            lambda x, r=rank: (_AVG[r](x * x, 3, 2) * 3**r).sqrt(),
            pad_type="valid",
        )
        for rank in (1, 2)
    ),
]

_IMAGE = normal(2, 4, 5, 6, scale=2)
_AFFINE = {"gamma": normal(4, seed=1), "beta": normal(4, seed=2)}

NORMALIZATION = [
    OpCase(
        "batch_norm",
        "affine",
        {"x": _IMAGE},
        {"mean": normal(4, seed=3), "variance": uniform(4, low=0.5, high=2), **_AFFINE},
        expected=lambda x, mean, variance, gamma, beta: F.batch_norm(
            x, mean, variance, gamma, beta
        ),
    ),
    OpCase(
        "batch_norm",
        "plain-3d",
        {"x": normal(2, 4, 3, 4, 5)},
        {"mean": normal(4, seed=3), "variance": uniform(4, low=0.5), "epsilon": np.float32(0.1)},
        expected=lambda x, mean, variance, epsilon: F.batch_norm(
            x, mean, variance, eps=float(epsilon)
        ),
    ),
    OpCase(
        "instance_norm",
        "affine",
        {"x": _IMAGE},
        _AFFINE,
        expected=lambda x, gamma, beta: F.instance_norm(x, weight=gamma, bias=beta),
    ),
    OpCase("instance_norm", "1d", {"x": normal(2, 4, 9)}, expected=lambda x: F.instance_norm(x)),
    OpCase("layer_norm", "all", {"x": _IMAGE}, {}, {"axes": [0, 1, 2, 3]}),
    OpCase(
        "layer_norm",
        "last",
        {"x": normal(3, 5, 8)},
        {"gamma": normal(8, seed=1), "beta": normal(8, seed=2)},
        {"axes": [-1]},
        expected=lambda x, gamma, beta: F.layer_norm(x, (8,), gamma, beta),
    ),
    OpCase(
        "layer_norm",
        "channel",
        {"x": _IMAGE},
        {"gamma": normal(4, 6, seed=1), "beta": normal(4, 6, seed=2), "epsilon": np.float32(0.1)},
        {"axes": [1, 3]},
    ),
    OpCase("l2_norm", "rank3", {"x": normal(3, 4, 5)}),
    OpCase("l2_norm", "rank5", {"x": normal(2, 2, 3, 4, 5)}, {"epsilon": np.float32(0.5)}),
    *(
        OpCase(
            "local_response_norm",
            note,
            {"x": x},
            {"alpha": np.float32(0.5), "beta": np.float32(0.75), "k": np.float32(2)},
            {"size": size},
            expected=lambda x, alpha, beta, k, size=size: F.local_response_norm(
                x, size, float(alpha), float(beta), float(k)
            ),
        )
        for note, size, x in (
            ("odd", 3, _IMAGE),
            ("even", 4, _IMAGE),
            ("rank3", 3, normal(2, 4, 5)),
            ("rank5", 4, normal(2, 4, 3, 2, 5)),
        )
    ),
]

_HEADS = {
    "query": normal(2, 3, 5, 8),
    "key": normal(2, 3, 7, 8, seed=1),
    "value": normal(2, 3, 7, 4, seed=2),
}

LINEAR = [
    OpCase(
        "linear",
        "bias",
        {"x": normal(3, 5)},
        {"weight": normal(4, 5, seed=1), "bias": normal(4, seed=2)},
    ),
    OpCase("linear", "rank3", {"x": normal(2, 3, 5)}, {"weight": normal(4, 5, seed=1)}),
    OpCase(
        "linear",
        "int",
        {"x": integers(3, 5)},
        {"weight": integers(4, 5, seed=1), "bias": integers(4)},
    ),
    OpCase("matmul", "broadcast", {"x": normal(2, 1, 3, 4), "y": normal(5, 4, 2, seed=1)}),
    OpCase("matmul", "int", {"x": integers(3, 4), "y": integers(4, 2, seed=1)}),
    OpCase(
        "matmul",
        "transposed",
        {"x": normal(2, 4, 3), "y": normal(2, 5, 4, seed=1)},
        {},
        {"transpose_x": True, "transpose_y": True},
    ),
    OpCase("matmul", "vector", {"x": normal(4), "y": normal(2, 4, 3, seed=1)}),
    OpCase(
        "einsum",
        "rank4",
        {"x": normal(2, 3, 4, 5), "y": normal(2, 5, 1, 6, seed=1)},
        {},
        {"equation": "nchw,nwhu->nchu"},
        arrange=together,
        expected=lambda x, y: torch.matmul(x.transpose(1, 2), y.transpose(1, 2)).transpose(1, 2),
    ),
    OpCase(
        "scaled_dot_product_attention",
        "plain",
        _HEADS,
        expected=lambda query, key, value: F.scaled_dot_product_attention(query, key, value),
    ),
    *(
        OpCase(
            "scaled_dot_product_attention",
            note,
            {**_HEADS, "attn_mask": mask},
            expected=lambda query, key, value, attn_mask: F.scaled_dot_product_attention(
                query, key, value, attn_mask
            ),
        )
        for note, mask in (("bool", np.tri(5, 7, 2, dtype=bool)), ("float", normal(5, 7, seed=3)))
    ),
]

CASES = [
    *CONV,
    *CONV_TRANSPOSE,
    *POOL,
    *NORMALIZATION,
    *LINEAR,
    OpCase(
        "conv",
        "other-weight-dtype",
        {"x": normal(1, 2, 5)},
        {},
        {"weight": normal(3, 2, 3, seed=1)},
        Opset.iOS17,
        expected=lambda x: F.conv1d(x, torch.as_tensor(normal(3, 2, 3, seed=1))),
    ),
]

"""Compressed weights on OpenVINO, against coremltools' own decompression."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_runs import assert_close, run
from support.mil import mb, types

from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)
_MASK = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]])


def _typed(values, label):
    return np.asarray(values).astype(types.nptype_from_builtin(types.string_to_builtin(label)))


def _scale(*shape):
    # Powers of two: coremltools expands in fp16, which then rounds nothing.
    return (2.0 ** _RNG.integers(-4, 2, shape)).astype(np.float16)


def _blockwise(label, low, high, blocks, offset, shape=(8, 6)):
    arguments = {
        "data": _typed(_RNG.integers(low, high, shape), label),
        "scale": _scale(*blocks),
    }
    if offset:
        arguments["offset"] = _typed(_RNG.integers(low, high, blocks), label)
    return "constexpr_blockwise_shift_scale", Opset.iOS18, arguments


_WEIGHTS = {
    **{
        f"{label}-{blocks}-{'offset' if offset else 'plain'}": _blockwise(
            label, low, high, blocks, offset
        )
        for label, low, high in (("int4", -8, 8), ("uint4", 0, 16), ("int8", -128, 128))
        for blocks in ((8, 1), (2, 3))
        for offset in (False, True)
    },
    # The last byte holds one element.
    "int4-odd": _blockwise("int4", -8, 8, (5, 1), offset=False, shape=(5, 7)),
    "uint4-odd": _blockwise("uint4", 0, 16, (5, 1), offset=True, shape=(5, 7)),
    "affine": (
        "constexpr_affine_dequantize",
        Opset.iOS16,
        {
            "quantized_data": _RNG.integers(-128, 128, (8, 6)).astype(np.int8),
            "zero_point": _RNG.integers(-9, 9, 8).astype(np.int8),
            "scale": _scale(8),
            "axis": 0,
        },
    ),
    "affine-scalar": (
        "constexpr_affine_dequantize",
        Opset.iOS16,
        {
            "quantized_data": _RNG.integers(0, 256, (8, 6)).astype(np.uint8),
            "zero_point": np.uint8(128),
            "scale": np.float32(0.1),
            "axis": 0,
        },
    ),
    "lut-ios16": (
        "constexpr_lut_to_dense",
        Opset.iOS16,
        {
            "indices": _RNG.integers(0, 256, 24).astype(np.uint8),
            "lut": _scale(16),
            "shape": np.array([8, 6], np.uint32),
        },
    ),
    "lut-grouped": (
        "constexpr_lut_to_dense",
        Opset.iOS18,
        {"indices": _typed(_RNG.integers(0, 8, (8, 6)), "uint3"), "lut": _scale(2, 1, 8, 1)},
    ),
    "lut-vector": (
        "constexpr_lut_to_dense",
        Opset.iOS18,
        {
            "indices": _typed(_RNG.integers(0, 4, (4, 6)), "uint2"),
            "lut": _scale(2, 1, 4, 2),
            "vector_axis": 0,
        },
    ),
    "sparse": (
        "constexpr_sparse_to_dense",
        Opset.iOS18,
        {"nonzero_data": _scale(6), "mask": _typed(_MASK, "uint1")},
    ),
}


@pytest.mark.parametrize("name", _WEIGHTS)
def test_weight_of_a_linear(name):
    op_type, opset, arguments = _WEIGHTS[name]
    expanded = []

    def function(x):
        weight = getattr(mb, op_type)(**arguments)
        expanded.append(weight.op.materialized_val_inference())
        x = mb.cast(x=x, dtype=types.builtin_to_string(weight.dtype))
        return mb.linear(x=x, weight=weight)

    width = 4 if name == "sparse" else 7 if name.endswith("odd") else 6
    x = _RNG.standard_normal((3, width)).astype(np.float32)
    (actual,) = run(OPENVINO, function, {"x": x}, opset)
    # The product itself is returned in the weight's dtype, mostly fp16.
    assert_close(actual, x @ expanded[0].T.astype(np.float32), "fp16")


def _plus_sparse(x, mask_and_values):
    mask, values = mask_and_values
    return mb.add(x=x, y=mb.constexpr_sparse_to_dense(nonzero_data=values, mask=mask))


def test_sparse_and_quantized():
    scale = np.array([[0.5, 1, 2, 4]], np.float32)

    def function(x):
        weight = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=_typed(_MASK, "uint1"),
            nonzero_data=_typed([10, 11, 3, 4, 5, 6], "int8"),
            scale=scale,
            offset=_typed([[1, 2, 3, 4]], "int8"),
        )
        return _plus_sparse(x, weight)

    (actual,) = run(OPENVINO, function, {"x": np.zeros((3, 4), np.float32)})
    expected = np.zeros((3, 4), np.float32)
    expected[_MASK == 1] = [10, 11, 3, 4, 5, 6]
    assert_close(actual, np.where(_MASK, (expected - [[1, 2, 3, 4]]) * scale, 0))


def test_sparse_and_palettized():
    lut = np.array([[[[-1.0], [7.0]]]], np.float32)

    def function(x):
        weight = mb.constexpr_lut_to_sparse(
            indices_mask=_typed(_MASK, "uint1"),
            indices_nonzero_data=_typed([0, 1, 1, 0, 1, 0], "uint1"),
            lut=lut,
        )
        return _plus_sparse(x, weight)

    (actual,) = run(OPENVINO, function, {"x": np.zeros((3, 4), np.float32)})
    expected = np.zeros((3, 4))
    expected[_MASK == 1] = [-1, 7, 7, -1, 7, -1]
    assert_close(actual, expected)


def test_palettized_with_a_quantized_table():
    def function(x):
        lut = mb.constexpr_blockwise_shift_scale(
            data=np.array([[[[1], [2], [3], [4]]]], np.int8),
            scale=np.array([[[[0.5]]]], np.float32),
        )
        indices = _typed([[0, 1, 2], [3, 2, 1]], "uint2")
        return mb.add(x=x, y=mb.constexpr_lut_to_dense(indices=indices, lut=lut))

    (actual,) = run(OPENVINO, function, {"x": np.zeros((2, 3), np.float32)})
    assert_close(actual, np.array([[0.5, 1, 1.5], [2, 1.5, 1]]))

"""Compressed weights on the reference engine, against coremltools' own decompression."""

from __future__ import annotations

import numpy as np
import pytest
from support.mil import build, main, mb, types

from coreml_delegate.errors import ExecutionError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)


def _typed(values, label):
    return np.asarray(values).astype(types.nptype_from_builtin(types.string_to_builtin(label)))


def _packed(values, bits):
    lanes = (values.reshape(-1, 1) >> np.arange(bits)) & 1
    return np.packbits(lanes.astype(np.uint8), bitorder="little")


_MASK = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
_BITS = {2: 1, 4: 2, 16: 4, 64: 6, 256: 8}


def _lut16(palettes):
    indices = _RNG.integers(0, palettes, (3, 5)).astype(np.uint8)
    return {
        "indices": _packed(indices, _BITS[palettes]),
        "lut": _RNG.standard_normal(palettes).astype(np.float16),
        "shape": np.array([3, 5], np.uint32),
    }


CASES = {
    "cast-16": ("constexpr_cast", Opset.iOS16, {
        "source_val": np.array([1.5, 65504], np.float16), "output_dtype": "fp32"}),
    **{
        f"affine-16-{note}": ("constexpr_affine_dequantize", Opset.iOS16, {
            "quantized_data": np.array([[1, -2, 3], [-128, 127, 0]], np.int8),
            "zero_point": zero_point,
            "scale": scale,
            "axis": axis,
        })
        for note, zero_point, scale, axis in (
            ("scalar", np.int8(3), np.float32(0.3), 0),
            ("vector", np.array([1, 2], np.int8), np.array([0.1, 0.7], np.float16), -2),
            ("mixed", np.int8(-4), np.array([0.1, 0.7, 3], np.float32), 1),
        )
    },
    **{
        f"lut-16-{palettes}": ("constexpr_lut_to_dense", Opset.iOS16, _lut16(palettes))
        for palettes in _BITS
    },
    "sparse-16": ("constexpr_sparse_to_dense", Opset.iOS16, {
        "nonzero_data": np.arange(1, 7, dtype=np.float16),
        "mask": _packed(_MASK, 1),
        "shape": np.array([3, 4], np.uint32),
    }),
    **{
        f"blockwise-18-{label}-{note}": ("constexpr_blockwise_shift_scale", Opset.iOS18, {
            "data": _typed(_RNG.integers(low, high, (4, 6)), label),
            "scale": _RNG.uniform(0.1, 2, (2, 3)).astype(np.float16),
            **({"offset": _typed(_RNG.integers(low, high, (2, 3)), label)} if offset else {}),
        })
        for label, low, high in (("int4", -8, 8), ("uint4", 0, 16), ("int8", -128, 128))
        for note, offset in (("plain", False), ("offset", True))
    },
    **{
        f"lut-18-uint{bits}": ("constexpr_lut_to_dense", Opset.iOS18, {
            "indices": _typed(_RNG.integers(0, 2**bits, (4, 6)), f"uint{bits}"),
            "lut": _RNG.standard_normal((2, 1, 2**bits, 1)).astype(np.float32),
        })
        for bits in (1, 2, 3, 4, 6, 8)
    },
    **{
        f"lut-18-vector-axis{axis}": ("constexpr_lut_to_dense", Opset.iOS18, {
            "indices": _typed(_RNG.integers(0, 4, (2, 3, 2)), "uint2"),
            "lut": _RNG.standard_normal((2, 1, 1, 4, 3)).astype(np.float16),
            "vector_axis": axis,
        })
        for axis in (0, 1, -1)
    },
    "sparse-18": ("constexpr_sparse_to_dense", Opset.iOS18, {
        "nonzero_data": np.arange(1, 7, dtype=np.float32), "mask": _typed(_MASK, "uint1")}),
    **{
        f"lut-to-sparse-18-{note}": ("constexpr_lut_to_sparse", Opset.iOS18, {
            "indices_mask": _typed(_MASK, "uint1"),
            "indices_nonzero_data": _typed([0, 1, 1, 0, 1, 0], "uint1"),
            "lut": _RNG.standard_normal((1, 1, 2, vector)).astype(np.float16),
            **axis,
        })
        for note, vector, axis in (("scalar", 1, {}), ("vector", 2, {"vector_axis": 0}))
    },
    "sparse-blockwise-18": ("constexpr_sparse_blockwise_shift_scale", Opset.iOS18, {
        "data_mask": _typed(_MASK, "uint1"),
        "nonzero_data": _typed([10, 11, 3, 4, 5, 6], "int8"),
        "scale": np.array([[0.1, 0.2, 0.3, 0.4]], np.float16),
        "offset": _typed([[1, 2, 3, 4]], "int8"),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_expanded_weights(name):
    op, opset, arguments = CASES[name]
    expected = []

    def function(x):
        outputs = getattr(mb, op)(**arguments)
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        expected.append(first.op.materialized_val_inference())
        dense = (
            mb.constexpr_sparse_to_dense(nonzero_data=outputs[1], mask=outputs[0])
            if isinstance(outputs, (tuple, list))
            else outputs
        )
        return mb.mul(x=mb.cast(x=x, dtype=types.builtin_to_string(dense.dtype)), y=dense)

    function_ = main(build(function, {"x": np.ones(1, np.float32)}, opset))
    (result,) = REFERENCE.compile(function_, EngineOptions())(
        {"x": np.ones(1, np.float32)}
    ).values()
    (answer,) = expected
    if isinstance(answer, tuple):
        mask, values = answer
        answer = np.zeros(mask.shape, values.dtype)
        answer[mask != 0] = values
    np.testing.assert_array_equal(result, answer.astype(result.dtype))


def test_failure_to_expand_names_the_weight():
    def function(x):
        weight = mb.constexpr_blockwise_shift_scale(
            data=np.ones((4, 6), np.int8), scale=np.ones((2, 3), np.float32), name="packed_weight"
        )
        return mb.add(x=x, y=weight)

    function_ = main(build(function, {"x": np.ones(1, np.float32)}))
    (op,) = [op for op in function_.block.ops if op.type.startswith("constexpr_")]
    broken = dict(op.inputs)
    broken["scale"] = (
        main(
            build(
                lambda x: mb.add(x=x, y=np.ones((3, 5), np.float32)), {"x": np.ones(1, np.float32)}
            )
        )
        .block.ops[0]
        .attributes["val"],
    )
    object.__setattr__(op, "inputs", broken)
    with pytest.raises(
        ExecutionError,
        match=r"cannot compute constexpr_\w+ 'packed_weight' at main op 0 .*3 blocks do not divide",
    ):
        REFERENCE.compile(function_, EngineOptions())

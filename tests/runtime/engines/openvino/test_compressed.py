"""Weights stay as small in the compiled graph as they are in the program."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import openvino as ov
import pytest
import torch
from support import mil
from support.gates import IS_X86, needs_vnni
from support.mil import mb, types
from support.tolerances import ATOL_RTOL, SQNR_FP32, sqnr_db

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.session.compilation import int8_sums_saturate
from coreml_delegate.runtime.engines.openvino.translate import translate
from coreml_delegate.runtime.mil.program import Constant, Packed
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)
_OUT, _IN, _BLOCK = 64, 128, 32


def _typed(values, label):
    return values.astype(types.nptype_from_builtin(types.string_to_builtin(label)))


def _quantized(label, low, high, blocks, *, offset):
    arguments = {
        "data": _typed(_RNG.integers(low, high, (_OUT, _IN)), label),
        "scale": (2.0 ** _RNG.integers(-4, 2, (_OUT, blocks))).astype(np.float16),
    }
    if offset:
        arguments["offset"] = _typed(_RNG.integers(low, high, (_OUT, blocks)), label)
    return lambda: mb.constexpr_blockwise_shift_scale(**arguments)


_WEIGHTS = {
    "f32": lambda: _RNG.standard_normal((_OUT, _IN)).astype(np.float32),
    "f16": lambda: _RNG.standard_normal((_OUT, _IN)).astype(np.float16),
    "i8": _quantized("int8", -128, 128, 1, offset=False),
    "i8 with offset": _quantized("int8", -128, 128, 1, offset=True),
    "i4": _quantized("int4", -8, 8, _IN // _BLOCK, offset=False),
    "u4 with offset": _quantized("uint4", 0, 16, _IN // _BLOCK, offset=True),
}


def _nodes(compiled, kind):
    """Precisions of the nodes of a kind in the graph that runs."""
    attributes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    return [
        str(attribute["runtimePrecision"].value)
        for attribute in attributes
        if attribute["layerType"].value == kind
    ]


def _linear_layer(name, x, *, returned=None):
    """A function that is one linear layer, and its weight in fp32."""
    dense = []

    def function(x):
        weight = _WEIGHTS[name]()
        if not isinstance(weight, np.ndarray):
            dense.append(weight.op.materialized_val_inference())
            x = mb.cast(x=x, dtype="fp16")
        else:
            dense.append(weight)
            x = mb.cast(x=x, dtype="fp16" if weight.dtype == np.float16 else "fp32")
        product = mb.linear(x=x, weight=weight)
        return product if returned is None else mb.cast(x=product, dtype=returned)

    main = mil.main(mil.build(function, {"x": x}, Opset.iOS18))
    return main, dense[0].astype(np.float32)


@pytest.mark.parametrize("name", _WEIGHTS)
def test_a_linear_layer_multiplies_by_the_stored_weights(name):
    x = _RNG.standard_normal((3, _IN)).astype(np.float32)
    main, weight = _linear_layer(name, x)
    compiled = OPENVINO.compile(main, EngineOptions(cache=None))
    assert _nodes(compiled.compiled, "FullyConnected") == [name.split()[0]]
    (actual,) = compiled(mil.features(main, {"x": x})).values()
    # The engine computes in fp32; the program returns all products but the first in fp16.
    atol, rtol = ATOL_RTOL["fp32" if name == "f32" else "fp16"]
    np.testing.assert_allclose(actual, x @ weight.T, atol=atol * 100, rtol=rtol)


def _rounded_to_8_bits(x):
    """``x`` with one scale for every block of a row, rounded to 127 steps up and down."""
    blocks = x.reshape(len(x), -1, _BLOCK).astype(np.float64)
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.round(blocks / scales) * scales).reshape(x.shape)


@needs_vnni
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("name", _WEIGHTS)
def test_dynamic_quantization_rounds_what_meets_integer_weights(name, rows):
    x = _RNG.standard_normal((rows, _IN)).astype(np.float32)
    main, weight = _linear_layer(name, x, returned="fp32")
    options = EngineOptions(cache=None, dynamic_quantization=True)
    (actual,) = OPENVINO.compile(main, options)(mil.features(main, {"x": x})).values()
    is_rounded = name in ("i8", "i4", "u4 with offset")  # OpenVINO has no kernel for another i8
    expected = (_rounded_to_8_bits(x) if is_rounded else x) @ weight.T
    assert sqnr_db(expected, actual) > SQNR_FP32


def test_packed_weights_stay_in_the_memory_of_the_program_which_the_function_keeps_alive():
    def function(x):
        return mb.linear(x=mb.cast(x=x, dtype="fp16"), weight=_WEIGHTS["i4"]())

    x = _RNG.standard_normal((3, _IN)).astype(np.float32)
    program = mil.build(function, {"x": x}, Opset.iOS18)
    main = mil.main(program)
    (stored,) = (
        constant.stored
        for op in main.block.ops
        for bindings in op.inputs.values()
        for constant in bindings
        if isinstance(constant, Constant) and isinstance(constant.content, Packed)
    )
    nodes = translate(main).model.get_ops()
    (weight,) = (n for n in nodes if n.get_output_element_type(0) == ov.Type.i4)
    assert np.shares_memory(weight.data, stored)
    compiled = OPENVINO.compile(main, EngineOptions(cache=None))
    features = mil.features(main, {"x": x})
    (before,) = compiled(features).values()
    kept = weakref.ref(stored)
    del program, main, nodes, weight, stored
    gc.collect()
    assert kept() is not None
    (after,) = compiled(features).values()
    np.testing.assert_array_equal(before, after)


def test_a_convolution_widens_fp16_weights_only_where_it_rearranges_them():
    weight = _RNG.standard_normal((16, 16, 3, 3)).astype(np.float16)
    x = _RNG.standard_normal((1, 16, 8, 8)).astype(np.float16)
    main = mil.main(mil.build(lambda x: mb.conv(x=x, weight=weight), {"x": x}, Opset.iOS18))
    compiled = OPENVINO.compile(main, EngineOptions(cache=None)).compiled
    constants = [
        node.get_output_element_type(0).get_type_name()
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].value == "Const"
        and node.get_output_shape(0) == list(weight.shape)
    ]
    assert constants == ["f16"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("zero_point", [None, 3], ids=["symmetric", "affine"])
@pytest.mark.parametrize("stored", ["int8", "uint8"])
def test_a_convolution_between_quantized_values_computes_in_integers(stored, zero_point, dtype):
    kind = np.float32 if dtype == "fp32" else np.float16
    # Powers of two and even weights: nothing is rounded, so that not one step may differ.
    weight = _RNG.integers(-4, 4, (16, 16, 3, 3)).astype(np.int8) * 2
    scales = {"scale": kind(0.25), "output_dtype": stored}
    shift = {} if zero_point is None else {"zero_point": getattr(np, stored)(zero_point)}

    def requantized(x):
        codes = mb.quantize(input=x, **scales, **shift)
        return mb.dequantize(input=codes, scale=scales["scale"], **shift)

    def function(x):
        dense = mb.constexpr_affine_dequantize(
            quantized_data=weight,
            scale=np.full(16, 0.5, kind),
            zero_point=np.zeros(16, np.int8),
            axis=0,
        )
        return requantized(mb.relu(x=mb.conv(x=requantized(x), weight=dense)))

    x = _RNG.integers(0, 20, (1, 16, 8, 8)).astype(kind) / 4
    main = mil.main(mil.build(function, {"x": x}, Opset.iOS17))
    compiled = OPENVINO.compile(main, EngineOptions(cache=None))
    (precision,) = _nodes(compiled.compiled, "Convolution")
    if IS_X86:  # Without VNNI sums of integers would be cut off.
        assert (precision in ("i8", "u8")) != int8_sums_saturate(), precision
    (actual,) = compiled(mil.features(main, {"x": x})).values()
    low, high = np.iinfo(stored).min, np.iinfo(stored).max
    quantize = lambda value: np.clip(np.rint(value * 4) + (zero_point or 0), low, high)  # noqa: E731
    dequantize = lambda code: (code - (zero_point or 0)) * 0.25  # noqa: E731
    sums = torch.nn.functional.conv2d(
        torch.from_numpy(dequantize(quantize(x))).double(), torch.from_numpy(weight * 0.5).double()
    )
    expected = dequantize(quantize(sums.relu().numpy()))
    np.testing.assert_array_equal(actual.astype(np.float64), expected)


# How many scales each dimension of a weight may have, and which of them the plugin multiplies by.
_COUNTS = [(rows, columns) for rows in (1, 2, _OUT) for columns in (1, 4, _IN)]
_PRODUCTS = {
    # Results along the first dimension: groups of a row each have a scale.
    "linear": {(1, 1), (_OUT, 1), (_OUT, 4)},
    "transposed": {(1, 1), (_OUT, 1), (_OUT, 4)},
    # ... and along the second.
    "matmul": {(1, 1), (1, _IN), (2, _IN)},
    "permuted": {(1, 1), (1, _IN), (2, _IN)},
    "left": set(),
}


def _product(kind, x, weight):
    if kind == "linear":
        return mb.linear(x=x, weight=weight)
    if kind == "left":
        return mb.matmul(x=weight, y=x)
    if kind == "permuted":
        return mb.matmul(x=x, y=mb.transpose(x=weight, perm=(1, 0)), transpose_y=True)
    return mb.matmul(x=x, y=weight, transpose_y=kind == "transposed")


@pytest.mark.parametrize("kind", _PRODUCTS)
@pytest.mark.parametrize("counts", _COUNTS)
def test_products_are_right_however_scales_are_arranged(kind, counts):
    rng = np.random.default_rng(1)
    arguments = {
        "data": _typed(rng.integers(0, 16, (_OUT, _IN)), "uint4"),
        "scale": rng.uniform(0.5, 1.5, counts).astype(np.float32),
        "offset": _typed(rng.integers(0, 16, counts), "uint4"),
    }
    dense = []

    def function(x):
        weight = mb.constexpr_blockwise_shift_scale(**arguments)
        dense.append(weight.op.materialized_val_inference())
        return _product(kind, x, weight)

    shape = {"left": (_IN, 3), "matmul": (3, _OUT), "permuted": (3, _OUT)}.get(kind, (3, _IN))
    x = rng.standard_normal(shape).astype(np.float32)
    main = mil.main(mil.build(function, {"x": x}, Opset.iOS18))
    compiled = OPENVINO.compile(main, EngineOptions(cache=None))
    (actual,) = compiled(mil.features(main, {"x": x})).values()
    weight = dense[0]
    expected = {"left": lambda: weight @ x, "matmul": lambda: x @ weight}.get(
        kind, lambda: x @ (weight if kind == "permuted" else weight.T)
    )()
    atol, rtol = ATOL_RTOL["fp32"]
    np.testing.assert_allclose(actual, expected, atol=atol * 100, rtol=rtol)
    used = _nodes(compiled.compiled, "FullyConnected")
    assert (used == ["u4"]) is (counts in _PRODUCTS[kind])


def test_a_strided_convolution_of_one_pixel_keeps_its_padding():
    x = np.arange(15, dtype=np.float32).reshape(1, 1, 5, 3)
    weight = np.full((1, 1, 1, 1), 2, np.float32)

    def function(x):
        numbers = mb.quantize(input=x, scale=np.float32(1), output_dtype="uint8")
        floats = mb.dequantize(input=numbers, scale=np.float32(1))
        return mb.conv(x=floats, weight=weight, strides=(2, 2), pad_type="custom", pad=(1, 0, 1, 1))

    main = mil.main(mil.build(function, {"x": x}, Opset.iOS18))
    compiled = OPENVINO.compile(main, EngineOptions(cache=None))
    (actual,) = compiled(mil.features(main, {"x": x})).values()
    padded = np.pad(x, ((0, 0), (0, 0), (1, 0), (1, 1)))
    np.testing.assert_array_equal(actual, 2 * padded[:, :, ::2, ::2])


_ORDERS = [None, (0, 1, 3, 2), (0, 2, 1, 3), (0, 2, 3, 1), (0, 3, 1, 2)]


@pytest.mark.parametrize("after", _ORDERS)
@pytest.mark.parametrize("before", _ORDERS)
def test_convolutions_of_one_pixel_between_transposes(before, after):
    """The weights are compressed, and square, so that they fit any order of dimensions."""
    size = 6
    data = _RNG.integers(-8, 8, (size, size, 1, 1)).astype(np.int8)
    scale = (2.0 ** _RNG.integers(-2, 2, size)).astype(np.float32)

    def function(x):
        weight = mb.constexpr_affine_dequantize(
            quantized_data=data, scale=scale, zero_point=np.int8(0), axis=0
        )
        y = x if before is None else mb.transpose(x=x, perm=before)
        y = mb.conv(x=y, weight=weight)
        return y if after is None else mb.transpose(x=y, perm=after)

    x = _RNG.integers(-8, 8, (1, size, size, size)).astype(np.float32)
    main = mil.main(mil.build(function, {"x": x}, Opset.iOS17))
    (actual,) = OPENVINO.compile(main, EngineOptions(cache=None))(
        mil.features(main, {"x": x})
    ).values()
    same = (0, 1, 2, 3)
    dense = data[:, :, 0, 0] * scale[:, None]
    expected = np.einsum("nchw,oc->nohw", x.transpose(before or same), dense)
    np.testing.assert_array_equal(actual, expected.transpose(after or same))

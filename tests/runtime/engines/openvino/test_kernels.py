"""Program forms that must reach a better kernel of the OpenVINO plugin, and their results."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from support import mil
from support.engine_runs import assert_close
from support.lowering import Function as Module
from support.lowering import lower
from support.mil import mb

from coreml_delegate import CoreMLBackend
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.runtime.delegate import read_blob
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.program.pte import PteProgram

_RNG = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def _compiled(function: Function):
    """The function compiled, and how often each kind of kernel occurs in it."""
    compiled = OPENVINO.compile(function, EngineOptions())
    nodes = compiled.compiled.get_runtime_model().get_ops()
    return compiled, Counter(node.get_rt_info()["layerType"].astype(str) for node in nodes)


def _run(function, inputs):
    """Outputs in order and kernels of a builder function."""
    main = mil.main(mil.build(function, inputs))
    compiled, kernels = _compiled(main)
    results = compiled(mil.features(main, inputs))
    return [results[name] for name in main.block.outputs], kernels


# Reductions and the constants that follow.


@pytest.mark.parametrize("keep_dims", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("kind", ["mean", "sum", "max", "l2_norm"])
def test_a_constant_for_each_row_is_added_to_what_is_reduced(kind, axis, keep_dims):
    x = _floats(2, 3, 4)
    reduced = _REDUCED[kind](x, axis, keep_dims)
    for shape in ([d if i == at else 1 for i, d in enumerate(reduced.shape)] for at in range(3)):
        constant = _floats(*shape[: reduced.ndim])

        def function(x, constant=constant):
            total = getattr(mb, f"reduce_{kind}")(x=x, axes=[axis], keep_dims=keep_dims)
            return mb.sub(x=constant, y=mb.mul(x=total, y=np.float32(0.5)))

        (result,), _ = _run(function, {"x": x})
        np.testing.assert_allclose(result, constant - reduced / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axis", "new"),
    [
        ((1, 3, 2), 1, (2, 1)),
        ((2, 3, 4), 1, (8, 1)),
        ((1, 3, 4), 1, (2, 2)),
        ((2, 3, 1), 0, (1, 3)),
    ],
    ids=str,
)
def test_what_is_reduced_takes_another_shape(shape, axis, new):
    def reshaped(x):
        return mb.reshape(x=mb.reduce_mean(x=x, axes=[axis], keep_dims=False), shape=new)

    def transposed(x):
        return mb.transpose(x=mb.reduce_mean(x=x, axes=[axis], keep_dims=False), perm=[1, 0])

    x = _floats(*shape)
    reduced = x.mean(axis)
    for function, expected in ((reshaped, reduced.reshape(new)), (transposed, reduced.T)):
        (result,), _ = _run(function, {"x": x})
        assert_close(result, expected)


@pytest.mark.parametrize("keep_dims", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 4, 3), (4, 1, 3), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "as it is"])
def test_what_is_transposed_and_reduced_keeps_its_shape(shape, axis, keep_dims, *, is_cast):
    def function(x):
        x = mb.transpose(x=x, perm=[1, 2, 0])
        x = mb.cast(x=mb.cast(x=x, dtype="int32"), dtype="fp32") if is_cast else x
        return mb.reduce_max(x=x, axes=[axis], keep_dims=keep_dims)

    x = _floats(*shape) * 8
    (result,), _ = _run(function, {"x": x})
    moved = x.transpose(1, 2, 0)
    expected = (np.trunc(moved) if is_cast else moved).max(axis, keepdims=keep_dims)
    assert_close(result, expected)


_REDUCED = {
    "mean": lambda x, axis, keep: x.mean(axis, keepdims=keep),
    "sum": lambda x, axis, keep: x.sum(axis, keepdims=keep),
    "max": lambda x, axis, keep: x.max(axis, keepdims=keep),
    "l2_norm": lambda x, axis, keep: np.sqrt((x * x).sum(axis, keepdims=keep)),
}


# Root-mean-square norm, in the form in which it is lowered.


def _lowered_norm(norm, x, precision):
    """Return a norm's kernels and its result on ``x``."""
    specs = CoreMLBackend.generate_compile_specs(compute_precision=_PRECISIONS[precision])
    program = PteProgram.open(lower(norm, (x,), compile_specs=specs).pte)
    (delegate,) = program.method("forward").delegates
    package, _ = read_blob(delegate.processed)
    function = mil.main(package)
    compiled, kernels = _compiled(function)
    (feature,) = function.inputs
    ((_, actual),) = compiled(mil.features(function, {feature.name: x.numpy()})).items()
    return kernels, actual


class WrittenOut(torch.nn.Module):
    """A root mean square norm as language models write it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


_PRECISIONS = {"fp32": Precision.FLOAT32, "fp16": Precision.FLOAT16}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(torch.nn.RMSNorm(64, eps=1e-5), id="weighted"),
        pytest.param(torch.nn.RMSNorm(64, eps=1e-5, elementwise_affine=False), id="plain"),
        pytest.param(WrittenOut(), id="of-a-language-model"),
    ],
)
def test_a_lowered_rms_norm_is_one_kernel(norm, precision):
    torch.manual_seed(0)
    if norm.weight is not None:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(1, 7, 64)
    x[0, 1] *= 1e4  # its squares overflow in fp16
    x[0, 2] = 0
    kernels, actual = _lowered_norm(norm, x, precision)
    assert kernels["RMS"] == 1
    assert kernels["Reduce"] == 0
    assert_close(actual, norm(x).detach().numpy(), precision)


def _mean(x, dim=-1):
    return x.mean(dim, keepdim=True)


@pytest.mark.parametrize(
    ("norm", "kernel"),
    [
        pytest.param(
            lambda x: (x - _mean(x)) / (_mean((x - _mean(x)) ** 2) + 1e-5).sqrt(), "MVN", id="mean"
        ),
        pytest.param(
            lambda x: (x - _mean(x)) * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt(),
            "MVN",
            id="variance",
        ),
        pytest.param(
            lambda x: (x - _mean(x, 1)) * (_mean((x - _mean(x, 1)) ** 2) + 1e-5).rsqrt(),
            "RMS",
            id="mean along another axis",
        ),
        pytest.param(
            lambda x: (y := x - _mean(x.abs())) * (_mean(y * y) + 1e-5).rsqrt(),
            "RMS",
            id="mean of something else",
        ),
    ],
)
def test_a_layer_norm_that_is_written_out_is_one_kernel(norm, kernel):
    torch.manual_seed(0)
    x = torch.randn(1, 7, 64)
    x[0, 1] *= 1e4
    kernels, actual = _lowered_norm(Module(norm), x, "fp16")
    assert kernels[kernel] == 1
    assert kernels["Reduce"] == (kernel != "MVN")
    assert_close(actual, norm(x).numpy(), "fp16")


def _pair_norm(x, *, factors=(0.5, -0.5), begin=0, axes=(-1,), gamma=None, pair=None):
    width = x.shape[-1]
    signs = np.repeat(np.array(factors, np.float32), width)
    values = mb.concat(values=[x, x if pair is None else mb.abs(x=x)], axis=-1)
    scale = {} if gamma is None else {"gamma": np.full(2 * width, gamma, np.float32)}
    y = mb.layer_norm(x=mb.mul(x=values, y=signs), axes=axes, epsilon=np.float32(1e-4), **scale)
    end, is_end_open = [0, 0, begin + width], [True, True, False]
    return mb.slice_by_index(x=y, begin=[0, 0, begin], end=end, end_mask=is_end_open)


@pytest.mark.parametrize(
    ("difference", "is_rewritten"),
    [
        pytest.param({}, True, id="none"),
        pytest.param({"gamma": 2.0}, True, id="a-scale"),
        pytest.param({"factors": (0.5, -0.25)}, False, id="other-factors"),
        pytest.param({"factors": (-0.5, 0.5)}, False, id="negated"),
        pytest.param({"begin": 3}, False, id="another-part"),
        pytest.param({"axes": (-2,)}, False, id="another-axis"),
        pytest.param({"pair": "abs"}, False, id="another-pair"),
    ],
)
def test_only_the_norm_of_pairs_itself_is_rewritten(difference, is_rewritten):
    x = _floats(1, 6, 6) * 3
    (actual,), kernels = _run(lambda x: _pair_norm(x, **difference), {"x": x})
    (expected,) = mil.infer(lambda x: _pair_norm(x, **difference), {"x": x})
    assert_close(actual, expected)
    assert (kernels["RMS"] == 1) is is_rewritten


# One element of one axis.


@pytest.mark.parametrize(
    ("keywords", "kernel"),
    [
        ({"begin": [1, 0, 0], "end": [2, 3, 4], "squeeze_mask": [True, False, False]}, "Gather"),
        (
            {
                "begin": [0, -1, 0],
                "end": [0, 0, 99],
                "end_mask": [True, False, False],
                "stride": [1, -2, 1],
                "squeeze_mask": [False, True, False],
            },
            "Gather",
        ),
        (
            {"begin": [1, 1, 0], "end": [2, 3, 4], "squeeze_mask": [True, False, False]},
            "StridedSlice",
        ),
        (
            {
                "begin": [1, 0, 0],
                "end": [2, 3, 4],
                "stride": [1, 2, 1],
                "squeeze_mask": [True, False, False],
            },
            "StridedSlice",
        ),
        (
            {"begin": [1, 0, 2], "end": [2, 3, 4], "squeeze_mask": [True, False, True]},
            "StridedSlice",
        ),
    ],
)
def test_an_index_into_one_axis_is_no_slice(keywords, kernel):
    x = _floats(2, 3, 4)
    (actual,), kernels = _run(lambda x: mb.slice_by_index(x=x, **keywords), {"x": x})
    (expected,) = mil.infer(lambda x: mb.slice_by_index(x=x, **keywords), {"x": x})
    assert_close(actual, expected)
    assert kernels[kernel] == 1


# Rows of a cache.

_CACHE = _floats(1, 2, 6, 4)
_ROWS = np.array([4, -1], np.int32)


def _write(data, rows, updates, *, mode="update"):
    column = mb.reshape(x=rows, shape=[1, 1, -1, 1])
    places = mb.tile(x=column, reps=(1, 2, 1, 4))
    return mb.scatter_along_axis(data=data, indices=places, updates=updates, axis=-2, mode=mode)


@pytest.mark.parametrize(
    ("mode", "kernel"), [("update", "ScatterUpdate"), ("add", "ScatterElementsUpdate")]
)
def test_rows_of_a_cache_are_written_as_rows(mode, kernel):
    updates = _floats(1, 2, 2, 4)
    (actual,), kernels = _run(
        lambda data, rows, updates: _write(data, rows, updates, mode=mode),
        {"data": _CACHE, "rows": _ROWS, "updates": updates},
    )
    expected = _CACHE.copy()
    expected[:, :, _ROWS] = updates + (expected[:, :, _ROWS] if mode == "add" else 0)
    assert_close(actual, expected)
    assert kernels[kernel] == 1


def test_indices_that_differ_by_place_are_written_by_element():
    updates, places = _floats(1, 2, 2, 4), np.tile(np.array([[4], [1]], np.int32), (1, 2, 1, 4))
    places[0, 1, :, 2] = 3, 0
    (actual,), kernels = _run(
        lambda data, places, updates: mb.scatter_along_axis(
            data=data, indices=places, updates=updates, axis=2, mode="update"
        ),
        {"data": _CACHE, "places": places, "updates": updates},
    )
    expected = torch.from_numpy(_CACHE).scatter(
        2, torch.from_numpy(places).long(), torch.from_numpy(updates)
    )
    assert_close(actual, expected.numpy())
    assert kernels["ScatterElementsUpdate"] == 1


def test_attention_does_not_transpose_the_keys():
    query, key, value = _floats(1, 2, 5, 8), _floats(1, 2, 7, 8), _floats(1, 2, 7, 8)
    mask = np.tri(5, 7, 2, dtype=bool)
    (attended, kept), kernels = _run(
        lambda query, key, value, mask: (
            mb.scaled_dot_product_attention(
                query=query, key=mb.relu(x=key), value=value, attn_mask=mask
            ),
            mb.relu(x=key),
        ),
        {"query": query, "key": key, "value": value, "mask": mask},
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (query, key.clip(0), value, mask))
    )
    assert_close(attended, expected.numpy())
    assert_close(kept, key.clip(0))
    assert kernels["Transpose"] == 0


@pytest.mark.parametrize(("op", "expected"), [("reduce_sum", 0), ("reduce_prod", 1)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_reductions_of_nothing(op: str, expected: int, dtype: Any, *, is_dynamic: bool) -> None:
    def function(x: Any, n: Any) -> Any:
        stop = mb.squeeze(x=n, axes=[0]) if is_dynamic else np.int32(0)
        places = mb.range_1d(start=np.int32(0), end=stop, step=np.int32(1))
        rows = mb.gather(x=x, indices=places, axis=1, validate_indices=False)
        return getattr(mb, op)(x=rows, axes=[1], keep_dims=False), mb.mul(x=x, y=x)

    inputs = {"x": np.full((200, 3), 7, dtype), "n": np.zeros(1, np.int32)}
    compiled = OPENVINO.compile(mil.main(mil.build(function, inputs)), EngineOptions())
    for _ in range(3):
        reduced, _ = compiled(inputs).values()
        assert reduced.tolist() == [expected] * 200


# Rotary position embeddings: tables of half the width, as gpt-oss has them, or of the whole width.


def _rotated_by_wide_tables(halves, *, backward=False):
    def function(x, cos, sin):
        first, second = halves(x)
        turned = mb.concat(values=[mb.mul(x=second, y=-1.0), first], axis=-1)
        if backward:
            turned = mb.concat(values=[second, mb.mul(x=first, y=-1.0)], axis=-1)
        return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))

    return function


def _rotated(halves):
    def function(x, cos, sin):
        first, second = halves(x)
        difference = mb.sub(x=mb.mul(x=first, y=cos), y=mb.mul(x=second, y=sin))
        total = mb.add(x=mb.mul(x=second, y=cos), y=mb.mul(x=first, y=sin))
        return mb.concat(values=[difference, total], axis=-1)

    return function


def _sliced(x):
    return [
        mb.slice_by_index(
            x=x, begin=[0, 0, 0, start], end=[0, 0, 0, start + 8], end_mask=[True] * 3 + [False]
        )
        for start in (0, 8)
    ]


_HALVES = pytest.mark.parametrize(
    "halves",
    [
        pytest.param(lambda x: mb.split(x=x, split_sizes=[8, 8], axis=-1), id="split"),
        pytest.param(_sliced, id="sliced"),
    ],
)


def _is_right_once_exported(compiled, inputs, expected):
    """OpenVINO 2026.4 reads behind narrow tables once a compiled model was exported."""
    exported = compiled.compiled.export_model().getvalue()
    imported = ov.Core().import_model(exported, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for run in (compiled.compiled, imported):
        (found,) = run(list(inputs.values())).values()
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-4)


@_HALVES
def test_a_rotation_with_narrow_tables_is_one_kernel(halves):
    inputs = {"x": _floats(1, 4, 3, 16), "cos": _floats(1, 1, 3, 8), "sin": _floats(1, 1, 3, 8)}
    compiled, kernels = _compiled(mil.main(mil.build(_rotated(halves), inputs)))
    assert kernels["RoPE"] == 1
    x, cos, sin = inputs.values()
    first, second = x[..., :8], x[..., 8:]
    expected = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
    _is_right_once_exported(compiled, inputs, expected)


@_HALVES
@pytest.mark.parametrize(("backward", "kernel"), [(False, 1), (True, 0)])
def test_a_rotation_with_wide_tables_is_one_kernel(halves, backward, kernel):
    inputs = {"x": _floats(2, 4, 3, 16), "cos": _floats(1, 1, 3, 16), "sin": _floats(1, 1, 3, 16)}
    function = _rotated_by_wide_tables(halves, backward=backward)
    compiled, kernels = _compiled(mil.main(mil.build(function, inputs)))
    assert kernels["RoPE"] == kernel
    x, cos, sin = inputs.values()
    turned = np.concatenate((-x[..., 8:], x[..., :8]), -1)
    _is_right_once_exported(compiled, inputs, x * cos + (-turned if backward else turned) * sin)


def test_halves_that_numbers_multiply_are_no_rotation():
    inputs = {"x": _floats(1, 4, 3, 16)}

    def function(x):
        first, second = mb.split(x=x, split_sizes=[8, 8], axis=-1)
        difference = mb.sub(x=mb.mul(x=first, y=0.5), y=mb.mul(x=second, y=0.25))
        total = mb.add(x=mb.mul(x=second, y=0.5), y=mb.mul(x=first, y=0.25))
        return mb.concat(values=[difference, total], axis=-1)

    (found,), kernels = _run(function, inputs)
    first, second = inputs["x"][..., :8], inputs["x"][..., 8:]
    expected = np.concatenate((first / 2 - second / 4, second / 2 + first / 4), -1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert "RoPE" not in kernels

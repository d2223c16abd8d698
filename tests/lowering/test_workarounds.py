"""Each workaround: coremltools is right with it, and still wrong without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.lowering import fp32_specs, lower

from coreml_delegate import runtime
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.patches import patched
from coreml_delegate.patches.coremltools_errors import WORKAROUNDS
from coreml_delegate.patches.third_party import coremltools

ct = coremltools()
mb = ct.converters.mil.Builder
SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)
ROW = np.arange(3, dtype=np.float32)
CHANNELS = np.ones((3, 1, 1), np.float32)
HELD = np.empty((3, 1, 1), np.float32)
SPEC = {"input_specs": [mb.TensorSpec((3, 3))], "opset_version": ct.target.iOS17}


class Centred(torch.nn.Module):
    """A convolution less a constant that belongs to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 3, 1)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x) - self.mean


def test_the_model_stays_as_it_is() -> None:
    model, x = Centred(), torch.rand(1, 1, 2, 2)
    expected = model(x)
    for precision in (Precision.FLOAT32, Precision.FLOAT16):
        lowered = lower(model, (x,), compile_specs=fp32_specs(compute_precision=precision))
        (result,) = runtime.load_program(lowered.pte).run("forward", [x])
        torch.testing.assert_close(result, expected, atol=2e-3, rtol=2e-3)
    assert torch.equal(model.mean, torch.full((3, 1, 1), 0.5))


def difference_in_place(x: Any) -> Any:
    image = mb.reshape(x=x, shape=[1, 1, 3, 3])
    convolution = mb.conv(x=image, weight=np.ones((3, 1, 1, 1), np.float32))
    return mb.sub(x=convolution, y=HELD)


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_what_is_subtracted_is_not_negated_in_place(is_applied: bool) -> None:
    HELD.fill(0.5)
    program = mb.program(**SPEC)(difference_in_place)
    with patched(*WORKAROUNDS) if is_applied else nullcontext():
        registry = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY
        registry["common::fuse_conv_bias"](program)
    assert HELD[0, 0, 0] == (0.5 if is_applied else -0.5)
    (convolution,) = (op for op in program.functions["main"].operations if op.op_type == "conv")
    np.testing.assert_array_equal(convolution.bias.val, np.full(3, -0.5, np.float32))


def quotient(x: Any) -> Any:
    image = mb.reshape(x=x, shape=[1, 1, 3, 3])
    convolution = mb.conv(x=image, weight=np.ones((3, 1, 1, 1), np.float32))
    return mb.real_div(x=np.ones((1, 3, 1, 1), np.float32), y=convolution)


def difference(x: Any) -> Any:
    return mb.sub(x=ROW, y=mb.matmul(x=x, y=SQUARE))


def product(x: Any) -> Any:
    return mb.add(x=mb.matmul(x=SQUARE, y=x), y=ROW)


def power(x: Any) -> Any:
    return mb.transpose(x=mb.pow(x=mb.transpose(x=x, perm=[1, 0]), y=ROW), perm=[1, 0])


def repeated_channel(x: Any) -> Any:
    image = mb.reshape(x=x, shape=[1, 1, 3, 3])
    return mb.add(x=mb.mul(x=image, y=CHANNELS), y=CHANNELS)


def root_of_square(x: Any) -> Any:
    return mb.sqrt(x=mb.pow(x=x, y=np.float32(2)))


def square_of_root(x: Any) -> Any:
    return mb.pow(x=mb.sqrt(x=x), y=np.float32(2))


def nearly_a_mean(x: Any) -> Any:
    wide = mb.tile(x=x, reps=[1, 10000])
    return mb.mul(x=mb.reduce_sum(x=wide, axes=[1]), y=np.float32(3.4e-5))


# name -> (program, pass, ops that stay, ops that coremltools makes of them)
PASSES: dict[str, tuple[Callable[[Any], Any], str, list[str], list[str]]] = {
    "2776": (quotient, "fuse_conv_scale", ["reshape", "conv", "real_div"], ["reshape", "conv"]),
    "2801": (difference, "fuse_matmul_weight_bias", ["matmul", "sub"], ["transpose", "linear"]),
    "2801-left": (
        *(product, "fuse_matmul_weight_bias", ["matmul", "add"]),
        ["transpose", "linear", "transpose"],
    ),
    "2784": (power, "reduce_transposes", ["transpose", "pow", "transpose"], ["pow"]),
    "channels": (
        *(repeated_channel, "fuse_elementwise_to_batchnorm", ["reshape", "mul", "add"]),
        ["reshape", "batch_norm"],
    ),
    "roots": (root_of_square, "mil_backend::fuse_pow2_sqrt", ["abs"], ["identity"]),
    "squares": (square_of_root, "mil_backend::fuse_pow2_sqrt", ["sqrt", "pow"], ["identity"]),
    "2792": (
        *(nearly_a_mean, "fuse_reduce_mean", ["tile", "reduce_sum", "mul"]),
        ["tile", "reduce_mean"],
    ),
}


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
@pytest.mark.parametrize("name", PASSES)
def test_passes(name: str, is_applied: bool) -> None:
    """If the case without it fails, coremltools has mended the pass: the workaround can go."""
    function, pass_name, kept, made = PASSES[name]
    program = mb.program(**SPEC)(function)
    with patched(*WORKAROUNDS) if is_applied else nullcontext():
        registry = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY
        registry[pass_name if "::" in pass_name else f"common::{pass_name}"](program)
    operations = program.functions["main"].operations
    types = [op.op_type for op in operations if op.op_type != "const"]
    assert types == (kept if is_applied else made)


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_an_op_of_a_branch_after_an_op_outside(is_applied: bool) -> None:
    def branch(x: Any) -> Any:
        with patched(*WORKAROUNDS) if is_applied else nullcontext():
            flat = mb.reshape(x=x, shape=[9])
            flag = mb.greater(x=mb.reduce_max(x=x), y=np.float32(0))
            return mb.cond(
                pred=flag,
                _true_fn=lambda: mb.reshape(x=flat, shape=[3, 3]),
                _false_fn=lambda: mb.relu(x=x),
            )

    program = mb.program(**SPEC)(branch)
    registry = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY
    with (
        patched(*WORKAROUNDS) if is_applied else nullcontext(),
        nullcontext() if is_applied else pytest.raises(KeyError),
    ):
        registry["common::merge_consecutive_reshapes"](program)


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_a_reduction_over_all_dimensions_of_a_transpose(is_applied: bool) -> None:
    def total(x: Any) -> Any:
        return mb.reduce_sum(x=mb.relu(x=mb.transpose(x=x, perm=[1, 0])))

    program = mb.program(**SPEC)(total)
    registry = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY
    with (
        patched(*WORKAROUNDS) if is_applied else nullcontext(),
        nullcontext() if is_applied else pytest.raises(KeyError, match="axes"),
    ):
        registry["common::reduce_transposes"](program)


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_two_states_with_new_values_one_after_the_other(is_applied: bool) -> None:
    def counting(x: Any, first: Any, second: Any) -> Any:
        values = [mb.add(x=mb.read_state(input=state), y=ROW) for state in (first, second)]
        for state, value in zip((first, second), values, strict=True):
            mb.coreml_update_state(state=state, value=value)
        return mb.relu(x=x)

    states = [mb.StateTensorSpec((3,), ct.converters.mil.mil.types.fp32) for _ in range(2)]
    spec = {"input_specs": [mb.TensorSpec((3,)), *states], "opset_version": ct.target.iOS18}
    program = mb.program(**spec)(counting)
    registry = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY
    with (
        patched(*WORKAROUNDS) if is_applied else nullcontext(),
        nullcontext() if is_applied else pytest.raises(KeyError, match="coreml_update_state"),
    ):
        registry["common::canonicalize_inplace_pattern"](program)


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_a_flipped_constant_has_strides_that_torch_takes(is_applied: bool) -> None:
    values: list[Any] = []

    def flipped(x: Any) -> Any:
        row = mb.reverse(x=ROW, axes=[0])
        values.append(row.val)
        return mb.add(x=x, y=row)

    with patched(*WORKAROUNDS) if is_applied else nullcontext():
        mb.program(**SPEC)(flipped)
    assert list(values[0]) == [2, 1, 0]
    assert (values[0].strides[0] > 0) is is_applied


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_scatters_among_constants_are_not_folded_to_what_comes_last(is_applied: bool) -> None:
    values: list[Any] = []

    def scattered(x: Any) -> Any:
        indices, updates = np.array([1, 1], np.int32), np.array([2, 3], np.float32)
        row = mb.scatter_along_axis(data=ROW, indices=indices, updates=updates, axis=0, mode="add")
        values.append(row.val)
        return mb.add(x=x, y=row)

    with patched(*WORKAROUNDS) if is_applied else nullcontext():
        mb.program(**SPEC)(scattered)
    (value,) = values
    assert value is None if is_applied else list(value) == [0, 3, 2]


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
def test_weights_with_a_sign(is_applied: bool) -> None:
    data, zero = np.array([[-128, -1, 0, 127]], np.int8), np.array([5], np.int8)

    def weight(x: Any) -> Any:
        scale = np.array([0.5], np.float32)
        table = {"quantized_data": data, "zero_point": zero, "scale": scale, "axis": np.int32(0)}
        return mb.matmul(x=x, y=mb.constexpr_affine_dequantize(**table))

    with patched(*WORKAROUNDS) if is_applied else nullcontext():
        spec = {**SPEC, "input_specs": [mb.TensorSpec((2, 1))]}
        program = mb.program(**spec)(weight)
    (op,) = (
        op
        for op in program.functions["main"].operations
        if op.op_type == "constexpr_affine_dequantize"
    )
    assert op.quantized_data.val.dtype == (np.uint8 if is_applied else np.int8)
    np.testing.assert_array_equal(
        op.materialized_val_inference(), (data.astype(np.float32) - 5) * np.float32(0.5)
    )


TIES = np.tile(np.array([1, 0], np.int32), 50)
LEAST = np.array([-(2**31), 5, 3], np.int32)

# name -> (op of constants, what it computes)
EVALUATED: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
    "a function of a scalar": (
        lambda: mb.exp(x=mb.floor(x=np.float32(2.5))),
        np.exp(np.array(2, np.float32)),
    ),
    "equal elements": (
        lambda: mb.argsort(x=TIES, axis=0, ascending=True),
        np.argsort(TIES, kind="stable"),
    ),
    "the least integer": (
        lambda: mb.topk(x=LEAST, k=2, axis=0, ascending=False)[1],
        np.array([1, 2]),
    ),
    "a scatter of maxima": (
        lambda: mb.scatter_along_axis(
            data=LEAST, indices=np.array([1], np.int32), updates=LEAST[:1], axis=0, mode="max"
        ),
        LEAST,
    ),
}


@pytest.mark.parametrize("is_applied", [True, False], ids=["with it", "without it"])
@pytest.mark.parametrize("name", EVALUATED)
def test_constants_are_evaluated_rightly_or_not_at_all(name: str, is_applied: bool) -> None:
    """If the case without it fails, coremltools has mended the op."""
    function, expected = EVALUATED[name]
    values: list[Any] = []

    def evaluate(x: Any) -> Any:
        values.append(function().val)
        return mb.identity(x=x)

    with patched(*WORKAROUNDS) if is_applied else nullcontext():
        try:
            mb.program(**SPEC)(evaluate)
        except AttributeError:
            assert not is_applied
            return
    (value,) = values
    assert (value is None or np.array_equal(value, expected)) == is_applied

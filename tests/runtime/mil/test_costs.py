"""The estimated work of MIL ops: operations as torch counts them, bytes as they are stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.handmade import FLOATS, constant, function, op
from support.mil import MilFunction, build, main, mb
from torch.utils.flop_counter import FlopCounterMode

from coreml_delegate.runtime.engines.reference.kernels import KERNELS
from coreml_delegate.runtime.mil.costs import MOVES, Work
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Function, TensorType

Arrays = dict[str, np.ndarray]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def place_of(function: Function, op_type: str) -> int:
    return [each.type for each in function.block.ops].index(op_type)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.softmax(query @ key.mT, -1) @ value


KERNEL, BACK = normal(8, 2, 3, 5), normal(6, 4, 3, 3)
PRODUCTS: dict[str, tuple[MilFunction, Arrays, Callable[..., torch.Tensor]]] = {
    "conv": (
        lambda x: mb.conv(x=x, weight=KERNEL, groups=2, strides=[2, 1], pad_type="valid"),
        {"x": normal(2, 4, 16, 17)},
        lambda x: F.conv2d(x, torch.from_numpy(KERNEL), stride=(2, 1), groups=2),
    ),
    "conv_transpose": (
        lambda x: mb.conv_transpose(x=x, weight=BACK, strides=[2, 2], pad_type="valid"),
        {"x": normal(2, 6, 5, 7)},
        lambda x: F.conv_transpose2d(x, torch.from_numpy(BACK), stride=2),
    ),
    "linear": (
        lambda x: mb.linear(x=x, weight=normal(5, 7)),
        {"x": normal(2, 3, 7)},
        lambda x: F.linear(x, torch.from_numpy(normal(5, 7))),
    ),
    "matmul": (
        lambda x, y: mb.matmul(x=x, y=y, transpose_x=True),
        {"x": normal(3, 7, 4), "y": normal(3, 7, 5)},
        lambda x, y: x.mT @ y,
    ),
    "einsum": (
        lambda x, y: mb.einsum(values=(x, y), equation="nchw,nwhu->nchu"),
        {"x": normal(2, 3, 4, 5), "y": normal(2, 5, 4, 6)},
        lambda x, y: torch.einsum("nchw,nwhu->nchu", x, y),
    ),
}


@pytest.mark.parametrize("op_type", PRODUCTS)
def test_products_count_as_torch_counts_them(op_type: str) -> None:
    made, inputs, same = PRODUCTS[op_type]
    built = main(build(made, inputs))
    with FlopCounterMode(display=False) as counter:
        same(*map(torch.from_numpy, inputs.values()))
    place = place_of(built, op_type)
    bias = bool(built.block.ops[place].inputs.get("bias"))
    extra = np.prod(built.block.ops[place].outputs[0].type.shape) if bias else 0
    assert Work(built).flops(place) == counter.get_total_flops() + extra


def test_attention_counts_its_products_and_the_softmax() -> None:
    inputs = {"query": normal(2, 3, 4, 8), "key": normal(2, 3, 5, 8), "value": normal(2, 3, 5, 6)}
    built = main(build(lambda **given: mb.scaled_dot_product_attention(**given), inputs))
    with FlopCounterMode(display=False) as counter:
        attention(*map(torch.from_numpy, inputs.values()))
    softmax = 5 * 2 * 3 * 4 * 5
    found = Work(built).flops(place_of(built, "scaled_dot_product_attention"))
    assert found == counter.get_total_flops() + softmax


def test_recurrent_steps_multiply_all_weights() -> None:
    steps, batch, width, hidden = 5, 2, 3, 4

    def lstm(x):
        return mb.lstm(
            x=x,
            initial_h=normal(batch, hidden),
            initial_c=normal(batch, hidden),
            weight_ih=normal(4 * hidden, width),
            weight_hh=normal(4 * hidden, hidden),
        )

    built = main(build(lstm, {"x": normal(steps, batch, width)}))
    expected = 2 * steps * batch * 4 * hidden * (width + hidden)
    assert Work(built).flops(place_of(built, "lstm")) == expected


def test_elementwise_ops_count_their_results_and_moves_nothing() -> None:
    def made(x):
        return mb.transpose(x=mb.reduce_sum(x=mb.exp(x=x), axes=[0]), perm=[1, 0])

    built = main(build(made, {"x": normal(4, 3, 5)}))
    work = Work(built)
    found = {name: work.flops(place_of(built, name)) for name in ("exp", "reduce_sum", "transpose")}
    assert found == {"exp": 60, "reduce_sum": 60, "transpose": 0}


def test_every_op_that_moves_data_exists() -> None:
    known = {version.op_type for version in KERNELS}
    known |= {"const", "read_state", "write_state", "coreml_update_state"}
    assert known >= MOVES


def test_values_inside_a_kernel_move_nothing() -> None:
    built = function([op("exp", "a", x="x"), op("relu", "b", x="a")], ["b"])
    work = Work(built)
    tensor = 3 * 4
    assert [work.bytes_moved(0), work.bytes_moved(1)] == [2 * tensor, 2 * tensor]
    assert [work.bytes_moved(0, [1]), work.bytes_moved(1, [0])] == [tensor, tensor]


def test_a_value_that_is_used_elsewhere_is_written() -> None:
    ops = [op("exp", "a", x="x"), op("relu", "b", x="a"), op("sin", "c", x="a")]
    work = Work(function(ops, ["b", "c"]))
    assert work.bytes_moved(0, [1]) == 2 * 3 * 4


def test_weights_count_as_they_are_stored() -> None:
    def compressed(x):
        weight = mb.constexpr_blockwise_shift_scale(
            data=np.ones((5, 8), np.int8), scale=np.ones((5, 1), np.float16)
        )
        return mb.linear(x=x, weight=weight, bias=np.ones(5, np.float16))

    built = main(build(compressed, {"x": normal(2, 8).astype(np.float16)}))
    found = Work(built).bytes_moved(place_of(built, "linear"))
    assert found == 2 * 8 * 2 + 5 * 8 + 5 * 2 + 5 * 2 + 2 * 5 * 2


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table = np.ones((1000, 4), np.float32)
    built = main(
        build(
            lambda x: mb.gather(x=table, indices=x, axis=0, validate_indices=False),
            {"x": np.zeros(3, np.int32)},
        )
    )
    moved = Work(built).bytes_moved(place_of(built, "gather"))
    # Rows read and written, indices, and at most a few bytes of the op's own arguments.
    rows = 3 * 4 * 4
    assert 2 * rows + 3 * 4 <= moved < 2 * rows + 3 * 4 + 16


def test_sizes_of_run_time_are_unknown() -> None:
    open_ = TensorType(DType.FP32, (None, 3))
    built = function([op("exp", "a", open_, x="x"), op("add", "b", open_, x="a", y="a")], ["b"])
    work = Work(built)
    assert work.flops(0) is None
    assert work.bytes_moved(1) is None


def test_a_literal_counts_once() -> None:
    built = function([op("add", "a", FLOATS, x="x", y=constant([1.0, 2.0, 3.0]))], ["a"])
    assert Work(built).bytes_moved(0) == 3 * 4 * 3

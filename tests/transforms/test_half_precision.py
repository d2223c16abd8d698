"""fp16 and bfloat16 models, fp16 and fp64 tensors at the boundary, islands of fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import Function, fp32_specs, lower, lower_unchecked, reasons
from support.tolerances import SQNR_HALF, sqnr_db
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import OptionError
from coreml_delegate.ops.call import target_name
from coreml_delegate.transforms.half_precision import promote_half_to_fp32

HALVES = (torch.float16, torch.bfloat16)


class Block(nn.Module):
    """Layers of a half-precision model, with those that upstream fails on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 4)
        self.last = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = nn.functional.leaky_relu(self.norm(self.conv(x))).mean((2, 3))
        return self.last(self.linear(features))


def _image(dtype: torch.dtype) -> tuple[torch.Tensor]:
    return (torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype),)


@pytest.mark.share(2)
@pytest.mark.parametrize("host", ["python", "stock"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_half_precision_model_lowers_and_keeps_its_interface(
    dtype: torch.dtype, host: str
) -> None:
    module, inputs = Block().eval().to(dtype), _image(dtype)
    lowered = lower(module, inputs)
    left = {n.op for n in lowered.report.undelegated}
    casts = {"dim_order_ops._to_dim_order_copy.default"} if dtype is torch.bfloat16 else set()
    assert left == casts
    (result,) = runtime.load_program(lowered.pte, host=host).run("forward", list(inputs))
    assert result.dtype is dtype
    truth = Block().eval()(inputs[0].float()).detach()
    assert sqnr_db(truth.numpy(), result.float().numpy()) > SQNR_HALF[dtype]


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_plan_of_a_half_precision_model_equals_its_lowering(dtype: torch.dtype) -> None:
    module, inputs = Block().eval().to(dtype), _image(dtype)
    plan = CoreMLPartitioner(compile_specs=fp32_specs()).plan(torch.export.export(module, inputs))
    assert plan == lower(module, inputs).report


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_promotion_does_not_change_the_given_program(dtype: torch.dtype) -> None:
    module, inputs = Block().eval().to(dtype), _image(dtype)
    exported = torch.export.export(module, inputs)
    before = str(exported)
    promote_half_to_fp32(exported)
    assert str(exported) == before
    assert exported.module()(*inputs).dtype is dtype


def test_promotion_returns_fp32_programs_themselves() -> None:
    exported = torch.export.export(Block().eval(), _image(torch.float32))
    assert promote_half_to_fp32(exported) is exported


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def test_tied_weights_stay_one_tensor() -> None:
    exported = torch.export.export(Tied().half(), (torch.tensor([1, 2]),))
    state = promote_half_to_fp32(exported).state_dict
    assert state["table.weight"] is state["head.weight"]
    assert state["table.weight"].dtype is torch.float32


class Counter(nn.Module):
    """Half-precision state, an input returned, and an output computed from the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.total.add_(x)
        return self.total * 2, x


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mutable_buffers_and_returned_inputs_keep_their_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    program = runtime.load_program(lower(Counter().to(dtype), (x,)).pte)
    for turn in (1, 2):
        total, same = program.run("forward", [x])
        assert torch.equal(total, x * 2 * turn)
        assert torch.equal(same, x)
        assert total.dtype is same.dtype is dtype


class Bits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).view(torch.int16)


def test_calls_that_are_left_out_stay_in_half_precision() -> None:
    """A weight that another call uses as well is promoted, and cast for the left out call."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 4))
            self.register_buffer("last", torch.zeros(2, 2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first, second = torch.split(torch.sin(x @ self.weight), 2, dim=1)
            self.last.copy_(first)
            return second, first + torch.cos(second), self.weight.exp()

    module, x = Parts().half(), torch.rand(2, 4).half()
    exported = torch.export.export(module, (x,)).run_decompositions({})
    names = ("aten.matmul.default", "aten.split.Tensor", "aten.split_with_sizes.default")
    program = promote_half_to_fp32(exported, lambda node: target_name(node.target) in names)
    dtypes = {
        node.name: node.meta["val"].dtype
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    assert dtypes["matmul"] == torch.float16
    assert {dtypes[name] for name in ("sin", "cos", "add", "exp")} == {torch.float32}
    assert program.state_dict["weight"].dtype == torch.float32
    with torch.no_grad():
        for actual, expected in zip(program.module()(x), module(x), strict=True):
            torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_sizes_that_depend_on_values_are_those_of_one_call() -> None:
    class Selected(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.masked_select(x * 2 + 1, mask)

    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    mask = torch.tensor([True, False, True])
    exported = torch.export.export(Selected(), (x, mask))
    for is_left_out in (lambda _: False, lambda node: "masked" in node.name):
        program = promote_half_to_fp32(exported, is_left_out)
        assert program is not exported
        decomposed = program.run_decompositions({})
        assert decomposed.module()(x, mask).tolist() == [3.0, 7.0]


def test_a_program_that_looks_at_bits_stays_as_it_is() -> None:
    exported = torch.export.export(Bits(), (torch.ones(4, dtype=torch.float16),))
    assert promote_half_to_fp32(exported) is exported


class Doubles(nn.Module):
    """Between fp64 and fp32; only the casts are for Core ML."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(x.float()) + 1).double()


def test_fp64_crosses_the_boundary_by_a_cast() -> None:
    x = torch.rand(4, dtype=torch.float64)
    lowered = lower(Doubles(), (x,))
    assert lowered.operators == ()
    for host in ("python", "stock"):
        (result,) = runtime.load_program(lowered.pte, host=host).run("forward", [x])
        assert result.dtype is torch.float64
        torch.testing.assert_close(result, Doubles()(x))


class DoubleMath(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def test_fp64_arithmetic_stays_on_the_cpu() -> None:
    lowered = lower(DoubleMath(), (torch.rand(4, dtype=torch.float64),))
    assert "float64" in reasons(lowered.report)["aten.mul.Tensor"]


class Truncated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int32) + 1


def test_fp64_is_not_cast_to_integers_by_way_of_fp32() -> None:
    x = torch.tensor([16777217.0], dtype=torch.float64)  # fp32 does not have it
    lowered = lower(Truncated(), (x,))
    assert len(lowered.operators) == 1
    (result,) = runtime.load_program(lowered.pte).run("forward", [x])
    assert result.item() == 16777218


# Islands of fp32


class Energy(nn.Module):
    """A logarithm of squares: 1000 ** 2 is beyond fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x * x + 1)


class Heard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = Energy()
        self.linear = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.energy(x))


def _large() -> torch.Tensor:
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 1000


def _sqnr(**options: object) -> float:
    module, x = Heard().eval(), _large()
    pte = lower(module, (x,), **options).pte
    (result,) = runtime.load_program(pte, engine="reference").run("forward", [x])
    return sqnr_db(module(x).detach().numpy(), result.numpy())


def _specs(**keywords: object) -> list[object]:
    return CoreMLBackend.generate_compile_specs(**keywords)


def test_squares_overflow_in_fp16() -> None:
    assert _sqnr(compile_specs=_specs()) < 10


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "keep",
    [
        {"modules": ["energy"]},
        {"modules": ["Energy"]},
        {"modules": ["en*"]},
        {"ops": ["mul", "add", "log"]},
    ],
    ids=str,
)
def test_squares_kept_in_fp32_do_not_overflow(keep: dict[str, list[str]]) -> None:
    assert _sqnr(compile_specs=_specs(keep_fp32=keep)) > SQNR_HALF[torch.float16]


def test_squares_kept_in_fp32_by_a_predicate_do_not_overflow() -> None:
    def in_energy(node: torch.fx.Node) -> bool:
        return "energy" in str(node.meta["nn_module_stack"])

    sqnr = _sqnr(compile_specs=_specs(), keep_fp32=in_energy)
    assert sqnr > SQNR_HALF[torch.float16]


def test_keep_fp32_is_part_of_the_compile_specs() -> None:
    edge = to_edge_transform_and_lower(
        torch.export.export(Heard().eval(), (_large(),)),
        partitioner=[
            CoreMLPartitioner(
                compile_specs=_specs(keep_fp32={"modules": ["energy"], "ops": ["softmax"]}),
                keep_fp32=lambda node: "aten.log" in str(node.target),
            )
        ],
    )
    (lowered,) = edge.exported_program().graph_module.children()
    (kept,) = (bytes(s.value) for s in lowered.compile_specs if s.key == "keep_fp32")
    assert kept == b'{"modules": ["energy"], "nodes": ["aten_log_default"], "ops": ["softmax"]}'


def test_an_unknown_op_in_keep_fp32_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"unknown MIL op.*'sofmax'.*softmax"):
        lower(Heard(), (_large(),), compile_specs=_specs(keep_fp32={"ops": ["sofmax"]}))


def test_an_unknown_kind_in_keep_fp32_is_an_error() -> None:
    with pytest.raises(OptionError, match="'layers'"):
        _specs(keep_fp32={"layers": ["energy"]})


def test_keep_fp32_makes_no_difference_in_fp32() -> None:
    module, x = Heard().eval(), _large()
    plain = lower(module, (x,)).pte
    kept = lower(module, (x,), compile_specs=fp32_specs(keep_fp32={"ops": ["mul"]})).pte
    results = [runtime.load_program(p).run("forward", [x])[0] for p in (plain, kept)]
    assert torch.equal(*results)


def _write_rows(cache: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache[:, 1:3] = rows
    return (cache * 2).sum(1), cache[0] + 0


def _write_a_view(cache: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache[0].add_(rows[0, 0])
    return cache * 2, cache[0] + 0


@pytest.mark.parametrize("engine", ["reference", "openvino"])
@pytest.mark.parametrize("function", [_write_rows, _write_a_view])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_writes_to_an_input_are_read_afterwards(
    dtype: torch.dtype, function: Any, engine: str
) -> None:
    inputs = torch.randn(4, 6).to(dtype), torch.randn(4, 2).to(dtype)
    expected = function(*(x.clone() for x in inputs))
    lowered = lower_unchecked(Function(function), inputs)
    results = runtime.load_program(lowered.pte, engine=engine, host="python").run(
        "forward", [x.clone() for x in inputs]
    )
    for result, value in zip(results[-len(expected) :], expected, strict=True):
        assert sqnr_db(value.float().numpy(), result.float().numpy()) > SQNR_HALF[dtype]

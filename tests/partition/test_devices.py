"""``CoreMLPartitioner(device=...)``: calls that move to the CPU, and changed layers and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from support.tolerances import SQNR_FP16, sqnr_db
from torch import nn
from torch.export import Dim

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.device_check import Finding, check
from coreml_delegate.errors import OptionError
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.partition.grouping import decision, moved_calls
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.device_findings import models_of_pte
from coreml_delegate.targets import ComputeUnit, Device, Opset

NEURAL_ENGINE = "neural-engine"


class Layers(nn.Module):
    """A function of named layers."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(self, *tensors)


@dataclass(frozen=True)
class Case:
    """A model with a finding.

    Attributes:
        rule: Name of the rule.
        model: Returns the module.
        inputs: Returns its inputs.
        on_cpu: Ops that stay on the CPU in the form for the neural engine.
    """

    rule: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    on_cpu: frozenset[str] = frozenset()


def rows(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.tensor([[4, 69_999, 0, 66_000]]),)


CASES = {
    "wide lookup": Case(
        "wide-gather",
        lambda: Layers(
            lambda m, x: m.linear(m.table(x)), table=nn.Embedding(70_000, 4), linear=nn.Linear(4, 8)
        ),
        tokens,
        frozenset({"aten.embedding.default"}),
    ),
    "wide layer": Case(
        "large-dimension",
        lambda: Layers(lambda m, x: m.linear(x), linear=nn.Linear(8, 40_000)),
        rows(1, 3, 8),
        frozenset({"aten.cat.default"}),
    ),
    "logarithms of a wide layer": Case(
        "large-dimension",
        lambda: Layers(
            lambda m, x: torch.log_softmax(m.linear(x), -1), linear=nn.Linear(8, 17_000, bias=False)
        ),
        rows(3, 8),
        frozenset({"aten.cat.default", "aten._log_softmax.default"}),
    ),
    "largest values": Case(
        "topk",
        lambda: Layers(lambda m, x: m.linear(x).topk(16)[0], linear=nn.Linear(32, 64)),
        rows(4, 32),
        frozenset({"aten.topk.default", "operator.getitem"}),
    ),
    "largest index": Case(
        "unsupported-type",
        lambda: Layers(lambda m, x: m.linear(x).argmax(-1) + 1, linear=nn.Linear(8, 16)),
        rows(4, 8),
        frozenset({"aten.add.Tensor", "aten.argmax.default"}),
    ),
    "largest value with its index": Case(
        "unsupported-type",
        lambda: Layers(lambda m, x: m.linear(x).max(-1)[1] + 1, linear=nn.Linear(8, 16)),
        rows(4, 8),
        frozenset({"aten.add.Tensor", "aten.max.dim", "operator.getitem"}),
    ),
    "last token": Case(
        "unsupported-type",
        lambda: Layers(
            lambda m, x, ids: m.linear(x)[torch.arange(2), ids.argmax(-1)], linear=nn.Linear(64, 64)
        ),
        lambda: (torch.randn(2, 8, 64), torch.randint(0, 9, (2, 8))),
        frozenset({"aten.arange.start_step", "aten.argmax.default", "aten.index.Tensor"}),
    ),
    "positions": Case(
        "unsupported-type",
        lambda: Layers(
            lambda m, x: m.linear(m.table(torch.cumsum((x != 1).int(), 1))),
            table=nn.Embedding(16, 64),
            linear=nn.Linear(64, 64),
        ),
        lambda: (torch.tensor([[4, 7, 1, 1]]),),
        frozenset(
            {"aten.ne.Scalar", "dim_order_ops._to_dim_order_copy.default", "aten.cumsum.default"}
        ),
    ),
    "rows that a computed mask hides": Case(
        "unsupported-type",
        lambda: Layers(
            lambda m, x: m.last(
                nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=m.mask(x))
            ),
            mask=nn.Linear(64, 64),
            last=nn.Linear(64, 64),
        ),
        rows(1, 2, 64, 64),
    ),
    "short last axes": Case(
        "narrow-last-axis",
        lambda: Layers(lambda m, x: m.linear(x).relu(), linear=nn.Linear(4, 6)),
        rows(1, 2100, 4),
        frozenset({"aten.permute_copy.default"}),
    ),
}


def lower(model: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> tuple[bytes, Any]:
    target = options.pop("target", Opset.iOS16)
    shapes = options.pop("dynamic_shapes", None)
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=target)
    partitioner = CoreMLPartitioner(compile_specs=specs, **options)
    with torch.no_grad():
        exported = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
        manager = to_edge_transform_and_lower(
            exported,
            partitioner=[partitioner],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    return bytes(manager.to_executorch().buffer), partitioner.report


def findings(pte: bytes) -> list[Finding]:
    return check(models_of_pte(PteProgram.open(pte)).checked)


def rules_in(pte: bytes) -> set[str]:
    return {f.rule.name for f in findings(pte)}


@pytest.mark.parametrize("name", CASES)
def test_the_finding_is_gone_and_executorch_has_the_kernels(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.model(), case.inputs()
    expected = model(*inputs)
    plain = [f for f in findings(lower(model, inputs)[0]) if f.rule.name == case.rule]
    assert plain
    assert not [f for f in plain if f.rewrite is None]
    pte, report = lower(model, inputs, device=NEURAL_ENGINE)
    assert case.rule not in rules_in(pte)
    assert {node.op for node in report.undelegated} == case.on_cpu
    assert len(report.partitions) == 1
    assert not [node for node in report.undelegated if node.cpu_obstacle is not None]
    program = runtime.load_program(pte, engine="reference", host="stock")
    (actual,) = program.run("forward", list(inputs))
    assert actual.shape == expected.shape
    assert sqnr_db(expected.detach().numpy(), actual.numpy()) > SQNR_FP16


class Caches(nn.Module):
    """Two caches of widths that are no multiples of 32, one of which does not start at zero."""

    rows: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 6, 12))
        self.register_buffer("count", torch.full((5,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.copy_(torch.cat((self.rows[:, 1:], x), 1))
        self.count.add_(1)
        return self.rows * self.count.sum()


def test_states_have_widths_of_the_neural_engine() -> None:
    inputs = [torch.randn(2, 1, 12) for _ in range(3)]
    plain, _ = lower(Caches(), (inputs[0],), target=Opset.iOS18)
    pte, report = lower(Caches(), (inputs[0],), target=Opset.iOS18, device=NEURAL_ENGINE)
    assert "state-width" in rules_in(plain)
    assert "state-width" not in rules_in(pte)
    assert [buffer.is_state for buffer in report.buffers] == [True, True]
    model, program = Caches(), runtime.load_program(pte, engine="reference")
    for x in inputs:
        (actual,) = program.run("forward", [x])
        assert sqnr_db(model(x).numpy(), actual.numpy()) > SQNR_FP16


def test_no_states_beside_inputs_of_several_sizes() -> None:
    class Summed(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(32))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            return self.total * y

    inputs = (torch.randn(4, 32), torch.randn(32))
    options = {"target": Opset.iOS18, "dynamic_shapes": ({0: Dim("rows", max=8)}, None)}
    assert "state-with-range" in rules_in(lower(Summed(), inputs, **options)[0])
    pte, report = lower(Summed(), inputs, **options, device="gpu")
    assert "state-with-range" not in rules_in(pte)
    (buffer,) = report.buffers
    assert (
        buffer.reason == "Core ML fails to load states beside inputs of fixed and of several sizes"
    )


@pytest.mark.parametrize("device", Device)
def test_large_weights_are_cut_into_partitions(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "LARGEST_WEIGHTS", 2 * 64 * 64 * 2)  # two layers in fp16
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    pte, report = lower(model, (torch.randn(2, 64),), device=device)
    assert [p.weight_bytes for p in report.partitions] == [2 * 2**14, 2 * 2**14, 2**14]
    x = torch.randn(2, 64)
    (actual,) = runtime.load_program(pte, engine="reference").run("forward", [x])
    assert sqnr_db(model(x).detach().numpy(), actual.numpy()) > SQNR_FP16


def test_a_tiny_partition_stays_on_the_cpu() -> None:
    model = Layers(
        lambda m, x: m.linear(x).topk(4)[0] * 2 + 1, linear=nn.Linear(64, 512, bias=False)
    )
    _, report = lower(model, (torch.randn(8, 64),), device=NEURAL_ENGINE)
    assert len(report.partitions) == 1
    reasons = [str(node.reason) for node in report.undelegated if "mul" in node.op]
    assert reasons == ["its partition would have 4 operation(s) with 0.01% of the work"]


def test_what_would_split_a_partition_stays() -> None:
    model = Layers(
        lambda m, x: m.second(torch.topk(m.first(x), 16)[0]).argmax(-1),
        first=nn.Linear(32, 64),
        second=nn.Linear(16, 64),
    )
    pte, report = lower(model, (torch.randn(4, 32),), device=NEURAL_ENGINE)
    assert {node.op for node in report.undelegated} == {"aten.argmax.default"}
    assert len(report.partitions) == 1
    (finding,) = findings(pte)
    assert finding.rule.name == "topk"
    assert finding.obstacle == "in the middle of the model, which would become two"


def test_a_whole_graph_moves_nothing_to_the_cpu() -> None:
    case = CASES["largest index"]
    _, report = lower(case.model(), case.inputs(), device=NEURAL_ENGINE, lower_full_graph=True)
    assert not report.undelegated


def test_the_program_records_its_device() -> None:
    pte, _ = lower(nn.Linear(4, 4), (torch.randn(2, 4),), device="gpu")
    (delegate,) = PteProgram.open(pte).method("forward").delegates
    options = CompileOptions.from_pairs(delegate.compile_specs)
    assert options.device is Device.GPU
    assert options.compute_unit is ComputeUnit.ALL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "ane"}, "device has an unknown value: got 'ane'"),
        ({"device": "gpu", "compute_unit": ComputeUnit.CPU_ONLY}, "the GPU needs a compute unit"),
        ({"device": NEURAL_ENGINE, "compute_precision": "float32"}, "computes in fp16"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CoreMLBackend.generate_compile_specs(**options)


def test_a_call_that_splits_a_partition_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale_by_signs(self: Layers, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x) * ((x > 0).to(torch.int32) * 3)
        return x

    model = Layers(scale_by_signs, **{f"layer_{n}": nn.Linear(64, 64) for n in range(6)})
    program = to_edge(torch.export.export(model, (torch.rand(1, 64),))).exported_program()
    examined = {name: 0 for name in ("flops_of", "group_calls")}

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(moved_calls, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            examined[name] += 1
            return function(*arguments, **keywords)

        return call

    for name in examined:
        monkeypatch.setattr(moved_calls, name, counted(name))
    moved_calls.moved_calls(program, {})
    assert examined["group_calls"] <= len(program.graph.nodes)
    assert examined["flops_of"] <= 2 * len(program.graph.nodes)

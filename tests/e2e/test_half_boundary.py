"""fp16 tensors at the boundary of Core ML models: features, caches and constants stay in fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.lowering import lower, lower_unchecked
from support.tolerances import ATOL_RTOL, SQNR_HALF, sqnr_db
from torch import nn

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.partition import do_not_delegate
from coreml_delegate.runtime.program.plan import TensorSpec
from coreml_delegate.targets import Opset

ENGINES = ("reference", "openvino")
ATOL, RTOL = ATOL_RTOL["fp16"]


def _specs(target: Opset, precision: Precision = Precision.FLOAT16) -> list[Any]:
    return CoreMLBackend.generate_compile_specs(
        minimum_deployment_target=target, compute_precision=precision
    )


def _models(pte: bytes, method: str = "forward") -> list[Any]:
    delegates = runtime.load_program(pte, host="python", engine="reference").delegates(method)
    return [delegate.model for delegate in delegates]


def _features(pte: bytes, method: str = "forward") -> list[dict[str, str]]:
    """Dtype of the inputs and outputs of each model, by name."""
    return [
        {f.name: f.type.dtype.label for f in (*model.inputs, *model.outputs)}
        for model in _models(pte, method)
    ]


def _operators(pte: bytes) -> list[str]:
    (model,) = _models(pte)
    return [op.type for op in model.function.block.ops if op.type != "const"]


class Layers(nn.Module):
    """A table, a sum with an input, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 16)
        self.layer = nn.Linear(16, 64, bias=False)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.table(tokens) + x
        return self.layer(total), total * 2


def _inputs(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (1, count), generator=random)
    return tokens, torch.randn(1, count, 16, generator=random).half()


@pytest.mark.share(2)
@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.FLOAT32], ids=str)
@pytest.mark.parametrize(
    ("target", "dtype"), [(Opset.iOS15, "fp32"), (Opset.iOS16, "fp16"), (Opset.iOS18, "fp16")]
)
def test_half_tensors_are_fp16_features_from_ios16_on(
    target: Opset, dtype: str, precision: Precision
) -> None:
    module, inputs = Layers().half().eval(), _inputs()
    pte = lower(module, inputs, compile_specs=_specs(target, precision)).pte
    (features,) = _features(pte)
    assert set(features.values()) == {"int32", dtype}
    if dtype == "fp16" and precision is Precision.FLOAT16:
        assert "cast" not in _operators(pte)
    expected = Layers().eval()(inputs[0], inputs[1].float())
    for engine in ENGINES:
        for host in ("python", "stock"):
            program = runtime.load_program(pte, host=host, engine=engine)
            for actual, truth in zip(program.run("forward", list(inputs)), expected, strict=True):
                assert actual.dtype is torch.float16
                sqnr = sqnr_db(truth.detach().numpy(), actual.float().numpy())
                assert sqnr > SQNR_HALF[torch.float16]


def test_fp32_tensors_are_fp32_features_beside_half_tensors() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 2, y + 1, (x + y).half()

    inputs = (torch.ones(3, dtype=torch.float16), torch.ones(3))
    pte = lower(Mixed(), inputs, compile_specs=_specs(Opset.iOS16, Precision.FLOAT32)).pte
    (model,) = _models(pte)
    assert [f.type.dtype.label for f in model.inputs] == ["fp16", "fp32"]
    assert sorted(f.type.dtype.label for f in model.outputs) == ["fp16", "fp16", "fp32"]
    for engine in ENGINES:
        results = runtime.load_program(pte, engine=engine).run("forward", list(inputs))
        for actual, expected in zip(results, Mixed()(*inputs), strict=True):
            assert actual.dtype is expected.dtype
            torch.testing.assert_close(actual, expected)


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", ["range", "enumerated"])
def test_half_features_of_several_shapes(kind: str) -> None:
    module, inputs = Layers().half().eval(), _inputs()
    size = torch.export.Dim("count", min=2, max=8)
    shapes = {"tokens": {1: size}, "x": {1: size}}
    exported = torch.export.export(module, inputs, dynamic_shapes=shapes)
    specs = _specs(Opset.iOS18)
    if kind == "enumerated":
        sizes = {"tokens": [[1, 3], [1, 5]], "x": [[1, 3, 16], [1, 5, 16]]}
        specs.append(CoreMLBackend.generate_enumerated_shapes_compile_spec(exported, sizes))
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[CoreMLPartitioner(compile_specs=specs)],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    pte = edge.to_executorch().buffer
    (features,) = _features(pte)
    assert set(features.values()) == {"int32", "fp16"}
    for engine in ENGINES:
        program = runtime.load_program(pte, engine=engine)
        for count in (3, 5):
            inputs = _inputs(count)
            for actual, truth in zip(
                program.run("forward", list(inputs)), module(*inputs), strict=True
            ):
                torch.testing.assert_close(actual, truth.detach(), atol=ATOL, rtol=RTOL)


class Twice(nn.Module):
    """Outputs of one value, in two dtypes, and an input returned."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.reshape(-1), y.float(), y, x, x.clone()


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.FLOAT32], ids=str)
def test_half_outputs_may_have_one_value(precision: Precision) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float16)
    lowered = lower(Twice(), (x,), compile_specs=_specs(Opset.iOS17, precision))
    assert lowered.operators == ()
    for engine in ENGINES:
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", [x])
        for actual, expected in zip(results, Twice()(x), strict=True):
            assert actual.dtype is expected.dtype
            assert torch.equal(actual, expected)


# Caches


class Rows(nn.Module):
    """Attention over a cache of keys, of which a call writes some rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 16)
        self.register_buffer("keys", torch.zeros(1, 12, 16))

    def forward(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        self.keys[:, rows] = x
        return (x @ self.keys.transpose(1, 2)).softmax(-1) @ self.keys


_CALLS = tuple((torch.tensor([[n, n + 1]]), torch.tensor([n, n + 1])) for n in (0, 2, 4))


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "left_out", [(), ("aten.embedding.default", "aten.index_put.default")], ids=["all", "some"]
)
def test_a_half_buffer_outside_of_core_ml_is_neither_widened_nor_cast(
    left_out: tuple[str, ...],
) -> None:
    lowered = lower_unchecked(
        Rows().half().eval(),
        _CALLS[0],
        compile_specs=_specs(Opset.iOS16),
        take_over_mutable_buffer=False,
        skip_ops_for_coreml_delegation=list(left_out),
    )
    assert {name for name in lowered.operators if "copy" in name} <= {"aten.copy_.default"}
    pte = lowered.pte
    program = runtime.load_program(pte)
    floats = {
        spec.dtype
        for spec in program.program.method("forward").values
        if isinstance(spec, TensorSpec) and spec.dtype.is_floating_point
    }
    assert floats == {torch.float16}
    for features in _features(pte):
        assert set(features.values()) <= {"int32", "fp16"}
    for engine in ENGINES:
        for host in ("python", "stock"):
            module = Rows().half().eval()
            program = runtime.load_program(pte, host=host, engine=engine)
            for call in _CALLS:
                (actual,) = program.run("forward", list(call))
                torch.testing.assert_close(actual, module(*call).detach(), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.FLOAT32], ids=str)
def test_a_half_buffer_as_a_state_is_not_rounded_twice(precision: Precision) -> None:
    lowered = lower(Rows().half().eval(), _CALLS[0], compile_specs=_specs(Opset.iOS18, precision))
    assert [buffer.is_state for buffer in lowered.report.buffers] == [True]
    if precision is Precision.FLOAT16:
        assert "cast" not in _operators(lowered.pte)
    for engine in ENGINES:
        module = Rows().half().eval()
        program = runtime.load_program(lowered.pte, engine=engine)
        for call in _CALLS:
            (actual,) = program.run("forward", list(call))
            torch.testing.assert_close(actual, module(*call).detach(), atol=ATOL, rtol=RTOL)


# Constants


def _matrices(pte: bytes) -> list[torch.dtype]:
    """Dtypes of the matrices that the program stores outside of its delegates."""
    method = runtime.load_program(pte).program.method("forward")
    tensors = [spec for spec in method.values if isinstance(spec, TensorSpec)]
    return [t.dtype for t in tensors if t.is_constant and len(t.shape) == 2]


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight = self.table.weight


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", [Layers, Tied])
def test_the_table_of_an_embedding_that_is_left_out_stays_half(kind: type[nn.Module]) -> None:
    """A tied table is stored twice: on the CPU, and in the model for the layer."""
    module, inputs = kind().half().eval(), _inputs()
    exported = torch.export.export(module, inputs)
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.embedding.default:
            do_not_delegate(node, "a test")
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[CoreMLPartitioner(compile_specs=_specs(Opset.iOS16))],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    pte = edge.to_executorch().buffer
    assert _matrices(pte) == [torch.float16]
    (features,) = _features(pte)
    assert set(features.values()) == {"fp16"}
    assert "cast" not in _operators(pte)
    for engine in ENGINES:
        results = runtime.load_program(pte, engine=engine).run("forward", list(inputs))
        for actual, expected in zip(results, module(*inputs), strict=True):
            torch.testing.assert_close(actual, expected.detach(), atol=ATOL, rtol=RTOL)


def test_half_constants_outside_of_the_model_are_passed_as_they_are() -> None:
    module, inputs = Layers().half().eval(), _inputs()
    lowered = lower(
        module, inputs, compile_specs=_specs(Opset.iOS16), take_over_constant_data=False
    )
    assert lowered.operators == ()
    assert _matrices(lowered.pte) == [torch.float16] * 2
    (model,) = _models(lowered.pte)
    assert sorted(f.type.dtype.label for f in model.inputs) == ["fp16"] * 3 + ["int32"] * 2
    for engine in ENGINES:
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", list(inputs))
        for actual, expected in zip(results, module(*inputs), strict=True):
            torch.testing.assert_close(actual, expected.detach(), atol=ATOL, rtol=RTOL)

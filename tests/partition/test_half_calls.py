"""Calls of half-precision models that the rules refuse: weights and computation stay in half."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    to_edge,
    to_edge_transform_and_lower,
)
from ops.op_samples import ACCEPTED
from ops.op_samples.sample import Calls, Sample, TensorArg
from support.lowering import Function, Lowered, lower_unchecked, reasons
from support.tolerances import ATOL_RTOL, SQNR_HALF, SUM_LOST_DB, sqnr_db
from torch import nn
from torch.nn import functional as F

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import ExecutionError
from coreml_delegate.partition.verdicts.cpu_kernels import takes_half
from coreml_delegate.runtime.program.plan import TensorSpec
from coreml_delegate.targets import Opset

HALVES = (torch.float16, torch.bfloat16)
HOSTS = ("python", "stock")


def _lower(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Lowered:
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=Opset.iOS17)
    return lower_unchecked(module, inputs, compile_specs=specs)


def _constants(pte: bytes) -> dict[tuple[int, ...], torch.dtype]:
    """Dtypes of the floats that a program stores outside of its delegates, by shape."""
    specs = runtime.load_program(pte).program.method("forward").values
    tensors = [spec for spec in specs if isinstance(spec, TensorSpec) and spec.is_constant]
    return {tuple(t.shape): t.dtype for t in tensors if t.dtype.is_floating_point}


def _assert_equal_fp32(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], pte: bytes, dtype: torch.dtype
) -> None:
    wide = [x.float() if x.dtype is dtype else x for x in inputs]
    expected = copy.deepcopy(module).float()(*wide)
    for host in HOSTS:
        (actual,) = runtime.load_program(pte, host=host).run("forward", list(inputs))
        assert actual.dtype is dtype
        assert sqnr_db(expected.detach().numpy(), actual.float().numpy()) > SQNR_HALF[dtype]


class Words(nn.Module):
    """An embedding that the rules refuse, and a layer that Core ML takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(256, 32, sparse=True)
        self.layer = nn.Linear(32, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(tokens)).tanh()


class Deviations(nn.Module):
    """A group norm of which the statistics are used, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(16, 24), nn.GroupNorm(1, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arguments = (self.norm.weight, self.norm.bias, x.shape[0], 24, 1, 1, 1e-5)
        normal, mean, _ = torch.native_group_norm(self.layer(x), *arguments)
        return (normal - mean).tanh()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], set[Any], str]] = {
    "embedding": (Words, (torch.arange(6),), {(256, 32)}, "sparse=True"),
    "group norm": (Deviations, (_random(3, 16),), {(24,)}, "result 1 is used"),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("model", _MODELS)
def test_refused_calls_keep_their_weights_in_half(model: str, dtype: torch.dtype) -> None:
    kind, inputs, shapes, text = _MODELS[model]
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    module = kind().to(dtype).eval()
    lowered = _lower(module, inputs)
    pte = lowered.pte
    assert _constants(pte) == dict.fromkeys(shapes, dtype)
    texts = [str(n.reason) for n in lowered.report.undelegated if "copy" not in n.op]
    assert texts
    assert [other for other in texts if text not in other] == []
    _assert_equal_fp32(module, inputs, pte, dtype)
    delegates = runtime.load_program(pte).delegates("forward")
    assert delegates
    if dtype is torch.float16:
        features = [f for d in delegates for f in (*d.model.inputs, *d.model.outputs)]
        assert {f.type.dtype.label for f in features} == {"fp16"}
        assert lowered.operators.count("dim_order_ops._to_dim_order_copy.default") == 0


def test_a_program_in_fp32_has_the_reasons_of_one_in_half() -> None:
    half, wide = (_lower(Words().to(t), (torch.arange(6),)) for t in (torch.half, torch.float))
    assert reasons(half.report) == reasons(wide.report)
    saved = len(wide.pte) - len(half.pte)
    assert saved > 256 * 32 * 2 * 0.9


def test_both_of_two_partitioners_know_the_reason() -> None:
    partitioners = [CoreMLPartitioner(), CoreMLPartitioner()]
    to_edge_transform_and_lower(
        torch.export.export(Words().half(), (torch.arange(6),)), partitioner=partitioners
    )
    for partitioner in partitioners:
        assert "sparse=True" in reasons(partitioner.report)["aten.embedding.default"]


class Codes(nn.Module):
    """Distances, for which no CPU kernel of torch takes fp16, and bags without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.codes = nn.Parameter(torch.randn(8, 16))
        self.layer = nn.Linear(16, 16)
        self.bags = nn.EmbeddingBag(64, 12)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distances = torch.cdist(self.layer(x), self.codes, p=1.0)
        return distances, self.bags(torch.arange(8), offsets)


def test_calls_whose_kernels_take_no_half_are_promoted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        pte = _lower(Codes().half(), (_random(4, 16).half(), torch.tensor([0, 3]))).pte
    assert _constants(pte)[64, 12] is torch.float32


# Kernels

SAMPLES = [
    sample
    for family, samples in ACCEPTED.items()
    if family != "recurrent"  # they consist of the others
    for sample in samples
    if sample.target != "aten.linalg_inv_ex.default"  # torch has no such call in half precision
    if sample.compare and any(t.dtype is torch.float32 for t in sample.tensors())
]


def _narrow(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument of a sample in half precision."""
    if isinstance(value, list | tuple):
        return type(value)(_narrow(item, dtype) for item in value)
    if isinstance(value, TensorArg) and value.dtype is torch.float32:
        return dataclasses.replace(value, dtype=dtype)
    return dtype if value is torch.float32 else value


@pytest.mark.share(80)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_kernels_that_are_said_to_take_half_do(sample: Sample, dtype: torch.dtype) -> None:
    kwargs = {name: _narrow(value, dtype) for name, value in sample.kwargs.items()}
    half = dataclasses.replace(sample, args=_narrow(sample.args, dtype), kwargs=kwargs)
    edge, inputs = _exported(half)
    calls = [n for n in edge.exported_program().graph.nodes if n.op == "call_function"]
    if not all(map(takes_half, calls)):
        pytest.skip("a kernel is missing, or takes no half precision")
    try:
        results = _run(edge, inputs)
    except ExecutionError:
        with pytest.raises(ExecutionError):
            _run(*_exported(sample))
        pytest.skip("the kernel refuses the call in fp32 too")
    wide = Calls([sample])
    wide.load_state_dict(Calls([half]).state_dict())
    atol, rtol = ATOL_RTOL["fp16" if dtype is torch.float16 else "bf16"]
    exact = wide(*(x.float() if x.dtype is dtype else x for x in inputs))
    for actual, expected in zip(results, exact, strict=True):
        expected = expected.to(actual.dtype)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, equal_nan=True)


def _exported(sample: Sample) -> tuple[EdgeProgramManager, tuple[torch.Tensor, ...]]:
    module = Calls([sample])
    return _to_edge(module, module.inputs()), module.inputs()


@torch.no_grad()
def _to_edge(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> EdgeProgramManager:
    config = EdgeCompileConfig(_check_ir_validity=False)
    return to_edge(torch.export.export(module, inputs), compile_config=config)


def _run(edge: EdgeProgramManager, inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    program = runtime.load_program(edge.to_executorch().buffer, host="stock")
    return program.run("forward", list(inputs))


_LONG = 2048


def _rows(*sizes: int) -> torch.Tensor:
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(0))


# Functions that add many numbers, and their arguments.
_SUMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (_rows(4, _LONG), _rows(8, _LONG))),
    "linear with bias": (F.linear, (_rows(4, _LONG), _rows(8, _LONG), _rows(8))),
    "matmul": (torch.matmul, (_rows(2, 4, _LONG), _rows(2, _LONG, 8))),
    "sum": (lambda x: x.sum(1), (_rows(4, _LONG),)),
    "mean": (lambda x: x.mean(1), (_rows(4, _LONG),)),
    "cumsum": (lambda x: x.cumsum(1), (_rows(4, _LONG),)),
    "variance": (lambda x: x.var(1), (_rows(4, _LONG),)),
    "variance and mean": (lambda x: torch.var_mean(x, 1)[0], (_rows(4, _LONG),)),
    "layer norm": (lambda x: F.layer_norm(x, (_LONG,)), (_rows(4, _LONG),)),
    "group norm": (lambda x: F.group_norm(x, 2), (_rows(2, 4, _LONG),)),
    "rms norm": (lambda x: F.rms_norm(x, (_LONG,)), (_rows(4, _LONG),)),
    "instance norm": (F.instance_norm, (_rows(1, 4, _LONG),)),
    "softmax": (lambda x: x.softmax(1), (_rows(4, _LONG),)),
    "logarithm of softmax": (lambda x: x.log_softmax(1), (_rows(4, _LONG),)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), (_rows(4, _LONG),)),
    "average pooling": (lambda x: F.avg_pool2d(x, 16), (_rows(1, 4, 32, 32),)),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 1), (_rows(1, 4, 32, 32),)),
    "convolution": (torch.conv2d, (_rows(1, 128, 6, 6), _rows(8, 128, 4, 4))),
    "transposed convolution": (
        torch.conv_transpose2d,
        (_rows(1, 128, 6, 6), _rows(128, 8, 4, 4)),
    ),
    "attention": (
        F.scaled_dot_product_attention,
        (_rows(1, 2, 4, 64), _rows(1, 2, 512, 64), _rows(1, 2, 512, 64)),
    ),
    "scatter": (
        lambda x: torch.zeros(4, dtype=x.dtype).scatter_add(0, torch.zeros(_LONG).long(), x),
        (_rows(_LONG),),
    ),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", _SUMS)
def test_kernels_that_are_said_to_take_half_add_in_fp32(name: str, dtype: torch.dtype) -> None:
    function, arguments = _SUMS[name]
    inputs = tuple(x.to(dtype) for x in arguments)
    module = Function(function)
    edge = _to_edge(module, inputs)
    calls = [n for n in edge.exported_program().graph.nodes if n.op == "call_function"]
    (actual,) = _run(edge, inputs)
    exact = module(*(x.double() for x in inputs)).numpy()
    of_torch, of_runtime = (
        sqnr_db(exact, result.double().numpy()) for result in (module(*inputs), actual)
    )
    if all(map(takes_half, calls)):
        assert of_runtime > of_torch - SUM_LOST_DB
    elif dtype is torch.bfloat16:
        assert of_runtime < of_torch - SUM_LOST_DB

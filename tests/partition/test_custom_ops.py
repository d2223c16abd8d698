"""Custom operators: those of ExecuTorch's packages, and a user's without an out variant."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from support.lowering import Function, fp32_specs, lower_unchecked
from support.tolerances import ATOL_RTOL
from torch.export import export

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import LoweringError
from coreml_delegate.ops import RECORDS, REFUSED, ReasonCode

ATOL, RTOL = ATOL_RTOL["fp32"]
X = torch.linspace(-1, 1, 12).reshape(3, 4)
_LLAMA = "executorch.examples.models.llama.source_transformation.sdpa"
_PACKAGES = (
    _LLAMA,
    "executorch.extension.llm.cache.update_and_attend",
    "executorch.extension.llm.custom_ops.custom_ops",
    *(f"executorch.extension.llm.export.{name}" for name in ("gguf", "int4", "mx", "nvfp4")),
)


# Attention that export_llm preserves for Core ML


def _attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return torch.ops.coreml.sdpa(q * 2, k, v, mask) + 1


@pytest.fixture(scope="module")
def attention_inputs() -> tuple[torch.Tensor, ...]:
    importlib.import_module(_LLAMA)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    mask = torch.zeros(1, 1, 3, 5)
    mask[..., 3:] = -torch.inf
    return q, k, v, mask


@pytest.mark.parametrize("split", [False, True], ids=["at-once", "to-edge-first"])
def test_attention_for_core_ml_is_delegated(split: bool, attention_inputs: Any) -> None:
    program = export(Function(_attention), attention_inputs)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs(), lower_full_graph=True)
    edge = (
        to_edge(program).to_backend(partitioner)
        if split
        else to_edge_transform_and_lower(program, partitioner=[partitioner])
    )
    loaded = runtime.load_program(edge.to_executorch().buffer, host="python")
    (actual,) = loaded.run("forward", list(attention_inputs))
    torch.testing.assert_close(actual, _attention(*attention_inputs), atol=ATOL, rtol=RTOL)


def test_attention_for_core_ml_runs_on_the_cpu_too(attention_inputs: Any) -> None:
    lowered = lower_unchecked(Function(_attention), attention_inputs, only_ops=["add"])
    assert "aten.bmm.default" in lowered.operators
    assert lowered.report.without_kernel == ()
    (actual,) = runtime.load_program(lowered.pte, host="python").run(
        "forward", list(attention_inputs)
    )
    torch.testing.assert_close(actual, _attention(*attention_inputs), atol=ATOL, rtol=RTOL)


# ExecuTorch's other operators, whose import takes seconds


@pytest.fixture(scope="module")
def packages() -> None:
    for name in _PACKAGES:
        importlib.import_module(name)


def _custom_ops() -> Iterator[str]:
    namespaces = {"coreml", "executorch", "kvcache", "llama", "preprocess"}
    schemas: Any = torch._C._jit_get_all_schemas()
    for schema in schemas:
        namespace, _, name = schema.name.partition("::")
        returns_tensor = any("Tensor" in str(value.type) for value in schema.returns)
        is_out = any(argument.is_out for argument in schema.arguments)
        if namespace in namespaces and returns_tensor and not is_out:
            yield f"{namespace}.{name}.{schema.overload_name or 'default'}"


@pytest.mark.slow
def test_custom_operators_of_executorch_are_taken_or_refused(packages: None) -> None:
    names = set(_custom_ops())
    assert "llama.custom_sdpa.default" in names
    taken = {"executorch.alias.default", "llama.fallback.default"}  # stand for their arguments
    internal = {"executorch.move.default"}  # of ExecuTorch's verifier
    assert names - internal <= RECORDS.keys() | REFUSED.keys() | taken


@pytest.mark.slow
def test_operators_that_stand_for_their_arguments(packages: None) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = torch.ops.executorch.alias(x * 2, y)
        return first - second

    inputs = X, X + 1
    options: Any = {"compile_specs": fp32_specs(), "lower_full_graph": True}
    lowered = lower_unchecked(Function(function), inputs, **options)
    (actual,) = runtime.load_program(lowered.pte, host="python").run("forward", list(inputs))
    torch.testing.assert_close(actual, X * 2 - (X + 1), atol=ATOL, rtol=RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 128, 24])
def test_hadamard_transforms(count: int, packages: None) -> None:
    x = torch.linspace(-3, 3, 3 * count).sin().reshape(3, count)
    function = Function(lambda x: torch.ops.llama.fast_hadamard_transform(x * 2))
    if count == 24:
        node = lower_unchecked(function, (x,)).report.undelegated[0]
        assert (node.reason.code, node.reason.text) == (ReasonCode.SHAPE, "a row is no power of 2")
        return
    lowered = lower_unchecked(function, (x,), compile_specs=fp32_specs(), lower_full_graph=True)
    (actual,) = runtime.load_program(lowered.pte, host="python").run("forward", [x])
    torch.testing.assert_close(actual, function(x), atol=ATOL, rtol=RTOL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_check_is_size:FutureWarning")  # ExecuTorch calls it
def test_caches_that_are_written_in_place_are_refused_by_name(packages: None) -> None:
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 8, 2, 4))

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            torch.ops.llama.update_cache(k, self.cache, 2)
            return torch.ops.llama.custom_sdpa(q, self.cache, self.cache, 2, None, 0.0, True)

    inputs = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 2, 4)
    lowered = lower_unchecked(Cache(), inputs)
    reasons = {str(node.reason) for node in lowered.report.undelegated}
    for op in ("update_cache", "custom_sdpa"):
        assert any(reason.startswith(f"llama.{op}.default is refused") for reason in reasons)
    assert lowered.report.without_kernel == ()
    (actual,) = runtime.load_program(lowered.pte, host="python").run("forward", list(inputs))[-1:]
    torch.testing.assert_close(actual, Cache()(*inputs), atol=ATOL, rtol=RTOL)


# A user's operators


@pytest.fixture
def operator() -> Iterator[Any]:
    """An operator that torch knows and ExecuTorch cannot lower."""
    with torch.library._scoped_library("coreml_delegate_tests", "FRAGMENT") as library:
        library.define("shifted(Tensor x, *, int by=2) -> (Tensor, Tensor)")
        library.impl("shifted", lambda x, by=2: (x + by, x - by), "CompositeExplicitAutograd")
        yield torch.ops.coreml_delegate_tests.shifted


def test_the_error_says_how_to_register_an_out_variant(operator: Any) -> None:
    class Shifted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, down = operator(x * 2, by=3)
            return up * down

    with pytest.raises(LoweringError) as raised:
        lower_unchecked(Shifted(), (X,))
    assert str(raised.value.got).startswith(
        "coreml_delegate_tests.shifted.default at test_custom_ops.py:"
    )
    match = re.search(
        r'torch\.library\.define\("(\S+)", "(.+?)"\) and torch\.library\.impl\("\1"',
        str(raised.value.remedy),
    )
    assert match is not None
    name, schema = match.groups()
    assert name == "coreml_delegate_tests::shifted.out"

    def variant(x: Any, *, by: int = 2, out0: Any, out1: Any) -> Any:
        return out0.copy_(x + by), out1.copy_(x - by)

    with torch.library._scoped_library("coreml_delegate_tests", "FRAGMENT") as library:
        library.define(f"shifted.out{schema}")
        library.impl("shifted.out", variant, "CompositeExplicitAutograd")
        lowered = lower_unchecked(Shifted(), (X,))
        assert [n.cpu_obstacle.code for n in lowered.report.without_kernel] == [ReasonCode.KERNEL]
        (actual,) = runtime.load_program(lowered.pte, host="python").run("forward", [X])
    torch.testing.assert_close(actual, (X * 2 + 3) * (X * 2 - 3), atol=ATOL, rtol=RTOL)

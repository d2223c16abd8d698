"""Norms of rows whose squares overflow fp16, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import Function, lower_unchecked
from support.partitioned import delegate_functions
from support.tolerances import SQNR_FP16, sqnr_db
from torch.export import Dim
from torch.nn import functional as F

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.options.compile_specs import Precision

Norm = Callable[[torch.Tensor], torch.Tensor]


def mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1, keepdim=True)


def variance(x: torch.Tensor) -> torch.Tensor:
    return x.var(1, keepdim=True, correction=0)


# Their inputs are [2, 64, 5, 5], and the channels are normed.
NORMS: dict[str, Norm] = {
    "convnext": lambda x: (x - mean(x)) / torch.sqrt(mean((x - mean(x)).pow(2)) + 1e-6),
    "variance": lambda x: (x - mean(x)) / (variance(x) + 1e-6).sqrt(),
    "inverse": lambda x: (x - mean(x)) * torch.rsqrt(variance(x) + 1e-6),
    "variance first": lambda x: torch.rsqrt(variance(x) + 1e-6) * (x - mean(x)),
    "deviation": lambda x: (x - mean(x)) / (x.std(1, keepdim=True) + 1e-6),
    "own mean": lambda x: x / (variance(x) + 1e-6).sqrt(),
    "rms": lambda x: x / torch.sqrt(mean(x * x) + 1e-6),
    "rms, epsilon outside": lambda x: x / (mean(x.square()).sqrt() + 1e-6),
    "rms, inverse": lambda x: x * torch.rsqrt(mean(x.pow(2)) + 1e-6),
    "root of a sum": lambda x: x.pow(2).sum(1).sqrt(),
    "power": lambda x: mean(x.pow(2)) ** -0.5,
    "power of a sum": lambda x: ((x * x).sum((2, 3)) + 1e-3) ** 0.5,
    "of everything": lambda x: x / (x - x.mean()).pow(2).mean((0, 1, 2, 3)).sqrt(),
    "cosine": lambda x: F.cosine_similarity(x[:, :, :2], x[:, :, 2:4], dim=1),
    "divided in a branch": lambda x: torch.cond(
        x.sum() > 0,
        lambda x, inverse: x * inverse,
        lambda x, inverse: -x * inverse,
        (x, torch.rsqrt(mean(x * x) + 1e-6)),
    ),
    "in a branch": lambda x: torch.cond(
        x.sum() > 0, NORMS["convnext"], lambda x: NORMS["variance"](-x), (x,)
    ),
}


def sample(size: float) -> torch.Tensor:
    torch.manual_seed(0)
    return size * torch.randn(2, 64, 5, 5)


def check(norm: Norm, x: torch.Tensor, **options: Any) -> None:
    specs = CoreMLBackend.generate_compile_specs(**options)
    lowered = lower_unchecked(Function(norm), (x,), compile_specs=specs)
    assert lowered.operators == ()
    for engine in ("openvino", "reference"):
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", [x])
        assert sqnr_db(norm(x).numpy(), actual.numpy()) > SQNR_FP16


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(0.001, marks=pytest.mark.slow),
        pytest.param(1.0, marks=pytest.mark.slow),
        2000.0,
    ],
)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_any_size(name: str, size: float) -> None:
    check(NORMS[name], sample(size))


@pytest.mark.parametrize("name", ["convnext", "rms", "rms, inverse", "root of a sum"])
def test_a_row_of_zeros(name: str) -> None:
    x = sample(1.0)
    x[0] = 0.0
    check(NORMS[name], x)


def test_a_dynamic_length() -> None:
    """Whose number of squares, which the deviation is corrected by, is not known before."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-6)

    x = sample(2000.0)
    sizes = ({2: Dim("length", min=2, max=9)},)
    exported = torch.export.export(Function(norm), (x,), dynamic_shapes=(sizes,))
    partitioner = CoreMLPartitioner(lower_full_graph=True)
    pte = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch().buffer
    for engine in ("openvino", "reference"):
        program = runtime.load_program(pte, engine=engine)
        for given in (x, x[:, :, :3].contiguous()):
            (actual,) = program.run("forward", [given])
            assert sqnr_db(norm(given).numpy(), actual.numpy()) > SQNR_FP16


def ops_of(norm: Norm, **options: Any) -> list[str]:
    specs = CoreMLBackend.generate_compile_specs(**options)
    lowered = lower_unchecked(Function(norm), (sample(1.0),), compile_specs=specs)
    (function,) = delegate_functions(lowered.edge)
    return [op.type for op in function.block.ops]


@pytest.mark.parametrize("name", ["convnext", "variance", "inverse", "variance first"])
def test_a_written_out_layer_norm_is_one_op(name: str) -> None:
    ops = [op for op in ops_of(NORMS[name]) if op not in ("cast", "const")]
    assert ops == ["mul", "layer_norm"]


def test_two_random_numbers_are_not_one() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        one, other = x - torch.rand_like(x), x - torch.rand_like(x)
        return one / (mean(other * other) + 1e-6).sqrt()

    assert ops_of(norm).count("sub") == 2


@pytest.mark.parametrize(
    "options",
    [{"compute_precision": Precision.FLOAT32}, {"keep_fp32": {"ops": ["reduce_mean"]}}],
    ids=["fp32", "kept in fp32"],
)
def test_fp32_has_the_squares(options: dict[str, Any]) -> None:
    assert "reduce_max" not in ops_of(NORMS["rms"], **options)

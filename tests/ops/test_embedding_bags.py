"""Embedding bags, of which rows of equal length are delegated, and embeddings of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.lowering import Function, fp32_specs, lower_unchecked
from support.tolerances import ATOL_RTOL
from torch.nn import functional

from coreml_delegate import CoreMLPartitioner, runtime

TABLE = torch.linspace(-2.0, 2.0, 36).reshape(9, 4).sin()
OPTIONS: dict[str, Any] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum, padded": {"mode": "sum", "padding_idx": 3},
    "mean, padded": {"mode": "mean", "padding_idx": 3},
}


def _bags(ids: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    bags = {name: functional.embedding_bag(ids, TABLE, **how) for name, how in OPTIONS.items()}
    weighted = functional.embedding_bag(ids, TABLE, mode="sum", per_sample_weights=weights)
    return bags | {"weighted": weighted}


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_rows_of_equal_length(is_dynamic: bool) -> None:
    ids = torch.tensor([[0, 3, 3, 8, 1], [3, 3, 3, 3, 3], [7, 6, 3, 2, 2]])
    module, weights = Function(_bags), torch.linspace(-1.0, 1.0, 15).reshape(3, 5)
    batch = {0: torch.export.Dim("batch", min=1, max=8)} if is_dynamic else None
    shapes = ((batch, batch),) if is_dynamic else None
    with torch.no_grad():
        exported = torch.export.export(module, (ids, weights), dynamic_shapes=shapes)
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    # Decomposed, it is an operator that ExecuTorch does not count among core ATen.
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    pte = edge.to_executorch().buffer
    assert not partitioner.report.undelegated
    atol, rtol = ATOL_RTOL["fp32"]
    for engine in ("reference", "openvino"):
        results = runtime.load_program(pte, engine=engine).run("forward", [ids, weights])
        for result, (name, expected) in zip(results, module(ids, weights).items(), strict=True):
            torch.testing.assert_close(result, expected, atol=atol, rtol=rtol, msg=name)


def _bags_at_offsets(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    starts, bounds = torch.tensor([0, 3, 6]), torch.tensor([0, 3, 6, 9])
    return {
        "starts": functional.embedding_bag(ids, TABLE, starts, mode="sum"),
        "bounds": functional.embedding_bag(ids, TABLE, bounds, include_last_offset=True),
        "padded": functional.embedding_bag(ids, TABLE, starts, padding_idx=3, mode="sum"),
        "one": functional.embedding_bag(ids, TABLE, torch.tensor([0]), mode="max"),
    }


def test_constant_offsets_of_equal_bags() -> None:
    ids, module = torch.tensor([0, 3, 3, 8, 1, 3, 7, 6, 2]), Function(_bags_at_offsets)
    lowered = lower_unchecked(module, (ids,))
    assert not lowered.report.undelegated
    atol, rtol = ATOL_RTOL["fp32"]
    for engine in ("reference", "openvino"):
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", [ids])
        for result, (name, expected) in zip(results, module(ids).items(), strict=True):
            torch.testing.assert_close(result, expected, atol=atol, rtol=rtol, msg=name)


def _reduced(x: torch.Tensor, source: torch.Tensor) -> dict[str, torch.Tensor]:
    index = torch.tensor([2, 2, 0])
    return {
        f"{reduce}, {includes_self}": x.index_reduce(
            dim, index, source, reduce, include_self=includes_self
        )
        for dim, reduce in ((0, "amax"), (-1, "amin"), (0, "mean"), (1, "prod"))
        for includes_self in (True, False)
    }


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
def test_index_reduce_is_a_scatter() -> None:
    x, source = torch.linspace(-1.0, 1.0, 9).reshape(3, 3), torch.linspace(3.0, -2.0, 9).sin()
    module, inputs = Function(_reduced), (x, source.reshape(3, 3))
    lowered = lower_unchecked(module, inputs)
    assert not lowered.report.undelegated
    for engine in ("reference", "openvino"):
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", list(inputs))
        for result, (name, expected) in zip(results, module(*inputs).items(), strict=True):
            torch.testing.assert_close(result, expected, msg=name)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"offsets": torch.tensor([0, 2])}, "not known to have equally many elements"),
        ({"mode": "max", "padding_idx": 3}, "the largest of bags with padding"),
    ],
)
def test_other_bags_stay_on_the_cpu(how: dict[str, Any], why: str) -> None:
    ids = torch.arange(6) if "offsets" in how else torch.arange(6).reshape(2, 3)
    module = Function(lambda ids: functional.embedding_bag(ids, TABLE, **how))
    with torch.no_grad():
        exported = torch.export.export(module, (ids,))
    report = CoreMLPartitioner(compile_specs=fp32_specs()).plan(exported)
    (reason,) = {str(n.reason) for n in report.undelegated if "embedding_bag" in n.op}
    assert why in reason


def _merge(ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    tokens = functional.embedding(ids, TABLE)
    return tokens.masked_scatter((ids == 7)[..., None].expand_as(tokens), images * 2)


def test_embeddings_of_images_are_scattered_by_rows() -> None:
    ids = torch.tensor([[1, 7, 7, 2, 3], [7, 7, 1, 2, 7]])
    images = torch.linspace(-1.0, 1.0, 28).reshape(7, 4)
    shapes = ({1: torch.export.Dim("tokens", min=2, max=16)}, None)
    exported = torch.export.export(Function(_merge), (ids, images), dynamic_shapes=(shapes,))
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    pte = edge.to_executorch().buffer
    assert not partitioner.report.undelegated
    calls = (ids, torch.zeros_like(ids), torch.full((2, 3), 7).fill_diagonal_(0))
    for engine in ("reference", "openvino"):
        program = runtime.load_program(pte, engine=engine)
        for tokens in calls:
            (result,) = program.run("forward", [tokens, images])
            assert torch.equal(result, _merge(tokens, images))

"""Ops that neither Core ML nor ExecuTorch's runtime has, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_model
from support.llm_families import FAMILIES
from support.lowering import Function, Inputs, lower_unchecked
from support.tolerances import ATOL_RTOL, ATOL_RTOL_LOGITS
from torch.nn import functional

from coreml_delegate import runtime
from coreml_delegate.patches.third_party import transformers

X = torch.linspace(-3.0, 3.0, 24).sin().reshape(2, 3, 4)
PLACES = torch.tensor([1, 2, 0])
MATRICES = torch.linspace(-2.0, 2.0, 4 * 8 * 8).cos().reshape(4, 8, 8)
ROWS = X.reshape(3, 8), torch.tensor([1, 1, 2, 2], dtype=torch.int32)
"""Rows of the first and the third group, and a row after the last group."""


def _filled(empty: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    empty[:, PLACES] = values.to(empty.dtype)
    return empty


def _empty(x: torch.Tensor) -> dict[str, torch.Tensor]:
    swapped = x.transpose(0, 1).contiguous().transpose(0, 1)
    images = x[None].expand(2, 2, 3, 4)
    return {
        "like": _filled(torch.empty_like(x), x),
        "transposed": _filled(torch.empty_like(swapped), swapped) * 2,
        "expanded": _filled(torch.empty_like(x[:, :, :1].expand(2, 3, 4)), x),
        "integers": _filled(torch.empty_like(x, dtype=torch.int64), 10 * x),
        "truth values": _filled(torch.empty_like(x, dtype=torch.bool), x > 0),
        "row-major": _filled(torch.empty_like(swapped, memory_format=torch.contiguous_format), x),
        "channels last": _filled(
            torch.empty_like(images, memory_format=torch.channels_last).movedim(1, 0)[0], images[0]
        ),
        "new": _filled(x.new_empty(2, 3, 4), x),
    }


def _histograms(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "bounds of the data": torch.histc(x, 5),
        "given bounds": torch.histc(x, 4, -0.5, 0.7),
        "a constant": torch.histc(torch.ones_like(x), 3),
        "experts": torch.histc((x * 4).round(), 9, -4, 4),
    }


def _order_statistics(x: torch.Tensor) -> dict[str, torch.Tensor]:
    medians = {f"of dimension {dim}": x.median(dim) for dim in range(3)}
    integers = (9 * x).to(torch.int64)
    results = {
        "of all": x.median(),
        "of integers": integers.median(1, keepdim=True)[0],
        "third": x.kthvalue(3)[0],
        "position of the second": x.kthvalue(2, 1, keepdim=True)[1],
        "of NaN": x.log().median(1)[0],
        "position of NaN": x.log().median(1)[1],
    }
    results |= {f"{name}, value": result[0] for name, result in medians.items()}
    return results | {f"{name}, position": result[1] for name, result in medians.items()}


def _one_hot(x: torch.Tensor) -> dict[str, torch.Tensor]:
    truth = (x > 0).to(torch.int64)
    return {"largest": functional.one_hot(x.argmax(-1), 4), "truth": functional.one_hot(truth, 2)}


def _nothing_written(x: torch.Tensor) -> dict[str, torch.Tensor]:
    written, cropped = x.clone(), x.clone()
    written[..., 4:9] = 2 * x[..., 4:]
    cropped[1:1] = 3.0
    results = {"beyond": written * 2, "empty": cropped * 2}
    return results | {"beside another op": written.median()}


def _product(rows: torch.Tensor, ends: torch.Tensor) -> dict[str, torch.Tensor]:
    transformers()  # registers its op
    fallback: Any = torch.ops.transformers.grouped_mm_fallback
    return {"product": fallback(rows, MATRICES, ends)}


def _half_product(rows: torch.Tensor, ends: torch.Tensor) -> dict[str, torch.Tensor]:
    matrices, ends = MATRICES.bfloat16(), ends + 1  # rows after the last group are not defined
    return {"product": functional.grouped_mm(rows.bfloat16(), matrices, offs=ends).float()}


def _compare(
    pte: Any, inputs: Inputs, expected: dict[str, torch.Tensor], precision: str = "fp32"
) -> None:
    atol, rtol = ATOL_RTOL[precision]
    for engine in ("reference", "openvino"):
        results = runtime.load_program(pte, engine=engine).run("forward", list(inputs))
        for result, (name, value) in zip(results, expected.items(), strict=True):
            torch.testing.assert_close(
                result, value, atol=atol, rtol=rtol, equal_nan=True, msg=name
            )


@pytest.mark.parametrize(
    ("function", "inputs", "precision"),
    [
        (_empty, (X,), "fp32"),
        (_histograms, (X,), "fp32"),
        (_order_statistics, (X,), "fp32"),
        (_one_hot, (X,), "fp32"),
        (_nothing_written, (X,), "fp32"),
        (_product, ROWS, "fp32"),
        (_half_product, ROWS, "bf16"),
    ],
    ids=lambda value: value.__name__.lstrip("_") if callable(value) else "",
)
def test_delegated(
    function: Callable[..., dict[str, torch.Tensor]], inputs: Inputs, precision: str
) -> None:
    lowered = lower_unchecked(Function(function), inputs)
    assert not lowered.report.undelegated
    _compare(lowered.pte, inputs, function(*inputs), precision)


def test_any_number_of_rows() -> None:
    def function(x: torch.Tensor, ends: torch.Tensor) -> dict[str, torch.Tensor]:
        flipped = torch.empty_like(x)
        flipped[:] = x.flip(0)
        doubled = torch.empty(x.shape)
        doubled[:] = 2 * x
        results = {"flipped": flipped, "doubled": doubled, "counts": torch.histc(x, 4)}
        return results | _product(x, ends)

    shapes = (({0: torch.export.Dim("rows", min=2, max=9)}, None),)
    lowered = lower_unchecked(Function(function), ROWS, dynamic_shapes=shapes)
    assert not lowered.report.undelegated
    pte = lowered.pte
    for rows in (2, 9):
        inputs = torch.linspace(-1.0, 1.0, 8 * rows).reshape(rows, 8), ROWS[1]
        _compare(pte, inputs, function(*inputs))


@pytest.mark.parametrize("count", [128, 1000])
def test_integers_are_counted_exactly_in_fp16(count: int) -> None:
    numbers = torch.arange(count).repeat(2)[3:]

    def function(numbers: torch.Tensor) -> torch.Tensor:
        return torch.histc(numbers.float(), count, 0, count - 1)

    lowered = lower_unchecked(Function(function), (numbers,), compile_specs=[])
    assert not lowered.report.undelegated
    _compare(lowered.pte, (numbers,), {"counts": function(numbers)}, "int32")


def test_experts_of_transformers() -> None:
    model = tiny_model("mixtral", **FAMILIES["mixtral"].changes)
    tokens = torch.arange(12).reshape(1, 12)
    logits = Function(lambda ids: model(input_ids=ids, use_cache=False).logits)
    lowered = lower_unchecked(logits, (tokens,))
    assert not lowered.report.undelegated
    (actual,) = runtime.load_program(lowered.pte).run("forward", [tokens])
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(actual, logits(tokens), atol=atol, rtol=rtol)

"""Custom ops for control flow, with the graphs of their branches as a text argument.

ExecuTorch does not delegate calls with graphs as arguments, and cannot serialize some of them.
These ops take tensors and a text instead, so that they are traced, checked, partitioned and
converted like any other op. The text has the branches in the format of ``torch.export.save``: the
program needs no other data.
"""

from __future__ import annotations

import base64
import copy
import functools
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from coreml_delegate.patches.torch import OpOverload

_OWN: Any = torch.ops.coreml_delegate
_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")

Tensors = Sequence[torch.Tensor]
Branch = Callable[..., Tensors]

_CACHED = 64  # parsed texts: a model has few calls, which are evaluated often


def write_branches(branches: Sequence[ExportedProgram]) -> str:
    """Return the text of branches; equal branches have equal texts.

    Args:
        branches: In ATen dialect; source lines are not written. The last branch defines the types
            of the call's results.
    """
    outputs: Any = branches[-1].graph.output_node().args[0]
    values = [output.meta["val"] for output in outputs]
    results = [[list(value.shape), str(value.dtype).removeprefix("torch.")] for value in values]
    return json.dumps({"results": results, "branches": [*map(_write_branch, branches)]})


def read_branches(text: str) -> tuple[ExportedProgram, ...]:
    """Return new copies of the branches of a text."""
    encoded = json.loads(text)["branches"]
    return tuple(torch.export.load(io.BytesIO(base64.b64decode(branch))) for branch in encoded)


@functools.lru_cache(_CACHED)
def results_of(text: str) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return the shapes and dtypes of the last branch's results."""
    results = json.loads(text)["results"]
    return tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in results)


def _write_branch(branch: ExportedProgram) -> str:
    for node in branch.graph.nodes:
        # torch's metadata has line numbers of generated code, which differ between processes.
        node.meta = {
            key: value for key, value in node.meta.items() if key in ("val", "tensor_meta")
        }
    stripped: Any = copy.copy(branch)
    stripped.example_inputs = None  # they include weights, if weights are operands
    buffer = io.BytesIO()
    torch.export.save(stripped, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.lru_cache(_CACHED)
def _branches(text: str) -> tuple[Branch, ...]:
    return tuple(_as_function(branch) for branch in read_branches(text))


def _as_function(branch: ExportedProgram) -> Branch:
    module = branch.module()

    def call(*arguments: torch.Tensor) -> Tensors:
        result = module(*arguments)
        return [result] if isinstance(result, torch.Tensor) else list(result)

    return call


# Results must not alias arguments. ExecuTorch's verifier takes the length of the first of several
# results, so a result of rank 0 gets one dimension.


def _without_alias(result: torch.Tensor) -> torch.Tensor:
    return result.clone() if result.dim() else result.reshape(1).clone()


def _empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return like.new_empty(tuple(shape) or (1,), dtype=dtype)


def _cond(branches: str, condition: torch.Tensor, operands: Tensors) -> Tensors:
    then, otherwise = _branches(branches)
    chosen = then if condition.item() else otherwise
    return [*map(_without_alias, chosen(*operands))]


def _while_loop(branches: str, carry: Tensors, operands: Tensors) -> Tensors:
    condition, body = _branches(branches)
    while condition(*carry, *operands)[0].item():
        carry = body(*carry, *operands)
    return [*map(_without_alias, carry)]


def _scan(branches: str, carry: Tensors, sequences: Tensors, operands: Tensors) -> Tensors:
    (step,) = _branches(branches)
    rows: list[Tensors] = []
    for index in range(sequences[0].shape[0]):
        results = step(*carry, *(sequence[index] for sequence in sequences), *operands)
        carry, row = results[: len(carry)], results[len(carry) :]
        rows.append(row)
    last = [*map(_without_alias, carry)]
    return last + [torch.stack(list(column)) for column in zip(*rows, strict=True)]


def _cond_shapes(branches: str, condition: torch.Tensor, operands: Tensors) -> Tensors:
    del operands
    return [_empty(condition, *result) for result in results_of(branches)]


def _while_loop_shapes(branches: str, carry: Tensors, operands: Tensors) -> Tensors:
    del branches, operands
    return [_empty(value, value.shape, value.dtype) for value in carry]


def _scan_shapes(branches: str, carry: Tensors, sequences: Tensors, operands: Tensors) -> Tensors:
    del operands
    count, like = sequences[0].shape[0], sequences[0]
    rows = results_of(branches)[len(carry) :]
    return [
        *(_empty(value, value.shape, value.dtype) for value in carry),
        *(_empty(like, (count, *size), dtype) for size, dtype in rows),
    ]


def _define(schema: str, compute: Any, shapes: Any) -> OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shapes, "Meta")
    return getattr(_OWN, name).default


COND = _define(
    "cond(str branches, Tensor condition, Tensor[] operands) -> Tensor[]", _cond, _cond_shapes
)
"""Branches: for true and for false; both take the operands. All ops here return a result of rank 0
with shape [1]."""

WHILE_LOOP = _define(
    "while_loop(str branches, Tensor[] carry, Tensor[] operands) -> Tensor[]",
    _while_loop,
    _while_loop_shapes,
)
"""Branches: the condition and the body; both take the carry and the operands. The body returns the
next carry."""

SCAN = _define(
    "scan(str branches, Tensor[] carry, Tensor[] sequences, Tensor[] operands) -> Tensor[]",
    _scan,
    _scan_shapes,
)
"""Branch: takes the carry, a row of each sequence and the operands; returns the next carry and a
row of each stacked result. Results: the last carry and the stacked results."""

PROTECTED = frozenset({COND, WHILE_LOOP, SCAN})
"""All ops of this module, which are protected from decomposition during partitioning."""

"""Translation of control flow to MIL, each branch to a block: see ``control_flow``.

Source: coremltools' MIL op reference, ``control_flow``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export import ExportedProgram

from coreml_delegate.mil.compose import Var, mb
from coreml_delegate.mil.compose.recurrent import loop_over_rows
from coreml_delegate.opaque_ops.control_flow import read_branches, results_of

Block: TypeAlias = Callable[..., list[Var]]
"""Emits a branch into the block at hand, given its inputs; returns its results."""


def _cond(condition: Var, operands: Sequence[Var], then: Block, otherwise: Block) -> Any:
    """Emit a ``cond``.

    Args:
        condition: A boolean of one element.
        operands: Inputs of both branches.
        then: The branch for true.
        otherwise: The branch for false.

    Returns:
        The results, a tuple.
    """
    results = mb.cond(
        pred=_scalar(condition),
        _true_fn=lambda: _unpack_single(then(*operands)),
        _false_fn=lambda: _unpack_single(otherwise(*operands)),
    )
    return _at_least_1d(results)


def _while_loop(carry: Sequence[Var], operands: Sequence[Var], goes_on: Block, body: Block) -> Any:
    """Emit a ``while_loop``.

    Args:
        carry: First values of the loop variables.
        operands: Values that every iteration takes unchanged.
        goes_on: Takes the carry and the operands; returns a boolean.
        body: Takes the same; returns the next carry.

    Returns:
        The last carry, a tuple.
    """
    results = mb.while_loop(
        _cond=lambda *values: _scalar(goes_on(*values, *operands)[0]),
        _body=lambda *values: tuple(body(*values, *operands)),
        loop_vars=tuple(carry),
    )
    return _at_least_1d(results)


def _scan(
    carry: Sequence[Var],
    sequences: Sequence[Var],
    operands: Sequence[Var],
    rows: Sequence[tuple[tuple[int, ...], torch.dtype]],
    step: Block,
) -> Any:
    """Emit a ``while_loop`` over the rows of sequences.

    Args:
        carry: First values of the loop variables.
        sequences: Tensors of one size along their first dimension.
        operands: Values that every iteration takes unchanged.
        rows: Shapes and dtypes of the rows that each step returns.
        step: Takes the carry, a row of each sequence and the operands; returns the next carry and a
            row of each stacked result.

    Returns:
        The last carry and the stacked results, a tuple.
    """
    count = sequences[0].shape[0]
    stacks = [mb.fill(shape=(count, *size), value=_zero(dtype)) for size, dtype in rows]
    return _at_least_1d(
        loop_over_rows(carry, sequences, stacks, lambda *values: step(*values, *operands))
    )


def _block_of(branch: ExportedProgram, context: Any, meta: dict[str, Any]) -> Block:
    """Return a function that emits a branch as a MIL block.

    Args:
        branch: As ``lowering.prepare`` leaves it.
        context: coremltools' transcription context of the call.
        meta: Metadata of the call's node, which the operations of the branch get.
    """
    from coremltools.converters.mil.frontend.torch.converter import TranscriptionContext
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRGraph
    from coremltools.converters.mil.frontend.torch.ops import convert_nodes

    graph: Any = InternalTorchIRGraph.from_exir(branch)
    for node in graph.nodes:
        node.meta = {**node.meta, **meta}

    def emit(*inputs: Var) -> list[Var]:
        inner: Any = TranscriptionContext(frontend=context.frontend)
        inner.torch_graph = graph
        for name, var in zip(branch.graph_signature.user_inputs, inputs, strict=True):
            inner.add(var, torch_name=str(name))
        for name, value in {**graph.params, **graph.buffers}.items():
            inner.add(mb.const(val=_array(value), name=name), torch_name=name)
        convert_nodes(inner, graph, early_exit=False)
        outputs: Any = branch.graph.output_node().args[0]
        return [_result(inner[node.name], node.meta["val"].dtype) for node in outputs]

    return emit


def _result(var: Var, dtype: torch.dtype) -> Var:
    """Return a new value with the torch dtype: a block cannot return an input or a constant."""
    kind = "fp32" if dtype.is_floating_point else "bool" if dtype is torch.bool else "int32"
    return mb.identity(x=var) if _kind(var) == kind else mb.cast(x=var, dtype=kind)


def _kind(var: Var) -> str:
    from coremltools.converters.mil.mil.types import builtin_to_string

    return builtin_to_string(var.dtype)


def _array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    array = value.detach().cpu().numpy()
    narrow = {np.dtype(np.int64): np.int32, np.dtype(np.float64): np.float32}
    return array.astype(narrow.get(array.dtype, array.dtype))


def _zero(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _scalar(condition: Var) -> Var:
    return mb.squeeze(x=condition) if condition.rank else condition


def _unpack_single(results: Sequence[Var]) -> Any:
    return tuple(results) if len(results) > 1 else results[0]


def _at_least_1d(values: Any) -> tuple[Var, ...]:
    """Return the results as a tuple, scalars as tensors of shape [1]."""
    results = values if isinstance(values, tuple | list) else (values,)
    return tuple(var if var.rank else mb.expand_dims(x=var, axes=[0]) for var in results)


def _translate_cond(context: Any, node: Any) -> None:
    text, condition, operands = node.inputs
    then, otherwise = _blocks(context, node, text)
    inputs = [context[name] for name in operands]
    context.add(_cond(context[condition], inputs, then, otherwise), torch_name=node.name)


def _translate_while_loop(context: Any, node: Any) -> None:
    text, *values = node.inputs
    goes_on, body = _blocks(context, node, text)
    carry, operands = ([context[name] for name in names] for names in values)
    context.add(_while_loop(carry, operands, goes_on, body), torch_name=node.name)


def _translate_scan(context: Any, node: Any) -> None:
    text, *values = node.inputs
    (step,) = _blocks(context, node, text)
    carry, sequences, operands = ([context[name] for name in names] for names in values)
    rows = results_of(text)[len(carry) :]
    context.add(_scan(carry, sequences, operands, rows, step), torch_name=node.name)


TRANSLATIONS: Mapping[str, Callable[[Any, Any], None]] = {
    "coreml_delegate::cond": _translate_cond,
    "coreml_delegate::while_loop": _translate_while_loop,
    "coreml_delegate::scan": _translate_scan,
}
"""Translations of these ops, by name; each takes coremltools' context and the node."""


def _blocks(context: Any, node: Any, text: str) -> list[Block]:
    return [_block_of(branch, context, dict(node.meta)) for branch in read_branches(text)]

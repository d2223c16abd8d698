"""Calls, branches, loops, tuples and composites."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from coreml_delegate.graph import DType, Value
from coreml_delegate.stablehlo.operations.elementwise import CHLO_UNARY
from coreml_delegate.stablehlo.source_op import Operand, Rule, SourceOp, Token

_COMPOSITES: Mapping[str, tuple[str, ...]] = {**dict.fromkeys(CHLO_UNARY, ()), "top_k": ("k",)}
"""Composites of CHLO that are operations of the builder, with the names of their attributes."""


def _call(source: SourceOp) -> list[Operand]:
    return source.context.call(source.attribute("callee"), source.operands)


def _composite(source: SourceOp) -> list[Operand]:
    """Read a composite as an operation that the builder has, else as its decomposition."""
    dialect, _, name = str(source.attribute("name")).partition(".")
    if dialect == "chlo" and name in _COMPOSITES:
        attributes = source.attribute("composite_attributes", {})
        return source.build(name, *source.values, *(attributes[n] for n in _COMPOSITES[name]))
    return source.context.call(source.attribute("decomposition"), source.operands)


def _while(source: SourceOp) -> list[Operand]:
    return source.build("while_", *source.regions, *source.values)


def _if(source: SourceOp) -> list[Operand]:
    return source.build("if_", source.value(0), *source.regions)


def _case(source: SourceOp) -> list[Operand]:
    return source.build("case", source.value(0), source.regions)


def _tuple(source: SourceOp) -> tuple[Operand, ...]:
    return tuple(source.operands)


def _get_tuple_element(source: SourceOp) -> Operand:
    operand = source.operands[0]
    if not isinstance(operand, tuple):
        raise source.refusal("its operand is no tuple")
    return operand[source.attribute("index")]


def _token(_: SourceOp) -> Token:
    return Token()


def _only_device(source: SourceOp) -> Value:
    return source.builder.constant(np.uint32(0), DType.UINT32)


def _unchanged(source: SourceOp) -> list[Operand]:
    return list(source.operands)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "func.call": _call,
        "sdy.propagation_barrier": _unchanged,
        "sdy.reshard": _unchanged,
        "sdy.sharding_constraint": _unchanged,
        "stablehlo.after_all": _token,
        "stablehlo.case": _case,
        "stablehlo.composite": _composite,
        "stablehlo.create_token": _token,
        "stablehlo.get_tuple_element": _get_tuple_element,
        "stablehlo.if": _if,
        "stablehlo.optimization_barrier": _unchanged,
        "stablehlo.partition_id": _only_device,
        "stablehlo.replica_id": _only_device,
        "stablehlo.tuple": _tuple,
        "stablehlo.while": _while,
    }
)

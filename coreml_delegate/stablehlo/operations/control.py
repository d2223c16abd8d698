"""Calls, branches, loops, tuples and composites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from coreml_delegate.graph import DType, Value
from coreml_delegate.stablehlo.operations.elementwise import CHLO_UNARY
from coreml_delegate.stablehlo.source_op import Operand, Rule, SourceOp, Token


def _call(source: SourceOp) -> list[Operand]:
    return source.context.call(source.attribute("callee"), source.operands)


def _composite(source: SourceOp) -> Any:
    name = str(source.attribute("name"))
    if name in _COMPOSITES:
        return _COMPOSITES[name](source, source.attribute("composite_attributes", {}))
    return source.context.call(source.attribute("decomposition"), source.operands)


def _while(source: SourceOp) -> list[Operand]:
    return list(source.builder.while_(_single(source.region(0)), source.region(1), *source.values))


def _single(function: Callable[..., Any]) -> Callable[..., Any]:
    def first(*arguments: Value) -> Any:
        (result,) = function(*arguments)
        return result

    return first


def _if(source: SourceOp) -> list[Operand]:
    return list(source.builder.if_(source.value(0), source.region(0), source.region(1)))


def _case(source: SourceOp) -> list[Operand]:
    branches = [source.region(n) for n in range(source.region_count)]
    return list(source.builder.case(source.value(0), branches))


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


def _direct(method: str) -> Callable[[SourceOp, Mapping[str, Any]], Operand]:
    def composite(source: SourceOp, _: Mapping[str, Any]) -> Operand:
        return getattr(source.builder, method)(*source.values)

    return composite


def _top_k(source: SourceOp, attributes: Mapping[str, Any]) -> list[Operand]:
    return list(source.builder.top_k(source.value(0), attributes["k"]))


_COMPOSITES: Mapping[str, Callable[[SourceOp, Mapping[str, Any]], Any]] = MappingProxyType(
    {**{f"chlo.{name}": _direct(name) for name in CHLO_UNARY}, "chlo.top_k": _top_k}
)
"""Composites that the builder has an operation for; the others are decomposed."""

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
        "stablehlo.partition_id": _only_device,
        "stablehlo.replica_id": _only_device,
        "stablehlo.tuple": _tuple,
        "stablehlo.while": _while,
    }
)

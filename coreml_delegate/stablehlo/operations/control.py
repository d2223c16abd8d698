"""Calls, branches, loops, tuples, composites and custom calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from coreml_delegate.graph import DType, Value
from coreml_delegate.stablehlo.operations.elementwise import CHLO_UNARY
from coreml_delegate.stablehlo.source_op import Operand, Rule, SourceOp, Token

_COMPOSITES: Mapping[str, tuple[str, ...]] = {**dict.fromkeys(CHLO_UNARY, ()), "top_k": ("k",)}
"""Composites of CHLO that are operations of the builder, with the names of their attributes."""


_UNCHANGED_TARGETS = frozenset(
    {
        *("AllocateBuffer", "LayoutConstraint", "MoveToDevice", "MoveToHost", "Sharding"),
        *("SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"),
        *("checkpoint_name", "name", "xla.sdy.FuncResultSharding"),
        *("xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"),
    }
)
"""Targets that place or name a tensor, and return it unchanged."""

_CALLS_PYTHON = "it calls Python while the model runs"
_REASONS = (
    (
        re.compile(r"lapack_|cusolver|hipsolver|Qr|Eigh|Cholesky|ProductOfElementary|Lu"),
        "Core ML has no decompositions or solvers of matrices",
    ),
    (re.compile(r"ducc_fft"), "Core ML has no complex numbers"),
    (re.compile(r"xla_(ffi_)?(python|partitioned_python)"), _CALLS_PYTHON),
    (re.compile(r"tpu_custom_call|triton|mosaic"), "it is a kernel for another device"),
)


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


def _custom_call(source: SourceOp) -> list[Operand] | None:
    target = str(source.attribute("call_target_name"))
    if target == "shape_assertion":
        return []
    if target in _UNCHANGED_TARGETS:
        return list(source.operands[: source.result_count])
    if target in _TARGETS:
        return _TARGETS[target](source)
    dialect, _, name = target.partition(".")
    if dialect == "mhlo" and name in CHLO_UNARY:
        return source.build(name, *source.values)
    reasons = [reason for pattern, reason in _REASONS if pattern.match(target)]
    reason = f"{reasons[0]}" if reasons else "what it computes is not known"
    calls = "Leave callbacks, as of jax.debug.print, out of what is compiled"
    raise source.refusal(f"target {target!r}: {reason}", calls if reason == _CALLS_PYTHON else None)


def _attributes(source: SourceOp) -> dict[str, Any]:
    for name in ("mhlo.attributes", "mhlo.backend_config", "backend_config"):
        attributes = source.attribute(name, None)
        if isinstance(attributes, dict):
            return attributes
    return {}


def _top_k(source: SourceOp) -> list[Operand]:
    attributes = _attributes(source)
    if not attributes.get("largest", True):
        raise source.refusal("it returns the smallest elements")
    return source.build("top_k", source.value(0), attributes["k"])


def _approximate_top_k(source: SourceOp) -> list[Operand]:
    """Sort, and take the first elements: an exact result of the approximate top k."""
    attributes = _attributes(source)
    values = source.values
    values = values[: len(values) // 2]
    (comparator,) = source.attribute("called_computations")
    axis, count = int(attributes["reduction_dim"]), int(attributes["top_k"])
    ordered = source.builder.sort(
        values, axis, lambda *pair: source.context.call(comparator, pair), is_stable=True
    )
    results: list[Operand] = []
    for value in ordered:
        limit = [count if n == axis else size for n, size in enumerate(value.shape)]
        results.append(source.builder.slice(value, [0] * value.rank, limit))
    return results


_TARGETS: Mapping[str, Callable[[SourceOp], list[Operand]]] = MappingProxyType(
    {"ApproxTopK": _approximate_top_k, "mhlo.topk": _top_k}
)

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
        "stablehlo.custom_call": _custom_call,
        "stablehlo.get_tuple_element": _get_tuple_element,
        "stablehlo.if": _if,
        "stablehlo.optimization_barrier": _unchanged,
        "stablehlo.partition_id": _only_device,
        "stablehlo.replica_id": _only_device,
        "stablehlo.tuple": _tuple,
        "stablehlo.while": _while,
    }
)

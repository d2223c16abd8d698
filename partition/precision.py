"""The calls that compute in fp32 where fp16 loses their numbers, chosen by measurement.

A program is lowered in fp16 and measured (``runtime.precision``); then it is lowered with the
chosen calls in fp32 and measured again. coremltools may fuse other operations around calls in fp32,
so a program that misses the target by some dB is chosen for anew, with a target higher by as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram

from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.partition.report import (
    DelegationReport,
    LossyCall,
    NodeReport,
    PrecisionReport,
)
from coreml_delegate.patches.torch import pytree
from coreml_delegate.runtime.precision import Operation, PrecisionMeasurement, measure_method

Lower: TypeAlias = Callable[[frozenset[str]], tuple[bytes, DelegationReport]]
"""Lowers a program to a ``.pte`` with one method, ``forward``, in fp16 but for the named calls."""

_ATTEMPTS = 3
_MARGIN_DB = 3.0


def choose_fp32_calls(
    lower: Lower, samples: Sequence[Sequence[Any]], min_sqnr_db: float
) -> PrecisionReport:
    """Return the calls that have to compute in fp32, and the accuracy with them.

    Args:
        lower: Lowers the program.
        samples: See ``measure_method``.
        min_sqnr_db: Ratio of signal to error that every output has to reach, in dB.

    Raises:
        CoreMLDelegateError: The program cannot be lowered, or see ``measure_method``.
    """
    plain, report = lower(frozenset())
    results: list[PrecisionReport] = []
    goal = min_sqnr_db
    for _ in range(_ATTEMPTS):
        measurement = measure_method(plain, samples, min_sqnr_db=goal)
        result = precision_report(measurement, report, target_db=min_sqnr_db)
        if not result.in_fp32:
            return result if not results else max(results, key=_after_db)
        buffer, _ = lower(result.in_fp32)
        after = measure_method(buffer, samples, min_sqnr_db=goal, search=False).before_db
        result = precision_report(measurement, report, target_db=min_sqnr_db, after_db=after)
        results.append(result)
        missing = min_sqnr_db - result.after_db
        if missing <= 0 or math.isinf(missing):
            break
        goal += missing + _MARGIN_DB
    return max(results, key=_after_db)


def _after_db(result: PrecisionReport) -> float:
    return result.after_db


def precision_report(
    measurement: PrecisionMeasurement,
    report: DelegationReport,
    *,
    target_db: float,
    after_db: Mapping[str, float] | None = None,
) -> PrecisionReport:
    """Return a measurement in terms of the calls of a program.

    Args:
        measurement: Of the lowered program.
        report: On the lowered program.
        target_db: Ratio of signal to error that every output has to reach, in dB.
        after_db: Ratio of each output with the islands, in dB, if that was lowered and measured.
    """
    by_handle: dict[int, list[NodeReport]] = {}
    for node in report.delegated:
        if node.debug_handle is not None:
            by_handle.setdefault(node.debug_handle, []).append(node)

    def call(operation: Operation) -> LossyCall:
        nodes = [node for handle in operation.handles for node in by_handle.get(handle, ())]
        return LossyCall(
            tuple(node.name for node in nodes),
            operation.op_type,
            nodes[-1].place if nodes else "",
            operation.fp16,
            operation.fp32,
            operation.sqnr_db,
            operation.without_db,
            operation.flops / measurement.flops if measurement.flops else 0.0,
        )

    after = measurement.after_db if after_db is None else after_db
    # The islands may have been searched for a higher target.
    is_minimal = all(island.without_db < target_db for island in measurement.islands)
    return PrecisionReport(
        target_db,
        tuple((name, db, after[name]) for name, db in measurement.before_db.items()),
        tuple(map(call, measurement.islands)),
        tuple(call(lossy) for lossy in measurement.lossy if lossy.sqnr_db < target_db),
        measurement.is_minimal and is_minimal,
    )


def samples_for(
    program: ExportedProgram, data: Collection[Collection[Any]] | None
) -> list[list[Any]]:
    """Return the inputs to measure a program with, flattened.

    Args:
        program: From ``torch.export``.
        data: The user's samples, each with the arguments of a call; None for the example inputs
            that the program was exported with.

    Raises:
        OptionError: There are no inputs.
        InputError: A sample has another number of inputs than the program.
    """
    samples = [program.example_inputs] if data is None else list(data)
    if not samples or samples[0] is None:
        raise OptionError(
            "precision auto measures a program on example inputs",
            got="a program without example inputs" if data is None else "an empty list",
            remedy="Pass precision_data, a list of the arguments of calls",
        )
    leaves = [pytree.tree_leaves(sample) for sample in samples]
    count = len(program.graph_signature.user_inputs)
    for sample in leaves:
        if len(sample) != count:
            raise InputError(
                "a sample of precision_data has the wrong number of inputs",
                got=str(len(sample)),
                expected=str(count),
                remedy="Pass a list of samples, each a tuple of the arguments of a call",
            )
    return [[_copied(leaf) for leaf in sample] for sample in leaves]


def interface_of(program: ExportedProgram) -> tuple[str, ...]:
    """Return the names and shapes of a program's inputs, which tell methods apart."""
    inputs = set(program.graph_signature.user_inputs)
    return tuple(
        f"{node.name} {_described(node.meta.get('val'))}"
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in inputs
    )


def _described(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

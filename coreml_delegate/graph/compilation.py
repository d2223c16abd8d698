"""From a complete graph to an executable; with precision ``auto``, by measurement.

A graph is converted in fp16 and measured on example inputs, then converted with the nodes that lose
their numbers in fp32, and measured again; see ``runtime.precision``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.graph.executable import Executable, Settings
from coreml_delegate.graph.mil_program import Graph, convert_graph
from coreml_delegate.options.compile_specs import KeepFp32, Precision
from coreml_delegate.options.declaration import checked
from coreml_delegate.options.lowering_options import PartitionerKeywords
from coreml_delegate.runtime.engines.selection import REFERENCE
from coreml_delegate.runtime.precision import LoweredProgram, choose_fp32_calls

Samples = Collection[Sequence[Any]]
"""Inputs of calls, each a sequence of arrays."""


def compile_graph(
    graph: Graph, settings: Settings, data: Samples | None, min_sqnr_db: float
) -> Executable:
    """Compile a graph.

    Args:
        graph: The graph.
        settings: How it is compiled and run.
        data: The inputs to measure with, for precision ``auto`` only.
        min_sqnr_db: See ``PartitionerKeywords``.

    Raises:
        InputError: A sample does not fit the graph.
        OptionError: There are no inputs to measure with, or they are not needed.
        CoreMLDelegateError: See ``Builder.compile``.
    """
    samples = checked(PartitionerKeywords, "precision_data", data)
    target_db = checked(PartitionerKeywords, "min_sqnr_db", min_sqnr_db)
    precision = settings.compile_options.precision
    if precision is Precision.AUTO:
        return _measured(graph, settings, _samples(graph, samples), target_db)
    if samples is not None:
        raise OptionError(
            "precision_data is for precision auto",
            got=f"precision {precision.value}",
            remedy="Pass precision='auto', or measure the result by measure_precision",
        )
    return _executable(graph, settings)


def _samples(graph: Graph, samples: Samples | None) -> Samples:
    """Return the inputs to measure with; a graph without inputs needs none."""
    if not samples and graph.inputs:
        raise OptionError(
            "precision auto measures a program on example inputs",
            got="no example inputs" if samples is None else "an empty list",
            expected="arrays for " + ", ".join(graph.inputs),
            remedy="Pass precision_data, a list of the arrays of calls",
        )
    return samples or [()]


def _measured(graph: Graph, settings: Settings, samples: Samples, min_sqnr_db: float) -> Executable:
    """Compile a graph in fp16, with the nodes in fp32 that need it."""
    options = replace(settings.compile_options, precision=Precision.FLOAT16)
    executables: dict[frozenset[str], Executable] = {}
    numbers: dict[str, int] = {}

    def lower(in_fp32: frozenset[str]) -> LoweredProgram:
        if in_fp32 not in executables:
            mixed = replace(options, keep_fp32=KeepFp32(nodes=tuple(sorted(in_fp32))))
            on_reference = Settings(REFERENCE.name, settings.options, settings.opset, mixed)
            chosen = frozenset(numbers[name] for name in in_fp32)
            executables[in_fp32] = _executable(graph, on_reference, chosen, is_measured=True)
        lowered = executables[in_fp32].to_measure(samples)
        numbers.update((call.name, number) for number, (call,) in lowered.calls.items())
        return lowered

    report = choose_fp32_calls(lower, min_sqnr_db)
    executable = executables[report.in_fp32].on(settings.engine)
    executable.precision = report
    return executable


def _executable(
    graph: Graph,
    settings: Settings,
    in_fp32: frozenset[int] = frozenset(),
    *,
    is_measured: bool = False,
) -> Executable:
    options, opset = settings.compile_options, settings.opset
    return Executable(
        convert_graph(graph, options, opset, in_fp32, records_constants=is_measured),
        settings,
        {name: value.type for name, value in graph.inputs.items()},
        {name: value.type for name, value in graph.outputs.items()},
        {name: value.type for name, (value, _) in graph.states.items()},
        graph.dimensions,
    )

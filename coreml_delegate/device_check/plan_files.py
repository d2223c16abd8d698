"""Compute plans as files: this package's JSON, and the performance report of Xcode.

Layout of a plan, version 1 (November 2026), an object with these keys::

    version        1
    operations     [operation, ...], in the order of functions and execution
    compute_unit   "all", "cpu_and_ne", "cpu_and_gpu", "cpu_only" or null; default null
    device         text; default ""
    system         text; default ""

An operation is an object with these keys::

    op             MIL op type; an opset before it (``ios17.conv``) is dropped
    runs_on        the preferred processor: "CPU", "GPU", "neural engine" or null
    supported      [processor, ...]; default []
    output         name of the first output; default "": the plan has no names
    function       name of the function; default "main"
    cost           fraction of the model's work, from 0 to 1, or null; default null

Constants and their decompression are skipped, and so are other keys.

Xcode exports a performance report as a folder ``NAME.mlperf`` with a file ``report.json``. Apple
does not document the file; these keys are those of two published reports, of ``jsonVersion`` 1 and
``deviceResultVersion`` 4::

    computeUnit    raw value of MLComputeUnits
    deviceInfo     {"modelName": str, "osNameAndVersionWithoutBuildNumber": str, ...}
    deviceResults  {"modelStructure": {"program": {"_0": {"functions": {name: {"block": block}}}}}}

A block is ``{"operations": [operation, ...], ...}``, and an operation is
``{"operatorName": str, "outputs": [{"name": str}], "blocks": [block], "cost": {"weight": float},
"deviceUsage": {"preferred": device, "supported": [device, ...]}}``; constants have neither cost nor
usage. A device is ``{"deviceType": {"cpu": {}}}``, or ``gpu`` or ``neuralEngine``. The report also
has the serial number and the owner's name of the device, which are not read.

Source: the reports in troobit/medata (iPhone 16 Pro, iOS 26.5) and D0NMEGA/Cortex (iPad Air M2,
iPadOS 18.7) on GitHub; both have no operation with blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coreml_delegate.device_check.compute_plan import (
    ComputePlan,
    PlannedOp,
    Processor,
    type_of_operator,
)
from coreml_delegate.device_check.functions import is_stored_type
from coreml_delegate.errors import OptionError
from coreml_delegate.formats.mlpackage import MAIN
from coreml_delegate.targets import ComputeUnit

VERSION: Final = 1

REPORT: Final = "report.json"
"""The file in the folder that Xcode exports."""

_RESULTS = "deviceResults"
_XCODE_PROCESSORS: Final = {
    "cpu": Processor.CPU,
    "gpu": Processor.GPU,
    "neuralEngine": Processor.NEURAL_ENGINE,
}
_XCODE_UNITS: Final = {
    0: ComputeUnit.CPU_ONLY,
    1: ComputeUnit.CPU_AND_GPU,
    2: ComputeUnit.ALL,
    3: ComputeUnit.CPU_AND_NE,
}
"""Compute units by raw value of ``MLComputeUnits``."""


def read_plan(path: Path) -> ComputePlan:
    """Read a compute plan.

    Args:
        path: A plan in this package's JSON, or the report of Xcode: the folder or its
            ``report.json``.

    Raises:
        OptionError: The file cannot be read, or is neither.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        document: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(
            f"cannot read {file}",
            got=str(error),
            expected="a compute plan as JSON, or the folder that Xcode exports",
        ) from error
    read = _plan_of_xcode if isinstance(document, dict) and _RESULTS in document else _plan
    try:
        plan = read(document)
    except OptionError as error:
        raise error.prefixed(f"{file}: ") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise OptionError(
            f"{file} is a malformed compute plan",
            got=f"{type(error).__name__}: {error}",
            remedy="Write the plan anew, as docs/evidence.md says",
        ) from error
    if not plan.operations:
        raise OptionError(
            f"{file} is a compute plan without operations",
            remedy="Write the plan of a model that computes something",
        )
    return plan


def plan_document(plan: ComputePlan) -> dict[str, Any]:
    """Return the JSON object of a plan; ``read_plan`` reads it."""
    return {
        "version": VERSION,
        "compute_unit": None if plan.compute_unit is None else plan.compute_unit.value,
        "device": plan.device,
        "system": plan.system,
        "operations": [
            {
                "function": op.function,
                "op": op.op_type,
                "output": op.output,
                "runs_on": None if op.preferred is None else op.preferred.value,
                "supported": [processor.value for processor in op.supported],
                "cost": op.cost,
            }
            for op in plan.operations
        ],
    }


def _plan(document: Any) -> ComputePlan:
    if not isinstance(document, dict) or "operations" not in document:
        raise OptionError(
            "not a compute plan", expected="an object with operations, or Xcode's report"
        )
    version = document.get("version")
    if version != VERSION:
        raise OptionError(
            "compute plan of another version", got=repr(version), expected=str(VERSION)
        )
    unit = document.get("compute_unit")
    return ComputePlan(
        tuple(
            _operation(entry)
            for entry in document["operations"]
            if not is_stored_type(type_of_operator(_text(entry["op"])))
        ),
        None if unit is None else ComputeUnit(unit),
        _text(document.get("device", "")),
        _text(document.get("system", "")),
    )


def _operation(entry: Mapping[str, Any]) -> PlannedOp:
    runs_on = entry["runs_on"]
    return PlannedOp(
        _text(entry.get("function", MAIN)),
        type_of_operator(_text(entry["op"])),
        _text(entry.get("output", "")),
        None if runs_on is None else Processor(runs_on),
        tuple(map(Processor, entry.get("supported", ()))),
        _cost(entry.get("cost")),
    )


def _plan_of_xcode(document: Mapping[str, Any]) -> ComputePlan:
    structure = document[_RESULTS]["modelStructure"]
    if "program" not in structure:
        raise OptionError(
            "the report is not of an ML Program", got=", ".join(structure), expected="program"
        )
    functions = structure["program"]["_0"]["functions"]
    device = document.get("deviceInfo", {})
    unit = document.get("computeUnit")
    return ComputePlan(
        tuple(
            op
            for name, function in functions.items()
            for op in _operations_of_xcode(_text(name), function["block"])
        ),
        None if unit is None else _XCODE_UNITS[unit],
        _text(device.get("modelName", "")),
        _text(device.get("osNameAndVersionWithoutBuildNumber", "")),
    )


def _operations_of_xcode(function: str, block: Mapping[str, Any]) -> Iterator[PlannedOp]:
    for op in block["operations"]:
        op_type = type_of_operator(_text(op["operatorName"]))
        if not is_stored_type(op_type):
            usage, cost, outputs = op.get("deviceUsage"), op.get("cost"), op.get("outputs")
            yield PlannedOp(
                function,
                op_type,
                _text(outputs[0]["name"]) if outputs else "",
                None if usage is None else _processor_of_xcode(usage["preferred"]),
                () if usage is None else tuple(map(_processor_of_xcode, usage["supported"])),
                None if cost is None else _cost(cost["weight"]),
            )
        for nested in op.get("blocks", ()):
            yield from _operations_of_xcode(function, nested)


def _processor_of_xcode(device: Mapping[str, Any]) -> Processor:
    (kind,) = device["deviceType"]
    return _XCODE_PROCESSORS[kind]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _cost(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no cost")
    return float(value)

"""Core ML's compute plans on any machine: coremltools' own classes around a stand-in of its proxy.

The native module of coremltools, which asks Core ML, exists only on macOS. A proxy that is as
strict replaces it: it takes a compiled model, knows only its own operations, and gives devices
of coremltools' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coreml_delegate.device_check import compute_plan as ours
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.mil.program import Block
from coreml_delegate.runtime.mil.reader import read_mlpackage

CPU, GPU, NE = "cpu", "gpu", "ne"


class _Device:
    """A proxy of a device."""


class _Plan:
    """A proxy of a plan."""

    def __init__(self, structure: Any, units: Mapping[str, str | None]) -> None:
        self.model_structure = structure
        self._units = units
        self._known = set(map(id, _operations(structure)))

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        from coremltools.models.compute_plan import MLComputePlanDeviceUsage

        unit = self._unit(operation)
        if unit is None:
            return None
        devices = {
            CPU: coremltools().models.compute_device.MLCPUComputeDevice(_Device()),
            GPU: coremltools().models.compute_device.MLGPUComputeDevice(_Device()),
            NE: coremltools().models.compute_device.MLNeuralEngineComputeDevice(_Device()),
        }
        supported = [devices[CPU]] if unit == CPU else [devices[CPU], devices[unit]]
        return MLComputePlanDeviceUsage(devices[unit], supported)

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
        from coremltools.models.compute_plan import MLComputePlanCost

        return None if self._unit(operation) is None else MLComputePlanCost(0.25)

    def _unit(self, operation: Any) -> str | None:
        if id(operation) not in self._known:
            raise ValueError("not an operation of this plan")
        return self._units.get(operation.operator_name.rpartition(".")[2], NE)


def _operations(structure: Any) -> list[Any]:
    def of(block: Any) -> list[Any]:
        nested = [
            operation for op in block.operations for inner in op.blocks for operation in of(inner)
        ]
        return [*block.operations, *nested]

    return [op for f in structure.program.functions.values() for op in of(f.block)]


def structure_of(package: Path) -> Any:
    """The structure that Core ML reads from the compiled form of a package."""
    from coremltools.models import compute_plan as theirs

    def block(ours: Block) -> Any:
        operations = [
            theirs.MLModelStructureProgramOperation(
                {},
                op.type if op.type == "const" else f"ios17.{op.type}",
                [
                    theirs.MLModelStructureProgramNamedValueType(
                        output.name, theirs.MLModelStructureProgramValueType()
                    )
                    for output in op.outputs
                ],
                [block(nested) for nested in op.blocks],
                None,
            )
            for op in ours.ops
        ]
        return theirs.MLModelStructureProgramBlock([], operations, list(ours.outputs))

    functions = {
        name: theirs.MLModelStructureProgramFunction([], block(function.block))
        for name, function in read_mlpackage(package).functions.items()
    }
    return theirs.MLModelStructure(None, theirs.MLModelStructureProgram(functions), None)


class Mac:
    """A Mac as far as compute plans go.

    Args:
        monkeypatch: Pytest's.
        folder: Folder of the compiled models.
        units: Processor by op type; the neural engine for other types, and None for ops that
            Core ML says nothing about.

    Attributes:
        asked: Names of the compute units that plans were asked for.
    """

    def __init__(self, monkeypatch: Any, folder: Path, units: Mapping[str, str | None]) -> None:
        from coremltools.models import compute_device, compute_plan

        self._folder = folder
        self._units = units
        self._packages: dict[str, Any] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(ours, "require_macos", lambda: None)
        monkeypatch.setattr(compute_plan, "_MLModelProxy", self)
        monkeypatch.setattr(compute_plan, "_MLComputePlanProxy", _Plan)
        for name in ("_MLCPU", "_MLGPU", "_MLNeuralEngine"):
            monkeypatch.setattr(compute_device, f"{name}ComputeDeviceProxy", _Device)
        monkeypatch.setattr(coremltools().models.utils, "compile_model", self._compile)

    def _compile(self, model: str) -> str:
        package = Path(model)
        if package.suffix != ".mlpackage" or not package.is_dir():
            raise ValueError(f"{model} is no mlpackage")
        compiled = self._folder / f"{len(self._packages)}.mlmodelc"
        compiled.mkdir()
        self._packages[str(compiled)] = structure_of(package)
        return str(compiled)

    def get_compute_plan(self, path: str, units: str) -> Any:
        """Return the plan of a compiled model; as ``_MLModelProxy`` does."""
        from coremltools.models.compute_plan import MLComputePlan

        if path not in self._packages or not Path(path).is_dir():
            raise SystemError(f"Core ML ends the process: {path} is no compiled model")
        self.asked.append(units)
        return MLComputePlan(_Plan(self._packages[path], self._units))

"""Record runs of a program on one machine; repeat and compare them on another."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.exported.source_model import copy_inputs
from coreml_delegate.formats.mlpackage import map_package
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.accuracy import Accuracy
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.loading import Execution, LoadedProgram, as_output, is_package
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.pipeline import read_pipeline
from coreml_delegate.runtime.recording import (
    Call,
    RecordedFile,
    Recording,
    Run,
    Value,
    files_of,
)
from coreml_delegate.scripts.delegates import open_pte, partitions_of
from coreml_delegate.scripts.inputs.input_files import random_inputs, read_inputs
from coreml_delegate.scripts.inputs.random_tensors import generator
from coreml_delegate.scripts.program_arguments import load
from coreml_delegate.scripts.stablehlo_files import is_stablehlo
from coreml_delegate.targets import ComputeUnit

_DISTRIBUTIONS: Final = (
    "coreml-delegate",
    "coremltools",
    "executorch",
    "numpy",
    "openvino",
    "torch",
)
_ONLY_METHOD: Final = "main"
_NUMBERED: Final = re.compile(r"(output|mutated_input)_\d+")
_UNITS: Final = "compute_units"


@dataclass(frozen=True, slots=True)
class Loading:
    """How the methods of a program are loaded; see ``runtime.load``.

    Attributes:
        engine: An engine, ``auto``, or None for one that computes in the program's types.
    """

    path: Path
    engine: str | None
    host: str
    options: EngineOptions
    data: tuple[Path, ...] = ()

    def load(self, method: str | None) -> LoadedProgram:
        """Load one method, in its first state."""
        return load(
            self.path,
            method=method,
            host=self.host,
            engine=self.engine,
            options=self.options,
            data=self.data or None,
        )

    def methods(self) -> dict[str, str | None]:
        """Return the argument of ``load`` for each method of the program, by the method's name."""
        if is_stablehlo(self.path):
            return {_ONLY_METHOD: None}
        if is_package(self.path):
            files = map_package(self.path)
            if read_pipeline(files) is not None:
                return {_ONLY_METHOD: None}
            return {name: name for name in read_files(files).functions}
        return {name: name for name in open_pte(self.path, self.data).method_names}

    def compute_units(self) -> tuple[str, ...]:
        """Return the compute units for Core ML: of the options, or else of the export."""
        if self.options.compute_unit is not None:
            return (ComputeUnit(self.options.compute_unit).value,)
        if is_stablehlo(self.path) or is_package(self.path):
            return (ComputeUnit.ALL.value,)
        program = open_pte(self.path, self.data)
        infos = [p.info for method in program.methods for p in partitions_of(program, method)]
        default = ComputeUnit.ALL.value.encode()
        units = {dict(info.compile_specs).get(_UNITS, default) for info in infos}
        return tuple(sorted(unit.decode(errors="replace") for unit in units))


def record(
    loading: Loading,
    *,
    method: str | None,
    inputs: Sequence[Path],
    samples: int,
    seed: int,
    with_program: bool,
) -> tuple[Recording, Execution]:
    """Run a program; record its inputs, outputs and states.

    Args:
        loading: How it is loaded.
        method: The method to run, or None for each, one after the other.
        inputs: Files with the inputs of one call; without them they are random.
        samples: Calls of each method with random inputs.
        seed: Seed of the random inputs.
        with_program: Whether the recording gets the files of the program.

    Raises:
        OptionError: There are ``inputs``, but several methods.
        CoreMLDelegateError: See ``runtime.load`` and its result.
    """
    methods = {method: method} if method is not None else loading.methods()
    if inputs and len(methods) > 1:
        raise OptionError(
            "the inputs fit only one method",
            got=", ".join(methods),
            remedy="Name it with --method, or record random inputs",
        )
    random = generator(seed)
    calls: list[Call] = []
    states: dict[str, dict[str, torch.Tensor]] = {}
    executions: list[Execution] = []
    hosts: set[str] = set()
    for name, argument in methods.items():
        program = loading.load(argument)
        for _ in range(1 if inputs else samples):
            values = (
                read_inputs(inputs, program.inputs)
                if inputs
                else random_inputs(program.inputs, random)
            )
            outputs = program.run(copy_inputs(values))
            calls.append(Call(name, tuple(values), dict(outputs)))
        states[name] = {key: torch.from_numpy(array) for key, array in program.states().items()}
        executions.append(program.execution)
        hosts.add(program.host_name)
    execution = Execution.of(executions)
    recording = Recording(
        program=loading.path.name,
        files=tuple(
            RecordedFile.of(path, content, stored=with_program)
            for path, content in files_of(loading.path, loading.data)
        ),
        run=Run(execution.engines, ", ".join(sorted(hosts - {""})), loading.compute_units()),
        machine={
            "system": platform.system(),
            "release": platform.release(),
            "architecture": platform.machine(),
            "processor": machine.processor(),
        },
        versions=_versions(),
        calls=tuple(calls),
        states={name: tensors for name, tensors in states.items() if tensors},
    )
    return recording, execution


def replay(recording: Recording, loading: Loading) -> tuple[dict[str, Accuracy], Execution]:
    """Repeat the calls of a recording, and compare outputs and states.

    Returns:
        Accuracy over all calls, by output or state, and the engines that ran the program.

    Raises:
        ProgramError: The recording is of another program, or has other outputs or states.
        CoreMLDelegateError: See ``runtime.load`` and its result.
    """
    _require_same_program(recording, loading)
    methods = loading.methods()
    results: dict[str, Accuracy] = {}
    executions: list[Execution] = []
    for method in recording.methods:
        if method not in methods:
            raise ProgramError(
                "the recording calls a method that the program does not have",
                got=repr(method),
                expected=", ".join(methods),
            )
        program = loading.load(methods[method])
        prefix = f"{method} " if len(recording.methods) > 1 else ""
        for call in recording.calls:
            if call.method == method:
                actual = program.run(copy_inputs(call.inputs))
                _compare(results, prefix, _renamed(call.outputs, actual), actual, "outputs")
        states = {key: torch.from_numpy(array) for key, array in program.states().items()}
        if expected := recording.states.get(method, {}):
            _compare(results, f"{prefix}state ", expected, states, "states")
        executions.append(program.execution)
    return results, Execution.of(executions)


def _renamed(recorded: Mapping[str, Value], actual: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return recorded outputs by the program's names; earlier releases numbered them."""
    if len(recorded) != len(actual) or not all(map(_NUMBERED.fullmatch, recorded)):
        return recorded
    return dict(zip(actual, recorded.values(), strict=True))


def _compare(
    results: dict[str, Accuracy],
    prefix: str,
    expected: Mapping[str, Value],
    actual: Mapping[str, Value],
    what: str,
) -> None:
    if expected.keys() != actual.keys():
        raise ProgramError(
            f"the recording has other {what} than the program",
            got=", ".join(expected) or "none",
            expected=", ".join(actual) or "none",
        )
    for name, want in expected.items():
        accuracy = results.setdefault(prefix + name, Accuracy())
        accuracy.add(as_output(want), as_output(actual[name]))


def _require_same_program(recording: Recording, loading: Loading) -> None:
    paths = {
        RecordedFile.of(path, content, stored=False).sha256: path
        for path, content in files_of(loading.path, loading.data)
    }
    if paths.keys() != {file.sha256 for file in recording.files}:
        raise ProgramError(
            "the recording is of another program",
            got=", ".join(_file_text(path, digest) for digest, path in paths.items()),
            expected=", ".join(_file_text(file.path, file.sha256) for file in recording.files),
            remedy="Pass exactly the recorded files, also for --data",
        )


def _file_text(path: str, digest: str) -> str:
    return f"{path} with SHA-256 {digest[:12]}..."


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {**versions, "macos": platform.mac_ver()[0] or None}


def describe(recording: Recording) -> dict[str, Any]:
    """Summarize the recorded run as plain data."""
    macos = recording.versions.get("macos")
    return {
        "program": recording.program,
        "methods": list(recording.methods),
        "calls": len(recording.calls),
        "engines": {name: list(types) for name, types in recording.run.engines.items()},
        "host": recording.run.host,
        "compute_units": list(recording.run.compute_units),
        "system": f"macOS {macos}" if macos else recording.machine.get("system"),
        "processor": recording.machine.get("processor"),
        "versions": dict(recording.versions),
    }

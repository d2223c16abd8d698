"""A ``.pte`` or an ``.mlpackage`` whose Core ML models are looked into while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from coreml_delegate import runtime
from coreml_delegate.errors import ProgramError
from coreml_delegate.runtime import hosts
from coreml_delegate.runtime.delegate import CoreMLDelegate, delegate_loader
from coreml_delegate.runtime.diagnosis import Diagnosis
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID, DelegatePayload
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.scripts.delegates import partition_names
from coreml_delegate.scripts.loaded import (
    Port,
    default_method,
    feature_port,
    is_package,
    program_ports,
)

_ENGINE = "reference"


class Watched(Protocol):
    """A program ready to be traced."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Its inputs, in order."""
        ...

    def diagnose(self, inputs: Sequence[Any]) -> list[tuple[str, Diagnosis]]:
        """Run once; what was found in each Core ML model, by its name, in order of execution."""
        ...


def load_watched(path: Path, *, method: str | None, min_sqnr_db: float) -> Watched:
    """Load a program to be traced.

    Args:
        path: ``.pte`` file or ``.mlpackage`` folder.
        method: Method, or function of the package; None for ``forward``, the only method, or the
            default function.
        min_sqnr_db: A value below it, in dB, is bad.

    Raises:
        CoreMLDelegateError: See ``runtime.load_program`` and ``runtime.load_mlpackage``.
    """
    if is_package(path):
        model = runtime.load_mlpackage(path, function_name=method, engine=_ENGINE)
        return _Package(path.stem, model, min_sqnr_db)
    return _Program(path, method, min_sqnr_db)


class _Package:
    def __init__(self, name: str, model: runtime.Model, min_sqnr_db: float) -> None:
        self._name = name
        self._model = model
        self._min_sqnr_db = min_sqnr_db
        self.inputs = tuple(feature_port(feature) for feature in model.function.inputs)

    def diagnose(self, inputs: Sequence[Any]) -> list[tuple[str, Diagnosis]]:
        arrays = {port.name: value.numpy() for port, value in zip(self.inputs, inputs, strict=True)}
        diagnosis = self._model.diagnose(
            arrays, self._model.make_state(), min_sqnr_db=self._min_sqnr_db
        )
        return [(self._name, diagnosis)]


class _Program:
    def __init__(self, path: Path, method: str | None, min_sqnr_db: float) -> None:
        self._found: list[tuple[str, Diagnosis]] = []
        self._min_sqnr_db = min_sqnr_db
        self._load_delegate = delegate_loader(_ENGINE)
        opened = PteProgram.open(path)
        self._method = method or default_method(opened.method_names)
        # Hosts load the delegates of a method in the order of the file.
        names = {each.name: partition_names(each) for each in opened.methods}
        self._names = {each: iter(found.values()) for each, found in names.items()}
        if not partition_names(opened.method(self._method)):
            raise ProgramError(
                f"method {self._method!r} has no {COREML_BACKEND_ID} delegate", got=path.name
            )
        self._program = hosts.load(path, self._load)
        self.inputs = program_ports(self._program, self._method)
        self._program.load_method(self._method)

    def diagnose(self, inputs: Sequence[Any]) -> list[tuple[str, Diagnosis]]:
        self._found.clear()
        self._program.run(self._method, inputs)
        return list(self._found)

    def _load(self, payload: DelegatePayload) -> _WatchedDelegate:
        name = next(self._names[payload.method_name])
        loaded = self._load_delegate(payload)
        if not isinstance(loaded, CoreMLDelegate):
            raise ProgramError("the delegate cannot be traced", got=type(loaded).__name__)
        return _WatchedDelegate(name, loaded, self._min_sqnr_db, self._found)


class _WatchedDelegate:
    """A delegate that is diagnosed on every call, before it runs."""

    def __init__(
        self,
        name: str,
        delegate: CoreMLDelegate,
        min_sqnr_db: float,
        found: list[tuple[str, Diagnosis]],
    ) -> None:
        self._name = name
        self._delegate = delegate
        self._min_sqnr_db = min_sqnr_db
        self._found = found
        self.input_count = delegate.input_count

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        diagnosis = self._delegate.diagnose(inputs, min_sqnr_db=self._min_sqnr_db)
        self._found.append((self._name, diagnosis))
        return self._delegate(inputs)

"""Stand-ins for Core ML on a machine without it.

``strict`` stands in for ``libcoremlpython``, the library by which coremltools calls Core ML, and
refuses all that the library or Core ML refuses, and some arguments that Core ML accepts but an
engine must not rely on. It computes by the reference engine. ``executing`` is the patch of this
package, which accepts every argument that it can convert.

The strict stand-in was written from ``CoreMLPython.mm``, ``CoreMLPythonArray.mm`` and
``CoreMLPythonUtils.mm`` of coremltools as published, and Core ML's documentation. Neither was
compared with a Mac.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coreml_delegate import runtime
from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.runtime import Model, machine
from coreml_delegate.runtime.mil.program import Feature
from coreml_delegate.runtime.mil.reader import read_mlpackage

with quiet_import():
    import coremltools.models.model as client

SEQUOIA = (15, 0)
"""The first macOS with states and models of several functions."""

_COMPUTE_UNITS = ("ALL", "CPU_AND_GPU", "CPU_AND_NE", "CPU_ONLY")
_NOT_CONVERTIBLE = "value type not convertible"
# The arrays that Core ML has features of. It also converts: doubles are taken for any of them, and
# int32 for fp32. The engine must pass what is declared.
_DECLARED = {"fp16": "float32", "fp32": "float32", "fp64": "float64", "int32": "int32"}


@dataclass
class Loaded:
    """The arguments that models were loaded with: one entry for each proxy."""

    paths: list[Path] = field(default_factory=list)
    compute_units: list[str] = field(default_factory=list)
    function_names: list[str] = field(default_factory=list)


class State:
    """``_State``: the buffers of one ``MLState``, fp16."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.held = model.make_state()

    def read_state(self, name: str) -> np.ndarray:
        content = {} if self.held is None else self.held.snapshot()
        if name not in content:
            raise RuntimeError(f"No state named {name}.")
        return content[name].astype(np.float32)  # the library gives no fp16

    def write_state(self, name: str, value: Any) -> None:
        array = _as_array(value)
        present = self.read_state(name)
        if array.shape != present.shape:
            raise RuntimeError(f"Cannot transfer {array.shape} to {present.shape}.")
        self.held.write(name, array)


class Proxy:
    """``_MLModelProxy``, strict."""

    macos = SEQUOIA
    newest = 9
    loaded = Loaded()

    def __init__(
        self,
        path: str,
        compute_units: str,
        function_name: str,
        optimization_hints: dict[str, str],
        asset: object = None,
    ) -> None:
        texts = (path, compute_units, function_name)
        if not all(isinstance(text, str) for text in texts) or type(optimization_hints) is not dict:
            raise TypeError("__init__(): incompatible constructor arguments.")
        assert asset is None
        assert compute_units in _COMPUTE_UNITS
        if not path.endswith(".mlpackage") or not (Path(path) / "Manifest.json").is_file():
            raise RuntimeError('Error compiling model: "Failed to open file".')
        if function_name and self.macos < SEQUOIA:
            raise RuntimeError("The 'functionName' property can only be set on macOS >= 15.0")
        try:
            program = read_mlpackage(path)
        except CoreMLDelegateError as error:
            raise RuntimeError(f'Error compiling model: "{error}".') from error
        if function_name and function_name not in program.functions:
            raise RuntimeError(f"{{ NSLocalizedDescription = No function {function_name}; }}")
        self._model = Model(program, function_name=function_name or None, engine="reference")
        self._duration: int | None = None
        self.loaded.paths.append(Path(path))
        self.loaded.compute_units.append(compute_units)
        self.loaded.function_names.append(function_name)

    @classmethod
    def maximum_supported_specification_version(cls) -> int:
        return cls.newest

    def newState(self) -> State:
        if self.macos < SEQUOIA:
            raise RuntimeError("Stateful model is only available on macOS >= 15.0")
        return State(self._model)

    def predict(self, data: dict[str, Any], state: State | None) -> dict[str, np.ndarray]:
        if type(data) is not dict or not isinstance(state, State | None):
            raise TypeError("predict(): incompatible function arguments.")
        arrays = {name: _as_array(value) for name, value in data.items()}
        for feature in self._model.function.inputs:
            if feature.name not in arrays:
                raise RuntimeError(f"Feature {feature.name} is required but not specified.")
            _check(feature, arrays[feature.name])
        try:
            self._model.check_shapes(arrays)
        except CoreMLDelegateError as error:
            raise RuntimeError(f"MultiArray shape does not match: {error}") from error
        if (state.model if state else None) is not (
            self._model if self._model.function.states else None
        ):
            raise RuntimeError("The state is not one of this model.")
        results = self._model.predict(arrays, state.held if state else None)
        self._duration = 1
        # In no order that a caller might count on.
        return {name: _as_declared(results[name]) for name in sorted(results, reverse=True)}

    def batchPredict(self, data: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
        return [self.predict(sample, None) for sample in data]

    def get_last_predict_duration_in_nano_seconds(self) -> int | None:
        return self._duration


def _as_array(value: Any) -> np.ndarray:
    """Return the array that the library makes of a value, in the same memory."""
    refused = (
        not isinstance(value, np.ndarray)
        or (value.dtype.kind, value.dtype.itemsize) not in {("i", 4), ("f", 4), ("f", 8)}
        or value.ndim == 0
        or not value.flags.writeable
    )
    if refused:
        raise RuntimeError(_NOT_CONVERTIBLE)
    if value.strides != np.empty(value.shape, value.dtype).strides:
        raise RuntimeError("Strides are passed on as they are, for what it is worth.")
    return value


def _check(feature: Feature, array: np.ndarray) -> None:
    if feature.color_space is not None:
        raise RuntimeError(f"Feature {feature.name} is an image.")
    if str(array.dtype) != _DECLARED[feature.type.dtype.label]:
        raise RuntimeError(f"Feature {feature.name} is of another type than {array.dtype}.")
    fixed = feature.type.shape
    shape = None if feature.shapes or feature.bounds or fixed is None else fixed or (1,)
    if not array.size or (shape is not None and array.shape != shape):
        raise RuntimeError(f"MultiArray shape {array.shape} does not match {shape}.")


def _as_declared(array: np.ndarray) -> np.ndarray:
    is_half = array.dtype == np.float16
    return (array.astype(np.float32) if is_half else array).reshape(array.shape or (1,))


@contextmanager
def strict(macos: tuple[int, int] = SEQUOIA, newest: int = 9) -> Generator[Loaded]:
    """Let this machine look like a Mac, with the strict stand-in.

    Args:
        macos: The version of macOS.
        newest: The newest specification version that Core ML reads.

    Yields:
        The arguments that models are loaded with.
    """
    loaded = Loaded()
    members = {"macos": macos, "newest": newest, "loaded": loaded}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_MLModelProxy", type("Proxy", (Proxy,), members))
        patch.setattr(client, "_is_macos", lambda: True)
        patch.setattr(client, "_macos_version", lambda: macos)
        patch.setattr(machine, "has_core_ml", lambda: True)
        yield loaded


@contextmanager
def executing() -> Generator[None]:
    """Let this machine look like a Mac, with this package's patch in place of Core ML."""
    with runtime.patch_coremltools("reference"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "has_core_ml", lambda: True)
        yield

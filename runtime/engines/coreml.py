"""The Core ML engine: runs programs by Core ML, on macOS, through coremltools' ``MLModel``.

Core ML takes complete models, so the mlpackage that a function was read from is written to a
temporary folder. The arrays that Core ML accepts and returns:

==================  =================================================================
arrays in           fp32, fp64, int32 or (from macOS 26) int8; writable; of rank 1 or more. int64,
                    bool and read-only arrays are "value type not convertible". Strides are passed
                    on unchanged; negative strides become huge
arrays out          fp32, fp64 or int32, in no order; an fp16 output comes as fp32
states              read and written like outputs and inputs; Core ML stores them in fp16
==================  =================================================================

Source: ``coremltools/models/model.py`` of coremltools 9.0; ``CoreMLPython.mm``,
``CoreMLPythonArray.mm`` and ``CoreMLPythonUtils.mm`` of its ``coremlpython``.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from coreml_delegate.errors import (
    EngineUnavailableError,
    ExecutionError,
    InputError,
    OptionError,
    UnsupportedOpError,
)
from coreml_delegate.formats.files import write_folder
from coreml_delegate.formats.mlpackage import empty_folders
from coreml_delegate.patches import third_party
from coreml_delegate.patches.coremltools import core_ml_proxy, load_error
from coreml_delegate.patches.third_party import describe_error
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.engines.base import (
    Array,
    CompiledFunction,
    Engine,
    EngineOptions,
    KernelTime,
    State,
)
from coreml_delegate.runtime.engines.live_values import LiveValues
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Function, StateType, TensorType
from coreml_delegate.runtime.op_errors import first_line
from coreml_delegate.runtime.snapshots import Snapshot
from coreml_delegate.targets import ComputeUnit

# dtype of a feature -> dtype in which its arrays are passed.
_PASSED_AS: Final = {
    DType.FP16: np.dtype(np.float32),
    DType.FP32: np.dtype(np.float32),
    DType.FP64: np.dtype(np.float64),
    DType.INT32: np.dtype(np.int32),
    DType.INT8: np.dtype(np.int8),
}

_LIBRARY: Final = "libcoremlpython"


class CoreMLState(State):
    """State tensors of one ``MLModel``, which Core ML holds; ``types`` are their types by name."""

    def __init__(self, model: Any, types: Mapping[str, TensorType]) -> None:
        self._model = model
        # Arrays of one element in memory: only their shapes and dtypes are used.
        self._like = {
            name: np.broadcast_to(
                np.zeros((), declared.dtype.numpy), [size or 0 for size in declared.shape or ()]
            )
            for name, declared in types.items()
        }
        self.held = _new_state(model)

    def is_of(self, model: Any) -> bool:
        """Whether this is a state of ``model``."""
        return self._model is model

    def reset(self) -> None:
        """Replace the state by a new one of zeros."""
        self.held = _new_state(self._model)

    def _tensors_like(self) -> Snapshot:
        return self._like

    def _read(self, name: str) -> Array:
        like = self._like[name]
        try:
            content = self.held.read_state(name)
        except Exception as error:  # Core ML raises any class
            raise _failure(f"Core ML does not read state {name!r}", error) from error
        return np.array(content, like.dtype, order="C").reshape(like.shape)

    def _write(self, name: str, value: Array) -> None:
        try:
            self.held.write_state(name, _passable(value, np.dtype(np.float32)))
        except Exception as error:  # Core ML raises any class
            raise _failure(f"Core ML does not write state {name!r}", error) from error


class CoreMLFunction:
    """A function that Core ML has loaded. Calls run one at a time, as Core ML's models require.

    The mlpackage that the ``MLModel`` was loaded from lives as long as the function.
    """

    native = None

    def __init__(self, function: Function, model: Any, package: _Package) -> None:
        self._model = model
        self._package = package
        self._lock = threading.Lock()
        self._inputs = {f.name: _PASSED_AS[f.type.dtype] for f in function.inputs}
        self._outputs = [f.name for f in function.outputs]
        self._types = function.output_types()
        self._states = {
            p.name: p.type.wrapped for p in function.params if isinstance(p.type, StateType)
        }

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once; see ``CompiledFunction``."""
        return self._run(inputs, state)[0]

    def profile(
        self, inputs: Mapping[str, Array], state: State | None = None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        """Run once, and time the complete call: Core ML does not report times of ops."""
        outputs, nanoseconds = self._run(inputs, state)
        return outputs, (KernelTime((), nanoseconds, "Core ML"),)

    def make_state(self) -> CoreMLState | None:
        """Return a new state, all zeros; None if the function has no state."""
        return CoreMLState(self._model, self._states) if self._states else None

    def _run(
        self, inputs: Mapping[str, Array], state: State | None
    ) -> tuple[dict[str, Array], int]:
        core_ml_state = self._core_ml_state(state)
        # A new dict, because coremltools writes into it.
        arrays = {name: _input(name, inputs[name], dtype) for name, dtype in self._inputs.items()}
        with self._lock:
            start = time.perf_counter_ns()
            try:
                results = self._model.predict(arrays, core_ml_state)
            except Exception as error:  # Core ML raises any class
                raise _failure("Core ML fails to run the program", error) from error
            elapsed = time.perf_counter_ns() - start
        return {name: self._output(name, results) for name in self._outputs}, elapsed

    def _output(self, name: str, results: Mapping[str, Any]) -> Array:
        if name not in results:
            raise ExecutionError(
                f"Core ML returns no output {name!r}", got=", ".join(sorted(results)) or "nothing"
            )
        declared = self._types[name]
        array: Array = np.ascontiguousarray(results[name], declared.dtype.numpy)
        # Core ML has no scalars.
        return array.reshape(()) if declared.shape == () else array

    def _core_ml_state(self, state: State | None) -> Any:
        if isinstance(state, CoreMLState) and state.is_of(self._model):
            return state.held
        if state is None and not self._states:
            return None
        raise InputError(
            "function and state do not fit",
            got=type(state).__name__ if state is not None else "no state",
            expected=f"a state of {', '.join(self._states)}" if self._states else "no state",
            remedy="Pass a state from make_state of the same function",
        )


class CoreMLEngine:
    """Runs programs by Core ML, which chooses the processor, the order of sums, and fusions.

    ``EngineOptions.threads`` and ``cache`` have no effect: Core ML has its own threads and cache.
    ``compute_unit`` limits the processors.
    """

    name = "coreml"
    python_reason = "Core ML is called in Python"

    def unavailable_reason(self) -> str | None:
        """Return the reason why Core ML cannot be used on this machine, or None if it can."""
        if not machine.has_core_ml():
            return "Core ML is a part of macOS"
        if _proxy() is None:
            return f"coremltools does not load its {_LIBRARY}"
        return None

    def unsupported(self, function: Function) -> list[str]:
        """Return one reason for each input or output that is no multi-array, and for labels.

        Core ML only reports whether it loads a program.
        """
        self._require()
        sides = (("input", function.inputs), ("output", function.outputs))
        labels = [] if function.classifier is None else ["class labels, which are no multi-array"]
        return labels + [
            f"{side} {feature.name!r} is an image, which Core ML takes and gives as a picture"
            for side, features in sides
            for feature in features
            if feature.color_space is not None
        ]

    def compile(
        self, function: Function, options: EngineOptions, source: ProgramSource | None = None
    ) -> CompiledFunction:
        """Load ``function`` into Core ML, which compiles its mlpackage; see ``Engine``.

        Raises:
            EngineUnavailableError: See ``unavailable_reason``.
            OptionError: ``precision`` or ``exact_nan`` is set, which Core ML does not have.
            UnsupportedOpError: See ``unsupported``; or there is no mlpackage, or Core ML does not
                load it.
        """
        self._require()
        _refuse_options(options)
        if source is None or not source.files:
            raise UnsupportedOpError(
                "Core ML runs whole mlpackages",
                got="Core ML gives the outputs of a model, not the values inside",
                remedy="Use engine='openvino' or 'reference'",
            )
        if reasons := self.unsupported(function):
            raise UnsupportedOpError("Core ML does not take the function", got="; ".join(reasons))
        package = _PACKAGES.get(source.address, lambda: _Package(source))
        unit = ComputeUnit(options.compute_unit or ComputeUnit.ALL)
        model = _load(package.path, _function_name(function, source), unit)
        return CoreMLFunction(function, model, package)

    def _require(self) -> None:
        reason = self.unavailable_reason()
        if reason is not None:
            raise EngineUnavailableError(
                "the coreml engine cannot be used",
                got=reason,
                expected=f"macOS, and a coremltools with {_LIBRARY}",
                remedy="Use engine='auto'",
            )


COREML: Engine = CoreMLEngine()
"""The engine, a singleton."""


class _Package:
    """The mlpackage of a source in a temporary folder, which is removed with this object."""

    def __init__(self, source: ProgramSource) -> None:
        folder = tempfile.mkdtemp(prefix="coreml-delegate-")
        remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / "model.mlpackage"
        self._source = source  # the key of this object has its address
        try:
            write_folder(source.files, self.path, folders=empty_folders(source.files))
        except BaseException:
            remove()
            raise


_PACKAGES: LiveValues[_Package] = LiveValues()


def _refuse_options(options: EngineOptions) -> None:
    options.refuse_numerics_option("Core ML")
    if options.exact_nan:
        raise OptionError(
            "Core ML does not promise that NaN passes through every op",
            got="exact_nan=True",
            remedy="Use the openvino or reference engine, or leave the option out",
        )


def _proxy() -> Any:
    """Return the class by which coremltools calls Core ML, or None."""
    third_party.coremltools()
    return core_ml_proxy()


def _function_name(function: Function, source: ProgramSource) -> str | None:
    """Return Core ML's name of the function; None if the model names no functions.

    Only a model of several functions, which needs macOS 15, names them.
    """
    model = third_party.model_pb2().Model()
    model.ParseFromString(bytes(source.spec))
    return function.name if model.description.functions else None


def _load(path: Path, function_name: str | None, unit: ComputeUnit) -> Any:
    ct = third_party.coremltools()
    with warnings.catch_warnings():
        # The error is raised below.
        warnings.filterwarnings("ignore", "You will not be able to run predict", RuntimeWarning)
        try:
            model = ct.models.MLModel(
                str(path), compute_units=ct.ComputeUnit[unit.name], function_name=function_name
            )
        except Exception as error:  # Core ML raises any class
            raise _refusal(describe_error(error)) from error
    if model.__proxy__ is not None:
        return model
    error = load_error(model)
    if error is not None:
        raise _refusal(first_line(error)) from error
    newest = _proxy().maximum_supported_specification_version()
    raise _refusal(f"its specification version is above {newest}, the newest that coremltools has")


def _refusal(got: str) -> UnsupportedOpError:
    return UnsupportedOpError("Core ML does not load the model", got=got)


def _new_state(model: Any) -> Any:
    try:
        return model.make_state()
    except Exception as error:  # Core ML raises any class
        raise _failure("Core ML makes no state", error) from error


def _failure(what: str, error: Exception) -> ExecutionError:
    # The description of Core ML's errors is a dictionary over several lines.
    return ExecutionError(what, got=" ".join(str(error).split()) or type(error).__name__)


def _input(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    if not array.size:
        raise InputError(
            f"input {name!r} is empty",
            got=f"shape {list(array.shape)}",
            expected="at least one element, as Core ML has no empty arrays",
        )
    return _passable(array, dtype)


def _passable(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array that Core ML accepts, of rank 1 or more, on the same memory if possible."""
    dense = np.require(array, dtype, ("C", "A", "W"))
    # Reshaped twice, so that dimensions of size 1 get regular strides too.
    return dense.reshape(-1).reshape(dense.shape or (1,))

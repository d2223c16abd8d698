"""Predictions of ``coremltools.models.MLModel`` computed by the engines of this package.

Without macOS coremltools has no Core ML: ``MLModel.predict`` and ``make_state`` raise. On macOS
they call one class, ``_MLModelProxy`` in ``coremltools.models.model``. This module replaces that
class, the two functions by which ``make_state`` checks the operating system, and the method by
which the experimental benchmarker gets a compute plan. The rest of coremltools is unchanged, so its
checks of names, types and image modes still apply.

Source: ``coremltools/models/model.py`` and ``ml_program/experimental/async_wrapper.py`` of
coremltools 9.0.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from coreml_delegate.errors import CoreMLDelegateError, InputError
from coreml_delegate.patches import third_party
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.engines.base import Array, EngineOptions, State
from coreml_delegate.runtime.engines.selection import AUTO, ENGINES, require_choice
from coreml_delegate.runtime.measured_plan import MeasuredPlan
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.pictures import array_to_picture, is_picture
from coreml_delegate.runtime.pipeline import Pipeline, load_mlpackage
from coreml_delegate.targets import Opset

_ASYNC_WRAPPER = "coremltools.models.ml_program.experimental.async_wrapper"

# The macOS version of the newest specification version that this package reads.
_MACOS_VERSION = (26, 0)


class FrameworkError(CoreMLDelegateError, RuntimeError):
    """A failure of ``MLModel``.

    It is a ``RuntimeError``, like failures of Core ML, which coremltools and programs written for
    macOS catch. Its cause is the original error of this package.
    """


@contextmanager
def _as_framework_error(prefix: str = "") -> Generator[None]:
    """Raise errors of this package as ``FrameworkError``.

    Programs written for macOS look for ``prefix``, the start of Core ML's message.
    """
    try:
        yield
    except CoreMLDelegateError as error:
        raise FrameworkError(
            prefix + error.what, got=error.got, expected=error.expected, remedy=error.remedy
        ) from error


def _only_core_ml(what: str) -> Callable[..., NoReturn]:
    """Return a method that raises a ``FrameworkError``, because other machines lack ``what``."""

    def refuse(*_: object) -> NoReturn:
        raise FrameworkError(f"{what} exist only where Core ML does", expected="macOS")

    return refuse


class StateProxy:
    """The state inside ``coremltools.models.model.MLState``."""

    def __init__(self, state: State) -> None:
        self.state = state

    def read_state(self, name: str) -> Array:
        """Return a copy of one state tensor.

        Raises:
            FrameworkError: No such state.
        """
        tensors = self.state.snapshot()
        if name not in tensors:
            raise FrameworkError(
                "no such state", got=repr(name), expected=", ".join(sorted(tensors))
            )
        return tensors[name]

    def write_state(self, name: str, value: Any) -> None:
        """Replace the state tensor ``name`` by an array of its shape.

        Raises:
            FrameworkError: No such state, or the shape or the kind of dtype differs.
        """
        with _as_framework_error():
            self.state.write(name, np.asarray(value))


class ModelProxy:
    """The model inside ``MLModel``: one function of its program on an engine, or a pipeline."""

    def __init__(self, model: Model | Pipeline, load_nanoseconds: int) -> None:
        self.model = model
        self._load_nanoseconds = load_nanoseconds
        self._predict_nanoseconds: int | None = None
        self._dtypes = dict(zip(model.input_names, model.param_dtypes(), strict=True))
        self._color_spaces = {f.name: f.color_space for f in model.outputs}

    def predict(self, data: Mapping[str, Any], state: StateProxy | None = None) -> dict[str, Any]:
        """Run once.

        Args:
            data: Arrays by input name; Pillow pictures for images. As in Core ML, any numeric dtype
                is converted to the declared dtype, floats to integers by truncation.
            state: From ``newState``; updated in place.

        Returns:
            Arrays by output name; pictures for images; label and probabilities of a classifier. As
            in Core ML, which has no scalars, rank 0 becomes ``[1]``.

        Raises:
            FrameworkError: An input does not fit, or an op failed.
        """
        started = time.perf_counter_ns()
        with _as_framework_error("Unable to compute the prediction using ML Program: "):
            inputs = {name: self._input(name, value) for name, value in data.items()}
            outputs = self.model.predict(inputs, state.state if state is not None else None)
        self._predict_nanoseconds = time.perf_counter_ns() - started
        return {name: self._output(name, value) for name, value in outputs.items()}

    def _output(self, name: str, value: Any) -> Any:
        color_space = self._color_spaces.get(name)
        if color_space is not None:
            return array_to_picture(value, color_space)
        return value.reshape(value.shape or (1,)) if isinstance(value, np.ndarray) else value

    def batchPredict(self, data: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Run once for each element; see ``predict``."""
        started = time.perf_counter_ns()
        results = [self.predict(inputs) for inputs in data]
        self._predict_nanoseconds = time.perf_counter_ns() - started
        return results

    def newState(self) -> StateProxy:
        """Return a new state, all zeros.

        Raises:
            FrameworkError: The function has no state.
        """
        state = self.model.make_state()
        if state is None:
            raise FrameworkError("function has no state", got=repr(self.model.function_name))
        return StateProxy(state)

    def get_load_duration_in_nano_seconds(self) -> int:
        """Return the time that reading and compiling the model took."""
        return self._load_nanoseconds

    def get_last_predict_duration_in_nano_seconds(self) -> int | None:
        """Return the time that the last prediction took; None before the first prediction."""
        return self._predict_nanoseconds

    get_compiled_model_path = _only_core_ml("compiled models (.mlmodelc)")

    def _input(self, name: str, value: Any) -> Any:
        if is_picture(value):
            return value
        array: Array = np.asarray(value)
        dtype = self._dtypes.get(name)
        if dtype is None or dtype.kind not in "iu" or array.dtype.kind != "f":
            return array
        limits = np.iinfo(dtype.name)
        exact = array.astype(np.float64)  # float32 cannot represent the limits of int32
        # NaN fails these comparisons as well.
        if not bool(((exact > limits.min - 1) & (exact < limits.max + 1)).all()):
            raise InputError(
                f"input {name!r} has values beyond {dtype}",
                got=f"{array.min()} to {array.max()}",
                expected=f"{limits.min} to {limits.max}",
            )
        return array.astype(dtype)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Replaces the class ``_MLModelProxy``: coremltools calls it to load a model."""

    engine: str
    options: EngineOptions | None

    def __call__(
        self,
        path: str,
        compute_units: str,  # noqa: ARG002 - the engine is the same for all
        function_name: str,
        optimization_hints: Mapping[str, str],  # noqa: ARG002 - hints to Apple's compiler
        asset: object,
    ) -> ModelProxy:
        """Load an ``.mlpackage`` or an ``.mlmodel``; no function name is the default function.

        coremltools passes an asset, a compiled model in memory, only for compiled models.

        Raises:
            FrameworkError: The model cannot be read, or no engine can run it. coremltools turns the
                error into a warning, and raises it at the first prediction.
        """
        if asset is not None:
            self.create_model_asset_from_memory()
        started = time.perf_counter_ns()
        with _as_framework_error():
            model = load_mlpackage(
                path, function_name=function_name or None, engine=self.engine, options=self.options
            )
        return ModelProxy(model, time.perf_counter_ns() - started)

    @property
    def retrieve_compute_plan(self) -> Callable[[Any], Coroutine[Any, Any, MeasuredPlan]]:
        """A method for coremltools' ``LocalMLModelAsyncWrapper`` that returns a measured plan."""
        engine, options = self.engine, self.options

        async def retrieve(wrapper: Any) -> MeasuredPlan:
            if wrapper._model is None:
                await wrapper.load()
            model: Any = wrapper._model  # loaded by now
            with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
                package = Path(folder) / "model.mlpackage"
                model.save(str(package))
                with _as_framework_error():
                    return MeasuredPlan(
                        package, model.function_name or None, engine, options or EngineOptions()
                    )

        return retrieve

    def maximum_supported_specification_version(self) -> int:
        """Return the newest specification version that the engines read."""
        return int(max(Opset))

    get_available_compute_devices = _only_core_ml("compute devices")
    create_model_asset_from_path = _only_core_ml("compiled models (.mlmodelc)")
    create_model_asset_from_memory = _only_core_ml("compiled models (.mlmodelc)")


# --- the patch ------------------------------------------------------------------------------------


class CoreMLToolsPatch:
    """Replaces Core ML in coremltools until ``undo`` or the end of a ``with`` block.

    Patches may be nested and undone in any order: the newest active patch applies. Models loaded
    under a patch keep its engine, and can predict after the patch is undone.
    """

    def __init__(self, loader: ModelLoader) -> None:
        self._loader = loader

    def __enter__(self) -> CoreMLToolsPatch:
        self.apply()
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def apply(self) -> None:
        """Apply the patch; does nothing if it is active, or on macOS."""
        if machine.has_core_ml():
            return
        with _LOCK:
            if self not in _ACTIVE:
                _ACTIVE.append(self)
                _install()

    def undo(self) -> None:
        """Undo the patch; does nothing if it is not active."""
        with _LOCK:
            if self in _ACTIVE:
                _ACTIVE.remove(self)
                _install()

    def replacements(self) -> list[tuple[Any, str, object]]:
        """Return (module or class of coremltools, attribute name, replacement) of the patch."""
        module = importlib.import_module("coremltools.models.model")
        experimental = importlib.import_module(_ASYNC_WRAPPER)
        return [
            (module, "_MLModelProxy", self._loader),
            (module, "_is_macos", lambda: True),
            (module, "_macos_version", lambda: _MACOS_VERSION),
            (
                experimental.LocalMLModelAsyncWrapper,
                "retrieve_compute_plan",
                self._loader.retrieve_compute_plan,
            ),
        ]


def patch_coremltools(engine: str = AUTO, options: EngineOptions | None = None) -> CoreMLToolsPatch:
    """Make ``predict`` and ``make_state`` of ``coremltools.models.MLModel`` work on this machine.

    The patch applies to models loaded afterwards, also by ``coremltools.convert``. They must be ML
    Programs, including classifiers, or pipelines of ML Programs and non-maximum suppression; any
    compute unit is accepted. On macOS, where coremltools calls Core ML, this does nothing.

    Args:
        engine: ``auto``, or an engine's name.
        options: How to execute.

    Returns:
        A handle with ``undo()``; also a context manager that undoes the patch at its end.

    Raises:
        OptionError: No such engine.
    """
    require_choice("engine", engine, ENGINES)
    patch = CoreMLToolsPatch(ModelLoader(engine, options))
    patch.apply()
    return patch


_LOCK = threading.Lock()
_ACTIVE: list[CoreMLToolsPatch] = []
# The replaced objects of coremltools, while a patch is active.
_ORIGINALS: list[tuple[Any, str, object]] = []


def _install() -> None:
    """Install the newest active patch in coremltools, or restore coremltools."""
    third_party.coremltools()
    if not _ACTIVE:
        for owner, name, original in _ORIGINALS:
            setattr(owner, name, original)
        _ORIGINALS.clear()
        return
    replacements = _ACTIVE[-1].replacements()
    if not _ORIGINALS:
        _ORIGINALS.extend((owner, name, vars(owner)[name]) for owner, name, _ in replacements)
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)

"""Core ML delegates of a ``.pte``: load the blob on an engine, and call it with tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from coreml_delegate.errors import BlobFormatError, InputError, OptionError, ProgramError
from coreml_delegate.formats.blob import BlobReference, Buffer, unflatten
from coreml_delegate.formats.blob_layout import (
    COMPILED,
    PACKAGE,
    MethodMetadata,
    ModelMetadata,
    debug_info_in,
    metadata_in,
    models_in,
)
from coreml_delegate.runtime import machine
from coreml_delegate.runtime.diagnosis import INACCURATE_BELOW_DB, Diagnosis
from coreml_delegate.runtime.engines.base import EngineOptions, State
from coreml_delegate.runtime.engines.input_shapes import InputShapes
from coreml_delegate.runtime.engines.reference import REFERENCE, Listener
from coreml_delegate.runtime.engines.selection import AUTO, ENGINES
from coreml_delegate.runtime.mil.program import Function, Program
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.model import Model, cast_input
from coreml_delegate.runtime.native import SMALL, NativeCall, NativeProgram
from coreml_delegate.runtime.observation import Observer
from coreml_delegate.runtime.program.delegate_interface import (
    COREML_BACKEND_ID,
    DelegateLoader,
    DelegatePayload,
    NamedData,
    OpEvent,
)
from coreml_delegate.runtime.program.plan import MethodInfo
from coreml_delegate.runtime.threads import all_torch_threads


class CoreMLDelegate:
    """One loaded delegate with its own state, which is zero at start and persists between calls.

    The inputs and outputs in ``names`` are in the order of calls. The model was read from a blob of
    ``nbytes``, and runs by ``observer`` if calls are observed.

    Attributes:
        model: The model of the delegate.
        input_count: Number of tensors that the delegate takes.
        state: The state that persists between calls; None for a stateless delegate.
        native: The call without Python, or None; see ``DelegateCallable``.
        python_reason: The reason why calls need Python, as text; None if they do not.
        listener: Called with the inputs before each call in Python, unless it is None.
    """

    def __init__(
        self, model: Model, names: MethodMetadata, nbytes: int, *, observer: Observer | None = None
    ) -> None:
        _check_names("input", names.input_names, model.input_names)
        _check_names("output", names.output_names, model.output_names)
        self.model = model
        self._outputs = names.output_names
        dtypes = dict(zip(model.input_names, model.param_dtypes(), strict=True))
        ranks = {f.name: f.type.shape for f in model.function.inputs}
        self._inputs = [(name, dtypes[name], ranks[name]) for name in names.input_names]
        self.input_count = len(self._inputs)
        self.state: State | None = model.make_state()
        self._computes_with_torch = model.engine_name == REFERENCE.name
        # Inputs to check; the shapes of the last call, which seldom change, need no check.
        self._flexible = model.flexible_inputs
        self._observer = observer
        self.python_reason = (
            ("its calls are observed" if observer is not None else None)
            or python_reason(model.program, model.function, model.engine_name, nbytes)
            or model.native_obstacle()
        )
        inputs = [name for name, _, _ in self._inputs]
        is_native = self.python_reason is None
        native = model.native_call(inputs, self._outputs, self.state) if is_native else None
        self.native: NativeCall | None = native
        self._checked_shapes: tuple[tuple[int, ...], ...] = ()
        self.listener: Callable[[Sequence[torch.Tensor]], None] | None = None

    def native_program(self) -> NativeProgram | None:
        """Return the form of the delegate that runs without Python; None if that is impossible.

        Raises:
            CoreMLDelegateError: The model cannot be compiled for an enumerated shape.
        """
        return self.model.native_program([name for name, _, _ in self._inputs], self._outputs)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once.

        The inputs are in the metadata's order, and are cast to the program's dtypes.

        Raises:
            InputError: Wrong number of inputs, shapes that the program does not accept, or integers
                beyond its dtype (which a device truncates silently).
            ExecutionError: An op failed.
        """
        if self.listener is not None:
            self.listener(inputs)
        arrays = self._checked_arrays(inputs)
        # OpenVINO has its own threads; the reference engine uses torch's.
        with all_torch_threads() if self._computes_with_torch else nullcontext():
            results = self.model.compiled(arrays, self.state)
        return [torch.from_numpy(results[name]) for name in self._outputs]

    def observe(
        self, inputs: Sequence[torch.Tensor], *, with_values: bool
    ) -> tuple[list[torch.Tensor], tuple[OpEvent, ...]]:
        """Run once, as a call does; return the outputs and the events of ops.

        There are no events if the delegate was not loaded to be observed, and values only with
        ``with_values``; see ``Observer.run``.
        """
        if self._observer is None:
            return self(inputs), ()
        arrays = self._checked_arrays(inputs)
        with all_torch_threads() if self._computes_with_torch else nullcontext():
            results, events = self._observer.run(arrays, self.state, with_values=with_values)
        return [torch.from_numpy(results[name]) for name in self._outputs], events

    def diagnose(
        self, inputs: Sequence[torch.Tensor], *, min_sqnr_db: float = INACCURATE_BELOW_DB
    ) -> Diagnosis:
        """Diagnose every value of a call with these inputs; the state is unchanged.

        See ``Model.diagnose``.
        """
        return self.model.diagnose(self._arrays(inputs), self.state, min_sqnr_db=min_sqnr_db)

    def trace(self, inputs: Sequence[torch.Tensor], listener: Listener) -> list[torch.Tensor]:
        """Run once on the reference engine without a change of the state; see ``Model.trace``."""
        results = self.model.trace(self._arrays(inputs), listener, self.state)
        return [torch.from_numpy(results[name]) for name in self._outputs]

    def _checked_arrays(self, inputs: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
        arrays = self._arrays(inputs)
        if self._flexible:
            shapes = tuple(arrays[name].shape for name in self._flexible)
            if shapes != self._checked_shapes:
                self.model.check_shapes(arrays)
                self._checked_shapes = shapes
        return arrays

    def _arrays(self, inputs: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
        if len(inputs) != len(self._inputs):
            raise InputError(
                "wrong number of delegate inputs",
                got=str(len(inputs)),
                expected=str(len(self._inputs)),
            )
        return {
            name: _array(tensor, dtype, shape, name)
            for (name, dtype, shape), tensor in zip(self._inputs, inputs, strict=True)
        }


def python_reason(program: Program, function: Function, engine: str, nbytes: int) -> str | None:
    """Return the reason why a host calls a delegate in Python, if it is known before compilation.

    ``nbytes`` is the size of the delegate's blob.
    """
    if ENGINES[engine].python_reason is not None:
        return ENGINES[engine].python_reason
    if nbytes > SMALL:
        return f"it has more than {SMALL >> 20} MB"
    return InputShapes.of(program, function).native_obstacle


def delegate_loader(engine: str | None, options: EngineOptions | None = None) -> DelegateLoader:
    """Return a loader of Core ML delegates for a host; see ``compile_function`` for ``engine``."""

    def load(payload: DelegatePayload) -> CoreMLDelegate:
        blob, function = resolve(payload.processed, payload.named_data)
        files, metadata = blob_files(blob)
        settings = _with_compute_unit(options or EngineOptions(), payload)
        if payload.is_observed:
            settings = replace(settings, profiling=True)
        model = Model.from_files(files, function_name=function, engine=engine, options=settings)
        names = metadata.method(payload.method_name)
        observer = Observer(model, debug_info_in(unflatten(blob))) if payload.is_observed else None
        return CoreMLDelegate(model, names, memoryview(blob).nbytes, observer=observer)

    return load


def _with_compute_unit(options: EngineOptions, payload: DelegatePayload) -> EngineOptions:
    """Return options with the delegate's compute unit, unless they have a compute unit.

    Without Core ML the options are unchanged, so that delegates that differ only in the compute
    unit are compiled once.

    Raises:
        BlobFormatError: The delegate has an unknown compute unit.
    """
    unit = dict(payload.compile_specs).get(_COMPUTE_UNITS)
    if unit is None or options.compute_unit is not None or not machine.has_core_ml():
        return options
    try:
        return replace(options, compute_unit=unit.decode(errors="replace"))
    except OptionError as error:
        raise BlobFormatError(
            "a compile spec of the delegate has no such value",
            got=f"{_COMPUTE_UNITS}={error.got}",
            expected=error.expected,
        ) from error


_COMPUTE_UNITS: Final = "compute_units"
"""Key of the only compile spec that Core ML's own delegate reads."""


def resolve(processed: Buffer, named_data: NamedData) -> tuple[Buffer, str | None]:
    """Return the blob of a delegate and the function to run.

    The bytes of a delegate are a blob, or a reference to named data of the program.

    Raises:
        BlobFormatError: A malformed reference, or a reference to missing data.
    """
    reference = BlobReference.decode(processed)
    if reference is None:
        return processed, None
    blob = named_data(reference.key)
    if blob is None:
        raise BlobFormatError(
            "delegate refers to data the program does not have",
            got=repr(reference.key),
            remedy="Pass the .ptd files that were written with the .pte, if there are any",
        )
    return blob, reference.function_name


def read_blob(blob: Buffer) -> tuple[Program, ModelMetadata]:
    """Return the program and metadata of a blob; constants are views of it.

    Raises:
        BlobFormatError: The bytes are no blob, or a part is missing or malformed.
        ProgramError: The blob has a model compiled for Apple devices.
    """
    files, metadata = blob_files(blob)
    return read_files(files), metadata


def blob_files(blob: Buffer) -> tuple[dict[str, memoryview], ModelMetadata]:
    """Return the files of the mlpackage inside a blob, as views, and the blob's metadata.

    Raises:
        BlobFormatError: The bytes are no blob, or a part is missing or malformed.
        ProgramError: The blob has a model compiled for Apple devices.
    """
    files = unflatten(blob)
    metadata, models = metadata_in(files), models_in(files)
    if PACKAGE not in models:
        raise ProgramError(
            "blob holds a compiled model, which only Apple devices read",
            got=COMPILED,
            remedy="Export with MODEL_TYPE.MODEL",
        )
    return models[PACKAGE], metadata


def load_blob(
    blob: Buffer,
    *,
    function_name: str | None = None,
    engine: str | None = AUTO,
    options: EngineOptions | None = None,
) -> Model:
    """Load the blob of a delegate, which ``CoreMLBackend.preprocess`` returns.

    Args:
        blob: The bytes; weights are views of them.
        function_name: None for the default function.
        engine: See ``runtime.load_mlpackage``.
        options: How to execute.

    Raises:
        BlobFormatError: Not a blob, or a part is missing or malformed.
        CoreMLDelegateError: As ``load_mlpackage``.
    """
    files, _ = blob_files(blob)
    return Model.from_files(files, function_name=function_name, engine=engine, options=options)


def delegate_names(method: MethodInfo) -> dict[int, str]:
    """Return the names of a method's Core ML delegates by their number among its delegates."""
    return {
        index: f"{method.name}_{index}"
        for index, info in enumerate(method.delegates)
        if info.backend_id == COREML_BACKEND_ID
    }


def _array(
    tensor: torch.Tensor,
    dtype: np.dtype[np.generic],
    shape: tuple[int | None, ...] | None,
    name: str,
) -> np.ndarray:
    array = tensor.detach().numpy()
    if array.ndim == 0 and shape == (1,):
        array = array.reshape(1)
    return cast_input(array, dtype, name)


def _check_names(side: str, listed: Sequence[str], declared: Sequence[str]) -> None:
    if sorted(listed) != sorted(declared):
        raise BlobFormatError(
            f"metadata and model disagree on the {side}s",
            got=", ".join(listed) or "none",
            expected=", ".join(declared) or "none",
        )

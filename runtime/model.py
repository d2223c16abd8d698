"""``Model``: one function of an ML Program, ready to predict."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import InputError
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.runtime import diagnosis
from coreml_delegate.runtime.diagnosis import INACCURATE_BELOW_DB, Diagnosis
from coreml_delegate.runtime.engines import limits
from coreml_delegate.runtime.engines.base import EngineOptions, State
from coreml_delegate.runtime.engines.input_shapes import InputShapes, check_shape, smallest_shape
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.engines.reference import REFERENCE, ReferenceFunction
from coreml_delegate.runtime.engines.reference.interpreter import Listener
from coreml_delegate.runtime.engines.selection import (
    AUTO,
    ENGINES,
    Selection,
    compile_function,
)
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import (
    Classifier,
    Feature,
    Function,
    Program,
    StateType,
    TensorType,
)
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.native import NativeCall, NativeInterface, NativeProgram
from coreml_delegate.runtime.pictures import is_picture, picture_to_array

Array = NDArray[Any]


class Model:
    """One function of a program, compiled by an engine.

    Args:
        program: A program, as read from an mlpackage.
        function_name: None for the program's default function.
        engine: See ``compile_function``.
        options: How to execute.
        source: The bytes that ``program`` was read from. With them, the compiled function is shared
            with other models that run it, and may be loaded from the cache. Core ML requires them.
        selection: The function as it was compiled already; None to compile it.

    Attributes:
        program: The program.
        function: The function.
        function_name: Name of the function.
        compiled: The function as the engine compiled it, which does not check its inputs.
        engine_name: Name of the engine that runs the function.
        rejected_engines: Reasons why faster engines were rejected, by engine name.
        inputs: The inputs, in declaration order.
        outputs: The outputs that ``compute`` returns, in order.
        input_names: Names of the inputs.
        output_names: Names of the outputs, without a classifier's label.
        flexible_inputs: Names of the inputs whose shape is not fixed.
        classifiers: The labels of a classifier; empty for any other function.

    Raises:
        ProgramError: No such function.
        CoreMLDelegateError: See ``compile_function``.
    """

    def __init__(
        self,
        program: Program,
        *,
        function_name: str | None = None,
        engine: str | None = AUTO,
        options: EngineOptions | None = None,
        source: ProgramSource | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.program = program
        self.function = program.function(function_name)
        self._options = options or EngineOptions()
        if selection is None:
            selection = compile_function(engine, self.function, self._options, source)
        self._selection = selection
        self.compiled = self._selection.compiled
        self.engine_name = self._selection.engine_name
        self.rejected_engines = self._selection.rejected_engines
        self.function_name = self.function.name
        self.inputs, self.outputs = self.function.inputs, self.function.outputs
        self.input_names = tuple(feature.name for feature in self.inputs)
        self.output_names = tuple(feature.name for feature in self.outputs)
        classifier = self.function.classifier
        self.classifiers: tuple[Classifier, ...] = () if classifier is None else (classifier,)
        self._shapes = InputShapes.of(program, self.function)
        self.flexible_inputs = self._shapes.names
        params = {p.name: p.type for p in self.function.params}
        self._param_dtypes = {
            f.name: param.dtype
            for f in self.function.inputs
            if isinstance(param := params[f.name], TensorType)
        }

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, Buffer],
        *,
        function_name: str | None = None,
        engine: str | None = AUTO,
        options: EngineOptions | None = None,
    ) -> Model:
        """Load a function of the mlpackage that consists of ``files``; constants are views of them.

        Raises:
            BlobFormatError: A part is missing or malformed.
            ProgramError: Not an ML Program, or no such function.
            CoreMLDelegateError: See ``compile_function``.
        """
        program = read_files(files)
        source = ProgramSource.of_files(files)
        return cls(
            program, function_name=function_name, engine=engine, options=options, source=source
        )

    def make_state(self) -> State | None:
        """Return a new state, all zeros, to pass to ``predict``; None for a stateless function.

        Raises:
            ExecutionError: The state does not fit into memory.
        """
        limits.require_memory(_state_nbytes(self.function), "the state")
        return self.compiled.make_state()

    def predict(self, inputs: Mapping[str, Any], state: State | None = None) -> dict[str, Any]:
        """Run once.

        Args:
            inputs: Arrays (anything that ``numpy.asarray`` accepts) by input name. A dtype of the
                same kind as the declared dtype is cast. An image is a picture of Pillow, or an
                array of pixels from 0 to 255, [1, C, H, W].
            state: From ``make_state``; updated in place.

        Returns:
            Arrays by output name, in declaration order. For a classifier, also the label of the
            most probable class, and a dictionary of probabilities by label.

        Raises:
            InputError: A name, shape, dtype or picture that the function does not accept.
            ExecutionError: An op failed.
        """
        return with_labels(self.compute(inputs, state), self.classifiers)

    def compute(self, inputs: Mapping[str, Any], state: State | None = None) -> dict[str, Array]:
        """Run once, as ``predict`` does, and return only tensors.

        Args:
            inputs: See ``predict``.
            state: See ``predict``.

        Returns:
            Arrays by output name; for a classifier the probabilities, in the order of its labels.

        Raises:
            CoreMLDelegateError: See ``predict``.
        """
        return self.compiled(self._inputs(inputs), state)

    def trace(
        self, inputs: Mapping[str, Any], listener: Listener, state: State | None = None
    ) -> dict[str, Array]:
        """Run once on the reference engine and pass every value to ``listener``.

        Args:
            inputs: See ``predict``.
            listener: Receives every value, including nested blocks and each iteration of a loop.
            state: From ``make_state``; it is not changed.

        Returns:
            Arrays by output name, computed by the reference engine.

        Raises:
            InputError: A name, shape or dtype that the function does not accept.
            UnsupportedOpError: The reference engine lacks an op.
            ExecutionError: An op failed.
        """
        own_state = self._reference.copy_state(state)
        return self._reference.run(self._inputs(inputs), own_state, listener=listener)

    def diagnose(
        self,
        inputs: Mapping[str, Any],
        state: State | None = None,
        *,
        min_sqnr_db: float = INACCURATE_BELOW_DB,
    ) -> Diagnosis:
        """Find where the program loses its numbers: the first NaN, overflow or large error.

        Args:
            inputs: See ``predict``.
            state: From ``make_state``; it is not changed.
            min_sqnr_db: Ratio of signal to error in dB, against the program computed in fp32, below
                which a value is inaccurate.

        Raises:
            CoreMLDelegateError: As ``trace``.
        """
        return diagnosis.diagnose(
            self.function,
            self._reference,
            self._inputs(inputs),
            state=state,
            min_sqnr_db=min_sqnr_db,
        )

    def native_call(
        self, inputs: Sequence[str], outputs: Sequence[str], state: State | None
    ) -> NativeCall | None:
        """Return a call that runs without Python; None if that is impossible.

        ``inputs`` and ``outputs`` are names, in the order in which calls pass the tensors. Calls
        read and write ``state``, from ``make_state``.
        """
        interface, native = self._native_interface(inputs, outputs), self.compiled.native
        if interface is None or native is None:
            return None
        return native.native_call(interface, state)

    def native_program(self, inputs: Sequence[str], outputs: Sequence[str]) -> NativeProgram | None:
        """Return the form of the function that runs without Python; None if that is impossible.

        See ``native_call``.
        """
        interface, native = self._native_interface(inputs, outputs), self.compiled.native
        if interface is None or native is None:
            return None
        return native.native_program(interface, self._shapes.enumerated())

    def native_obstacle(self) -> str | None:
        """Return the reason why calls need Python, or None if native calls are possible."""
        native = self.compiled.native
        if native is None:
            return ENGINES[self.engine_name].python_reason
        return self._shapes.native_obstacle or native.native_obstacle()

    def _native_interface(
        self, inputs: Sequence[str], outputs: Sequence[str]
    ) -> NativeInterface | None:
        limits = self._shapes.limits(inputs)
        if limits is None:
            return None
        return NativeInterface(tuple(inputs), tuple(outputs), limits)

    def prepare_native_calls(self) -> None:
        """Make later calls without Python, if possible.

        Takes some milliseconds, and saves as many microseconds in each call.
        """
        if self.compiled.native is not None:
            self.compiled.native.prepare_native_calls()

    def prepare_shapes(self) -> None:
        """Compile for every enumerated shape now, rather than at the first call with it."""
        if self.compiled.native is not None:
            for shapes in self._shapes.enumerated():
                self.compiled.native.prepare_shape(shapes)

    def with_outputs(self, outputs: Sequence[Feature]) -> Model:
        """Return a model with other values of the function as outputs, on the same engine.

        The values are of the function's outermost block.

        Raises:
            CoreMLDelegateError: See ``compile_function``.
        """
        names = tuple(feature.name for feature in outputs)
        function = replace(
            self.function,
            outputs=tuple(outputs),
            block=replace(self.function.block, outputs=names),
            classifier=None,
        )
        return self._with_function(function, self.engine_name)

    def with_function(self, function: Function) -> Model:
        """Return a model of the reference engine with another function of the same interface.

        Args:
            function: A function of the same name.

        Raises:
            CoreMLDelegateError: See ``compile_function``.
        """
        return self._with_function(function, REFERENCE.name)

    def with_variant(self, function: Function) -> Model:
        """Return a model of the reference engine with a variant of the function.

        Args:
            function: A function of the same name; see ``ReferenceFunction.variant``.

        Raises:
            CoreMLDelegateError: See ``compile_function``.
        """
        selection = Selection(REFERENCE.name, self._reference.variant(function), {})
        return self._with_function(function, REFERENCE.name, selection)

    def _with_function(
        self, function: Function, engine: str, selection: Selection | None = None
    ) -> Model:
        functions = {**self.program.functions, function.name: function}
        return Model(
            replace(self.program, functions=functions),
            function_name=function.name,
            engine=engine,
            options=replace(self._options, profiling=False),
            selection=selection,
        )

    def check_shapes(self, arrays: Mapping[str, Array]) -> None:
        """Refuse shapes that the function does not accept, of arrays by input name.

        Raises:
            InputError: Names the input, the dimension, its size, and what was expected.
        """
        self._shapes.check({name: arrays[name].shape for name in self._shapes.names})

    def param_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Return the dtype of each parameter of the MIL function, in declaration order."""
        return tuple(self._param_dtypes[name].numpy for name in self.input_names)

    @functools.cached_property
    def _reference(self) -> ReferenceFunction:
        """The function on the reference engine, for traces."""
        if isinstance(self.compiled, ReferenceFunction):
            return self.compiled
        return REFERENCE.compile(self.function, EngineOptions())

    def _inputs(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        refuse_unknown(inputs, self.input_names)
        arrays = {feature.name: self._input(feature, inputs) for feature in self.function.inputs}
        self.check_shapes(arrays)
        return arrays

    def _input(self, feature: Feature, inputs: Mapping[str, Any]) -> Array:
        if feature.name not in inputs:
            if feature.optional:
                return _default_input(feature, self._param_dtypes[feature.name])
            raise InputError(
                f"input {feature.name!r} is missing",
                got=", ".join(sorted(inputs)) or "no input",
                expected=", ".join(self.input_names),
            )
        value = inputs[feature.name]
        array = picture_to_array(value, feature) if is_picture(value) else np.asarray(value)
        if array.ndim == 0 and feature.type.shape == (1,):
            array = array.reshape(1)
        check_shape(feature, array.shape)
        return _cast_declared(feature, array, self._param_dtypes[feature.name])


def refuse_unknown(inputs: Iterable[str], names: Sequence[str]) -> None:
    """Refuse inputs whose names are not among ``names``.

    Raises:
        InputError: There is such an input.
    """
    if unknown := sorted(set(inputs) - set(names)):
        raise InputError("unknown input", got=", ".join(unknown), expected=", ".join(names))


def with_labels(outputs: Mapping[str, Array], classifiers: Sequence[Classifier]) -> dict[str, Any]:
    """Return outputs with each classifier's label, and its probabilities by label."""
    results: dict[str, Any] = dict(outputs)
    for classifier in classifiers:
        values = outputs[classifier.probabilities].reshape(-1).tolist()
        results[classifier.label] = best_label(outputs[classifier.probabilities], classifier)
        results[classifier.probabilities] = dict(zip(classifier.labels, values, strict=True))
    return results


def best_label(probabilities: Any, classifier: Classifier) -> str | int:
    """Return the label of the largest probability, in an array or tensor of any shape."""
    return classifier.labels[int(probabilities.argmax())]


def _state_nbytes(function: Function) -> int:
    types = [p.type.wrapped for p in function.params if isinstance(p.type, StateType)]
    return sum(t.dtype.bits // 8 * math.prod(d or 1 for d in t.shape or ()) for t in types)


def _default_input(feature: Feature, dtype: DType) -> Array:
    shape = smallest_shape(feature)
    limits.require_memory(
        math.prod(shape) * dtype.bits // 8, f"the default of input {feature.name!r}"
    )
    return np.full(shape, feature.default or 0, dtype=dtype.numpy)


def _cast_declared(feature: Feature, array: Array, dtype: DType) -> Array:
    if array.dtype == dtype.numpy:
        return array
    if not np.can_cast(array.dtype, dtype.numpy, casting="same_kind"):
        raise InputError(
            f"input {feature.name!r} has the wrong dtype",
            got=str(array.dtype),
            expected=dtype.label,
        )
    return cast_input(array, dtype.numpy, feature.name)


def cast_input(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return ``array`` as ``dtype``, the same object if it has that dtype already.

    Raises:
        InputError: The array has integers that ``dtype`` cannot hold; names the input.
    """
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind in "iu" and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise InputError(
                f"input {name!r} has values beyond {dtype.name}",
                got=f"{array.min()} to {array.max()}",
                expected=f"{bounds.min} to {bounds.max}",
                remedy="Core ML has no wider integers: keep the values small, or leave the ops "
                "that need them on the CPU (skip_ops_for_coreml_delegation)",
            )
    return array.astype(dtype)

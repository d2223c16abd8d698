"""``Model``: one function of an ML Program, ready to predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import InputError, ProgramError
from coreml_delegate.runtime.engines.base import EngineOptions, State
from coreml_delegate.runtime.engines.selection import AUTO, compile_function
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, Function, Program, TensorType

Array = NDArray[Any]


class Model:
    """One function of a program, compiled by an engine.

    Args:
        program: As read from an mlpackage.
        function_name: None for the program's default function.
        engine: ``auto``, ``openvino`` or ``reference``.
        options: How to execute.

    Raises:
        ProgramError: No such function.
        CoreMLDelegateError: See ``compile_function``.
    """

    def __init__(
        self,
        program: Program,
        *,
        function_name: str | None = None,
        engine: str = AUTO,
        options: EngineOptions | None = None,
    ) -> None:
        self.program = program
        self.function = _function(program, function_name)
        self._selection = compile_function(engine, self.function, options or EngineOptions())
        self._compiled = self._selection.compiled
        params = {p.name: p.type for p in self.function.params}
        self._param_dtypes = {
            f.name: param.dtype
            for f in self.function.inputs
            if isinstance(param := params[f.name], TensorType)
        }

    @property
    def engine_name(self) -> str:
        """Name of the engine that runs it."""
        return self._selection.engine_name

    @property
    def passed_over(self) -> Mapping[str, tuple[str, ...]]:
        """Why faster engines were passed over, by engine name."""
        return self._selection.passed_over

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in declaration order."""
        return tuple(f.name for f in self.function.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in declaration order."""
        return tuple(f.name for f in self.function.outputs)

    def make_state(self) -> State | None:
        """Fresh state, all zeros, to pass to ``predict``; None for a stateless function."""
        return self._compiled.make_state()

    def predict(self, inputs: Mapping[str, Any], state: State | None = None) -> dict[str, Array]:
        """Run once.

        Args:
            inputs: Arrays (anything ``numpy.asarray`` takes) by input name. A dtype of the same
                kind as the declared one is cast.
            state: From ``make_state``; updated in place.

        Returns:
            Arrays by output name, in declaration order.

        Raises:
            InputError: A name, shape or dtype that the function does not take.
            ExecutionError: An op failed.
        """
        unknown = sorted(set(inputs) - set(self.input_names))
        if unknown:
            raise InputError(
                "unknown input", got=", ".join(unknown), expected=", ".join(self.input_names)
            )
        return self._compiled({f.name: self._input(f, inputs) for f in self.function.inputs}, state)

    def run_unchecked(self, inputs: Mapping[str, Array], state: State | None) -> dict[str, Array]:
        """``predict`` without checks, for callers that guarantee names, shapes and MIL dtypes."""
        return self._compiled(inputs, state)

    def param_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtype of each input as the MIL program takes it, in declaration order."""
        return tuple(self._param_dtypes[name].numpy for name in self.input_names)

    def _input(self, feature: Feature, inputs: Mapping[str, Any]) -> Array:
        if feature.name not in inputs:
            if feature.optional:
                return _default(feature, self._param_dtypes[feature.name])
            raise InputError(
                f"input {feature.name!r} is missing",
                got=", ".join(sorted(inputs)) or "no input",
                expected=", ".join(self.input_names),
            )
        array = np.asarray(inputs[feature.name])
        if array.ndim == 0 and feature.type.shape == (1,):
            array = array.reshape(1)
        _check_shape(feature, array.shape)
        return _cast(feature, array, self._param_dtypes[feature.name])


def _function(program: Program, name: str | None) -> Function:
    wanted = program.default_function if name is None else name
    try:
        return program.functions[wanted]
    except KeyError:
        raise ProgramError(
            "no such function", got=repr(wanted), expected=", ".join(program.functions)
        ) from None


def _default(feature: Feature, dtype: DType) -> Array:
    shape = tuple(d if d is not None else 1 for d in feature.type.shape or ())
    return np.full(shape, feature.default or 0, dtype=dtype.numpy)


def _check_shape(feature: Feature, shape: tuple[int, ...]) -> None:
    if feature.shapes:
        fits = shape in feature.shapes
        expected = " or ".join(str(s) for s in feature.shapes)
    elif feature.bounds:
        fits = len(shape) == len(feature.bounds) and all(
            low <= d and (high is None or d <= high)
            for d, (low, high) in zip(shape, feature.bounds, strict=True)
        )
        expected = str([f"{low}..{'' if high is None else high}" for low, high in feature.bounds])
    else:
        declared = feature.type.shape
        fits = declared is None or (
            len(shape) == len(declared)
            and all(want is None or d == want for d, want in zip(shape, declared, strict=True))
        )
        expected = str(feature.type)
    if not fits:
        raise InputError(
            f"input {feature.name!r} has the wrong shape", got=str(shape), expected=expected
        )


def _cast(feature: Feature, array: Array, dtype: DType) -> Array:
    if array.dtype == dtype.numpy:
        return array
    if not np.can_cast(array.dtype, dtype.numpy, casting="same_kind"):
        raise InputError(
            f"input {feature.name!r} has the wrong dtype",
            got=str(array.dtype),
            expected=dtype.label,
        )
    if array.size and not dtype.is_float and array.dtype.kind in "iu":
        limits = np.iinfo(dtype.numpy.name)
        if array.min() < limits.min or array.max() > limits.max:
            raise InputError(
                f"input {feature.name!r} has values beyond {dtype.label}",
                got=f"{array.min()} to {array.max()}",
                expected=f"{limits.min} to {limits.max}",
            )
    return array.astype(dtype.numpy)

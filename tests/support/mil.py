"""MIL programs for tests, built with coremltools' builder and read back with our reader.

``build`` serializes a builder function without passes: nothing is folded, fused or cast.
``infer`` asks coremltools for the value of the same function on constants, computed with numpy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coreml_delegate.patches.third_party import quiet_import
from coreml_delegate.runtime.mil.program import Function, Program, TensorType
from coreml_delegate.runtime.mil.reader import WeightFile, read_program
from coreml_delegate.targets import Opset

with quiet_import():
    import coremltools as ct
    from coremltools.converters.mil.backend.mil.load import load
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

MilFunction = Callable[..., Any]
"""Takes builder variables by name and returns one or several."""

Arrays = Mapping[str, np.ndarray]

# coremltools knows no op of iOS26: its builder takes programs up to iOS18.
TARGETS = {opset: ct.target[opset.name] for opset in Opset if opset <= Opset.iOS18}


def _feature_dtype(dtype: np.dtype, opset: Opset) -> np.dtype:
    """Return the dtype in which a value of ``dtype`` enters or leaves a model."""
    if np.issubdtype(dtype, np.floating):
        return np.dtype(np.float16 if dtype == np.float16 and opset >= Opset.iOS16 else np.float32)
    return np.dtype(np.int32)


def _label(dtype: np.dtype) -> str:
    return types.builtin_to_string(types.numpy_type_to_builtin_type(dtype))


def _as_feature(var: Any, opset: Opset) -> Any:
    dtype = np.dtype(types.nptype_from_builtin(var.dtype))
    feature = _feature_dtype(dtype, opset)
    return var if feature == dtype else mb.cast(x=var, dtype=_label(feature))


def builder_program(function: MilFunction, inputs: Arrays, opset: Opset) -> Any:
    """A coremltools program of ``function`` on inputs like ``inputs``.

    Inputs and outputs of dtypes that a model does not support are cast, so that ``function`` sees
    the dtypes of ``inputs``.
    """

    def with_casts(**features: Any) -> Any:
        arguments = {
            name: var
            if _feature_dtype(inputs[name].dtype, opset) == inputs[name].dtype
            else mb.cast(x=var, dtype=_label(inputs[name].dtype))
            for name, var in features.items()
        }
        result = function(**arguments)
        if isinstance(result, Sequence):
            return tuple(_as_feature(var, opset) for var in result)
        return _as_feature(result, opset)

    # The builder names inputs after the parameters of the function it is given.
    names = list(inputs)
    keywords = ", ".join(f"{name}={name}" for name in names)
    traced = eval(f"lambda {', '.join(names)}: with_casts({keywords})", {"with_casts": with_casts})
    specs = [
        mb.TensorSpec(
            array.shape, types.numpy_type_to_builtin_type(_feature_dtype(array.dtype, opset))
        )
        for array in inputs.values()
    ]
    return mb.program(input_specs=specs, opset_version=TARGETS[opset])(traced)


def build(function: MilFunction, inputs: Arrays, opset: Opset = Opset.iOS18) -> Program:
    """``function`` on inputs like ``inputs``, serialized by coremltools and read by our reader."""
    return serialized(builder_program(function, inputs, opset), opset)


def serialized(program: Any, opset: Opset) -> Program:
    """A coremltools program, serialized without passes and read by our reader."""
    with tempfile.TemporaryDirectory() as folder:
        message = load(program, folder, specification_version=int(opset))
        stored = {
            f"weights/{path.name}": WeightFile(path.name, memoryview(path.read_bytes()))
            for path in Path(folder).iterdir()
        }
    return read_program(message.SerializeToString(), stored)


def main(program: Program) -> Function:
    """The default function of a program."""
    return program.functions[program.default_function]


def features(function: Function, arrays: Arrays) -> dict[str, np.ndarray]:
    """``arrays`` in the dtypes of the function's parameters."""
    declared = {param.name: param.type for param in function.params}
    return {
        name: array.astype(declared[name].dtype.numpy)
        for name, array in arrays.items()
        if isinstance(declared[name], TensorType)
    }


def infer(function: MilFunction, inputs: Arrays, opset: Opset = Opset.iOS18) -> list[np.ndarray]:
    """The values coremltools computes for ``function`` when ``inputs`` are constants."""
    variables: list[Any] = []

    def on_constants() -> Any:
        constants = {name: mb.const(val=array) for name, array in inputs.items()}
        result = function(**constants)
        variables.extend(result if isinstance(result, Sequence) else [result])
        return result

    mb.program(input_specs=[], opset_version=TARGETS[opset])(on_constants)
    values = [var.val for var in variables]
    missing = [var.name for var in variables if var.val is None]
    assert not missing, f"coremltools infers no value for {missing}"
    return [np.asarray(value) for value in values]


def op_versions() -> list[tuple[str, Opset, Any]]:
    """Every op type of coremltools with each of its versions: the opset it came with, its class."""
    versions: list[tuple[str, Opset, Any]] = []
    for op_type, by_target in sorted(SSAOpRegistry.core_ops.items()):
        latest = None
        for target in sorted(by_target, key=int):
            if by_target[target] is not latest:
                latest = by_target[target]
                # What predates ML Programs is there from their first opset on.
                versions.append((op_type, Opset(max(int(target), int(Opset.iOS15))), latest))
    return versions

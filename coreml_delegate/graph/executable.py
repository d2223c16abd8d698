"""``Executable``: a compiled graph; ``Buffer``: a tensor in the form in which it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from coreml_delegate.errors import GraphError, InputError, OptionError
from coreml_delegate.formats.blob_layout import PACKAGE, in_folder
from coreml_delegate.formats.files import new_file, new_folder
from coreml_delegate.formats.mlpackage import SUFFIX
from coreml_delegate.graph.compose import MOST_AXES, from_storage, to_storage
from coreml_delegate.graph.mil_program import Package
from coreml_delegate.graph.pte import delegate_program
from coreml_delegate.graph.tensor_types import Dim, Dimension, DType, TensorType, linear
from coreml_delegate.lowering.interface import declare_interface
from coreml_delegate.options.lowering_options import MIN_SQNR_DB, CompileOptions
from coreml_delegate.options.model_interface import ModelInterface
from coreml_delegate.runtime import EngineOptions, Model
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.runtime.engines.selection import REFERENCE
from coreml_delegate.runtime.native import SMALL
from coreml_delegate.runtime.precision import (
    LoweredProgram,
    Measurements,
    PrecisionReport,
    SingleModel,
)
from coreml_delegate.targets import Opset

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Settings:
    """How graphs are compiled and run: the attributes of a ``Backend``.

    Attributes:
        engine: ``auto``, or an engine's name.
        options: Options of the engine.
        opset: MIL opset of the deployment target.
        compile_options: Options of the lowering.
    """

    engine: str
    options: EngineOptions
    opset: Opset
    compile_options: CompileOptions


class Buffer:
    """A tensor in an executable's own form, which needs no copy as an input or output.

    Args:
        stored: The elements, in the storage dtype of the element type.
        type: Element type and shape.
    """

    __slots__ = ("stored", "type")

    def __init__(self, stored: Array, type: TensorType) -> None:
        self.stored = stored
        self.type = type

    @classmethod
    def of(cls, data: Any, dtype: DType | None = None) -> Buffer:
        """Return a buffer of an array.

        Args:
            data: An array, anything with ``__dlpack__``, or a buffer.
            dtype: Required element type; None for the element type of ``data``.

        Raises:
            InputError: It has another element type, or values that 32 bits cannot hold.
        """
        if isinstance(data, Buffer):
            if dtype is not None and data.type.dtype is not dtype:
                raise _wrong_dtype(data.type.dtype.label, dtype)
            return data
        array = as_numpy(data)
        if dtype is None:
            dtype = DType.of(array.dtype)
        elif array.dtype != dtype.numpy:
            is_python = not hasattr(data, "dtype")
            if not (is_python and np.can_cast(array.dtype, dtype.numpy, casting="same_kind")):
                raise _wrong_dtype(str(array.dtype), dtype)
            if dtype.is_integer and array.size:
                _check_range(array, dtype)
            array = array.astype(dtype.numpy)
        if array.dtype == dtype.storage_numpy and dtype is not DType.UINT32:
            return cls(array, TensorType(dtype, array.shape))
        try:
            return cls(to_storage(array, dtype), TensorType(dtype, array.shape))
        except GraphError as error:
            raise InputError(error.what, got=error.got, expected=error.expected) from None

    def numpy(self) -> Array:
        """Return the tensor as a NumPy array of its element type; a view where possible."""
        return from_storage(self.stored, self.type.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.numpy().__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.numpy().__dlpack_device__()

    def __repr__(self) -> str:
        return f"<Buffer: {self.type}>"


class Executable:
    """A compiled graph. Thread-safe if each thread has its own state.

    Attributes:
        model: The function as the engine compiled it.
        files: Content of the mlpackage's files, by relative path.
        parameters: Types of the inputs by name, in the order of ``run``.
        outputs: Types of the outputs by name.
        states: Types of the states by name.
        dimensions: Ranges of symbolic sizes by name.
        precision: The accuracy that decided which nodes compute in fp32, with precision ``auto``;
            else None.
    """

    def __init__(
        self,
        package: Package,
        settings: Settings,
        parameters: Mapping[str, TensorType],
        outputs: Mapping[str, TensorType],
        states: Mapping[str, TensorType],
        dimensions: Mapping[str, Dimension],
    ) -> None:
        self.files = package.files
        self.precision: PrecisionReport | None = None
        self._package = package
        self.parameters = dict(parameters)
        self.outputs = dict(outputs)
        self.states = dict(states)
        self.dimensions = dict(dimensions)
        self._settings = settings
        self.model = self._load(settings.engine, settings.options)
        self._inputs = [
            (name, type, 0 < type.rank <= MOST_AXES, type.shape if type.is_static else None)
            for name, type in parameters.items()
        ]
        self._outputs = list(outputs.items())

    @property
    def engine_name(self) -> str:
        """Name of the engine that runs it."""
        return self.model.engine_name

    def on(self, engine: str, options: EngineOptions | None = None) -> Executable:
        """Return the same graph on another engine, without converting it again.

        Args:
            engine: ``auto``, or an engine's name.
            options: The engine's options; None for the options that the graph was compiled with.

        Raises:
            CoreMLDelegateError: The engine cannot be used here, or lacks an op.
        """
        moved = copy.copy(self)
        engine_options = self._settings.options if options is None else options
        moved.model = moved._load(engine, engine_options)
        return moved

    def _load(self, engine: str, options: EngineOptions | None) -> Model:
        model = Model.from_files(self.files, engine=engine, options=options)
        if sum(memoryview(content).nbytes for content in self.files.values()) <= SMALL:
            model.prepare_native_calls()
        return model

    def measure_precision(
        self, samples: Iterable[Sequence[Any]], min_sqnr_db: float = MIN_SQNR_DB
    ) -> PrecisionReport:
        """Measure how exact the graph is, on the engine ``reference``, which rounds as a device.

        Args:
            samples: The inputs of calls, each a tuple of arrays; see ``run``.
            min_sqnr_db: The ratio of signal to error, in dB, that every output has to reach.

        Returns:
            The accuracy as the graph is compiled, and with the nodes in fp32 that restore it.

        Raises:
            InputError: A sample does not fit the graph.
            ExecutionError: An op failed.
        """
        return self.to_measure(samples).report(min_sqnr_db)

    def to_measure(self, samples: Iterable[Sequence[Any]]) -> LoweredProgram:
        """Return the graph with the samples to measure it on; see ``measure_precision``."""
        inputs = [list(self._features(sample)[0].values()) for sample in samples]
        model = self.on(REFERENCE.name).model
        package = self._package
        calls = {number: (call,) for number, call in package.calls.items()}
        measured = SingleModel(model, package.handles, package.fp32_constants)
        measurements = Measurements(measured, inputs)
        return LoweredProgram(measurements.measure, calls)

    @property
    def signature(self) -> str:
        """The inputs' names and types, and the outputs' types: ``(x: float32[2]) -> bool[]``."""
        inputs = ", ".join(f"{name}: {type}" for name, type in self.parameters.items())
        outputs = ", ".join(map(str, self.outputs.values()))
        return f"({inputs}) -> {outputs}"

    def __repr__(self) -> str:
        return f"<Executable{self.signature}>"

    def make_state(self) -> State | None:
        """Return a new state, all zeros, to pass to ``run``; None for a graph without states."""
        return self.model.make_state()

    def run(self, *arrays: Any, state: State | None = None) -> tuple[Array, ...]:
        """Run once.

        Args:
            arrays: An array for each parameter, in the order in which the parameters were made.
            state: From ``make_state``; updated in place.

        Returns:
            The outputs, in the order given to ``compile``.

        Raises:
            InputError: A wrong number of arrays, a wrong shape or element type.
            ExecutionError: An op failed.
        """
        return tuple(buffer.numpy() for buffer in self.execute(*arrays, state=state))

    def execute(self, *buffers: Any, state: State | None = None) -> tuple[Buffer, ...]:
        """Run once as ``run`` does, and return buffers.

        Args:
            buffers: Buffers, or arrays.
            state: From ``make_state``; updated in place.
        """
        if (state is None) and self.states:
            raise InputError(
                "the graph has states", expected="state=", remedy="Pass one from make_state()"
            )
        inputs, sizes = self._features(buffers)
        outputs = self.model.compiled(inputs, state)
        return tuple(self._output(name, type, outputs, sizes) for name, type in self._outputs)

    def _features(self, buffers: Sequence[Any]) -> tuple[dict[str, Array], dict[sympy.Symbol, int]]:
        """Return the inputs of the model by name, and the symbolic sizes, of buffers or arrays."""
        if len(buffers) != len(self._inputs):
            raise InputError(
                "wrong number of arrays",
                got=str(len(buffers)),
                expected=f"{len(self._inputs)}: {', '.join(self.parameters) or 'none'}",
            )
        sizes: dict[sympy.Symbol, int] = {}
        inputs: dict[str, Array] = {}
        for (name, type, is_same_rank, fixed), data in zip(self._inputs, buffers, strict=True):
            try:
                buffer = Buffer.of(data, type.dtype)
            except InputError as error:
                raise InputError(
                    f"parameter {name!r}: {error.what}", got=error.got, expected=error.expected
                ) from None
            if buffer.stored.shape != fixed:
                self._check_shape(name, type, buffer.stored.shape, sizes)
            if type.is_empty:
                continue
            array = buffer.stored if is_same_rank else buffer.stored.reshape(-1)
            # Core ML has no inputs of bools.
            inputs[name] = array.astype(np.int32) if type.dtype is DType.BOOL else array
        return inputs, sizes

    def save(self, path: Path | str, interface: ModelInterface | None = None) -> None:
        """Write the model, and replace an existing file. Equal graphs give equal bytes.

        Args:
            path: A ``.mlpackage``, or a ``.pte`` whose method ``forward`` is one Core ML delegate;
                see ``graph.pte``.
            interface: Of an ``.mlpackage``: other names, images, labels and a description.

        Raises:
            OptionError: Another suffix, or the interface does not fit the graph.
            LoweringError: See ``graph.pte.delegate_program``.
            OSError: The file cannot be written; an existing file stays unchanged.
        """
        path = Path(path)
        if path.suffix == SUFFIX:
            files = self.files if interface is None else declare_interface(self.files, interface)
            with new_folder(files, path, overwrite=True):
                return
        if path.suffix != ".pte":
            raise OptionError("unknown kind of file", got=str(path), expected=".mlpackage or .pte")
        if interface is not None:
            raise OptionError(f"only an {SUFFIX} has an interface", got=str(path))
        model = in_folder(PACKAGE, dict(self.files))
        data = delegate_program(
            model, self.parameters, self.outputs, self.dimensions, self._settings.compile_options
        )
        with new_file(path) as file:
            file.write(data)

    def _output(
        self,
        name: str,
        type: TensorType,
        outputs: Mapping[str, Array],
        sizes: Mapping[sympy.Symbol, int],
    ) -> Buffer:
        if type.is_empty:
            return Buffer(np.zeros(type.static_shape, type.dtype.storage_numpy), type)
        array = outputs[name]
        if not 0 < type.rank <= MOST_AXES:
            array = array.reshape(type.static_shape)
        return Buffer(array, TensorType(type.dtype, array.shape) if sizes else type)

    def _check_shape(
        self, name: str, type: TensorType, shape: Sequence[int], sizes: dict[sympy.Symbol, int]
    ) -> None:
        fits = len(shape) == type.rank
        for size, declared in zip(shape, type.shape, strict=False):
            parts = linear(declared)
            if parts is not None:
                symbol, slope, offset = parts
                dimension = self.dimensions[symbol.name]
                count, remainder = divmod(size - offset, slope)
                fits &= remainder == 0 and sizes.setdefault(symbol, count) == count
                fits &= dimension.least <= count <= dimension.most
            else:
                fits &= size == declared
        if not fits:
            described = ", ".join(self._describe(size, sizes) for size in type.shape)
            raise InputError(
                f"parameter {name!r} has the wrong shape",
                got=str(list(shape)),
                expected=f"[{described}]",
            )

    def _describe(self, size: Dim, sizes: Mapping[sympy.Symbol, int]) -> str:
        parts = linear(size)
        if parts is None:
            return str(size)
        dimension = self.dimensions[parts[0].name]
        earlier = f", {sizes[dimension.symbol]} before" if dimension.symbol in sizes else ""
        range = f"{dimension.least} to {dimension.most}{earlier}"
        is_plain = isinstance(size, sympy.Symbol)
        return f"{size} ({range})" if is_plain else f"{size} ({dimension.name}: {range})"


def as_numpy(array: Any) -> Array:
    """Return any framework's array as a NumPy array, without a copy where possible."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        return np.from_dlpack(array)
    return np.asarray(array)


def _wrong_dtype(got: str, expected: DType) -> InputError:
    return InputError("wrong element type", got=got, expected=expected.label)


def _check_range(array: Array, dtype: DType) -> None:
    bounds = np.iinfo(dtype.numpy)
    if array.min() < bounds.min or array.max() > bounds.max:
        raise InputError(
            f"values beyond {dtype.label}",
            got=f"{array.min()} to {array.max()}",
            expected=f"{bounds.min} to {bounds.max}",
        )

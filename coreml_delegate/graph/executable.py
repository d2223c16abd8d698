"""``Executable``: a compiled graph; ``Buffer``: a tensor in the form in which it runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import sympy
from numpy.typing import NDArray

from coreml_delegate.errors import GraphError, InputError, OptionError
from coreml_delegate.formats.blob import Buffer as Bytes
from coreml_delegate.formats.blob_layout import PACKAGE, in_folder
from coreml_delegate.formats.files import new_file, new_folder
from coreml_delegate.graph.compose import (
    MOST_AXES,
    Composer,
    Var,
    from_storage,
    storage_shape,
    to_storage,
)
from coreml_delegate.graph.fusion import fused_nodes
from coreml_delegate.graph.node import Value
from coreml_delegate.graph.pte import delegate_program
from coreml_delegate.graph.tensor_types import Dim, Dimension, DType, TensorType, linear
from coreml_delegate.lowering.build import model_files
from coreml_delegate.lowering.convert import Conversion, convert_mil
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime import EngineOptions, Model
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.runtime.native import SMALL
from coreml_delegate.targets import Opset

if TYPE_CHECKING:
    from coreml_delegate.graph.backend import Backend
    from coreml_delegate.graph.builder import Builder

Array = NDArray[Any]

STATE_DTYPES = frozenset(
    {DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.BOOL, DType.UINT8, DType.INT8}
)
"""Element types of states, which are fp16: floats are rounded; wider integers are not exact."""


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
    """

    def __init__(
        self,
        files: Mapping[str, Bytes],
        backend: Backend,
        parameters: Mapping[str, TensorType],
        outputs: Mapping[str, TensorType],
        states: Mapping[str, TensorType],
        dimensions: Mapping[str, Dimension],
    ) -> None:
        self.files = files
        self.parameters = dict(parameters)
        self.outputs = dict(outputs)
        self.states = dict(states)
        self.dimensions = dict(dimensions)
        self._backend = backend
        self.model = self._load(backend.engine, backend.options)
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
        engine_options = self._backend.options if options is None else options
        moved.model = moved._load(engine, engine_options)
        return moved

    def _load(self, engine: str, options: EngineOptions | None) -> Model:
        model = Model.from_files(self.files, engine=engine, options=options)
        if sum(memoryview(content).nbytes for content in self.files.values()) <= SMALL:
            model.prepare_native_calls()
        return model

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
        if len(buffers) != len(self._inputs):
            raise InputError(
                "wrong number of arrays",
                got=str(len(buffers)),
                expected=f"{len(self._inputs)}: {', '.join(self.parameters) or 'none'}",
            )
        if (state is None) and self.states:
            raise InputError(
                "the graph has states", expected="state=", remedy="Pass one from make_state()"
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
        outputs = self.model.compiled(inputs, state)
        return tuple(self._output(name, type, outputs, sizes) for name, type in self._outputs)

    def save(self, path: Path | str) -> None:
        """Write the model, and replace an existing file. Equal graphs give equal bytes.

        Args:
            path: A ``.mlpackage``, or a ``.pte`` whose method ``forward`` is one Core ML delegate;
                see ``graph.pte``.

        Raises:
            OptionError: Another suffix.
            LoweringError: See ``graph.pte.delegate_program``.
            OSError: The file cannot be written; an existing file stays unchanged.
        """
        path = Path(path)
        if path.suffix == ".mlpackage":
            with new_folder(self.files, path, overwrite=True):
                return
        if path.suffix != ".pte":
            raise OptionError("unknown kind of file", got=str(path), expected=".mlpackage or .pte")
        model = in_folder(PACKAGE, dict(self.files))
        data = delegate_program(
            model, self.parameters, self.outputs, self.dimensions, self._backend.compile_options
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


def compile_graph(
    builder: Builder,
    outputs: Value | Sequence[Value] | Mapping[str, Value],
    states: Mapping[Value, Value],
) -> Executable:
    """Compile a graph; see ``Builder.compile``."""
    named = _name_outputs(builder, outputs)
    _check_states(builder, states)
    names = {value: name for name, value in builder.parameters.items()}
    inputs = {name: v for name, v in builder.parameters.items() if v not in states}
    new_states = {names[value]: new_value for value, new_value in states.items()}
    with convert_mil(
        lambda: _mil_program(builder, inputs, named, new_states), builder.backend.compile_options
    ) as conversion:
        files = _package_files(conversion)
    return Executable(
        files,
        builder.backend,
        {name: value.type for name, value in inputs.items()},
        {name: value.type for name, value in named.items()},
        {name: builder.parameters[name].type for name in new_states},
        builder.dimensions,
    )


def _name_outputs(
    builder: Builder, outputs: Value | Sequence[Value] | Mapping[str, Value]
) -> dict[str, Value]:
    if isinstance(outputs, Mapping):
        named = dict(outputs)
    elif isinstance(outputs, Value):
        named = {"output": outputs}
    else:
        prefix = "output"
        while any(name.startswith(f"{prefix}_") for name in builder.parameters):
            prefix += "s"
        named = {f"{prefix}_{n}": value for n, value in enumerate(outputs)}
    if not named:
        raise GraphError("nothing to compile", expected="at least one output")
    builder.check_outputs(named)
    return named


def _check_states(builder: Builder, states: Mapping[Value, Value]) -> None:
    if states and builder.backend.opset < Opset.iOS18:
        raise GraphError(
            "Core ML has states since iOS18",
            got=builder.backend.opset.name,
            remedy="Pass target='iOS18' to Backend",
        )
    for before, after in states.items():
        if before not in builder.parameters.values():
            raise GraphError("only parameters can be states", got=repr(before))
        if before.type != after.type:
            raise GraphError(
                "a state is replaced by a value of another type",
                got=str(after.type),
                expected=str(before.type),
            )
        if before.dtype not in STATE_DTYPES or before.type.is_empty or not before.type.is_static:
            raise GraphError(
                "a value of this type cannot be a Core ML state, whose elements are fp16",
                got=str(before.type),
                expected="a fixed shape of "
                + ", ".join(dtype.label for dtype in DType if dtype in STATE_DTYPES),
            )


def _mil_program(
    builder: Builder,
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    states: Mapping[str, Value],
) -> tuple[Any, dict[str, Any]]:
    """Return the MIL program, and coremltools' types of its inputs if shapes are symbolic."""
    from coremltools.converters.mil import Builder as MilBuilder
    from coremltools.converters.mil.mil import Function, Program, types

    ct = coremltools()
    mb: Any = MilBuilder
    backend = builder.backend
    symbols: dict[sympy.Expr, Any] = {}
    storage_types = {
        "fp32": types.fp32,
        "fp16": types.fp16,
        "int32": types.int32,
        "bool": types.int32,
    }
    nonempty = {name: value for name, value in inputs.items() if not value.type.is_empty}
    placeholders = {
        name: mb.placeholder(
            shape=_placeholder_shape(value, symbols),
            dtype=storage_types[value.dtype.storage_dtype],
            name=name,
        )
        for name, value in nonempty.items()
    }
    for name in states:
        type = builder.parameters[name].type
        placeholders[name] = mb.state_tensor_placeholder(
            shape=storage_shape(type.static_shape) or (1,), dtype=types.fp16
        )
    composer = Composer(mb, backend.opset, fused_nodes)
    with Function(placeholders, opset_version=ct.target(int(backend.opset))) as function:
        for name, value in inputs.items():
            composer.bind(value, None)
            if name in nonempty:
                composer.bind(value, _from_feature(composer, value, function.inputs[name]))
        for name in states:
            value = builder.parameters[name]
            stored = mb.read_state(input=function.inputs[name])
            composer.bind(value, _from_state(composer, value, stored))
        needed_values = [*outputs.values(), *states.values()]
        composer.compose(composer.order(builder.scope, needed_values))
        for name, value in states.items():
            mb.coreml_update_state(state=function.inputs[name], value=_to_state(composer, value))
        results = [
            _to_feature(composer, value, name)
            for name, value in outputs.items()
            if not value.type.is_empty
        ]
        function.set_outputs(results)
    program = Program()
    program.add_function("main", function)
    input_types = [
        ct.TensorType(
            name=name,
            shape=ct.Shape(
                [_range(ct, builder, size) for size in storage_shape(value.shape) or (1,)]
            ),
            dtype=types.nptype_from_builtin(storage_types[value.dtype.storage_dtype]),
        )
        for name, value in nonempty.items()
    ]
    return program, {"inputs": input_types} if builder.dimensions else {}


def _placeholder_shape(value: Value, symbols: dict[sympy.Expr, Any]) -> list[Any]:
    from coremltools.converters.mil.mil import get_new_symbol

    shape: list[Any] = []
    for size in storage_shape(value.shape) or (1,):
        if isinstance(size, sympy.Expr):
            symbols[size] = symbols.get(size) or get_new_symbol()
            shape.append(symbols[size])
        else:
            shape.append(size)
    return shape


def _range(ct: Any, builder: Builder, size: Dim) -> Any:
    parts = linear(size)
    if parts is None:
        return size
    symbol, slope, offset = parts
    dimension = builder.dimensions[symbol.name]
    least, most = (slope * count + offset for count in (dimension.least, dimension.most))
    return ct.RangeDim(lower_bound=least, upper_bound=most, default=least)


def _from_feature(c: Composer, value: Value, var: Var) -> Var:
    """Convert an input of the MIL function to the value's storage dtype and rank."""
    if not value.rank:
        var = c.mb.squeeze(x=var, axes=[0])
    return c.mb.cast(x=var, dtype="bool") if value.dtype is DType.BOOL else var


def _from_state(c: Composer, value: Value, var: Var) -> Var:
    """Convert the fp16 elements of a state to the value's storage dtype and rank."""
    if not value.rank:
        var = c.mb.squeeze(x=var, axes=[0])
    if value.dtype is DType.BOOL:
        return c.mb.not_equal(x=var, y=np.float16(0))
    storage = value.dtype.storage_dtype
    return var if storage == "fp16" else c.mb.cast(x=var, dtype=storage)


def _to_state(c: Composer, value: Value) -> Var:
    """Convert a value to a state's elements: fp16, of rank 1 or more."""
    var = c.reshape(c.var(value), value.shape or (1,))
    return var if value.dtype.storage_dtype == "fp16" else c.mb.cast(x=var, dtype="fp16")


def _to_feature(c: Composer, value: Value, name: str) -> Var:
    """Convert a value to an output of this name: bools become int32, rank 0 becomes 1."""
    var = c.var(value)
    if value.dtype is DType.BOOL:
        var = c.mb.cast(x=var, dtype="int32")
    if not value.rank:
        var = c.mb.expand_dims(x=var, axes=[0])
    # In Core ML, an output is not an input or a constant, and two outputs are two values.
    return c.mb.identity(x=var, name=name)


def _package_files(conversion: Conversion) -> dict[str, Bytes]:
    prefix = f"{PACKAGE}/"
    files = model_files(conversion, is_declared=False)
    return {path.removeprefix(prefix): cast(Bytes, content) for path, content in files.items()}


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

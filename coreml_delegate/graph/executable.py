"""``Executable``: a compiled graph; ``Buffer``: a tensor in the form in which it runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import sympy
from numpy.typing import NDArray

from coreml_delegate.conversion.convert import Conversion, convert_mil
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
from coreml_delegate.preprocess.package import model_files
from coreml_delegate.runtime import EngineOptions, Model
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.runtime.native import SMALL
from coreml_delegate.targets import Opset
from coreml_delegate.third_party import coremltools

if TYPE_CHECKING:
    from coreml_delegate.graph.backend import Backend
    from coreml_delegate.graph.builder import Builder

Array = NDArray[Any]

STATE_DTYPES = frozenset(
    {DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.BOOL, DType.UINT8, DType.INT8}
)
"""Element types of states, which hold fp16: floats are rounded to it, and other integers lost."""


class Buffer:
    """A tensor in the form in which an executable takes and returns it, so that nothing is copied.

    Args:
        stored: In the storage dtype of the element type.
        type: Element type and shape.
    """

    __slots__ = ("stored", "type")

    def __init__(self, stored: Array, type: TensorType) -> None:
        self.stored = stored
        self.type = type

    @classmethod
    def of(cls, given: Any, dtype: DType | None = None) -> Buffer:
        """Return a buffer of an array.

        Args:
            given: An array, anything with ``__dlpack__``, or a buffer.
            dtype: Element type it has to have; None for its own.

        Raises:
            InputError: It has another element type, or values that 32 bits cannot hold.
        """
        if isinstance(given, Buffer):
            if dtype is not None and given.type.dtype is not dtype:
                raise _wrong_dtype(given.type.dtype.label, dtype)
            return given
        array = as_numpy(given)
        if dtype is None:
            dtype = DType.of(array.dtype)
        elif array.dtype != dtype.numpy:
            is_python = not hasattr(given, "dtype")
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
        """Return the tensor as a NumPy array of its element type; a view where that is possible."""
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
    """A compiled graph. Safe to use from several threads, with a state each.

    Attributes:
        model: The function that the engine has compiled.
        files: The mlpackage, relative path to content.
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
        self.model = self._loaded(backend.engine, backend.options)
        self._takes = [
            (name, type, 0 < type.rank <= MOST_AXES, type.shape if type.is_static else None)
            for name, type in parameters.items()
        ]
        self._gives = list(outputs.items())

    @property
    def engine_name(self) -> str:
        """Name of the engine that runs it."""
        return self.model.engine_name

    def on(self, engine: str, options: EngineOptions | None = None) -> Executable:
        """Return the same graph on another engine, without converting it again.

        Args:
            engine: ``auto``, or an engine's name.
            options: How it executes; None for those that the graph was compiled with.

        Raises:
            CoreMLDelegateError: The engine cannot be used here, or lacks an op.
        """
        found = copy.copy(self)
        chosen = self._backend.options if options is None else options
        found.model = found._loaded(engine, chosen)
        return found

    def _loaded(self, engine: str, options: EngineOptions | None) -> Model:
        model = Model.from_files(self.files, engine=engine, options=options)
        if sum(memoryview(content).nbytes for content in self.files.values()) <= SMALL:
            model.prepare_native_calls()
        return model

    @property
    def signature(self) -> str:
        """The inputs' names and types, and the outputs' types: ``(x: float32[2]) -> bool[]``."""
        takes = ", ".join(f"{name}: {type}" for name, type in self.parameters.items())
        gives = ", ".join(map(str, self.outputs.values()))
        return f"({takes}) -> {gives}"

    def __repr__(self) -> str:
        return f"<Executable{self.signature}>"

    def make_state(self) -> State | None:
        """Return a new state, all zeros, to pass to ``run``; None for a graph without states."""
        return self.model.make_state()

    def run(self, *arrays: Any, state: State | None = None) -> tuple[Array, ...]:
        """Run once.

        Args:
            arrays: One per parameter, in the order in which the parameters were made.
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
        if len(buffers) != len(self._takes):
            raise InputError(
                "wrong number of arrays",
                got=str(len(buffers)),
                expected=f"{len(self._takes)}: {', '.join(self.parameters) or 'none'}",
            )
        if (state is None) and self.states:
            raise InputError(
                "the graph has states", expected="state=", remedy="Pass one from make_state()"
            )
        sizes: dict[sympy.Symbol, int] = {}
        inputs: dict[str, Array] = {}
        for (name, type, is_same_rank, fixed), given in zip(self._takes, buffers, strict=True):
            try:
                buffer = Buffer.of(given, type.dtype)
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
        outputs = self.model.run_unchecked(inputs, state)
        return tuple(self._output(name, type, outputs, sizes) for name, type in self._gives)

    def save(self, path: Path | str) -> None:
        """Write the model, replacing one of that name. Equal graphs give equal bytes.

        Args:
            path: A ``.mlpackage``, or a ``.pte`` whose method ``forward`` is one Core ML delegate;
                see ``graph.pte``.

        Raises:
            OptionError: Another suffix.
            LoweringError: See ``graph.pte.delegate_program``.
            OSError: It cannot be written; an existing one is left as it was.
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
                count, rest = divmod(size - offset, slope)
                fits &= rest == 0 and sizes.setdefault(symbol, count) == count
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
        taken = f", {sizes[dimension.symbol]} before" if dimension.symbol in sizes else ""
        range = f"{dimension.least} to {dimension.most}{taken}"
        is_plain = isinstance(size, sympy.Symbol)
        return f"{size} ({range})" if is_plain else f"{size} ({dimension.name}: {range})"


def as_numpy(given: Any) -> Array:
    """Return an array of any framework as NumPy's, without a copy where that is possible."""
    if isinstance(given, np.ndarray):
        return given
    if hasattr(given, "__dlpack__") and not hasattr(given, "__array__"):
        return np.from_dlpack(given)
    return np.asarray(given)


def compile_graph(
    builder: Builder,
    outputs: Value | Sequence[Value] | Mapping[str, Value],
    states: Mapping[Value, Value],
) -> Executable:
    """Compile a graph; see ``Builder.compile``."""
    named = _named(builder, outputs)
    _check_states(builder, states)
    names = {value: name for name, value in builder.parameters.items()}
    inputs = {name: v for name, v in builder.parameters.items() if v not in states}
    kept = {names[value]: after for value, after in states.items()}
    with convert_mil(
        lambda: _mil_program(builder, inputs, named, kept), builder.backend.compile_options
    ) as conversion:
        files = _package_files(conversion)
    return Executable(
        files,
        builder.backend,
        {name: value.type for name, value in inputs.items()},
        {name: value.type for name, value in named.items()},
        {name: builder.parameters[name].type for name in kept},
        builder.dimensions,
    )


def _named(
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
    """Make the MIL program, and describe its inputs to coremltools where shapes are symbolic."""
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
    fed = {name: value for name, value in inputs.items() if not value.type.is_empty}
    placeholders = {
        name: mb.placeholder(
            shape=_placeholder_shape(value, symbols),
            dtype=storage_types[value.dtype.storage_dtype],
            name=name,
        )
        for name, value in fed.items()
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
            if name in fed:
                composer.bind(value, _from_feature(composer, value, function.inputs[name]))
        for name in states:
            value = builder.parameters[name]
            read = mb.read_state(input=function.inputs[name])
            composer.bind(value, _from_state(composer, value, read))
        wanted = [*outputs.values(), *states.values()]
        composer.compose(composer.order(builder.scope, wanted))
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
    described = [
        ct.TensorType(
            name=name,
            shape=ct.Shape(
                [_range(ct, builder, size) for size in storage_shape(value.shape) or (1,)]
            ),
            dtype=types.nptype_from_builtin(storage_types[value.dtype.storage_dtype]),
        )
        for name, value in fed.items()
    ]
    return program, {"inputs": described} if builder.dimensions else {}


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
    """Return an input or a state as its storage dtype, in its own rank."""
    if not value.rank:
        var = c.mb.squeeze(x=var, axes=[0])
    return c.mb.cast(x=var, dtype="bool") if value.dtype is DType.BOOL else var


def _from_state(c: Composer, value: Value, var: Var) -> Var:
    """Return the fp16 numbers of a state as the storage dtype, in the value's rank."""
    if not value.rank:
        var = c.mb.squeeze(x=var, axes=[0])
    if value.dtype is DType.BOOL:
        return c.mb.not_equal(x=var, y=np.float16(0))
    storage = value.dtype.storage_dtype
    return var if storage == "fp16" else c.mb.cast(x=var, dtype=storage)


def _to_state(c: Composer, value: Value) -> Var:
    """Return what a state holds from now on: fp16, of rank 1 or more."""
    var = c.reshape(c.var(value), value.shape or (1,))
    return var if value.dtype.storage_dtype == "fp16" else c.mb.cast(x=var, dtype="fp16")


def _to_feature(c: Composer, value: Value, name: str) -> Var:
    """Return an output in a type and rank that Core ML has for outputs, named."""
    var = c.var(value)
    if value.dtype is DType.BOOL:
        var = c.mb.cast(x=var, dtype="int32")
    if not value.rank:
        var = c.mb.expand_dims(x=var, axes=[0])
    # An input or a constant is no output, and neither is one value two.
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

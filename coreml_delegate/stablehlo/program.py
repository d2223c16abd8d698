"""``Program``: a compiled StableHLO program."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coreml_delegate.errors import CoreMLDelegateError, OptionError, near_matches
from coreml_delegate.graph import (
    Backend,
    Builder,
    Dimension,
    Executable,
    TensorType,
    Value,
)
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.declaration import checked
from coreml_delegate.options.lowering_options import MIN_SQNR_DB, PartitionerKeywords
from coreml_delegate.options.model_interface import ModelInterface
from coreml_delegate.runtime import AUTO, EngineOptions
from coreml_delegate.runtime.engines.base import State
from coreml_delegate.runtime.precision import PrecisionReport
from coreml_delegate.stablehlo.attributes import BFLOAT16
from coreml_delegate.stablehlo.parse import mlir_module
from coreml_delegate.stablehlo.reader import Reader, argument_names, result_names, with_location
from coreml_delegate.stablehlo.sizes import Range, declared_shapes
from coreml_delegate.targets import Opset

logger = logging.getLogger(__name__)

_BFLOAT16 = ("refuse", "float32")


class Program:
    """A compiled StableHLO program. Thread-safe if each thread has its own state.

    Attributes:
        executable: The compiled graph.
        narrowed: Descriptions of values of 64 bits in the source that have 32 in the model.
    """

    def __init__(
        self, executable: Executable, narrowed: Sequence[str], bfloat16: Iterable[int] = ()
    ) -> None:
        self.executable = executable
        self.narrowed = tuple(narrowed)
        self._bfloat16 = frozenset(bfloat16)
        """Positions of parameters that are bfloat16 in the source and float32 in the model."""

    @property
    def parameters(self) -> dict[str, TensorType]:
        """Types of the inputs by name, in the order of ``run``."""
        return self.executable.parameters

    @property
    def outputs(self) -> dict[str, TensorType]:
        """Types of the outputs by name, in the order of ``main``."""
        return self.executable.outputs

    @property
    def states(self) -> dict[str, TensorType]:
        """Types of the states by name."""
        return self.executable.states

    @property
    def engine_name(self) -> str:
        """Name of the engine that runs the program."""
        return self.executable.engine_name

    def on(self, engine: str, options: EngineOptions | None = None) -> Program:
        """Return the same program on another engine; see ``Executable.on``."""
        return Program(self.executable.on(engine, options), self.narrowed, self._bfloat16)

    def make_state(self) -> State | None:
        """Return a new state, all zeros, to pass to ``run``; None for a program without states."""
        return self.executable.make_state()

    def run(self, *arrays: Any, state: State | None = None) -> tuple[NDArray[Any], ...]:
        """Run once.

        Args:
            arrays: An array for each parameter: NumPy's, or anything with ``__dlpack__``. A
                parameter that is bfloat16 in the source takes bfloat16 and float32.
            state: From ``make_state``; updated in place.

        Returns:
            The results of ``main`` without states.

        Raises:
            InputError: A wrong number of arrays, a wrong shape or element type.
            ExecutionError: An op failed.
        """
        return self.executable.run(*_in_model_types(arrays, self._bfloat16), state=state)

    @property
    def precision(self) -> PrecisionReport | None:
        """With precision ``auto``: which operations compute in fp32; see ``Executable``."""
        return self.executable.precision

    def measure_precision(
        self, samples: Iterable[Sequence[Any]], min_sqnr_db: float = MIN_SQNR_DB
    ) -> PrecisionReport:
        """Measure how exact the program is; see ``Executable.measure_precision``."""
        inputs = [_in_model_types(sample, self._bfloat16) for sample in samples]
        return self.executable.measure_precision(inputs, min_sqnr_db)

    def save(self, path: Path | str, interface: ModelInterface | None = None) -> None:
        """Write the model as an ``.mlpackage`` or ``.pte``; see ``Executable.save``."""
        self.executable.save(path, interface)

    def __repr__(self) -> str:
        return f"<Program{self.executable.signature}>"


def _in_model_types(arrays: Sequence[Any], bfloat16: Collection[int]) -> list[Any]:
    """Convert bfloat16 arrays of the parameters at positions ``bfloat16`` to float32."""
    return [
        np.asarray(array).astype(np.float32)
        if n in bfloat16 and str(getattr(array, "dtype", "")) == "bfloat16"
        else array
        for n, array in enumerate(arrays)
    ]


def compile(
    source: Any,
    engine: str = AUTO,
    *,
    states: Mapping[int | str, int] | None = None,
    dimensions: Mapping[str, Range] | None = None,
    bfloat16: str = "refuse",
    target: Any = Opset.iOS18,
    precision: Any = Precision.FLOAT32,
    compute_units: Any = "ALL",
    device: Any = None,
    options: EngineOptions | None = None,
    precision_data: Collection[Sequence[Any]] | None = None,
    min_sqnr_db: float = MIN_SQNR_DB,
) -> Program:
    """Compile a StableHLO program.

    Args:
        source: MLIR text; MLIR bytecode, a portable artifact or a serialized ``jax.export`` as
            bytes; the path of a file with any of these; a ``jax.export.Exported`` or a
            ``jax.stages.Lowered``.
        engine: ``auto``, or the name of the engine that runs the program on this machine.
        states: Arguments of ``main``, by position or name, that become states, each with the
            position of the result that replaces it.
        dimensions: Symbolic sizes of the program, by name: the least and the most (by default what
            the program says, else 1 to 16,384), the size itself, or the name of an equal size.
            Names are from ``jax.export``, or ``x_0`` for the first size of argument ``x``.
        bfloat16: ``refuse``, or ``float32`` to compute values of this type in float32; results are
            float32 as well.
        target: Deployment target, a ``ct.target`` or its name.
        precision: Floating-point type for values of float32; see ``graph.Backend``.
        compute_units: Where a device may run the program: a ``ct.ComputeUnit``, or its name.
        device: Processor that the program is shaped for; see ``graph.Backend``.
        options: Options of the engine.
        precision_data: With precision ``auto``, the inputs to measure with: a list of samples, each
            a tuple of the arrays of a call, see ``Program.run``.
        min_sqnr_db: See ``graph.Builder.compile``.

    Raises:
        InputError: A sample of ``precision_data`` does not fit the program.
        LoweringError: ``source`` is not StableHLO, or Core ML cannot express it; names the
            operation and its location in the source.
        OptionError: An option that is not accepted.
        OSError: The file cannot be read.
    """
    backend = Backend(
        engine,
        target=target,
        precision=precision,
        compute_units=compute_units,
        device=device,
        options=options,
    )
    samples = checked(PartitionerKeywords, "precision_data", precision_data)
    read = _read(source, backend, states or {}, dimensions or {}, bfloat16)
    bfloat16_inputs = [
        n for n, (_, type) in enumerate(read.inputs) if str(type.element_type) == BFLOAT16
    ]
    executable = read.builder.compile(
        read.outputs,
        states={value: read.results[n] for value, n in read.result_by_state.items()},
        precision_data=samples and [_in_model_types(s, bfloat16_inputs) for s in samples],
        min_sqnr_db=min_sqnr_db,
    )
    for what in read.reader.narrowed:
        logger.info("%s", what)
    return Program(executable, list(read.reader.narrowed), bfloat16_inputs)


def input_types(
    source: Any,
    *,
    states: Mapping[int | str, int] | None = None,
    dimensions: Mapping[str, Range] | None = None,
) -> tuple[dict[str, TensorType], dict[str, Dimension]]:
    """Return the types of a program's inputs by name, and its symbolic sizes, without compiling it.

    For the arguments and errors see ``compile``.
    """
    read = _read(source, Backend(), states or {}, dimensions or {}, _BFLOAT16[0])
    names = {value: name for name, value in read.builder.parameters.items()}
    types = {names[value]: value.type for value, _ in read.inputs}
    return types, dict(read.builder.dimensions)


def convert(source: Any, path: Path | str, **options: Any) -> Program:
    """Compile a StableHLO program, and write the model.

    Args:
        source: See ``compile``.
        path: A ``.mlpackage`` or ``.pte``; an existing file is replaced.
        options: Options of ``compile``.

    Returns:
        The program, on the reference engine by default.

    Raises:
        LoweringError: See ``compile``.
        OptionError: See ``compile``; or another suffix.
        OSError: The file cannot be written; an existing file stays unchanged.
    """
    compile_options: dict[str, Any] = {"engine": "reference", **options}
    program = compile(source, **compile_options)
    program.save(path)
    return program


@dataclass(frozen=True, slots=True)
class _ReadProgram:
    """A program, read into a graph.

    Attributes:
        builder: Has the graph.
        reader: Has read it.
        arguments: The arguments of ``main``.
        results: The results of ``main``.
        result_by_state: Position of the result that replaces each argument that is a state.
    """

    builder: Builder
    reader: Reader
    arguments: Sequence[Value]
    results: Sequence[Value]
    result_by_state: Mapping[Value, int]

    @property
    def inputs(self) -> list[tuple[Value, Any]]:
        """The arguments without the states, each with its type in MLIR."""
        pairs = zip(self.arguments, _types(self.reader), strict=True)
        return [(value, type) for value, type in pairs if value not in self.result_by_state]

    @property
    def outputs(self) -> dict[str, Value]:
        """The results that replace no state, by name."""
        names = result_names(self.reader.main, len(self.results), list(self.builder.parameters))
        replacing = set(self.result_by_state.values())
        pairs = enumerate(zip(names, self.results, strict=True))
        return {name: value for n, (name, value) in pairs if n not in replacing}


def _read(
    source: Any,
    backend: Backend,
    states: Mapping[int | str, int],
    dimensions: Mapping[str, Range],
    bfloat16: str,
) -> _ReadProgram:
    if bfloat16 not in _BFLOAT16:
        raise OptionError(
            "unknown way to read bfloat16", got=repr(bfloat16), expected=" | ".join(_BFLOAT16)
        )
    builder = backend.builder()
    reader = Reader(mlir_module(source), builder, bfloat16_as_float32=bfloat16 == "float32")
    arguments = _parameters(reader, builder, dimensions)
    results = reader.read(arguments)
    return _ReadProgram(builder, reader, arguments, results, _states(states, builder, results))


def _types(reader: Reader) -> list[Any]:
    """Return MLIR's types of the arguments of ``main``."""
    return [argument.type for argument in reader.main.regions[0].blocks[0].arguments]


def _parameters(reader: Reader, builder: Builder, dimensions: Mapping[str, Range]) -> list[Value]:
    names = argument_names(reader.main, reader.functions)
    declared = declared_shapes(reader.main, reader.functions, names, dimensions)
    builder.dimensions.update(declared.dimensions)
    values: list[Value] = []
    for name, type, shape in zip(names, _types(reader), declared.shapes, strict=True):
        try:
            dtype = reader.dtype(type)
        except CoreMLDelegateError as error:
            raise with_location(error, f"argument {name!r}", "") from error
        reader.narrow(f"argument {name!r}", dtype)
        values.append(builder.parameter(name, dtype, shape))
        values[-1].node.source = ""
    return values


def _states(
    states: Mapping[int | str, int], builder: Builder, results: Sequence[Value]
) -> dict[Value, int]:
    parameters = list(builder.parameters.items())
    named = dict(parameters)
    result_by_state: dict[Value, int] = {}
    for argument, result in states.items():
        if isinstance(argument, str) and argument not in named:
            raise OptionError(
                "states names an argument that main does not have",
                got=repr(argument),
                expected=near_matches(argument, named),
            )
        if not isinstance(argument, str) and not 0 <= argument < len(parameters):
            raise OptionError(
                "states has a position that main does not have",
                got=str(argument),
                expected=f"0 to {len(parameters) - 1}",
            )
        if not 0 <= result < len(results):
            raise OptionError(
                "states has a result that main does not have",
                got=str(result),
                expected=f"0 to {len(results) - 1}",
            )
        value = named[argument] if isinstance(argument, str) else parameters[argument][1]
        result_by_state[value] = result
    return result_by_state

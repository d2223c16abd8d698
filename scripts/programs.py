"""A ``.pte``, an ``.mlpackage`` or StableHLO, loaded to be run or traced by the same calls."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
import torch

from coreml_delegate import runtime
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.formats.mlpackage import map_package
from coreml_delegate.runtime import hosts
from coreml_delegate.runtime.delegate import CoreMLDelegate, delegate_loader, read_blob
from coreml_delegate.runtime.diagnosis import Diagnosis
from coreml_delegate.runtime.engines.selection import OPENVINO, REFERENCE
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Classifier, Feature, Function
from coreml_delegate.runtime.mil.reader import read_files
from coreml_delegate.runtime.pipeline import read_pipeline
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID, DelegatePayload
from coreml_delegate.runtime.program.plan import JumpFalseCall, TensorSpec
from coreml_delegate.runtime.program.pte import PteProgram
from coreml_delegate.runtime.program.signature import input_names, mutated_inputs, output_names
from coreml_delegate.runtime.program.states import snapshot, states_of
from coreml_delegate.runtime.snapshots import Snapshot
from coreml_delegate.scripts.delegates import open_pte, partition_names, partitions_of
from coreml_delegate.scripts.stablehlo_files import (
    compile_file,
    default_shape,
    is_stablehlo,
    torch_dtype,
)
from coreml_delegate.source_model import Outcome

if TYPE_CHECKING:
    from coreml_delegate.stablehlo import Program

PACKAGE_SUFFIX = ".mlpackage"
MODEL_SUFFIX = ".mlmodel"

# The type in which the openvino engine computes floating-point values.
_COMPUTED = {runtime.Precision.F32: DType.FP32, runtime.Precision.BF16: DType.BF16}


@dataclass(frozen=True, slots=True)
class Port:
    """An input of a program.

    Attributes:
        name: Feature name; in a ``.pte`` its path, or its position if the file has no names.
        dtype: Element type.
        shape: Default shape: the largest for a ``.pte``, the declared for an ``.mlpackage``.
        is_tensor: Whether the input is a tensor; its dtype and shape mean nothing otherwise.
        fixed: The value the program was exported for, if the input is no tensor.
        image: The feature, if the input of an ``.mlpackage`` is an image; None for an array.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_tensor: bool = True
    fixed: bool | float | str | None = None
    image: Feature | None = None


Output: TypeAlias = torch.Tensor | None
"""A result of a program or its model; a number is a scalar tensor, a text is None."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The engines that run the Core ML models of a program, and the types they compute in.

    Attributes:
        engines: The floating-point types that each engine computes in, by engine name.
        declared: The types that the program declares for the models that the engine runs.
    """

    engines: Mapping[str, tuple[str, ...]]
    declared: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, executions: Iterable[Execution]) -> Execution:
        """Merge executions: all of their engines, each with all of its types."""
        parts = list(executions)
        return cls(_union([e.engines for e in parts]), _union([e.declared for e in parts]))

    def __str__(self) -> str:
        return ", ".join(map(self._describe, self.engines)) or "no engine of this package"

    def _describe(self, engine: str) -> str:
        types, declared = self.engines[engine], self.declared[engine]
        remark = "" if types == declared else f" (the program declares {' and '.join(declared)})"
        return f"{engine} in {' and '.join(types) or 'integers'}{remark}"


def _union(mappings: Sequence[Mapping[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for mapping in mappings for name in mapping)
    return {
        name: tuple(sorted({type_ for mapping in mappings for type_ in mapping.get(name, ())}))
        for name in names
    }


class LoadedProgram(Protocol):
    """A program ready to be called."""

    @property
    def host_name(self) -> str:
        """Name of the host that runs it; empty for a program that needs none."""
        ...

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Its inputs, in order."""
        ...

    @property
    def execution(self) -> Execution:
        """The engines that run it."""
        ...

    @property
    def classifiers(self) -> tuple[Classifier, ...]:
        """Its class labels, each with the name of the output that has their probabilities."""
        ...

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        """Run once.

        Args:
            inputs: As the model takes them; an ``.mlpackage`` takes only the tensors.

        Returns:
            Outputs by name, in order.
        """
        ...

    def states(self) -> Snapshot:
        """Return copies of the states of its Core ML models, by name."""
        ...

    def expected_of(self, outcome: Outcome) -> list[Output]:
        """Return the expected outputs, in order, from a run of the model."""
        ...


def load(
    path: Path,
    *,
    method: str | None,
    host: str = runtime.AUTO,
    engine: str | None = runtime.AUTO,
    options: runtime.EngineOptions | None = None,
    data: Sequence[Path] = (),
) -> LoadedProgram:
    """Load a program.

    Args:
        path: ``.pte`` file, ``.mlpackage`` folder or StableHLO file.
        method: Method, or function of the package; None for ``forward``, the only method, or the
            default function.
        host: ``auto``, ``python`` or ``stock``; an ``.mlpackage`` needs none.
        engine: ``auto``, or an engine's name; None for the fastest engine that computes
            in the program's own types.
        options: Engine options.
        data: The ``.ptd`` files of a ``.pte`` with external data.

    Raises:
        CoreMLDelegateError: See ``runtime.load_program`` and ``runtime.load_mlpackage``.
    """
    options = options or runtime.EngineOptions()
    if is_stablehlo(path):
        _refuse_options_of_pte(path, host=host, data=data, method=method)
        return _LoadedStableHLO(compile_file(path, engine, options), options)
    if engine is None:
        engine = _judging_engine(path, method, options, data)
    if is_package(path):
        _refuse_options_of_pte(path, host=host, data=data)
        return _LoadedPackage(
            runtime.load_mlpackage(path, function_name=method, engine=engine, options=options),
            options,
        )
    program = runtime.load_program(
        path, data=data or None, host=host, engine=engine, options=options
    )
    return _LoadedPte(program, method or default_method(program.method_names), options)


def median_latency(program: LoadedProgram, inputs: Sequence[Any], repeat: int) -> float:
    """Return the median of ``repeat`` runs in milliseconds, of a program that has run before."""
    return statistics.median(_timed(program, inputs) for _ in range(repeat))


def _timed(program: LoadedProgram, inputs: Sequence[Any]) -> float:
    start = time.perf_counter()
    program.run(inputs)
    return (time.perf_counter() - start) * 1e3


DEBUG_BUFFER: Final = 2**30
"""Bytes that the values of a traced run may take."""


class TracedProgram:
    """A ``.pte`` whose runs are logged.

    Args:
        program: Loaded with ``enable_etdump``.
        method: The method that runs.
    """

    def __init__(self, program: runtime.PythonProgram | runtime.StockProgram, method: str) -> None:
        self._program = program
        self._method = method
        self.inputs = program_ports(program, method)
        chains = program.program.method(method).chains
        self.has_jumps = any(isinstance(i, JumpFalseCall) for chain in chains for i in chain)

    def run(self, inputs: Sequence[Any]) -> None:
        """Run once."""
        self._program.run(self._method, inputs)

    def events(self) -> tuple[bytes, bytes]:
        """Return the ETDump and the debug buffer of all runs."""
        with tempfile.TemporaryDirectory(prefix="coreml-delegate-") as folder:
            etdump, values = Path(folder) / "etdump", Path(folder) / "values"
            self._program.write_etdump_result_to_file(etdump, values)
            return etdump.read_bytes(), values.read_bytes()


def load_traced(
    path: Path,
    *,
    method: str | None,
    host: str,
    engine: str,
    options: runtime.EngineOptions,
    data: Sequence[Path],
    debug_buffer_size: int,
) -> TracedProgram:
    """Load a program whose runs are logged.

    Args:
        path: ``.pte`` file.
        method: See ``load``, as for the next four.
        host: One of ``HOSTS``.
        engine: An engine, or ``auto``.
        options: Engine options.
        data: ``.ptd`` files.
        debug_buffer_size: See ``runtime.load_program``.

    Raises:
        OptionError: The program is no ``.pte``.
        CoreMLDelegateError: See ``runtime.load_program``.
    """
    if is_stablehlo(path) or is_package(path):
        raise OptionError("only a .pte has events for ExecuTorch's Inspector", got=str(path))
    program = runtime.load_program(
        path,
        data=data or None,
        host=host,
        engine=engine,
        options=options,
        enable_etdump=True,
        debug_buffer_size=debug_buffer_size,
    )
    return TracedProgram(program, method or default_method(program.method_names))


def _refuse_options_of_pte(
    path: Path, *, host: str, data: Sequence[Path], method: str | None = None
) -> None:
    options = {
        "--host": host != runtime.AUTO,
        "--data": bool(data),
        "--method": method is not None,
    }
    for option, is_given in options.items():
        if is_given:
            raise OptionError(f"{option} is for a .pte", got=str(path))


def engine_options(args: argparse.Namespace) -> runtime.EngineOptions:
    """Return the engine options of the arguments of ``add_engine``."""
    return runtime.EngineOptions(
        threads=args.threads,
        precision=args.engine_precision,
        exact_nan=args.exact_nan,
        dynamic_quantization=args.dynamic_quantization,
        compute_unit=args.compute_unit,
    )


def _judging_engine(
    path: Path, method: str | None, options: runtime.EngineOptions, data: Sequence[Path]
) -> str:
    """Return the engine that computes in the program's own types.

    An engine that computes in fp32 shows neither rounding nor overflow of fp16.
    """
    if options.numerics_option is not None:
        return runtime.AUTO  # only one engine has the option
    types = {
        dtype for function in _functions(path, method, data) for dtype in function.computed_in()
    }
    return REFERENCE.name if any(dtype.bits < DType.FP32.bits for dtype in types) else runtime.AUTO


def _functions(path: Path, method: str | None, data: Sequence[Path]) -> Iterator[Function]:
    """Yield the MIL functions of a package, or of one method of a ``.pte``."""
    if is_package(path):
        files = map_package(path)
        pipeline = read_pipeline(files)
        for package in (files,) if pipeline is None else pipeline.packages():
            yield read_files(package).function(method)
        return
    pte = open_pte(path, data)
    info = pte.method(method or default_method(pte.method_names))
    for partition in partitions_of(pte, info):
        program, _ = read_blob(partition.blob)
        reference = partition.reference
        yield program.function(None if reference is None else reference.function_name)


def _execution(models: Sequence[runtime.Model], options: runtime.EngineOptions) -> Execution:
    declared: dict[str, set[str]] = {}
    for model in models:
        types = {dtype.label for dtype in model.function.computed_in()}
        declared.setdefault(model.engine_name, set()).update(types)
    fast = _COMPUTED[runtime.Precision(options.precision)].label
    return Execution(
        {
            name: tuple(sorted(types)) if name != OPENVINO.name else (fast,) if types else ()
            for name, types in declared.items()
        },
        {name: tuple(sorted(types)) for name, types in declared.items()},
    )


def is_package(path: Path) -> bool:
    """Whether ``path`` is taken for a model of Core ML rather than a ``.pte``."""
    return path.suffix in (PACKAGE_SUFFIX, MODEL_SUFFIX) or path.is_dir()


def default_method(names: Sequence[str]) -> str:
    """Return the method to run when the caller names none."""
    return names[0] if len(names) == 1 else "forward"


class _LoadedPte:
    classifiers = ()

    def __init__(
        self,
        program: runtime.PythonProgram | runtime.StockProgram,
        method: str,
        options: runtime.EngineOptions,
    ) -> None:
        self._program = program
        self._method = method
        self.host_name = program.host_name
        self.inputs = program_ports(program, method)
        program.load_method(method)
        info = program.program.method(method)
        self._mutated = mutated_inputs(info)
        self._outputs = output_names(info)
        delegates = program.delegates(method)
        models = [delegate.model for delegate in delegates if isinstance(delegate, CoreMLDelegate)]
        self.execution = _execution(models, options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        results = self._program.run(self._method, inputs)
        return {
            name: as_output(result) for name, result in zip(self._outputs, results, strict=True)
        }

    def states(self) -> Snapshot:
        states = states_of(self._method, self._program.delegates(self._method))
        return snapshot(dict(states))

    def expected_of(self, outcome: Outcome) -> list[Output]:
        mutated = [outcome.inputs[position] for position in self._mutated.values()]
        return [as_output(value) for value in (*mutated, *outcome.results)]


def as_output(value: object) -> Output:
    """Convert a value that a model returns to an output of a program."""
    if isinstance(value, torch.Tensor):
        return value
    if value is None or isinstance(value, str):
        return None  # as a .pte, which has None in place of a text
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int):
        return torch.tensor(value)
    raise ProgramError(
        "the model returns a value that no program can return",
        got=repr(value),
        expected="tensors, numbers, texts and None",
    )


def program_ports(
    program: runtime.PythonProgram | runtime.StockProgram, method: str
) -> tuple[Port, ...]:
    """Return the inputs of a method of a ``.pte``."""
    info = program.program.method(method)
    return tuple(map(_port, input_names(info), info.input_specs))


def _port(name: str, spec: Any) -> Port:
    if isinstance(spec, TensorSpec):
        return Port(name, spec.dtype, spec.shape)
    return Port(name, torch.float32, (), is_tensor=False, fixed=spec)


class _LoadedPackage:
    host_name = ""

    def __init__(
        self, model: runtime.Model | runtime.Pipeline, options: runtime.EngineOptions
    ) -> None:
        self._model = model
        self._state = model.make_state()
        # The thresholds of a pipeline keep their defaults.
        is_model = isinstance(model, runtime.Model)
        self.inputs = tuple(feature_port(f) for f in model.inputs if is_model or not f.optional)
        self.classifiers = model.classifiers
        self.execution = _execution([model] if is_model else model.models, options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        arrays = {port.name: t.numpy() for port, t in zip(self.inputs, tensors, strict=True)}
        results = self._model.compute(arrays, self._state)
        return {name: torch.from_numpy(array) for name, array in results.items()}

    def states(self) -> Snapshot:
        return {} if self._state is None else self._state.snapshot()

    def expected_of(self, outcome: Outcome) -> list[Output]:
        return [value for value in outcome.results if isinstance(value, torch.Tensor)]


class _LoadedStableHLO:
    host_name = ""
    classifiers = ()

    def __init__(self, program: Program, options: runtime.EngineOptions) -> None:
        self._program = program
        self.inputs = stablehlo_ports(program)
        self.execution = _execution([program.executable.model], options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        results = self._program.run(*(tensor.numpy() for tensor in inputs))
        return {
            name: torch.from_numpy(np.array(array))
            for name, array in zip(self._program.outputs, results, strict=True)
        }

    def states(self) -> Snapshot:
        return {}

    def expected_of(self, outcome: Outcome) -> list[Output]:
        return [value for value in outcome.results if isinstance(value, torch.Tensor)]


def stablehlo_ports(program: Program) -> tuple[Port, ...]:
    """Return the inputs of a StableHLO program."""
    return tuple(
        Port(name, torch_dtype(type), default_shape(program, type))
        for name, type in program.parameters.items()
    )


def feature_port(feature: Feature) -> Port:
    """Return an input of an ``.mlpackage``."""
    shape = tuple(1 if d is None else d for d in feature.type.shape or ())
    if feature.shapes:
        shape = feature.shapes[0]
    elif feature.bounds:
        shape = tuple(max(size, low) for size, (low, _) in zip(shape, feature.bounds, strict=True))
    dtype = torch.from_numpy(np.empty(0, feature.type.dtype.numpy)).dtype
    return Port(
        feature.name, dtype, shape, image=feature if feature.color_space is not None else None
    )


class TraceableProgram(Protocol):
    """A program ready to be traced."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Its inputs, in order."""
        ...

    def diagnose(self, inputs: Sequence[Any]) -> list[tuple[str, Diagnosis]]:
        """Run once; return each Core ML model's name and diagnosis, in execution order."""
        ...


def load_traceable(path: Path, *, method: str | None, min_sqnr_db: float) -> TraceableProgram:
    """Load a program to be traced.

    Args:
        path: ``.pte`` file, ``.mlpackage`` folder or StableHLO file.
        method: Method, or function of the package; None for ``forward``, the only method, or the
            default function.
        min_sqnr_db: A value below it, in dB, is bad.

    Raises:
        CoreMLDelegateError: See ``runtime.load_program`` and ``runtime.load_mlpackage``.
    """
    if is_stablehlo(path):
        _refuse_options_of_pte(path, host=runtime.AUTO, data=(), method=method)
        model = compile_file(path, REFERENCE.name).executable.model
        return _TraceablePackage(path.stem, model, min_sqnr_db)
    if is_package(path):
        files = map_package(path)
        model = runtime.Model.from_files(files, function_name=method, engine=REFERENCE.name)
        return _TraceablePackage(path.stem, model, min_sqnr_db)
    return _TraceablePte(path, method, min_sqnr_db)


class _TraceablePackage:
    def __init__(self, name: str, model: runtime.Model, min_sqnr_db: float) -> None:
        self._name = name
        self._model = model
        self._min_sqnr_db = min_sqnr_db
        self.inputs = tuple(feature_port(feature) for feature in model.function.inputs)

    def diagnose(self, inputs: Sequence[Any]) -> list[tuple[str, Diagnosis]]:
        arrays = {port.name: value.numpy() for port, value in zip(self.inputs, inputs, strict=True)}
        diagnosis = self._model.diagnose(
            arrays, self._model.make_state(), min_sqnr_db=self._min_sqnr_db
        )
        return [(self._name, diagnosis)]


class _TraceablePte:
    def __init__(self, path: Path, method: str | None, min_sqnr_db: float) -> None:
        self._diagnoses: list[tuple[str, Diagnosis]] = []
        self._min_sqnr_db = min_sqnr_db
        self._load_delegate = delegate_loader(REFERENCE.name)
        opened = PteProgram.open(path)
        self._method = method or default_method(opened.method_names)
        # Hosts load the delegates of a method in the order of the file.
        names = {info.name: partition_names(info) for info in opened.methods}
        self._names = {name: iter(delegates.values()) for name, delegates in names.items()}
        if not partition_names(opened.method(self._method)):
            raise ProgramError(
                f"method {self._method!r} has no {COREML_BACKEND_ID} delegate", got=path.name
            )
        self._program = hosts.load(path, self._load, engine=REFERENCE.name)
        self.inputs = program_ports(self._program, self._method)
        self._program.load_method(self._method)

    def diagnose(self, inputs: Sequence[Any]) -> list[tuple[str, Diagnosis]]:
        self._diagnoses.clear()
        self._program.run(self._method, inputs)
        return list(self._diagnoses)

    def _load(self, payload: DelegatePayload) -> _TraceableDelegate:
        name = next(self._names[payload.method_name])
        loaded = self._load_delegate(payload)
        if not isinstance(loaded, CoreMLDelegate):
            raise ProgramError("the delegate cannot be traced", got=type(loaded).__name__)
        return _TraceableDelegate(name, loaded, self._min_sqnr_db, self._diagnoses)


class _TraceableDelegate:
    """A delegate that is diagnosed at every call, before it runs."""

    native = None

    def __init__(
        self,
        name: str,
        delegate: CoreMLDelegate,
        min_sqnr_db: float,
        diagnoses: list[tuple[str, Diagnosis]],
    ) -> None:
        self._name = name
        self._delegate = delegate
        self._min_sqnr_db = min_sqnr_db
        self._diagnoses = diagnoses
        self.input_count = delegate.input_count

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        diagnosis = self._delegate.diagnose(inputs, min_sqnr_db=self._min_sqnr_db)
        self._diagnoses.append((self._name, diagnosis))
        return self._delegate(inputs)

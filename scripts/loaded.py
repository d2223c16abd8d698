"""A ``.pte`` or an ``.mlpackage``, loaded to be called the same way."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from coreml_delegate import runtime
from coreml_delegate.errors import OptionError, ProgramError
from coreml_delegate.runtime.delegate import CoreMLDelegate, read_blob
from coreml_delegate.runtime.engines.selection import REFERENCE
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Feature, Function
from coreml_delegate.runtime.mil.reader import read_mlpackage
from coreml_delegate.runtime.program.plan import TensorSpec
from coreml_delegate.runtime.program.states import mutated_inputs
from coreml_delegate.scripts.delegates import open_pte, partitions_of

if TYPE_CHECKING:
    from coreml_delegate.scripts.inputs.source import Outcome

PACKAGE_SUFFIX = ".mlpackage"

# What the fast engine computes floating-point values in.
_COMPUTED = {runtime.Precision.F32: DType.FP32, runtime.Precision.BF16: DType.BF16}


@dataclass(frozen=True, slots=True)
class Port:
    """An input of a program.

    Attributes:
        name: Feature name; in a ``.pte``, which names no inputs, its position.
        dtype: Element type.
        shape: Shape to choose when the caller gives none: the largest for a ``.pte``, the default
            for an ``.mlpackage``.
        is_tensor: Whether the input is a tensor; its dtype and shape mean nothing otherwise.
        fixed: The value the program was exported for, if the input is no tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_tensor: bool = True
    fixed: bool | float | str | None = None


Output: TypeAlias = torch.Tensor | None
"""A result of a program or its model: a number is a scalar."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What runs the Core ML models of a program.

    Attributes:
        engines: The floating-point types that each engine computes in, by its name.
        declared: Those that the program declares, in the models that the engine runs.
    """

    engines: Mapping[str, tuple[str, ...]]
    declared: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return ", ".join(map(self._describe, self.engines)) or "no engine of this package"

    def _describe(self, engine: str) -> str:
        types, declared = self.engines[engine], self.declared[engine]
        remark = "" if types == declared else f" (the program declares {' and '.join(declared)})"
        return f"{engine} in {' and '.join(types) or 'integers'}{remark}"


class Loaded(Protocol):
    """A program ready to be called."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Its inputs, in order."""
        ...

    @property
    def execution(self) -> Execution:
        """What runs it."""
        ...

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        """Run once.

        Args:
            inputs: As the model takes them; an ``.mlpackage`` takes the tensors alone.

        Returns:
            Outputs by name, in order.
        """
        ...

    def expected_of(self, outcome: Outcome) -> list[Output]:
        """What the outputs should be, in order, given a run of the model."""
        ...


def load(
    path: Path,
    *,
    method: str | None,
    host: str = runtime.AUTO,
    engine: str | None = runtime.AUTO,
    options: runtime.EngineOptions | None = None,
    data: Sequence[Path] = (),
) -> Loaded:
    """Load a program.

    Args:
        path: ``.pte`` file or ``.mlpackage`` folder.
        method: Method, or function of the package; None for ``forward``, the only method, or the
            default function.
        host: ``auto``, ``python`` or ``stock``; an ``.mlpackage`` needs none.
        engine: ``auto``, ``openvino`` or ``reference``; None for the fastest whose numbers are
            those of the program's own types.
        options: How to execute.
        data: What a ``.pte`` keeps outside: ``.ptd`` files.

    Raises:
        CoreMLDelegateError: See ``runtime.load_program`` and ``runtime.load_mlpackage``.
    """
    options = options or runtime.EngineOptions()
    if engine is None:
        engine = _judging_engine(path, method, options, data)
    if is_package(path):
        for option, given in (("--host", host != runtime.AUTO), ("--data", bool(data))):
            if given:
                raise OptionError(f"{option} goes with a .pte", got=str(path))
        return _Package(
            runtime.load_mlpackage(path, function_name=method, engine=engine, options=options),
            options,
        )
    program = runtime.load_program(
        path, data=data or None, host=host, engine=engine, options=options
    )
    return _Program(program, method or default_method(program.method_names), options)


def engine_options(args: argparse.Namespace) -> runtime.EngineOptions:
    """How to execute, as the arguments of ``add_engine`` say."""
    return runtime.EngineOptions(
        threads=args.threads, precision=args.engine_precision, exact_nan=args.exact_nan
    )


def _judging_engine(
    path: Path, method: str | None, options: runtime.EngineOptions, data: Sequence[Path]
) -> str:
    """The engine whose numbers tell what the program's own would be.

    One that computes in fp32 shows neither what fp16 rounds nor what overflows in it.
    """
    if options.precision is not runtime.Precision.F32:
        return runtime.AUTO  # asked for, which only one engine can do
    types = {
        dtype for function in _functions(path, method, data) for dtype in function.computed_in()
    }
    return REFERENCE.name if any(dtype.bits < DType.FP32.bits for dtype in types) else runtime.AUTO


def _functions(path: Path, method: str | None, data: Sequence[Path]) -> Iterator[Function]:
    """The functions that a method of a ``.pte`` runs, or the one of a package."""
    if is_package(path):
        program = read_mlpackage(path)
        yield program.function(method)
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
            name: tuple(sorted(types)) if name == REFERENCE.name else (fast,) if types else ()
            for name, types in declared.items()
        },
        {name: tuple(sorted(types)) for name, types in declared.items()},
    )


def is_package(path: Path) -> bool:
    """Whether ``path`` is taken for an ``.mlpackage`` rather than a ``.pte``."""
    return path.suffix == PACKAGE_SUFFIX or path.is_dir()


def default_method(names: Sequence[str]) -> str:
    """The method to run when the caller names none."""
    return names[0] if len(names) == 1 else "forward"


class _Program:
    def __init__(
        self,
        program: runtime.PythonProgram | runtime.StockProgram,
        method: str,
        options: runtime.EngineOptions,
    ) -> None:
        self._program = program
        self._method = method
        self.inputs = program_ports(program, method)
        program.load_method(method)
        self._mutated = mutated_inputs(program.program.method(method))
        delegates = program.delegates(method)
        models = [delegate.model for delegate in delegates if isinstance(delegate, CoreMLDelegate)]
        self.execution = _execution(models, options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        results = self._program.run(self._method, inputs)
        returned = itertools.count()
        return {
            f"mutated_input_{self._mutated[position]}"
            if position in self._mutated
            else f"output_{next(returned)}": _output(result)
            for position, result in enumerate(results)
        }

    def expected_of(self, outcome: Outcome) -> list[Output]:
        mutated = [outcome.inputs[position] for position in self._mutated.values()]
        return [_output(value) for value in (*mutated, *outcome.results)]


def _output(value: object) -> Output:
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int):
        return torch.tensor(value)
    raise ProgramError(
        "the model returns something that no program does",
        got=repr(value),
        expected="tensors, numbers and None",
    )


def program_ports(
    program: runtime.PythonProgram | runtime.StockProgram, method: str
) -> tuple[Port, ...]:
    """The inputs of a method of a ``.pte``."""
    specs = program.program.method(method).input_specs
    return tuple(_port(index, spec) for index, spec in enumerate(specs))


def _port(index: int, spec: Any) -> Port:
    if isinstance(spec, TensorSpec):
        return Port(str(index), spec.dtype, spec.shape)
    return Port(str(index), torch.float32, (), is_tensor=False, fixed=spec)


class _Package:
    def __init__(self, model: runtime.Model, options: runtime.EngineOptions) -> None:
        self._model = model
        self._state = model.make_state()
        self.inputs = tuple(feature_port(feature) for feature in model.function.inputs)
        self.execution = _execution([model], options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        arrays = {port.name: t.numpy() for port, t in zip(self.inputs, tensors, strict=True)}
        results = self._model.predict(arrays, self._state)
        return {name: torch.from_numpy(array) for name, array in results.items()}

    def expected_of(self, outcome: Outcome) -> list[Output]:
        return [value for value in outcome.results if isinstance(value, torch.Tensor)]


def feature_port(feature: Feature) -> Port:
    """An input of an ``.mlpackage``."""
    shape = tuple(1 if d is None else d for d in feature.type.shape or ())
    if feature.shapes:
        shape = feature.shapes[0]
    elif feature.bounds:
        shape = tuple(max(size, low) for size, (low, _) in zip(shape, feature.bounds, strict=True))
    dtype = torch.from_numpy(np.empty(0, feature.type.dtype.numpy)).dtype
    return Port(feature.name, dtype, shape)

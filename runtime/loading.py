"""``load``: a program of any format, run and examined by the same calls."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from coreml_delegate.errors import BlobFormatError, OptionError, ProgramError
from coreml_delegate.formats.added_steps import AddedSteps
from coreml_delegate.formats.blob import unflatten
from coreml_delegate.options.engine_options import EngineOptions, Precision
from coreml_delegate.runtime.delegate import CoreMLDelegate, delegate_names, load_blob
from coreml_delegate.runtime.diagnosis import INACCURATE_BELOW_DB, Diagnosis
from coreml_delegate.runtime.engines.selection import AUTO, OPENVINO, REFERENCE
from coreml_delegate.runtime.hosts import load_program
from coreml_delegate.runtime.mil.dtypes import DType
from coreml_delegate.runtime.mil.program import Classifier, Feature
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.pipeline import Pipeline, load_mlpackage
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID
from coreml_delegate.runtime.program.host_program import HostProgram, snapshot, states_of
from coreml_delegate.runtime.program.plan import TensorSpec, ValueSpec
from coreml_delegate.runtime.program.ptd import Sources
from coreml_delegate.runtime.program.pte import holds_program, map_source
from coreml_delegate.runtime.program.signature import input_names, mutated_inputs, output_names
from coreml_delegate.runtime.snapshots import Snapshot

Output: TypeAlias = torch.Tensor | None
"""A result of a program or its model; a number is a scalar tensor, a text is None."""

# The type in which the openvino engine computes floating-point values.
_COMPUTED = {Precision.F32: DType.FP32, Precision.BF16: DType.BF16}


@dataclass(frozen=True, slots=True)
class Input:
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

    @classmethod
    def of_feature(cls, feature: Feature) -> Input:
        """Return the input that a feature of an ``.mlpackage`` declares."""
        shape = tuple(1 if d is None else d for d in feature.type.shape or ())
        if feature.shapes:
            shape = feature.shapes[0]
        elif feature.bounds:
            lows = (low for low, _ in feature.bounds)
            shape = tuple(max(size, low) for size, low in zip(shape, lows, strict=True))
        dtype = getattr(torch, feature.type.dtype.numpy.name)
        image = None if feature.color_space is None else feature
        return cls(feature.name, dtype, shape, image=image)

    @classmethod
    def of_value(cls, name: str, spec: ValueSpec) -> Input:
        """Return the input that a method of a ``.pte`` declares."""
        if isinstance(spec, TensorSpec):
            return cls(name, spec.dtype, spec.shape)
        fixed: Any = spec
        return cls(name, torch.float32, (), is_tensor=False, fixed=fixed)


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
    def of_models(cls, models: Sequence[Model], options: EngineOptions) -> Execution:
        """Return the execution of models that were loaded with ``options``."""
        types = {
            name: {
                dtype.label
                for model in models
                if model.engine_name == name
                for dtype in model.function.computed_in()
            }
            for name in dict.fromkeys(model.engine_name for model in models)
        }
        fast = {_COMPUTED[Precision(options.precision)].label}
        computed = {
            name: fast if declared and name == OPENVINO.name else declared
            for name, declared in types.items()
        }
        return cls(_sorted(computed), _sorted(types))

    @classmethod
    def of_methods(
        cls, program: HostProgram, methods: Iterable[str], options: EngineOptions
    ) -> Execution:
        """Return the execution of a program's methods; the program was loaded with ``options``."""
        delegates = [delegate for name in methods for delegate in program.delegates(name)]
        models = [d.model for d in delegates if isinstance(d, CoreMLDelegate)]
        return cls.of_models(models, options)

    @classmethod
    def of(cls, executions: Iterable[Execution]) -> Execution:
        """Merge executions: all of their engines, each with all of its types."""
        engines: dict[str, set[str]] = {}
        declared: dict[str, set[str]] = {}
        for execution in executions:
            for merged, own in ((engines, execution.engines), (declared, execution.declared)):
                for name, types in own.items():
                    merged.setdefault(name, set()).update(types)
        return cls(_sorted(engines), _sorted(declared))

    def __str__(self) -> str:
        return ", ".join(map(self._describe, self.engines)) or "no engine of this package"

    def _describe(self, engine: str) -> str:
        types, declared = self.engines[engine], self.declared[engine]
        remark = "" if types == declared else f" (the program declares {' and '.join(declared)})"
        return f"{engine} in {' and '.join(types) or 'integers'}{remark}"


def _sorted(types: Mapping[str, set[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(sorted(labels)) for name, labels in types.items()}


class LoadedProgram(abc.ABC):
    """A program ready to be called.

    Attributes:
        host_name: Name of the host that runs it; empty for a program that needs none.
        inputs: Its inputs, in order.
        execution: The engines that run it.
        classifiers: Its class labels, each with the name of the output of their probabilities.
    """

    host_name: str = ""
    inputs: tuple[Input, ...]
    execution: Execution
    classifiers: tuple[Classifier, ...] = ()

    @abc.abstractmethod
    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        """Run once.

        Args:
            inputs: As the model takes them; only the tensors count, except for a ``.pte``.

        Returns:
            Outputs by name, in order.

        Raises:
            CoreMLDelegateError: The program does not accept the inputs, or an op failed.
        """

    def states(self) -> Snapshot:
        """Return copies of the states of its Core ML models, by name."""
        return {}

    def model_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs of the model in PyTorch that belong to inputs of the program.

        Args:
            inputs: The program's inputs, flattened; an ``.mlpackage`` may normalize images.
        """
        return list(inputs)

    def expected(self, results: Sequence[object], inputs: Sequence[object]) -> list[Output]:
        """Return the expected outputs, in order, from a run of the model in PyTorch.

        Args:
            results: The flattened results.
            inputs: The flattened inputs after the run: the model may have written to them.
        """
        del inputs  # only a .pte returns new values of inputs
        return [value for value in results if isinstance(value, torch.Tensor)]

    def diagnose(
        self, inputs: Sequence[Any], *, min_sqnr_db: float = INACCURATE_BELOW_DB
    ) -> list[tuple[str, Diagnosis]]:
        """Run once; return each Core ML model's name and diagnosis, in order of execution.

        Args:
            inputs: See ``run``.
            min_sqnr_db: See ``Model.diagnose``.

        Raises:
            ProgramError: The program is a pipeline, or has no Core ML model.
            OptionError: The program is a ``.pte`` and does not run on the reference engine.
        """
        raise NotImplementedError

    def events(self) -> tuple[bytes, bytes]:
        """Return the ETDump and the debug buffer of all runs; see ``load_program``.

        Raises:
            OptionError: The program is no ``.pte``, or was not loaded with ``enable_etdump``.
        """
        raise _refusal_of_events(type(self).__name__)


class LoadedModel(LoadedProgram):
    """A Core ML model, with its own state."""

    def __init__(self, model: Model | Pipeline, name: str, options: EngineOptions) -> None:
        self._model = model
        self._name = name
        self._state = model.make_state()
        is_model = isinstance(model, Model)
        # The thresholds of a pipeline keep their defaults.
        features = [feature for feature in model.inputs if is_model or not feature.optional]
        self.inputs = tuple(map(Input.of_feature, features))
        self.classifiers = model.classifiers
        self.execution = Execution.of_models([model] if is_model else model.models, options)
        self._added = AddedSteps.read(model.program.metadata) if is_model else AddedSteps()

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        """Run once; see ``LoadedProgram``."""
        results = self._model.compute(self._arrays(inputs), self._state)
        return {name: torch.from_numpy(array) for name, array in results.items()}

    def model_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the normalized images, and other inputs as they are; see ``LoadedProgram``."""
        names = iter(input_.name for input_ in self.inputs)
        return [
            _normalized(value, self._added.images.get(next(names)))
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        ]

    def expected(self, results: Sequence[object], inputs: Sequence[object]) -> list[Output]:
        """Return the expected outputs with the softmax that the export added."""
        values = super().expected(results, inputs)
        names = [feature.name for feature in self._model.outputs]
        by_name = dict(zip(self._added.outputs or names, values, strict=False))
        if len(values) != len(names) or by_name.keys() != set(names):
            return values  # as the model has other outputs, nothing is compared
        for name in self._added.softmax:
            scores = by_name[name]
            if scores is not None:
                flat = torch.softmax(scores.float().flatten(), dim=0)
                by_name[name] = flat.reshape(scores.shape)
        return [by_name[name] for name in names]

    def states(self) -> Snapshot:
        """Return copies of the states; see ``LoadedProgram``."""
        return {} if self._state is None else self._state.snapshot()

    def diagnose(
        self, inputs: Sequence[Any], *, min_sqnr_db: float = INACCURATE_BELOW_DB
    ) -> list[tuple[str, Diagnosis]]:
        """Diagnose a run, which leaves the state as it is; see ``LoadedProgram``."""
        if isinstance(self._model, Pipeline):
            raise ProgramError(
                "the values of a pipeline cannot be traced",
                got="several models that run one after the other",
                remedy="Trace each model on its own",
            )
        arrays = self._arrays(inputs)
        return [(self._name, self._model.diagnose(arrays, self._state, min_sqnr_db=min_sqnr_db))]

    def _arrays(self, inputs: Sequence[Any]) -> dict[str, np.ndarray]:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        return {i.name: tensor.numpy() for i, tensor in zip(self.inputs, tensors, strict=True)}


def _normalized(
    pixels: torch.Tensor, factors: tuple[Sequence[float], Sequence[float]] | None
) -> torch.Tensor:
    """Return ``scale * pixels + bias`` in the dtype of the pixels.

    Args:
        pixels: [N, C, H, W].
        factors: Scale and bias, each one number or one for each channel; None for the pixels.
    """
    if factors is None:
        return pixels
    scale, bias = (torch.tensor(values).reshape(-1, 1, 1) for values in factors)
    return (pixels.float() * scale + bias).to(pixels.dtype)


class _MethodOfPte(LoadedProgram):
    """A method of a ``.pte``."""

    def __init__(self, program: HostProgram, method: str, options: EngineOptions) -> None:
        self._program = program
        self._method = method
        self.host_name = program.host_name
        info = self._info = program.program.method(method)
        self.inputs = tuple(map(Input.of_value, input_names(info), info.input_specs))
        self.execution = Execution.of_methods(program, [method], options)

    def run(self, inputs: Sequence[Any]) -> dict[str, Output]:
        results = self._program.run(self._method, inputs)
        return dict(zip(output_names(self._info), map(as_output, results), strict=True))

    def states(self) -> Snapshot:
        return snapshot(states_of(self._method, self._program.delegates(self._method)))

    def expected(self, results: Sequence[object], inputs: Sequence[object]) -> list[Output]:
        new_inputs = [inputs[position] for position in mutated_inputs(self._info).values()]
        return [as_output(value) for value in (*new_inputs, *results)]

    def diagnose(
        self, inputs: Sequence[Any], *, min_sqnr_db: float = INACCURATE_BELOW_DB
    ) -> list[tuple[str, Diagnosis]]:
        names = delegate_names(self._info).values()
        if not names:
            raise ProgramError(
                f"method {self._method!r} has no {COREML_BACKEND_ID} delegate",
                got=Path(self._program.program.origin).name,
            )
        if list(self.execution.engines) != [REFERENCE.name]:
            raise OptionError(
                "only the reference engine shows the values of a .pte",
                got=str(self.execution),
                remedy="Load the program with engine='reference'",
            )
        diagnoses: list[tuple[str, Diagnosis]] = []

        def note(name: str, delegate: CoreMLDelegate, tensors: Sequence[torch.Tensor]) -> None:
            diagnoses.append((name, delegate.diagnose(tensors, min_sqnr_db=min_sqnr_db)))

        delegates = [
            delegate
            for delegate in self._program.delegates(self._method)
            if isinstance(delegate, CoreMLDelegate)
        ]
        for name, delegate in zip(names, delegates, strict=True):
            delegate.listener = partial(note, name, delegate)
        try:
            self._program.run(self._method, inputs)
        finally:
            for delegate in delegates:
                delegate.listener = None
        return diagnoses

    def events(self) -> tuple[bytes, bytes]:
        return self._program.events()


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


def load(
    path: Path | str,
    *,
    method: str | None = None,
    data: Sources | None = None,
    host: str = AUTO,
    engine: str | None = AUTO,
    options: EngineOptions | None = None,
    enable_etdump: bool = False,
    debug_buffer_size: int = 0,
) -> LoadedProgram:
    """Load a method of a ``.pte``, a model of Core ML, or a blob.

    Args:
        path: ``.pte`` or ``.bpte`` file, ``.mlpackage`` folder, ``.mlmodel`` file, or a file with
            the blob of a delegate.
        method: Method, or function of the package; None for ``forward``, the only method, or the
            default function.
        data: See ``load_program``; only for a ``.pte``, as for ``host`` and the events.
        host: See ``load_program``.
        engine: See ``load_program``.
        options: How to execute.
        enable_etdump: See ``load_program``.
        debug_buffer_size: See ``load_program``.

    Raises:
        OptionError: An option does not apply to the program.
        CoreMLDelegateError: See ``load_program``, ``load_mlpackage`` and ``load_blob``.
    """
    path, options = Path(path), options or EngineOptions()
    if is_package(path) or _is_blob(path):
        refuse_pte_options(path, host=host, data=data, enable_etdump=enable_etdump)
        if is_package(path):
            model = load_mlpackage(path, function_name=method, engine=engine, options=options)
        else:
            blob, _ = map_source(path, "the blob", "a blob")
            model = load_blob(blob, function_name=method, engine=engine, options=options)
        return LoadedModel(model, path.stem, options)
    program = load_program(
        path,
        data=data,
        host=host,
        engine=engine,
        options=options,
        enable_etdump=enable_etdump,
        debug_buffer_size=debug_buffer_size,
    )
    return _MethodOfPte(program, method or program.program.default_method, options)


def refuse_pte_options(path: Path, *, enable_etdump: bool = False, **options: object) -> None:
    """Refuse options of a ``.pte`` for a program of another format.

    Values of ``options`` that are None, empty or ``auto`` are defaults.

    Raises:
        OptionError: One has another value.
    """
    if enable_etdump:
        raise _refusal_of_events(str(path))
    for option, value in options.items():
        if value and value != AUTO:
            raise OptionError(f"{option} is for a .pte", got=str(path))


def _refusal_of_events(got: str) -> OptionError:
    return OptionError("only a .pte has events for ExecuTorch's Inspector", got=got)


def is_package(path: Path) -> bool:
    """Whether ``path`` is taken for a model of Core ML rather than a file with a program."""
    return path.suffix in (".mlpackage", ".mlmodel") or path.is_dir()


def _is_blob(path: Path) -> bool:
    if not path.is_file():
        return False
    view, _ = map_source(path, "the program", "a .pte file")
    if holds_program(view):  # which may end in a blob
        return False
    try:
        return bool(unflatten(view))
    except BlobFormatError:
        return False

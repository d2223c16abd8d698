"""The interface of engines: an engine compiles one function of a MIL program to a callable."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.entry_cache import CacheOptions
from coreml_delegate.runtime.engines.source import ProgramSource
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.native import NativeCall, NativeInterface, NativeProgram
from coreml_delegate.runtime.snapshots import Array, Snapshot
from coreml_delegate.targets import ComputeUnit


class Precision(enum.Enum):
    """The floating-point type that a fast engine computes in.

    An engine that computes at the program's own dtypes takes ``F32`` only, which asks for nothing
    less than the program declares.
    """

    F32 = "f32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to execute.

    Attributes:
        threads: CPU threads of a call, or None for the engine's default. With 1, calls of several
            threads compute side by side on the openvino engine.
        precision: A ``Precision`` or its value, ``"f32"`` or ``"bf16"``.
        exact_nan: Whether NaN has to pass through every op, even where a fast engine's kernels lose
            it and have to be replaced by slower ones.
        profiling: Whether ops are timed, which takes some time itself; see
            ``CompiledFunction.run_profiled``.
        cache: Where compiled programs are kept between processes, or None to keep none. By default
            read from the environment; see ``CacheOptions.from_environment``.
        compute_unit: Where the coreml engine may run a program: a ``ComputeUnit`` or its value, or
            None for what the program was exported for.
        dynamic_quantization: Whether the openvino engine may round activations to 8 bits, with a
            scale for every 32 of them that each call computes, where they meet weights that are
            compressed to integers of 4 or 8 bits.

    Raises:
        OptionError: No such precision or compute unit, fewer threads than one, or a value of the
            environment variable that is not understood.
    """

    threads: int | None = None
    precision: Precision | str = Precision.F32
    exact_nan: bool = False
    cache: CacheOptions | None = field(default_factory=CacheOptions.from_environment)
    profiling: bool = False
    compute_unit: ComputeUnit | str | None = None
    dynamic_quantization: bool = False

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise OptionError(
                "wrong number of threads", got=str(self.threads), expected="1 or more, or None"
            )
        object.__setattr__(self, "precision", _member(Precision, self.precision))
        if self.compute_unit is not None:
            object.__setattr__(self, "compute_unit", _member(ComputeUnit, self.compute_unit))

    @property
    def numerics_option(self) -> str | None:
        """The option that changes the program's numerics, as ``name=value``; None if none is set.

        ``precision`` and ``dynamic_quantization`` do. Only the openvino engine takes them.
        """
        if self.precision is not Precision.F32:
            return f"precision={Precision(self.precision).value!r}"
        return "dynamic_quantization=True" if self.dynamic_quantization else None

    def refuse_numerics_option(self, engine: str) -> None:
        """Raise an error if an option changes the program's numerics.

        Args:
            engine: Name of the engine that takes no such option, for the message.

        Raises:
            OptionError: ``numerics_option`` is set.
        """
        if self.numerics_option is not None:
            raise OptionError(
                f"{engine} cannot change the numerics of a program",
                got=self.numerics_option,
                remedy="Use the openvino engine, or leave the option out",
            )


def _member(kind: type[enum.Enum], value: object) -> enum.Enum:
    """Return the member of an option's enum that ``value`` is, or is the value of."""
    try:
        return kind(value)
    except ValueError:
        raise OptionError(
            f"unknown {_OPTIONS[kind]}",
            got=repr(value),
            expected=" | ".join(member.value for member in kind),
        ) from None


_OPTIONS: Mapping[type[enum.Enum], str] = {
    Precision: "engine precision",
    ComputeUnit: "compute unit",
}


class State(Protocol):
    """Mutable tensors of one model instance, zero at start; opaque outside its engine."""

    def snapshot(self) -> Snapshot:
        """Return copies of the state tensors, by feature name, in the declared dtypes."""
        ...

    def restore(self, snapshot: Mapping[str, Array]) -> None:
        """Replace the content of every state tensor.

        Args:
            snapshot: The result of ``snapshot``, or arrays of the same names and shapes, with
                dtypes of the same kind.

        Raises:
            InputError: The names differ, or a shape or kind of dtype; then nothing is replaced.
        """
        ...

    def reset(self) -> None:
        """Set every state tensor to zero, its first value."""
        ...

    def write(self, name: str, value: Array) -> None:
        """Replace the content of one state tensor.

        Args:
            name: Feature name.
            value: Array of the tensor's shape; a dtype of the same kind is cast.

        Raises:
            InputError: No such state tensor, or the shape or the kind of dtype differs.
        """
        ...


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of one kernel in a run.

    Attributes:
        ops: Positions, among the ops of the function's block, of those that it computed: several if
            they are fused, none for work of the engine that belongs to no op.
        nanoseconds: Its time.
        kernel: The engine's name of it.
        is_mean: Whether the time is the mean of the runs so far.
    """

    ops: tuple[int, ...]
    nanoseconds: int
    kernel: str
    is_mean: bool = False


class CompiledFunction(Protocol):
    """One function, ready to run. Safe to call from several threads, one call at a time each."""

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once.

        Args:
            inputs: By feature name, already checked: dtype of the MIL parameter, any strides.
            state: From ``make_state`` of the same object; None for stateless functions.

        Returns:
            Outputs by feature name, in declaration order, C-contiguous and owned by the caller, in
            the dtype the MIL program computes them in.

        Raises:
            ExecutionError: An op failed.
        """
        ...

    def run_profiled(
        self, inputs: Mapping[str, Array], state: State | None = None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        """Run once, and return the outputs and the time of every kernel, in order of execution.

        The function must have been compiled with ``profiling``. Raises as a call does.
        """
        ...

    def make_state(self) -> State | None:
        """Return a new state, all zeros; None if the function has no state."""
        ...

    def native_call(self, interface: NativeInterface, state: State | None) -> NativeCall | None:
        """Return how to run without Python, if that is possible.

        Args:
            interface: The tensors of calls.
            state: What calls read and write; from ``make_state``.
        """
        ...

    def native_program(
        self, interface: NativeInterface, shapes: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> NativeProgram | None:
        """Return what is loaded where there is no Python, if that is possible.

        Args:
            interface: The tensors of calls.
            shapes: All combinations of enumerated shapes, by input; empty if there are none.
        """
        ...

    def native_obstacle(self) -> str | None:
        """Return why there are no native calls, or None if there are."""
        ...

    def prepare_native_calls(self) -> None:
        """Make calls of this object itself without Python from now on, if that is possible."""
        ...

    def prepare_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compile for enumerated shapes, which is done at a call's need otherwise.

        Args:
            shapes: Of the inputs that have enumerated shapes, by name.
        """
        ...


class Engine(Protocol):
    """An engine is a module-level singleton; it holds no per-model state."""

    name: str

    def unavailable_reason(self) -> str | None:
        """Return why this engine cannot be used on this machine, or None if it can."""
        ...

    def unsupported(self, function: Function) -> list[str]:
        """Return the reasons why this engine cannot run ``function``; empty if it can."""
        ...

    def compile(
        self, function: Function, options: EngineOptions, source: ProgramSource | None = None
    ) -> CompiledFunction:
        """Prepare ``function`` for execution.

        Args:
            function: The function to run.
            options: How to execute.
            source: The bytes that ``function`` was read from; without them no cache is used.

        Raises:
            OptionError: The engine does not have the precision asked for.
            EngineUnavailableError: See ``unavailable_reason``.
            UnsupportedOpError: See ``unsupported``.
        """
        ...

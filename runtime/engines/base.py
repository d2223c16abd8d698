"""The interface of engines: an engine compiles one function of a MIL program to a callable."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.entry_cache import CacheOptions
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.native import NativeCall, NativeInterface, NativeProgram
from coreml_delegate.runtime.snapshots import Array, State
from coreml_delegate.targets import ComputeUnit


class Precision(enum.Enum):
    """The floating-point type that a fast engine computes in.

    An engine that computes in the program's own dtypes accepts only ``F32``, which is the default.
    """

    F32 = "f32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to execute.

    Attributes:
        threads: CPU threads of a call, or None for the engine's default. With 1, the openvino
            engine runs concurrent calls in parallel.
        precision: A ``Precision`` or its value, ``"f32"`` or ``"bf16"``.
        exact_nan: Whether every op propagates NaN, even where the kernels of a fast engine lose it
            and have to be replaced by slower kernels.
        profiling: Whether ops are timed, which takes some time itself; see
            ``CompiledFunction.profile``.
        cache: Where compiled programs are cached between processes, or None for no cache. By
            default read from the environment; see ``CacheOptions.from_environment``.
        compute_unit: Where the coreml engine may run a program: a ``ComputeUnit`` or its value, or
            None for the compute unit that the program was exported for.
        dynamic_quantization: Whether the openvino engine may round activations to 8 bits where they
            are multiplied by weights compressed to integers of 4 or 8 bits. Each call computes a
            scale for every 32 activations.

    Raises:
        OptionError: No such precision or compute unit, fewer threads than one, or an invalid value
            of the environment variable.
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
        object.__setattr__(
            self, "precision", _member(Precision, self.precision, "engine precision")
        )
        if self.compute_unit is not None:
            object.__setattr__(
                self, "compute_unit", _member(ComputeUnit, self.compute_unit, "compute unit")
            )

    @property
    def numerics_option(self) -> str | None:
        """The option that changes the program's numerics, as ``name=value``; None by default.

        These are ``precision`` and ``dynamic_quantization``, which only the openvino engine has.
        """
        if self.precision is not Precision.F32:
            return f"precision={Precision(self.precision).value!r}"
        return "dynamic_quantization=True" if self.dynamic_quantization else None

    def refuse_numerics_option(self, engine: str) -> None:
        """Refuse options that change a program's numerics, for an ``engine`` without such options.

        Raises:
            OptionError: ``numerics_option`` is set.
        """
        if self.numerics_option is not None:
            raise OptionError(
                f"{engine} cannot change the numerics of a program",
                got=self.numerics_option,
                remedy="Use the openvino engine, or leave the option out",
            )


def _member(kind: type[enum.Enum], value: object, name: str) -> enum.Enum:
    """Return the member of the enum ``kind`` for ``value``, a member or the value of a member."""
    try:
        return kind(value)
    except ValueError:
        raise OptionError(
            f"unknown {name}",
            got=repr(value),
            expected=" | ".join(member.value for member in kind),
        ) from None


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of one kernel in a run.

    Attributes:
        ops: Indices, in the function's block, of the ops that the kernel computes: several if they
            are fused, empty for work of the engine that belongs to no op.
        nanoseconds: Duration.
        kernel: The engine's name of the kernel.
        is_mean: Whether the time is the mean of the runs so far.
    """

    ops: tuple[int, ...]
    nanoseconds: int
    kernel: str
    is_mean: bool = False


class NativeFunction(Protocol):
    """A compiled function that may run without Python."""

    def native_call(self, interface: NativeInterface, state: State | None) -> NativeCall | None:
        """Return a call that runs without Python; None if that is impossible.

        Calls read and write ``state``, from ``make_state``.
        """
        ...

    def native_program(
        self, interface: NativeInterface, shapes: Sequence[Mapping[str, tuple[int, ...]]]
    ) -> NativeProgram | None:
        """Return the form of the function that runs without Python; None if that is impossible.

        ``shapes`` are all combinations of enumerated shapes, by input; there may be none.
        """
        ...

    def native_obstacle(self) -> str | None:
        """Return the reason why native calls are impossible, or None if they are possible."""
        ...

    def prepare_native_calls(self) -> None:
        """Make later calls of the function without Python, if possible."""
        ...

    def prepare_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compile for enumerated shapes now, rather than at the first call with them.

        ``shapes`` has the shape of each input with enumerated shapes.
        """
        ...


class CompiledFunction(Protocol):
    """One function, ready to run. It may be called from several threads at the same time."""

    @property
    def native(self) -> NativeFunction | None:
        """The function as it runs without Python; None if every call needs Python."""
        ...

    def __call__(self, inputs: Mapping[str, Array], state: State | None = None) -> dict[str, Array]:
        """Run once.

        Args:
            inputs: Arrays by feature name, already checked: dtype of the MIL parameter, any
                strides.
            state: From ``make_state`` of the same object; None for stateless functions.

        Returns:
            Outputs by feature name, in declaration order, C-contiguous and owned by the caller, in
            the dtype the MIL program computes them in.

        Raises:
            ExecutionError: An op failed.
        """
        ...

    def profile(
        self, inputs: Mapping[str, Array], state: State | None = None
    ) -> tuple[dict[str, Array], tuple[KernelTime, ...]]:
        """Run once, and return the outputs and the time of every kernel, in order of execution.

        The function must have been compiled with ``profiling``. Raises as a call does.
        """
        ...

    def make_state(self) -> State | None:
        """Return a new state, all zeros; None if the function has no state."""
        ...


class Engine(Protocol):
    """An engine is a module-level singleton without state per model."""

    name: str

    @property
    def python_reason(self) -> str | None:
        """The reason why every call needs Python, as text; None if there is none."""
        ...

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

        Without ``source``, the bytes that ``function`` was read from, no cache is used.

        Raises:
            OptionError: The engine does not support the precision of ``options``.
            EngineUnavailableError: See ``unavailable_reason``.
            UnsupportedOpError: See ``unsupported``.
        """
        ...

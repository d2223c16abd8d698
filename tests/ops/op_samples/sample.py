"""A test of one op rule: a call of one ATen overload, as data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from coreml_delegate.ops import ReasonCode
from coreml_delegate.targets import Opset


@dataclass(frozen=True, eq=False)
class TensorArg:
    """A tensor argument.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        low: Smallest value drawn.
        high: Largest value drawn; exclusive for integers.
        values: The values themselves, instead of drawn ones; ``shape`` is then ignored.
        constant: A buffer of the module rather than an input.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = -2.0
    high: float = 2.0
    values: Any = None
    constant: bool = False

    def make(self, seed: str) -> torch.Tensor:
        """The tensor, the same on every machine; fp16 holds its floats exactly."""
        if self.values is not None:
            return torch.tensor(self.values, dtype=self.dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        if self.dtype is torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if not self.dtype.is_floating_point:
            low, high = int(self.low), int(self.high)
            return torch.randint(low, high, self.shape, generator=generator, dtype=self.dtype)
        span = self.high - self.low
        drawn = torch.rand(self.shape, generator=generator) * span + self.low
        return drawn.half().to(self.dtype)


def x(*shape: int, **options: Any) -> TensorArg:
    """A float input, ``low`` and ``high`` as in ``TensorArg``."""
    return TensorArg(shape, **options)


def i(*shape: int, dtype: torch.dtype = torch.int64, **options: Any) -> TensorArg:
    """An integer input of small values."""
    return TensorArg(shape, dtype=dtype, **({"low": -5, "high": 6} | options))


def b(*shape: int) -> TensorArg:
    """A boolean input."""
    return TensorArg(shape, dtype=torch.bool)


def w(*shape: int, **options: Any) -> TensorArg:
    """A constant, as weights are."""
    return TensorArg(shape, constant=True, **({"low": -1.0, "high": 1.0} | options))


@dataclass(frozen=True, eq=False)
class Sample:
    """A call of one overload.

    Attributes:
        target: As in a rule, ``aten.add.Tensor``.
        note: What it is about; with ``target`` its id.
        args: Positional arguments; tensors as ``TensorArg``, also inside lists.
        kwargs: Keyword arguments likewise.
        takes: Which results to return, of an op with several.
        fp16: Whether it is also computed in fp16; not where a rounding makes results jump.
        target_opset: Deployment target, None for the default.
        dynamic: Whether the last dimension of the first input is dynamic.
        compare: Whether results can be compared (not random ones).
        core: Whether Core ML also takes all that core ATen makes of it.
    """

    target: str
    note: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[int, ...] | None = None
    fp16: bool = True
    target_opset: Opset | None = None
    dynamic: bool = False
    compare: bool = True
    core: bool = True

    @property
    def id(self) -> str:
        return f"{self.target}-{self.note}" if self.note else self.target

    @property
    def overload(self) -> Any:
        namespace, name, overload = self.target.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def tensors(self) -> list[TensorArg]:
        """Every tensor argument, in order."""
        return [a for a in _flat((*self.args, *self.kwargs.values())) if isinstance(a, TensorArg)]

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The values of the tensor arguments that are inputs."""
        made = self._made()
        return tuple(t for a, t in zip(self.tensors(), made, strict=True) if not a.constant)

    def constants(self) -> list[torch.Tensor]:
        """The values of the tensor arguments that are constants."""
        made = self._made()
        return [t for a, t in zip(self.tensors(), made, strict=True) if a.constant]

    def _made(self) -> list[torch.Tensor]:
        return [a.make(f"{self.id}/{n}") for n, a in enumerate(self.tensors())]

    def call(
        self, inputs: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The results of the op."""
        given, held = iter(inputs), iter(constants)

        def fill(value: Any) -> Any:
            if isinstance(value, TensorArg):
                return next(held if value.constant else given)
            if isinstance(value, list | tuple):
                return type(value)(fill(item) for item in value)
            return value

        args = [fill(arg) for arg in self.args]
        result = self.overload(*args, **{name: fill(arg) for name, arg in self.kwargs.items()})
        if isinstance(result, torch.Tensor):
            return (result,)
        return tuple(result) if self.takes is None else tuple(result[n] for n in self.takes)


@dataclass(frozen=True, eq=False)
class Rejected:
    """A call that Core ML cannot take.

    Attributes:
        sample: The call.
        code: The reason's code.
        text: A part of the reason's text.
    """

    sample: Sample
    code: ReasonCode
    text: str

    @property
    def id(self) -> str:
        return self.sample.id


def accept(
    target: str,
    *args: Any,
    note: str = "",
    takes: tuple[int, ...] | None = None,
    fp16: bool = True,
    target_opset: Opset | None = None,
    core: bool = True,
    compare: bool = True,
    **kwargs: Any,
) -> Sample:
    """A call that Core ML takes."""
    return Sample(target, note, args, kwargs, takes, fp16, target_opset, compare=compare, core=core)


def reject(
    code: ReasonCode,
    text: str,
    target: str,
    *args: Any,
    note: str = "",
    takes: tuple[int, ...] | None = None,
    target_opset: Opset | None = None,
    dynamic: bool = False,
    compare: bool = True,
    **kwargs: Any,
) -> Rejected:
    """A call that stays on the CPU."""
    sample = Sample(target, note, args, kwargs, takes, False, target_opset, dynamic, compare)
    return Rejected(sample, code, text)


class Calls(nn.Module):
    """Several independent calls; returns all their results in order.

    Args:
        samples: The calls.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self._samples = tuple(samples)
        self._names: list[list[str]] = []
        for n, sample in enumerate(self._samples):
            names = []
            for k, constant in enumerate(sample.constants()):
                names.append(f"constant_{n}_{k}")
                self.register_buffer(names[-1], constant)
            self._names.append(names)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The inputs of all calls, in order."""
        return tuple(t for sample in self._samples for t in sample.inputs())

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """For ``torch.export``, None if all is static."""
        if not any(sample.dynamic for sample in self._samples):
            return None
        shapes: list[Any] = []
        for sample in self._samples:
            inputs = sample.inputs()
            shapes += [None] * len(inputs)
            if sample.dynamic:
                first = len(shapes) - len(inputs)
                shapes[first] = {inputs[0].dim() - 1: torch.export.Dim.DYNAMIC}
        return {"inputs": tuple(shapes)}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        position, results = 0, []
        for sample, names in zip(self._samples, self._names, strict=True):
            count = len(sample.tensors()) - len(names)
            given = inputs[position : position + count]
            position += count
            results.extend(sample.call(given, [getattr(self, name) for name in names]))
        return tuple(results)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]

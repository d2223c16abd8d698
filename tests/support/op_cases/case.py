"""A test of one MIL op, for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from coreml_delegate.runtime.mil.program import Program
from coreml_delegate.targets import Opset
from support.mil import build, infer, mb

Arrays = Mapping[str, Any]

PRECISIONS = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class OpCase:
    """An op with arguments and the source of its expected result.

    Attributes:
        op: MIL op type.
        note: Subject of the case; with ``op`` its id.
        inputs: Arguments that are model inputs, floats as float32.
        constants: Arguments that are constants and follow the precision of the inputs.
        attributes: Other arguments, as the builder takes them.
        opset: The opset of the program.
        expected: Computes the result with torch from inputs and constants as fp32 tensors; None
            asks coremltools' own value inference.
        arrange: Converts the input variables to the op's arguments, if they differ.
        fp16: Whether the case is also run with floats in fp16.
    """

    op: str
    note: str
    inputs: Arrays
    constants: Arrays = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: Opset = Opset.iOS18
    expected: Callable[..., Any] | None = None
    arrange: Callable[..., dict[str, Any]] | None = None
    fp16: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.note}-{self.opset.name}"

    @property
    def has_floats(self) -> bool:
        return any(np.issubdtype(a.dtype, np.floating) for a in self.arrays("fp32").values())

    @property
    def precisions(self) -> tuple[str, ...]:
        return ("fp32", "fp16") if self.fp16 and self.has_floats else ("fp32",)

    def call(self, precision: str, **values: Any) -> Any:
        """The op on builder variables."""
        constants = {name: _cast(value, precision) for name, value in self.constants.items()}
        return self._add(values, constants)

    def arrays(self, precision: str) -> dict[str, np.ndarray]:
        """The inputs at a precision."""
        return {name: _cast(value, precision) for name, value in self.inputs.items()}

    def program(self, precision: str) -> Program:
        return build(lambda **v: self.call(precision, **v), self.arrays(precision), self.opset)

    def answers(self, precision: str) -> list[np.ndarray]:
        """The expected results for inputs rounded to ``precision``, computed at least in fp32."""
        rounded = {name: _cast(value, "fp32") for name, value in self.arrays(precision).items()}
        if self.expected is None:
            # Constants as they are at the precision, too.
            constants = {
                name: _cast(_cast(value, precision), "fp32")
                for name, value in self.constants.items()
            }
            return infer(lambda **values: self._add(values, constants), rounded, self.opset)
        constants = {name: _cast(value, precision) for name, value in self.constants.items()}
        tensors = {
            name: torch.as_tensor(_cast(value, "fp32"))
            for name, value in {**rounded, **constants}.items()
        }
        result = self.expected(**tensors)
        results = result if isinstance(result, Sequence) else [result]
        return [np.asarray(torch.as_tensor(r)) for r in results]

    def _add(self, values: Arrays, constants: Arrays) -> Any:
        arguments = values if self.arrange is None else self.arrange(**values)
        return getattr(mb, self.op)(**arguments, **constants, **self.attributes)


def together(**values: Any) -> dict[str, Any]:
    """All inputs as the variadic parameter ``values``."""
    return {"values": tuple(values.values())}


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def integers(*shape: int, low: int = -9, high: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def _cast(value: Any, precision: str) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(PRECISIONS[precision]) if np.issubdtype(array.dtype, np.floating) else array

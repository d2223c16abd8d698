"""``Backend``: how graphs are compiled and run."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.graph.builder import Builder
from coreml_delegate.graph.emitter import OPERATIONS, REFUSED
from coreml_delegate.graph.executable import Buffer, Settings
from coreml_delegate.graph.tensor_types import DType
from coreml_delegate.options.checks import member
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.runtime import AUTO, EngineOptions
from coreml_delegate.runtime.engines.selection import ENGINES
from coreml_delegate.targets import ComputeUnit, Opset


class Backend(Settings):
    """The options that graphs are compiled and run with.

    Args:
        engine: ``auto``, or the name of the engine that runs them on this machine.
        compute_units: Where a device may run them: a ``ct.ComputeUnit``, or its name.
        target: Deployment target, a ``ct.target`` or its name.
        precision: Floating-point type for values of float32: a ``ct.precision`` or ``"float16"`` or
            ``"float32"``; or ``"auto"`` for fp16, with the nodes in fp32 that need it on the
            ``precision_data`` of ``Builder.compile``.
        device: Processor that programs are shaped for: ``"neural-engine"``, ``"gpu"`` or ``"cpu"``;
            None to leave them as they are.
        options: Options of the engine.

    Raises:
        OptionError: An unknown engine, compute unit, target, precision or device, or a compute unit
            or precision without the device.
    """

    def __init__(
        self,
        engine: str = AUTO,
        *,
        compute_units: Any = "ALL",
        target: Any = Opset.iOS18,
        precision: Any = Precision.FLOAT32,
        device: Any = None,
        options: EngineOptions | None = None,
    ) -> None:
        if engine not in (AUTO, *ENGINES):
            raise OptionError(
                "unknown engine", got=repr(engine), expected=" | ".join((AUTO, *ENGINES))
            )
        opset = _opset(target)
        compile_options = dataclasses.replace(
            CompileOptions(),
            compute_unit=_member(ComputeUnit, compute_units, "compute unit"),
            deployment_target=opset,
            precision=_member(Precision, precision, "precision"),
            device=device,
        )
        super().__init__(engine, options or EngineOptions(), opset, compile_options)

    def builder(self, name: str = "main") -> Builder:
        """Return a builder of a new graph."""
        return Builder(self, name)

    def buffer(self, array: Any, dtype: Any = None) -> Buffer:
        """Return an array in the form in which executables take it.

        Args:
            array: NumPy's, or anything with ``__dlpack__``.
            dtype: Its element type, where it is a Python number or list.

        Raises:
            InputError: See ``Buffer.of``.
        """
        return Buffer.of(array, None if dtype is None else DType.of(dtype))

    def capabilities(self) -> dict[str, tuple[str, ...] | str]:
        """Return each operation's types of the first operand, or the reason it is refused."""
        operations = {
            name: tuple(dtype.label for dtype in DType if dtype in record.dtypes)
            for name, record in OPERATIONS.items()
        }
        return dict(sorted({**operations, **REFUSED}.items()))


def _opset(target: Any) -> Opset:
    if isinstance(target, str):
        return Opset.from_target_name(target)
    number = getattr(target, "value", target)
    try:
        return Opset(number)
    except ValueError:
        raise OptionError(
            "unknown deployment target",
            got=repr(target),
            expected=", ".join(opset.name for opset in Opset),
        ) from None


def _member(kind: type[enum.Enum], value: Any, called: str) -> Any:
    check = member(kind, f"unknown {called}", kind.__members__)
    return check(called, value.upper() if isinstance(value, str) else value)

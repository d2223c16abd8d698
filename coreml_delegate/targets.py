"""Deployment targets: processors, MIL opsets and Core ML specification versions.

Each iOS release that ships a new opset has exactly one specification version; the macOS, watchOS
and tvOS releases of the same year are aliases of it.

Source: coremltools 9.0, ``AvailableTarget`` and the opset names in its serialized programs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from coreml_delegate.errors import OptionError

LARGEST_DIMENSION = 16384
"""Largest dimension of a tensor on the neural engine of A13 to A15, M1 and M2."""

ROW_ALIGNMENT = 64
"""Bytes to which the neural engine pads the last axis of an input, output or state."""

PADDING_THAT_COUNTS = 2.0
"""Smallest factor of memory by padding that is worth a change."""

LARGEST_WEIGHTS = 2**31
"""Size in bytes of a weight file from which Core ML fails to load a model."""

STATE_WIDTH = 32
"""The neural engine takes states whose last dimension is a multiple of it."""

_SMALLEST_PADDED = 2**14
"""Size in bytes of the smallest padded tensor that counts."""

MOST_ROWS = 2**16
"""Most rows of a lookup on the neural engine, which has its indices in uint16."""


def padding_of(shape: Sequence[int], bits: int = 16) -> float:
    """Return padded size / size of a tensor on the neural engine.

    Args:
        shape: Its sizes.
        bits: Size of an element.

    Returns:
        1 for tensors that are small even when padded, and for an unknown last axis, of size 0.
    """
    width = shape[-1] if shape else 0
    if not width:
        return 1.0
    row = width * bits / 8
    padded = math.ceil(row / ROW_ALIGNMENT) * ROW_ALIGNMENT
    return padded / row if math.prod(shape[:-1]) * padded >= _SMALLEST_PADDED else 1.0


class ComputeUnit(enum.Enum):
    """Processors that Core ML may use; the device reads the value."""

    ALL = "all"
    CPU_AND_GPU = "cpu_and_gpu"
    CPU_AND_NE = "cpu_and_ne"
    CPU_ONLY = "cpu_only"


class Device(enum.Enum):
    """The processor that a program is shaped for; its values are the words of ``--for``."""

    NEURAL_ENGINE = "neural-engine"
    GPU = "gpu"
    CPU = "cpu"

    @property
    def text(self) -> str:
        """Its name in a sentence."""
        return {Device.NEURAL_ENGINE: "neural engine", Device.GPU: "GPU", Device.CPU: "CPU"}[self]

    @property
    def compute_unit(self) -> ComputeUnit:
        """The smallest compute unit that has it."""
        return _COMPUTE_UNITS[self]

    def is_in(self, unit: ComputeUnit) -> bool:
        """Return whether Core ML may use it with a compute unit."""
        return self is Device.CPU or unit in (ComputeUnit.ALL, self.compute_unit)


_COMPUTE_UNITS = {
    Device.NEURAL_ENGINE: ComputeUnit.CPU_AND_NE,
    Device.GPU: ComputeUnit.CPU_AND_GPU,
    Device.CPU: ComputeUnit.CPU_ONLY,
}


class Opset(enum.IntEnum):
    """A MIL opset; the integer is the Core ML specification version, so opsets compare by age."""

    iOS15 = 6
    iOS16 = 7
    iOS17 = 8
    iOS18 = 9
    iOS26 = 10

    @property
    def mil_name(self) -> str:
        """The name in a serialized program: ``CoreML5`` for iOS15 to ``CoreML9`` for iOS26."""
        return f"CoreML{self.value - 1}"

    @property
    def platforms(self) -> str:
        """The operating systems with the opset, as text."""
        return _PLATFORMS[self]

    @classmethod
    def from_mil_name(cls, name: str) -> Opset:
        """Return the opset with a name in serialized functions.

        Raises:
            OptionError: There is no such opset.
        """
        for opset in cls:
            if opset.mil_name == name:
                return opset
        raise OptionError(
            "unknown MIL opset", got=repr(name), expected=", ".join(o.mil_name for o in cls)
        )

    @classmethod
    def from_target_name(cls, name: str) -> Opset:
        """Return the opset of a deployment target.

        Args:
            name: ``iOS17``, ``macOS14``, ``watchOS10``, ``tvOS17`` ...; case does not matter.

        Raises:
            OptionError: The name is no target that supports ML Programs.
        """
        opset = _BY_TARGET.get(name.lower())
        if opset is None:
            raise OptionError(
                "unknown deployment target",
                got=repr(name),
                expected=", ".join(o.name for o in cls)
                + " or the macOS, watchOS, tvOS of that year",
            )
        return opset


_MACOS = {15: 12, 16: 13, 17: 14, 18: 15, 26: 26}
_WATCHOS = {15: 8, 16: 9, 17: 10, 18: 11, 26: 26}


def _names(opset: Opset) -> tuple[str, ...]:
    year = int(opset.name.removeprefix("iOS"))
    return (f"iOS{year}", f"macOS{_MACOS[year]}", f"watchOS{_WATCHOS[year]}", f"tvOS{year}")


_PLATFORMS = {opset: ", ".join(_names(opset)) for opset in Opset}
_BY_TARGET = {name.lower(): opset for opset in Opset for name in _names(opset)}

STATE_OPSET = Opset.iOS18
"""First opset with states, models without inputs, and multifunction models."""

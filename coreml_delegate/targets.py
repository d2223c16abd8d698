"""Deployment targets: processors, MIL opsets and Core ML specification versions.

Each iOS release that ships a new opset has exactly one specification version; the macOS, watchOS
and tvOS releases of the same year are aliases of it.

Source: coremltools 9.0, ``AvailableTarget`` and the opset names in its serialized programs.
"""

from __future__ import annotations

import enum

from coreml_delegate.errors import OptionError

LARGEST_DIMENSION = 16384
"""Largest dimension of a tensor on the neural engine of A13 to A15, M1 and M2."""


class ComputeUnit(enum.Enum):
    """Processors that Core ML may use; the device reads the value."""

    ALL = "all"
    CPU_AND_GPU = "cpu_and_gpu"
    CPU_AND_NE = "cpu_and_ne"
    CPU_ONLY = "cpu_only"


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

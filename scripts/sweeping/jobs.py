"""One job of a sweep: a model, and the options that it is lowered and run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from coreml_delegate.errors import OptionError
from coreml_delegate.quantization import QuantizationAssignment
from coreml_delegate.scripts.arguments import PRECISIONS
from coreml_delegate.targets import Opset

NONE: Final = "none"
"""The value of ``quantize`` that leaves a model as it is."""

AUTO: Final = "auto"
"""The value of ``target`` and ``engine`` that leaves the choice to the package."""

CONFIG_SUFFIX: Final = ".json"
"""Suffix of a file with a quantization mode for each module."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the file names it; paths are relative to the folder of the file.

    Attributes:
        source: As SOURCE of ``export``.
        input_shape: Shapes of random float32 inputs; empty for the source's own example inputs.
        calibration_samples: Number of calibration samples read at most.
        data: Data to compare on, or None for random inputs.
        samples: Number of samples of ``data`` to compare on at most, None for all; without ``data``
            the number of random inputs, None for ``verify``'s default.
    """

    source: str
    weights: str | None = None
    input_shape: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    calibration: str | None = None
    calibration_samples: int = 128
    data: str | None = None
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options that a sweep varies.

    Attributes:
        precision: Floating-point type that Core ML computes in.
        quantize: A mode, a file with a mode for each module, or ``none``.
        target: Oldest system to support, or ``auto``.
        engine: The engine that runs the program; ``auto`` compares on ``verify``'s default engine
            and measures latency on the fastest.
    """

    precision: str = PRECISIONS[0]
    quantize: str = NONE
    target: str = AUTO
    engine: str = AUTO

    @property
    def opset(self) -> Opset | None:
        """The deployment target."""
        return None if self.target == AUTO else Opset.from_target_name(self.target)


AXES: Final = tuple(field.name for field in fields(Options))
"""Names of the options, in the order of a job's name."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model with a combination of options.

    Attributes:
        name: Unique in its sweep, for a reader: ``net[float16-int8-weight]``.
    """

    name: str
    label: str
    model: Model
    options: Options

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Job:
        """Return the job of a document from ``as_dict``, which JSON may have converted."""
        model = dict(document["model"])
        model["input_shape"] = tuple(tuple(shape) for shape in model["input_shape"])
        options = Options(**document["options"])
        return cls(document["name"], document["label"], Model(**model), options)


def obstacle(options: Options, assignment: QuantizationAssignment | None) -> str | None:
    """Return why options exclude each other, or None."""
    if assignment is None:
        return None
    try:
        assignment.newest.require_target(options.opset, "target")
    except OptionError as error:
        return f"{error.what}: got {error.got}"
    return None

"""The records of a check: rules with their sources, their evidence, and findings."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from coreml_delegate.device_check.functions import FunctionView
from coreml_delegate.quantization.weight_inventory import StoredWeight, weights_of
from coreml_delegate.runtime.diagnosis import Diagnosis
from coreml_delegate.runtime.mil.location import Location
from coreml_delegate.runtime.mil.program import Op, Program
from coreml_delegate.runtime.precision import PrecisionMeasurement
from coreml_delegate.targets import ComputeUnit, Device

NEURAL_ENGINE = frozenset({None, ComputeUnit.ALL, ComputeUnit.CPU_AND_NE})
"""Compute units that may use the neural engine; an unknown compute unit may use it."""


class Consequence(enum.Enum):
    """The consequence of a finding, most severe first; values are names in commands and JSON."""

    FAILS = "fails"
    LEAVES_NEURAL_ENGINE = "leaves-neural-engine"
    LESS_EXACT = "less-exact"
    SLOWER = "slower"
    LARGER_FILE = "larger-file"
    NEWER_SYSTEM = "newer-system"

    @property
    def text(self) -> str:
        """The consequence as text."""
        return _TEXTS[self]


_TEXTS = {
    Consequence.FAILS: "fails on the device",
    Consequence.LEAVES_NEURAL_ENGINE: "leaves the neural engine",
    Consequence.LESS_EXACT: "less exact",
    Consequence.SLOWER: "slower",
    Consequence.LARGER_FILE: "larger file",
    Consequence.NEWER_SYSTEM: "needs a newer system than necessary",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A public document."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Use:
    """A delegate that runs a function of a model.

    Attributes:
        delegate: Its name, for example ``forward_0``; an mlpackage has the name of its folder.
        compute_unit: The processors that it may use; None if unknown.
    """

    delegate: str
    function: str
    compute_unit: ComputeUnit | None = None


@dataclass(frozen=True)
class CheckedModel:
    """A model of one or more delegates.

    Attributes:
        uses: The delegates that run it, each with its function.
        modules: Module path in the original model by debug symbol of an operation; empty if
            unknown.
    """

    program: Program
    uses: tuple[Use, ...]
    modules: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """The names of its delegates."""
        return ", ".join(dict.fromkeys(use.delegate for use in self.uses))

    @functools.cached_property
    def views(self) -> tuple[FunctionView, ...]:
        """The used functions, without duplicates."""
        by_function: dict[str, list[str]] = {}
        for use in self.uses:
            by_function.setdefault(use.function, []).append(use.delegate)
        return tuple(
            FunctionView(self.program.function(name), ", ".join(delegates), self.modules)
            for name, delegates in by_function.items()
        )

    @functools.cached_property
    def weights(self) -> tuple[StoredWeight, ...]:
        """The weights in the order of the ops; shared weights are listed once."""
        return tuple(weights_of(self.program))

    def on_neural_engine(self) -> CheckedModel:
        """Return the model with only the uses that may run on the neural engine."""
        return self.on(NEURAL_ENGINE)

    def on(self, units: Set[ComputeUnit | None]) -> CheckedModel:
        """Return the model with only the uses on ``units``."""
        uses = tuple(use for use in self.uses if use.compute_unit in units)
        return CheckedModel(self.program, uses, self.modules)


@dataclass(frozen=True, slots=True)
class MeasuredProgram:
    """The accuracy of a method, or of a model, on the user's data.

    Attributes:
        delegates: Names of its Core ML delegates, in order.
        measurement: The accuracy.
    """

    delegates: tuple[str, ...]
    measurement: PrecisionMeasurement


@dataclass(frozen=True, slots=True)
class Evidence:
    """The data that rules examine.

    Attributes:
        diagnoses: Runs on the user's data, each with the name of its delegate; may be empty.
        measurements: The accuracy of methods on the user's data; may be empty.
    """

    models: tuple[CheckedModel, ...]
    diagnoses: tuple[tuple[str, Diagnosis], ...] = ()
    measurements: tuple[MeasuredProgram, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a model.

    Attributes:
        what: MIL op type, or ``input``, ``output``, ``state`` or ``weight``.
        location: Location of the op; None for other places.
        module: Module path in the original model; None if unknown.
    """

    what: str
    name: str
    location: Location | None = None
    module: str | None = None

    @classmethod
    def of(cls, view: FunctionView, op: Op) -> Place:
        """Return the place of an op."""
        return cls(op.type, place_name(op), view.locations[op], view.module_of(op))

    def __str__(self) -> str:
        at = "" if self.location is None else f" at {self.location}"
        return f"{self.what} {self.name!r}{at}{f' ({self.module})' if self.module else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "what": self.what,
            "name": self.name,
            "location": None if self.location is None else str(self.location),
            "module": self.module,
        }


def place_name(op: Op) -> str:
    """Return the name of an op's first output, or its own name if it has no output."""
    return op.outputs[0].name if op.outputs else op.name


@dataclass(frozen=True, slots=True)
class Details:
    """Details of a finding, without its rule.

    Attributes:
        delegate: Names of the delegates.
        function: Name of the function; None for the whole model.
        got: The observed value, as text.
        places: The places, in order of execution.
        saved_bytes: Bytes that the remedy saves in the file; 0 if it saves none.
        remedy: A remedy for this finding; None for the rule's remedy.
    """

    delegate: str
    function: str | None
    got: str
    places: tuple[Place, ...] = ()
    saved_bytes: int = 0
    remedy: str | None = None

    def is_in(self, view: FunctionView) -> bool:
        """Whether a finding is in a function, or in its model."""
        is_here = set(self.delegate.split(", ")) & set(view.delegate.split(", "))
        return bool(is_here) and self.function in (None, view.function.name)

    def ops_in(self, view: FunctionView) -> list[Op]:
        """Return the ops of the places, which are in ``view``; no ops for other places."""
        return [view.by_location[p.location] for p in self.places if p.location is not None]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How ``--for DEVICE`` carries a remedy out.

    Attributes:
        devices: The devices for which it does.
        functions: The functions that rewrite a program, or leave calls to the CPU.
        limit: When the finding stays, as an adverbial; empty if it never does.
        obstacle: Returns why the finding stays at an op, as a noun phrase; None if it does not.
    """

    devices: tuple[Device, ...]
    functions: tuple[Callable[..., Any], ...]
    limit: str = ""
    obstacle: Callable[[FunctionView, Op], str | None] = lambda _view, _op: None

    def __str__(self) -> str:
        has_all = len(self.devices) == len(Device)
        device = "any" if has_all else ", ".join(device.value for device in self.devices)
        return f"--for {device}{f', {self.limit}' if self.limit else ''}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One documented cause of trouble.

    Attributes:
        name: Name for commands and JSON.
        finds: The subject of its findings, as a noun phrase.
        reason: The statement of the sources, and no more.
        consequence: The consequence of a finding.
        remedy: The remedy for the user, in the imperative.
        examine: Yields the details of findings.
        neural_engine: Whether it applies only to programs that may run on the neural engine.
        rewrite: How a lowering for a device carries the remedy out; None for advice.
    """

    name: str
    finds: str
    reason: str
    consequence: Consequence
    remedy: str
    sources: tuple[Source, ...]
    examine: Callable[[Evidence], Iterable[Details]]
    neural_engine: bool = True
    rewrite: Rewrite | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rule": self.name,
            "finds": self.finds,
            "reason": self.reason,
            "consequence": self.consequence.value,
            "remedy": self.remedy,
            "rewrite": None if self.rewrite is None else str(self.rewrite),
            "sources": [{"title": s.title, "url": s.url} for s in self.sources],
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation of a rule.

    Attributes:
        obstacle: Why ``--for DEVICE`` carries the rule's remedy out at none of the places; None if
            it does, or if the rule is advice only.
    """

    rule: Rule
    details: Details
    obstacle: str | None = None

    @property
    def rewrite(self) -> Rewrite | None:
        """How a lowering for a device carries the remedy out; None for advice."""
        return None if self.obstacle else self.rule.rewrite

    @property
    def remedy(self) -> str:
        """The remedy for the user, in the imperative."""
        return self.details.remedy or self.rule.remedy

    @property
    def where(self) -> str:
        """The delegate, the first place, and the number of further places, as text."""
        first = f": {self.details.places[0]}" if self.details.places else ""
        more = len(self.details.places) - 1
        return f"{self.details.delegate}{first}{f' and {more} more' if more > 0 else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, including the rule's data."""
        return self.rule.as_dict() | {
            "delegate": self.details.delegate,
            "function": self.details.function,
            "got": self.details.got,
            "places": [place.as_dict() for place in self.details.places],
            "saved_bytes": self.details.saved_bytes,
            "remedy": self.remedy,
            "obstacle": self.obstacle,
        }


def each_function(
    look: Callable[[FunctionView], Iterable[Details]],
) -> Callable[[Evidence], Iterator[Details]]:
    """Return an examination that applies ``look`` to each function."""

    def examine(evidence: Evidence) -> Iterator[Details]:
        for model in evidence.models:
            for view in model.views:
                yield from look(view)

    return examine


def each_value(
    look: Callable[[FunctionView], Iterable[tuple[str, Place]]],
) -> Callable[[Evidence], Iterator[Details]]:
    """Return an examination that yields one finding per function and observed value.

    Args:
        look: Yields the occurrences in a function: the value as text, and the place.
    """

    def examine(view: FunctionView) -> Iterator[Details]:
        places: dict[str, list[Place]] = {}
        for got, place in look(view):
            places.setdefault(got, []).append(place)
        return (view_details(view, got, listed) for got, listed in places.items())

    return each_function(examine)


def obstacle_to_leaving(view: FunctionView, op: Op) -> str | None:
    """Return why ``--for`` does not leave an op to the CPU; None if it may."""
    return "in the middle of the model, which would become two" if view.is_between(op) else None


def view_details(view: FunctionView, got: str, places: Iterable[Place]) -> Details:
    """Return the details of a finding in a function."""
    return Details(view.delegate, view.function.name, got, tuple(places))

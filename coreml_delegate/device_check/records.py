"""The records of a check: rules with their sources, what they look at, and findings."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from coreml_delegate.compile_options import ComputeUnit
from coreml_delegate.device_check.functions import FunctionView
from coreml_delegate.quantization.weight_inventory import StoredWeight, weights_of
from coreml_delegate.runtime.diagnosis import Diagnosis
from coreml_delegate.runtime.mil.location import Location
from coreml_delegate.runtime.mil.program import Op, Program

NEURAL_ENGINE = frozenset({None, ComputeUnit.ALL, ComputeUnit.CPU_AND_NE})
"""Compute units that have the neural engine; one that is not known may have it."""


class Consequence(enum.Enum):
    """The consequence of a finding, gravest first; the value is its name for commands and JSON."""

    FAILS = "fails"
    LEAVES_NEURAL_ENGINE = "leaves-neural-engine"
    LESS_EXACT = "less-exact"
    SLOWER = "slower"
    LARGER_FILE = "larger-file"
    NEWER_SYSTEM = "newer-system"

    @property
    def text(self) -> str:
        """The consequence for a reader."""
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
    """A public document.

    Attributes:
        title: Author and subject, for a reader.
        url: Where anyone can open it.
    """

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Use:
    """A delegate that runs a function of a model.

    Attributes:
        delegate: Its name, for example ``forward_0``; an mlpackage has the name of its folder.
        function: Name of the function.
        compute_unit: The processors that it may use; None if the program does not say.
    """

    delegate: str
    function: str
    compute_unit: ComputeUnit | None = None


@dataclass(frozen=True)
class CheckedModel:
    """A model, which several delegates may share.

    Attributes:
        program: Its MIL program.
        uses: The delegates that run it, each with its function.
        modules: Path of the module of the original model that an operation comes from, by debug
            symbol; empty if unknown.
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
        """Each function that runs, once."""
        by_function: dict[str, list[str]] = {}
        for use in self.uses:
            by_function.setdefault(use.function, []).append(use.delegate)
        return tuple(
            FunctionView(self.program.function(name), ", ".join(delegates), self.modules)
            for name, delegates in by_function.items()
        )

    @functools.cached_property
    def weights(self) -> tuple[StoredWeight, ...]:
        """The weights in the order of the ops; those that functions share count once."""
        return tuple(weights_of(self.program))

    def on_neural_engine(self) -> CheckedModel:
        """Return the model with those uses alone that may run on the neural engine."""
        return self.on(NEURAL_ENGINE)

    def on(self, units: Set[ComputeUnit | None]) -> CheckedModel:
        """Return the model with those uses alone that have one of these compute units."""
        kept = tuple(use for use in self.uses if use.compute_unit in units)
        return CheckedModel(self.program, kept, self.modules)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that rules look at.

    Attributes:
        models: The models of one program.
        diagnoses: Runs on the user's data, each with the name of its delegate; may be empty.
    """

    models: tuple[CheckedModel, ...]
    diagnoses: tuple[tuple[str, Diagnosis], ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a model.

    Attributes:
        what: MIL op type, or ``input``, ``output``, ``state`` or ``weight``.
        name: Name of the value there.
        location: Place of the op; None for what is no op.
        module: Path of the module of the original model that it comes from; None if unknown.
    """

    what: str
    name: str
    location: Location | None = None
    module: str | None = None

    @classmethod
    def of(cls, view: FunctionView, op: Op) -> Place:
        """Return the place of an op."""
        name = op.outputs[0].name if op.outputs else op.name
        return cls(op.type, name, view.locations[op], view.module_of(op))

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


@dataclass(frozen=True, slots=True)
class Found:
    """A place and a value that a rule has found, without the rule.

    Attributes:
        delegate: Names of the delegates.
        function: Name of the function; None if it is a matter of the whole model.
        got: The value found, for a reader.
        places: The places, in order of execution.
        saved_bytes: Bytes that the remedy saves in the file; 0 if it is not about bytes.
        remedy: The remedy, if it depends on what is found; None for the rule's own.
    """

    delegate: str
    function: str | None
    got: str
    places: tuple[Place, ...] = ()
    saved_bytes: int = 0
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One documented cause of trouble.

    Attributes:
        name: For commands and JSON.
        finds: What it finds, as a noun.
        reason: What the sources say, and no more.
        consequence: What it leads to.
        remedy: What the user can do, in the imperative.
        sources: The documents that say so.
        examine: Yields what is found.
        neural_engine: Whether it concerns only programs that may run on the neural engine.
    """

    name: str
    finds: str
    reason: str
    consequence: Consequence
    remedy: str
    sources: tuple[Source, ...]
    examine: Callable[[Evidence], Iterable[Found]]
    neural_engine: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rule": self.name,
            "finds": self.finds,
            "reason": self.reason,
            "consequence": self.consequence.value,
            "remedy": self.remedy,
            "sources": [{"title": s.title, "url": s.url} for s in self.sources],
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule with what it has found."""

    rule: Rule
    found: Found

    @property
    def remedy(self) -> str:
        """The remedy for the user, in the imperative."""
        return self.found.remedy or self.rule.remedy

    @property
    def where(self) -> str:
        """The first place, the number of others, and the delegate, for a reader."""
        first = f": {self.found.places[0]}" if self.found.places else ""
        others = len(self.found.places) - 1
        return f"{self.found.delegate}{first}{f' and {others} more' if others > 0 else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the rule's with it."""
        return self.rule.as_dict() | {
            "delegate": self.found.delegate,
            "function": self.found.function,
            "got": self.found.got,
            "places": [place.as_dict() for place in self.found.places],
            "saved_bytes": self.found.saved_bytes,
            "remedy": self.remedy,
        }


def each_function(
    look: Callable[[FunctionView], Iterable[Found]],
) -> Callable[[Evidence], Iterator[Found]]:
    """Return an examination that looks at one function after the other."""

    def examine(evidence: Evidence) -> Iterator[Found]:
        for model in evidence.models:
            for view in model.views:
                yield from look(view)

    return examine


def grouped(
    view: FunctionView, found: Iterable[tuple[str, Place]], **fields: Any
) -> Iterator[Found]:
    """Yield one finding for each value, with all places that have it.

    Args:
        view: The function.
        found: Values for a reader, with their places.
        **fields: Other fields of ``Found``.
    """
    places: dict[str, list[Place]] = {}
    for got, place in found:
        places.setdefault(got, []).append(place)
    for got, listed in places.items():
        yield Found(view.delegate, view.function.name, got, tuple(listed), **fields)

"""A record of one upstream report of a wrong result, and calls that show it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ops.op_samples.sample import Sample

COREMLTOOLS = "apple/coremltools"
EXECUTORCH = "pytorch/executorch"


class Here(enum.Enum):
    """How this package treats the calls of a report."""

    DELEGATED = "delegated, with PyTorch's results"
    REPAIRED = "delegated, with PyTorch's results, by a rewrite that this pack asked for"
    REFUSED = "stays on the CPU"
    NOT_CONCERNED = "does not apply"


@dataclass(frozen=True, eq=False)
class Case(Sample):
    """Calls of a function, rather than of one overload.

    Attributes:
        function: Called with the arguments; returns a tensor, or several.
    """

    function: Callable[..., Any] = field(kw_only=True)

    @property
    def overload(self) -> Any:
        return self.function


def case(
    function: Callable[..., Any],
    *args: Any,
    note: str = "",
    fp16: bool = True,
    dynamic: bool = False,
    compare: bool = True,
    **kwargs: Any,
) -> Case:
    """A call, whose arguments are as those of a sample.

    Args:
        function: What is called.
        args: Positional arguments.
        note: Tells the cases of one report apart.
        fp16: Whether the result can be compared in fp16: it needs numbers of that range, and does
            not jump where one is rounded.
        dynamic: Whether the last dimension of the first input is dynamic.
        compare: Whether results can be compared (not random ones).
        kwargs: Keyword arguments.
    """
    options = {"fp16": fp16, "dynamic": dynamic, "compare": compare}
    return Case("", note, args, kwargs, **options, function=function)


@dataclass(frozen=True, eq=False)
class Regression:
    """One report, or several of the same error.

    Attributes:
        issues: Issues and pull requests, as ``owner/repo#number``, or a release, as
            ``owner/repo@version``; the first names its tests.
        wrong: What went wrong upstream, in a sentence.
        here: How this package treats it.
        because: By which means its result is right, or why it is refused or does not apply.
        cases: Calls that show the error, with the arguments that do.
        absent: MIL ops that may not occur, because the device computes them wrongly.
        refused: Reasons in the delegation report, by op; of a refused one.
        held_by: Another test that holds it, as ``path::name``, where calls alone cannot show it.
    """

    issues: tuple[str, ...]
    wrong: str
    here: Here
    because: str
    cases: tuple[Case, ...] = ()
    absent: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    held_by: str = ""

    def __post_init__(self) -> None:
        named = tuple(replace(c, target=self.issues[0]) for c in self.cases)
        object.__setattr__(self, "cases", named)


def released(version: str) -> tuple[str, ...]:
    """A release of coremltools, for what its sources alone show."""
    return (f"{COREMLTOOLS}@{version}",)


def issues(repository: str, *numbers: int) -> tuple[str, ...]:
    """Issues of one repository."""
    return tuple(f"{repository}#{number}" for number in numbers)

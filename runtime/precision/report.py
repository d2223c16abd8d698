"""Report on a program in fp16: its accuracy, and the calls that need fp32 or lose most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coreml_delegate.errors import PrecisionError
from coreml_delegate.formats.text import decibels
from coreml_delegate.runtime.precision.islands import Operation, PrecisionMeasurement

_BLAMED = 3  # calls in an error
_LISTED = 5  # calls in a table if the target is missed
_INDENT = " " * 4
_NOTHING_TO_BLAME = (
    "no operation loses its numbers, but those in branches and loops are not measured one by one"
)


def describe_auto(islands: int, after_db: float) -> str:
    """Describe a program with precision ``auto``: ``keeps 3 operations in fp32 and has 58.0 dB``.

    Args:
        islands: Number of operations in fp32.
        after_db: Ratio of signal to error of the worst output, in dB.
    """
    operations = f"{islands} operation{'s' if islands > 1 else ''}"
    return f"keeps {operations} in fp32 and has {decibels(after_db)}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the user's program.

    Attributes:
        name: Its unique name.
        place: Its line or operation in the user's source, as text; empty if unknown.
    """

    name: str
    place: str


@dataclass(frozen=True, slots=True)
class LossyCall:
    """Calls whose numbers fp16 loses, measured on example inputs.

    Attributes:
        nodes: Names of the calls; empty if they are unknown.
        operation: MIL op type of the operation that loses most.
        place: Place of the last call in the user's source, as text; empty if unknown.
        fp16: The element with the largest error, computed in fp16 from rounded operands.
        fp32: The same element, computed in fp32.
        sqnr_db: Ratio of signal to error of the operation's value, on operands from fp32, in dB.
        without_db: Ratio of the program's worst output if only these calls return to fp16, in dB;
            nan if they compute in fp16 anyway, or if it was not measured.
        share: Their share of the program's estimated operations, 0 to 1.
    """

    nodes: tuple[str, ...]
    operation: str
    place: str
    fp16: float
    fp32: float
    sqnr_db: float
    without_db: float
    share: float

    @classmethod
    def of(cls, operation: Operation, calls: Mapping[int, Sequence[Call]], flops: int) -> LossyCall:
        """Return the calls of an operation.

        Args:
            operation: From a measurement.
            calls: The calls of the program, by debug handle.
            flops: Estimated floating-point operations of the program.
        """
        own = [call for handle in operation.handles for call in calls.get(handle, ())]
        return cls(
            tuple(call.name for call in own),
            operation.op_type,
            own[-1].place if own else "",
            operation.fp16,
            operation.fp32,
            operation.sqnr_db,
            operation.without_db,
            operation.flops / flops if flops else 0.0,
        )


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """The accuracy of a program in fp16, measured on example inputs; see ``runtime.precision``.

    Attributes:
        target_db: Ratio of signal to error that every output has to reach, in dB.
        outputs: Name of each output, its ratio in fp16, and its ratio with ``islands`` in fp32.
            Integers and booleans have inf if all are equal, otherwise -inf.
        islands: The calls that compute in fp32.
        lossy: The calls whose own values miss the target in fp16.
        is_minimal: Whether the target is missed without any one of the islands.
    """

    target_db: float
    outputs: tuple[tuple[str, float, float], ...]
    islands: tuple[LossyCall, ...]
    lossy: tuple[LossyCall, ...]
    is_minimal: bool

    @classmethod
    def of(
        cls,
        measurement: PrecisionMeasurement,
        calls: Mapping[int, Sequence[Call]],
        *,
        target_db: float,
        after_db: Mapping[str, float] | None = None,
    ) -> PrecisionReport:
        """Return a measurement in terms of the calls of a program.

        Args:
            measurement: Of the lowered program.
            calls: The calls of the program, by debug handle.
            target_db: See the attribute.
            after_db: Ratio of each output with the islands, in dB, if that was lowered and
                measured.
        """
        after = measurement.after_db if after_db is None else after_db
        # The islands may have been searched for a higher target.
        is_minimal = all(island.without_db < target_db for island in measurement.islands)
        lossy = [operation for operation in measurement.lossy if operation.sqnr_db < target_db]
        return cls(
            target_db,
            tuple((name, db, after[name]) for name, db in measurement.before_db.items()),
            tuple(LossyCall.of(o, calls, measurement.flops) for o in measurement.islands),
            tuple(LossyCall.of(o, calls, measurement.flops) for o in lossy),
            measurement.is_minimal and is_minimal,
        )

    @property
    def before_db(self) -> float:
        """The ratio of the worst output in fp16; inf without outputs."""
        return min((before for _, before, _ in self.outputs), default=math.inf)

    @property
    def after_db(self) -> float:
        """The ratio of the worst output with the islands; inf without outputs."""
        return min((after for _, _, after in self.outputs), default=math.inf)

    @property
    def is_reached(self) -> bool:
        """Whether every output reaches the target."""
        return self.after_db >= self.target_db

    @property
    def share(self) -> float:
        """The share of the islands in the program's estimated operations, 0 to 1."""
        return sum(call.share for call in self.islands)

    @property
    def in_fp32(self) -> frozenset[str]:
        """Names of the calls that compute in fp32."""
        return frozenset(name for call in self.islands for name in call.nodes)

    def in_fp16(self) -> PrecisionReport:
        """Return the report on the program without islands."""
        return replace(
            self,
            outputs=tuple((name, before, before) for name, before, _ in self.outputs),
            islands=(),
            lossy=tuple(replace(call, without_db=math.nan) for call in self.lossy),
            is_minimal=self.before_db >= self.target_db,
        )

    def require(self) -> None:
        """Check that the outputs reach the target.

        Raises:
            PrecisionError: They miss it; lists the calls that lose most.
        """
        if self.is_reached:
            return
        blamed = "; ".join(
            f"{call.operation} {', '.join(call.nodes)}{f' at {call.place}' if call.place else ''}: "
            f"{call.fp16:.4g} in fp16, {call.fp32:.4g} in fp32"
            for call in self._worst(_BLAMED)
        )
        raise PrecisionError(
            f"the outputs reach {self.after_db:.1f} dB, with "
            f"{len(self.in_fp32) or 'all'} operations in fp32",
            got=blamed or _NOTHING_TO_BLAME,
            expected=f"at least {self.target_db:g} dB",
            remedy="Lower in fp32, take a smaller --min-sqnr, or write the program with --force",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        derived = ("before_db", "after_db", "is_reached", "share")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table for a terminal."""
        yield (
            f"fp16 has {decibels(self.before_db)} on the example inputs; the target is "
            f"{self.target_db:g} dB"
        )
        if self.islands:
            exactly = "" if self.is_minimal else "at most "
            yield (
                f"{decibels(self.after_db)} with {exactly}{len(self.in_fp32)} operation(s) "
                f"in fp32, {self.share:.1%} of the estimated operations:"
            )
            yield from _call_lines(self.islands)
        if not self.is_reached:
            worst = self._worst(_LISTED)
            causes = "these operations lose most:" if worst else _NOTHING_TO_BLAME
            yield f"the target is missed; {causes}"
            yield from _call_lines(worst)

    def _worst(self, count: int) -> Sequence[LossyCall]:
        return sorted(self.lossy, key=lambda call: call.sqnr_db)[:count]


def _call_lines(calls: Iterable[LossyCall]) -> Iterator[str]:
    for call in calls:
        yield f"  {call.operation}: {', '.join(call.nodes) or 'an unknown call'}"
        if call.place:
            yield f"{_INDENT}at {call.place}"
        without = "" if math.isnan(call.without_db) else f"; without it {decibels(call.without_db)}"
        yield (
            f"{_INDENT}{call.fp16:.6g} in fp16, {call.fp32:.6g} in fp32, alone "
            f"{decibels(call.sqnr_db)}{without}"
        )

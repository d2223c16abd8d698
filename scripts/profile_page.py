"""A profile as a page: a flame chart, the roofline of this machine, modules and operations."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coreml_delegate.formats.html_pages import page_template
from coreml_delegate.scripts.profiles import Operation, Profile, module_levels, tree_sort_key
from coreml_delegate.scripts.roofline import Machine, draw_roofline

_TEMPLATE = "profile_page.html.j2"
_ROW = 22  # height of a row of the flame chart, in pixels


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the method's time: a box of the flame chart.

    Attributes:
        kind: ``method``, ``delegate``, ``module``, ``operation``, ``cpu`` or ``around``.
        start: Milliseconds from the start of the method.
        level: Row, counted from the top.
    """

    label: str
    kind: str
    start: float
    milliseconds: float
    level: int
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module in the table.

    Attributes:
        path: Its path; empty for the model.
    """

    path: str
    milliseconds: float
    compared: float | None


def to_html(
    profile: Profile,
    machine: Machine,
    *,
    program: str,
    other: Profile | None = None,
    other_program: str | None = None,
) -> str:
    """Return one page, which needs no network."""
    spans = list(flame(profile))
    kernels = profile.kernels()
    return page_template(
        "coreml_delegate.scripts", _TEMPLATE, number=_number, milliseconds=_milliseconds
    ).render(
        profile=profile,
        program=program,
        other=other,
        other_program=other_program,
        machine=machine,
        spans=spans,
        row=_ROW,
        height=_ROW * (1 + max(span.level for span in spans)),
        roofline=draw_roofline(kernels, machine),
        modules=_modules(profile, other),
        operations=sorted(profile.operations, key=lambda o: -o.milliseconds),
    )


def flame(profile: Profile) -> Iterator[Span]:
    """Yield the boxes of the flame chart, each after the one that it is in.

    Times are medians, laid one after another in order of execution; what a delegate or the method
    took beyond its operations comes at the end of it.
    """
    yield Span("the method", "method", 0.0, profile.milliseconds, 0)
    start = 0.0
    by_delegate = itertools.groupby(profile.operations, key=lambda o: o.delegate)
    for delegate, group in by_delegate:
        operations = list(group)
        inside = sum(o.milliseconds for o in operations)
        if delegate is None:
            yield Span("CPU", "cpu", start, inside, 1, (f"{len(operations)} operators",))
            spent = inside
        else:
            spent = statistics.median(profile.delegates[delegate])
            facts = (
                f"operations {_milliseconds(inside)}",
                f"around {_milliseconds(spent - inside)}",
            )
            yield Span(f"delegate {delegate}", "delegate", start, spent, 1, facts)
        yield from _nested(operations, 0, start, 2)
        if spent > inside:
            yield Span("around the operations", "around", start + inside, spent - inside, 2)
        start += spent
    if profile.milliseconds > start:
        yield Span("the host", "around", start, profile.milliseconds - start, 1)


def _nested(
    operations: Sequence[Operation], depth: int, start: float, level: int
) -> Iterator[Span]:
    """Yield the boxes of consecutive operations, each after the boxes of its modules."""

    def module(operation: Operation) -> str | None:
        levels = module_levels(operation.module) if operation.module is not None else []
        return ".".join(levels[: depth + 1]) if len(levels) > depth else None

    for path, group in itertools.groupby(operations, key=module):
        members = list(group)
        spent = sum(o.milliseconds for o in members)
        if path is not None and spent > 0:
            yield Span(path, "module", start, spent, level, (f"{len(members)} operations",))
            yield from _nested(members, depth + 1, start, level + 1)
        elif path is None:
            operation_start = start
            for member in members:
                if member.milliseconds > 0:
                    kind = "cpu" if member.delegate is None else "operation"
                    yield Span(
                        member.name,
                        kind,
                        operation_start,
                        member.milliseconds,
                        level,
                        tuple(_facts(member)),
                    )
                    operation_start += member.milliseconds
        start += spent


def _facts(operation: Operation) -> Iterator[str]:
    if operation.kernel:
        yield f"kernel {operation.kernel}"
    together = [name for name in operation.fused if name != operation.name]
    if together:
        yield f"computed with {', '.join(together)}"
    if operation.calls:
        yield f"calls {', '.join(operation.calls)}"
    if operation.flops:
        yield f"{_number(operation.flops)}FLOPs"
    if operation.bytes:
        yield f"{_number(operation.bytes)}B"


def _modules(profile: Profile, other: Profile | None) -> list[ModuleRow]:
    if not profile.has_modules:
        return []
    own = profile.modules(1000)
    compared = {} if other is None else other.modules(1000)
    return [
        ModuleRow(path, own.get(path, 0.0), None if other is None else compared.get(path, 0.0))
        for path in sorted({**own, **compared}, key=tree_sort_key)
    ]


def _number(value: float) -> str:
    """Return a number with three digits and the prefix of its unit."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms"

"""The file of a sweep, in TOML.

Its keys::

    timeout = 600               # seconds that a job may take
    memory = "4G"               # bytes that a job may hold, on Linux
    jobs = 2                    # jobs at a time
    repeat = 10                 # runs that the latency is the median of; 0 for no latency

    [models.NAME]               # any number of them
    source = "MODULE:FACTORY"   # and other attributes of ``Model``
    options = {...}             # for this model, in place of the common options

    [options]                   # lists, of which every combination becomes a job
    precision = ["float16", "float32"]
    quantize = ["none", "int8-weight"]
    target = ["auto"]
    engine = ["auto"]

    [[exclude]]                 # combinations to leave out: one value for model and options
    quantize = "int8-weight"

``samples``, ``seed``, ``data``, ``calibration`` and ``calibration_samples`` above the tables hold
for models that do not set their own. Paths are relative to the folder of the file, and modules are
imported from there.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.formats.entry_cache import parse_size
from coreml_delegate.options import checks
from coreml_delegate.options.checks import Check, instance, positive, refused
from coreml_delegate.quantization import QuantizationAssignment, mode_of
from coreml_delegate.scripts.arguments import ENGINES, PRECISIONS
from coreml_delegate.scripts.sweeping.jobs import (
    AUTO,
    AXES,
    CONFIG_SUFFIX,
    NONE,
    Job,
    Model,
    Options,
    obstacle,
)
from coreml_delegate.targets import Opset


@dataclass(frozen=True, slots=True)
class Limits:
    """The time and memory that a job may take.

    Attributes:
        memory: Bytes of resident memory; None for no limit.
    """

    seconds: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A combination that is no job, because its options exclude each other."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A file that was read and checked.

    Attributes:
        folder: The folder of the file, absolute.
        jobs: In the order of the file.
        repeat: Number of runs for the median latency; 0 for no latency.
    """

    folder: Path
    jobs: tuple[Job, ...]
    skipped: tuple[Skipped, ...]
    limits: Limits
    parallel: int
    repeat: int


def read(path: Path) -> SweepFile:
    """Read the file of a sweep.

    Raises:
        OptionError: It cannot be read, a key or a value is not accepted, or no job is left.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {path}", got=str(error)) from error
    try:
        return _read(document, path.resolve().parent)
    except OptionError as error:
        raise error.prefixed(f"{path}: ") from error


def _read(document: dict[str, Any], folder: Path) -> SweepFile:
    _check_table("", document, _TOP)
    if not document.get("models"):
        raise OptionError(
            "there is no model", expected='[models.NAME] with source = "MODULE:FACTORY"'
        )
    excluded = document.get("exclude", [])
    for entry in excluded:
        _check_table("[[exclude]] ", entry, _EXCLUDED)
        _check_label(entry.get("model"), document["models"])
    jobs: list[Job] = []
    skipped: list[Skipped] = []
    for job in _combinations(document):
        if any(_matches(job, entry) for entry in excluded):
            continue
        reason = _obstacle(job, folder)
        if reason is None:
            jobs.append(job)
        else:
            skipped.append(Skipped(job.name, reason))
    if not jobs:
        raise OptionError(
            "no job is left",
            got="; ".join(f"{s.name}: {s.reason}" for s in skipped[:3])
            or "every combination is excluded",
        )
    return SweepFile(
        folder,
        tuple(jobs),
        tuple(skipped),
        Limits(
            document.get("timeout"),
            parse_size(document["memory"]) if "memory" in document else None,
        ),
        document.get("jobs", 1),
        document.get("repeat", 10),
    )


def _combinations(document: Mapping[str, Any]) -> Iterator[Job]:
    """Yield every model with every combination of its options."""
    common = {name: document[name] for name in _COMMON if name in document}
    for label, table in document["models"].items():
        where = f"[models.{label}] "
        _check_table(where, table, _MODEL)
        if "source" not in table:
            raise OptionError(f"{where}has no source", expected='source = "MODULE:FACTORY"')
        attributes = common | table
        options = document.get("options", {}) | attributes.pop("options", {})
        axes = {name: options[name] for name in AXES if name in options}
        shapes = tuple(map(tuple, attributes.pop("input_shape", [])))
        model = Model(input_shape=shapes, **attributes)
        for values in itertools.product(*axes.values()):
            values_by_name = dict(zip(axes, values, strict=True))
            choice = f"[{'-'.join(values)}]" if values else ""
            yield Job(f"{label}{choice}", label, model, Options(**values_by_name))


def _matches(job: Job, entry: Mapping[str, str]) -> bool:
    own = {"model": job.label, **{name: getattr(job.options, name) for name in AXES}}
    return all(own[name] == value for name, value in entry.items())


def assignment_of(options: Options, folder: Path) -> QuantizationAssignment | None:
    """Return the quantization that options name, or None.

    Raises:
        OptionError: A file cannot be read.
    """
    if options.quantize == NONE:
        return None
    if options.quantize.endswith(CONFIG_SUFFIX):
        return QuantizationAssignment.read(folder / options.quantize)
    return QuantizationAssignment(mode_of(options.quantize))


def _obstacle(job: Job, folder: Path) -> str | None:
    assignment = assignment_of(job.options, folder)
    if assignment is not None and assignment.activations and job.model.calibration is None:
        raise OptionError(
            f"{job.label} has no calibration data",
            got=f"{job.options.quantize}, which quantizes activations",
            remedy="Set calibration to a folder, FILE.npz or MODULE:FACTORY",
        )
    return obstacle(job.options, assignment)


def _check_table(where: str, table: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Check the keys and values of a table; ``where`` names it in messages."""
    for name, value in table.items():
        if name not in checks:
            raise OptionError(
                f"{where}unknown key", got=repr(name), expected=near_matches(name, checks)
            )
        try:
            checks[name](name, value)
        except OptionError as error:
            raise error.prefixed(where) from error


def _check_label(label: str | None, models: Mapping[str, Any]) -> None:
    if label is not None and label not in models:
        raise OptionError(
            "[[exclude]] names no model", got=repr(label), expected=near_matches(label, models)
        )


_text: Final = instance(str, "text")
_table: Final = instance(dict, "a table")


def _seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise refused(name, "must be a positive number of seconds", value)


def _size(name: str, value: Any) -> None:
    if not isinstance(value, str) or parse_size(value) is None:
        raise refused(name, "must be a size in bytes", value, expected="text such as 500M or 2G")


def _natural(name: str, value: Any) -> None:
    checks.integer(name, value)
    if value < 0:
        raise refused(name, "must be at least 0", value)


def _shapes(name: str, value: Any) -> None:
    checks.list_of("shapes such as [1, 3, 224, 224]", list)(name, value)
    for shape in value:
        for size in shape:
            positive(name, size)


def _one_of(*choices: str) -> Check:
    """Return a check that a text is among ``choices``."""

    def check(name: str, value: str) -> None:
        if value not in choices:
            raise OptionError(f"unknown {name}", got=repr(value), expected=", ".join(choices))

    return check


def _quantize(_: str, value: str) -> None:
    if value != NONE and not value.endswith(CONFIG_SUFFIX):
        mode_of(value)


def _target(_: str, value: str) -> None:
    if value != AUTO:
        Opset.from_target_name(value)


def _list_of(check: Check) -> Check:
    """Return a check that the value is a list without repetition whose items ``check`` accepts."""

    def check_each(name: str, value: Any) -> None:
        checks.list_of("text", str)(name, value)
        items = cast("list[str]", value)
        if not items:
            raise refused(name, "must not be empty", items)
        for item in items:
            check(name, item)
        if len(set(items)) < len(items):
            raise refused(name, "must not repeat a value", items)

    return check_each


def _models(name: str, value: Any) -> None:
    _table(name, value)
    for label, table in value.items():
        _table(f"[models.{label}]", table)


def _single(check: Check) -> Check:
    """Return a check that the value is text that ``check`` accepts."""

    def check_one(name: str, value: Any) -> None:
        _text(name, value)
        check(name, value)

    return check_one


_CHOICES: Final[Mapping[str, Check]] = {
    "precision": _one_of(*PRECISIONS),
    "quantize": _quantize,
    "target": _target,
    "engine": _one_of(*ENGINES),
}
_OPTIONS: Final = {name: _list_of(check) for name, check in _CHOICES.items()}


def _options(name: str, value: Any) -> None:
    _table(name, value)
    _check_table("[options] ", value, _OPTIONS)


_COMMON: Final[Mapping[str, Check]] = {
    "seed": _natural,
    "calibration": _text,
    "data": _text,
    "calibration_samples": positive,
    "samples": positive,
}
_MODEL: Final[Mapping[str, Check]] = {
    "source": _text,
    "weights": _text,
    "input_shape": _shapes,
    "options": _options,
    **_COMMON,
}
_EXCLUDED: Final[Mapping[str, Check]] = {
    "model": _text,
    **{name: _single(check) for name, check in _CHOICES.items()},
}
_TOP: Final[Mapping[str, Check]] = {
    "models": _models,
    "options": _options,
    "exclude": checks.list_of("tables", dict),
    "timeout": _seconds,
    "memory": _size,
    "jobs": positive,
    "repeat": _natural,
    **_COMMON,
}

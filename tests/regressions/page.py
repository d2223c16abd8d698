"""Writes ``docs/regressions.md``, for ``make regressions``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from regressions import RECORDS, Here, Regression

PAGE = Path(__file__).parents[2] / "docs" / "regressions.md"
_INTRODUCTION = """\
# Wrong results upstream, and how they are handled here

Written by `make regressions`; do not edit.

coremltools 9.0 converts some calls to programs that compute something else, or that the device
cannot run, without an error. These are the reports about its converter since that release, and
the reports about ExecuTorch's own Core ML backend. `tests/regressions` makes the calls of each
report, with the arguments that show the error, lowers them in fp16 and fp32, and compares both
engines with PyTorch. Statements about Apple's devices are as reported: the tests run without one.
"""
_HEADINGS = {
    Here.REPAIRED: "Rewritten here",
    Here.DELEGATED: "Delegated, and correct",
    Here.REFUSED: "Stays on the CPU",
    Here.NOT_CONCERNED: "Does not apply",
}
_WHAT = {
    Here.REPAIRED: "how it is computed here",
    Here.DELEGATED: "why it is correct here",
    Here.REFUSED: "why it is not delegated",
    Here.NOT_CONCERNED: "why not",
}


def page() -> str:
    """Return the document."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    yield "| | reports |"
    yield "|---|---|"
    for here, heading in _HEADINGS.items():
        yield f"| {heading} | {sum(len(r.issues) for r in RECORDS if r.here is here)} |"
    for here, heading in _HEADINGS.items():
        yield f"\n## {heading}\n"
        yield f"| reports | what went wrong | {_WHAT[here]} |"
        yield "|---|---|---|"
        for record in RECORDS:
            if record.here is here:
                yield f"| {_links(record)} | {record.wrong} | {record.because} |"


def _links(record: Regression) -> str:
    return ", ".join(_link(issue) for issue in record.issues)


def _link(issue: str) -> str:
    repository, _, number = issue.partition("#")
    name = repository.partition("/")[2]
    if not number:
        package, _, version = name.partition("@")
        return f"[{package} {version}](https://pypi.org/project/{package}/{version}/)"
    return f"[{name} {number}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Write ``docs/op-support.md`` from the results of conformance runs.

An op counts as run by a test if it is in the program the test predicts with; a test that fails
counts against each op in it.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime.engines.openvino import structural_ops
from coreml_delegate.runtime.engines.openvino.translations import TRANSLATIONS
from coreml_delegate.runtime.engines.reference import compiler
from coreml_delegate.runtime.engines.reference.kernels import KERNELS
from coreml_delegate.targets import Opset

_COUNTED = ("passed", "failed", "unsupported")
_HAS = {
    "reference": lambda op, opset: op in compiler.STRUCTURAL or KERNELS.find(op, opset) is not None,
    "openvino": lambda op, opset: (
        op in structural_ops.STRUCTURAL or TRANSLATIONS.find(op, opset) is not None
    ),
}
_INTRODUCTION = """\
# MIL ops by engine and opset

Written by `python -m tests.conformance.op_support`; do not edit.

Every op that coremltools {coremltools} registers, by the first opset that has it in this version.

- `12`: twelve of coremltools' own tests with the op in their program ran and passed; `11/12`: one
  of them did not.
- `yes`: the engine has the op, but no test that was run reaches it.
- `no`: the engine declines it, and the program runs on the reference engine.
"""


def versions() -> dict[str, list[Opset]]:
    """The opsets at which each op type of coremltools got a version, oldest first."""
    coremltools()
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    return {op: _changes(by_target) for op, by_target in sorted(SSAOpRegistry.core_ops.items())}


def _changes(by_target: Mapping[Any, Any]) -> list[Opset]:
    """The opsets whose version is another one than before; the first stands for all before it."""
    found: dict[Any, Opset] = {}
    for target in sorted(by_target, key=int):
        found.setdefault(by_target[target], Opset(max(int(target), int(min(Opset)))))
    return sorted(set(found.values()))


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The document.

    Args:
        runs: What ``--results`` wrote, one per engine.
    """
    counts = {run["engine"]: _counts(run) for run in runs}
    lines = [_INTRODUCTION.format(coremltools=runs[0]["coremltools"])]
    lines += [
        "| engine | tests that predict | passed | declined | failed |",
        "|---|---|---|---|---|",
    ]
    lines += [_summary(run) for run in runs]
    lines += ["", f"| op | opset | {' | '.join(counts)} |", f"|---|---|{'---|' * len(counts)}"]
    for op, since in versions().items():
        for opset, later in zip(since, [*since[1:], None], strict=True):
            cells = (_cell(engine, op, opset, later, counts[engine]) for engine in counts)
            lines.append(f"| `{op}` | {opset.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *_failures(runs)]) + "\n"


def _counts(run: Mapping[str, Any]) -> dict[tuple[str, Opset], Counter[str]]:
    counts: dict[tuple[str, Opset], Counter[str]] = defaultdict(Counter)
    for test in run["tests"].values():
        if test["outcome"] in _COUNTED and test["opset"]:
            opset = Opset.from_mil_name(test["opset"])
            for op in test["ops"]:
                counts[op, opset][test["outcome"]] += 1
    return counts


def _summary(run: Mapping[str, Any]) -> str:
    found = run["counts"]
    share = "" if run["sample"] >= 1 else f" (a {run['sample']:.0%} sample)"
    total = sum(found.get(outcome, 0) for outcome in _COUNTED)
    passed = found.get("passed", 0)
    return (
        f"| `{run['engine']}`{share} | {total} | {passed} ({passed / total:.2%}) "
        f"| {found.get('unsupported', 0)} | {found.get('failed', 0)} |"
    )


def _cell(
    engine: str,
    op: str,
    since: Opset,
    until: Opset | None,
    counts: Mapping[tuple[str, Opset], Counter[str]],
) -> str:
    found: Counter[str] = Counter()
    for opset in Opset:
        if opset >= since and (until is None or opset < until):
            found += counts.get((op, opset), Counter())
    total, passed = found.total(), found["passed"]
    if total:
        return str(passed) if passed == total else f"{passed}/{total}"
    return "yes" if _HAS[engine](op, since) else "no"


# Why tests fail that are known to, by a part of their names.
_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "TestMatMul::test_ios17_mixed_precision": "the program declares an integer result of a "
        "product with floats; how Core ML rounds it is not documented",
        "TestScatter::test_ios17_invalid_indices": "without validation the result of indices out "
        "of range is undefined; the test wants another than ours, which counts from the end",
        "TestCropResize::test_builder_to_backend_smoke": "the box lies outside of the image, "
        "where we repeat the border; Core ML's rule is not documented",
    }
)


def _cause(test: str, found: Mapping[str, Any]) -> str:
    known = [cause for part, cause in _CAUSES.items() if part in test]
    if known and found["outcome"] == "failed":
        return known[0]
    return textwrap.shorten(str(found["reason"]), 240, placeholder=" ...")


def _failures(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for run in runs:
        left = {
            test: _cause(test, found)
            for test, found in sorted(run["tests"].items())
            if found["outcome"] in ("failed", "unsupported")
        }
        if left:
            yield f"\n## What `{run['engine']}` does not pass\n"
            for test, cause in left.items():
                yield f"- `{test.rpartition('/tests/')[2]}`: {cause}"


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of conformance runs")
    parser.add_argument("--output", type=Path, default=Path("docs/op-support.md"))
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.results]
    options.output.write_text(page(runs))


if __name__ == "__main__":
    main()

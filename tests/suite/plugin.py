"""The pytest plugin: puts our flow in place of the suite's, takes a sample, records outcomes.

It must be loaded by ``-p``: the suite's ``conftest`` asks for the flows when it is imported.

A test of the suite may lower several models; each is one case with one outcome:

- ``passed``: lowered, executed and equal to eager within the suite's tolerances;
- ``quantize-fail``, ``lower-fail``, ``run-fail``, ``mismatch``, ``fail``: the stage that failed;
- ``skipped``: the suite itself says the model does not run in eager mode or does not export, or
  ExecuTorch cannot serialize a program of which nothing was delegated;
- ``crash``: the process died;
- ``error``: the test failed before it had a model.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from coreml_delegate.runtime.engines.selection import AUTO, ENGINES
from coreml_delegate.scripts.inputs.vision import import_torchvision
from tests.suite.flows import LOWERINGS, Source, SuiteTester, make_flow

_PROPERTY = "suite"
_SEED = 0
_LONGEST_ERROR = 600
FAILURES = ("quantize-fail", "lower-fail", "run-fail", "mismatch", "fail", "crash", "error")
_OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "SUCCESS": "passed",
        "SUCCESS_UNDELEGATED": "passed",
        "SKIPPED": "skipped",
        "QUANTIZE_FAIL": "quantize-fail",
        "LOWER_FAIL": "lower-fail",
        "PTE_LOAD_FAIL": "run-fail",
        "PTE_RUN_FAIL": "run-fail",
        "OUTPUT_MISMATCH_FAIL": "mismatch",
    }
)


@dataclass(slots=True)
class Case:
    """Outcome of one model of one test.

    Attributes:
        outcome: One of those in the module's docstring.
        delegated: How many nodes the delegates took over, by op, as the suite counts.
        undelegated: How many nodes stay outside, by op.
        reasons: Why they do, by op.
        sqnr: The smallest signal-to-noise ratio of an output, in dB; None if nothing was compared.
        error: Why it did not pass, in one line.
        seconds: Duration of the whole test the case is of.
    """

    outcome: str = "error"
    delegated: dict[str, int] = field(default_factory=dict)
    undelegated: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    sqnr: float | None = None
    error: str = ""
    seconds: float = 0.0


class Suite:
    """State of one run: the flow, and the outcomes by case."""

    def __init__(self, options: Any) -> None:
        self.flow: str = options.flow
        self.source = Source(options.source)
        self.engine: str = options.engine
        self.sample: float = options.sample
        self.missed = None if options.missed is None else missed(options.missed)
        self.results: Path | None = options.results
        self.cases: dict[str, Case] = {}
        self._is_worker = False
        self._testers: list[SuiteTester] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        # Not by the environment: that of a run started by a worker of another run says it is one.
        self._is_worker = hasattr(config, "workerinput")

    def install(self) -> None:
        """Make ours the only flow, and leave no model out for kernels that our host has."""
        from executorch.backends.test.suite import flow, reporting, runner

        ours = make_flow(self.flow, self.source, self.engine, self._testers.append)
        flow.all_flows = lambda: {ours.name: ours}
        runner.UNSUPPORTED_PORTABLE_OPS = frozenset()
        runner._graph_has_unsupported_patterns = lambda _: False
        reporting.begin_test_session(None, seed=_SEED)
        if self.source is Source.UPSTREAM:
            # Coremltools collects garbage at every conversion; what the imports made is none. Our
            # conversions see to that themselves, unless somebody else does.
            gc.freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        names = [case_name(item.nodeid) for item in items]
        kept = [
            item
            for item, name in zip(items, names, strict=True)
            if in_sample(name, self.sample) and (self.missed is None or name in self.missed)
        ]
        dropped = [item for item in items if item not in kept]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        # Models draw weights and inputs from the global generators: by test, whatever ran before.
        seed = int.from_bytes(_digest(case_name(item.nodeid))[:4], "little")
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        self._testers.clear()
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            runner = getattr(item, "funcargs", {}).get("test_runner")
            summaries = [] if runner is None else runner._results
            reports = [tester.report() for tester in self._testers]
            cases = [
                asdict(_case(summary, reports[n] if n < len(reports) else {}))
                for n, summary in enumerate(summaries)
            ]
            for case in cases:
                case["seconds"] = round(time.perf_counter() - start, 2)
            item.user_properties.append((_PROPERTY, cases))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        recorded = dict(report.user_properties).get(_PROPERTY)
        name = case_name(report.nodeid)
        if report.when == "call" and isinstance(recorded, list) and recorded:
            self.cases |= {f"{name}/{n}": Case(**case) for n, case in enumerate(recorded)}
            # What makes a test fail is one of its cases, unless nothing is noted of any.
            if report.failed and not any(case["error"] for case in recorded):
                self.cases[f"{name}/{len(recorded)}"] = Case(error=_reason(report))
        elif report.when == "call" or not report.passed:
            # pytest-xdist reports the test during which a worker died with no phase.
            crashed = report.when not in ("setup", "call", "teardown")
            outcome = "crash" if crashed else "skipped" if report.skipped else "error"
            self.cases[f"{name}/0"] = Case(outcome, error=_reason(report))
        if report.when == "teardown":
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        """Keep what there is, after every test: a run may be ended before its end."""
        if self.results is not None and not self._is_worker:
            self.results.write_text(json.dumps(self.summary(), indent=1, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"suite: {self.flow} by {self.source}, run on {self.engine}")
        counts = Counter(case.outcome for case in self.cases.values())
        terminalreporter.line(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))

    def summary(self) -> dict[str, object]:
        """Return the content of the ``--results`` file."""
        return {
            "flow": self.flow,
            "source": str(self.source),
            "engine": self.engine,
            "sample": self.sample,
            "counts": dict(Counter(case.outcome for case in self.cases.values())),
            "cases": {name: asdict(case) for name, case in self.cases.items()},
        }


def _case(summary: Any, report: Mapping[str, tuple[str, ...]]) -> Case:
    ratios = [float(s.sqnr) for s in summary.tensor_error_statistics if s.sqnr is not None]
    finite = [ratio for ratio in ratios if np.isfinite(ratio)]
    outcome = _OUTCOMES.get(summary.result.name, "fail")
    if outcome == "fail" and summary.undelegated_op_counts and not summary.delegated_op_counts:
        outcome = "skipped"
    return Case(
        outcome=outcome,
        delegated=dict(sorted((summary.delegated_op_counts or {}).items())),
        undelegated=dict(sorted((summary.undelegated_op_counts or {}).items())),
        reasons={op: list(reasons) for op, reasons in report.items()},
        sqnr=round(min(finite), 1) if finite else None,
        error=_one_line(summary.error),
    )


def _one_line(error: BaseException | None) -> str:
    if error is None:
        return ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "")
    return " ".join(text.split())[:_LONGEST_ERROR]


def case_name(nodeid: str) -> str:
    """A test's name, alike in every run: folder, file and test without the path before them."""
    return "/".join(nodeid.split("::")[0].split("/")[-2:]) + "::" + nodeid.split("::", 1)[-1]


def in_sample(name: str, share: float) -> bool:
    """Whether a test belongs to the sample of that share; a larger sample holds every smaller."""
    return int.from_bytes(_digest(name)[:8], "big") < share * 2**64


def missed(results: Path) -> frozenset[str]:
    """Names of the tests of which a case failed, from a file that ``--results`` wrote."""
    cases = json.loads(results.read_text())["cases"]
    return frozenset(
        name.rsplit("/", 1)[0] for name, case in cases.items() if case["outcome"] in FAILURES
    )


@functools.cache
def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--flow", choices=tuple(LOWERINGS), default="coreml")
    group.addoption("--source", choices=tuple(map(str, Source)), default=str(Source.OURS))
    group.addoption("--engine", choices=(*ENGINES, AUTO), default=AUTO)
    group.addoption("--sample", type=float, default=1.0, help="share of the tests, chosen by name")
    group.addoption("--missed", type=Path, help="only the tests that the run of this file missed")
    group.addoption("--results", type=Path, help="JSON file to write")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    import_torchvision()  # before the tests do, in every worker
    suite = Suite(early_config.known_args_namespace)
    suite.install()
    early_config.pluginmanager.register(suite, "suite-run")

"""The pytest plugin: serves predictions, takes a sample, records outcomes.

It must be loaded by ``-p``, before the test modules: they ask at import whether this is macOS. A
test counts only if it came to ``MLModel.predict``. Each gets one outcome:

- ``passed``, ``failed``: it predicted, and its own comparison decided;
- ``unsupported``: it predicted, and the engine had declined the program with a reason;
- ``xfailed``, ``xpassed``: coremltools marks it as failing on Core ML itself; it does not count;
- ``skipped``, ``not-reached``, ``error``: it ended before a prediction; it does not count.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import random
import sys
import types
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.patches import third_party
from coreml_delegate.runtime import patch_coremltools
from coreml_delegate.runtime.coremltools_patch import ModelProxy
from coreml_delegate.runtime.engines.selection import AUTO, ENGINES
from coreml_delegate.scripts.inputs.vision import import_torchvision

COUNTED = ("passed", "failed", "unsupported")
_PROPERTY = "conformance"
# The macOS that runs every opset of the tests.
_MACOS_VERSION = (26, 0)


@dataclass(slots=True)
class Evidence:
    """Outcome of one test.

    Attributes:
        outcome: One of those in the module's docstring.
        reached: Whether it came to a prediction.
        ops: MIL op types of the programs it predicted with, constants aside.
        opset: MIL opset of those programs, or an empty string.
        engine: The engine that ran them, or an empty string.
        reason: Why it did not pass, in one line.
        declined: Whether the engine declined the program.
    """

    outcome: str = ""
    reached: bool = False
    ops: list[str] = field(default_factory=list)
    opset: str = ""
    engine: str = ""
    reason: str = ""
    declined: bool = False


class Conformance:
    """State of one run: the engine, the test being run, the outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        self.engine: str = config.getoption("--engine")
        self.sample: float = config.getoption("--sample")
        self.results: Path | None = config.getoption("--results")
        self.outcomes: dict[str, Evidence] = {}
        self._current = Evidence()
        self._is_worker = hasattr(config, "workerinput")

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let coremltools predict, and its tests believe that this is macOS."""
        monkeypatch.setenv("PYMIL_TEST_TARGETS", "mlprogram")
        third_party.coremltools()
        import_torchvision()  # some test modules do, before anything can help them
        _stand_in(monkeypatch, "peft", "LoraConfig", "get_peft_model")
        import coremltools._deps as deps
        import coremltools.models.model as model
        import coremltools.models.utils as utils

        monkeypatch.setattr(deps, "_IS_MACOS", True)
        monkeypatch.setattr(utils, "_is_macos", lambda: True)
        monkeypatch.setattr(utils, "_macos_version", lambda: _MACOS_VERSION)
        predict = model.MLModel.predict

        def recorded(mlmodel: Any, *arguments: Any, **keywords: Any) -> Any:
            self._note(mlmodel)
            if self._current.declined:
                pytest.skip(self._current.reason)
            return predict(mlmodel, *arguments, **keywords)

        monkeypatch.setattr(model.MLModel, "predict", recorded)

    def _note(self, mlmodel: Any) -> None:
        current = self._current
        spec = mlmodel.get_spec()
        if spec.WhichOneof("Type") != "mlProgram":
            pytest.skip("not an ML Program: a neural network, whatever PYMIL_TEST_TARGETS says")
        current.reached = True
        for function in spec.mlProgram.functions.values():
            current.opset = function.opset
            found = set(_op_types(function.block_specializations[function.opset]))
            current.ops = sorted({*current.ops, *found})
        proxy = mlmodel.__proxy__
        if isinstance(proxy, ModelProxy):
            current.engine = proxy.model.engine_name
            return
        cause = getattr(mlmodel._framework_error, "__cause__", None)
        current.declined = isinstance(cause, UnsupportedOpError)
        current.reason = str(cause)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self.sample >= 1.0:
            return
        kept = [item for item in items if in_sample(item.nodeid, self.sample)]
        dropped = [item for item in items if not in_sample(item.nodeid, self.sample)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    def pytest_collection_finish(self) -> None:
        # Every conversion collects garbage, and most of its time went to what is never garbage.
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        # Tests draw their inputs from the global generators: by id, so that no other test matters.
        seed = int.from_bytes(_digest(item.nodeid)[:4], "little")
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        self._current = Evidence()
        try:
            return (yield)
        finally:
            item.user_properties.append((_PROPERTY, asdict(self._current)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not (report.when == "setup" and not report.passed):
            return
        recorded = dict(report.user_properties).get(_PROPERTY)
        evidence = Evidence(**recorded) if isinstance(recorded, dict) else Evidence()
        evidence.outcome = _outcome(report, evidence)
        if evidence.outcome != "passed" and not evidence.reason:
            evidence.reason = _reason(report)
        self.outcomes[report.nodeid] = evidence

    def pytest_sessionfinish(self) -> None:
        if self.results is None or self._is_worker:
            return
        self.results.write_text(json.dumps(self.summary(), indent=1, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = Counter(evidence.outcome for evidence in self.outcomes.values())
        reached = sum(counts[outcome] for outcome in COUNTED)
        terminalreporter.section(f"conformance: {self.engine}")
        terminalreporter.line(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
        if reached:
            share = counts["passed"] / reached
            terminalreporter.line(f"{share:.2%} passed of {reached} that reached a prediction")

    def summary(self) -> dict[str, object]:
        """Return the content of the ``--results`` file."""
        return {
            "engine": self.engine,
            "sample": self.sample,
            "coremltools": third_party.coremltools().__version__,
            "counts": dict(Counter(e.outcome for e in self.outcomes.values())),
            "tests": {
                test: {k: v for k, v in asdict(evidence).items() if k != "declined"}
                for test, evidence in self.outcomes.items()
            },
        }


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--engine", choices=(*ENGINES, AUTO), default=AUTO)
    group.addoption("--sample", type=float, default=1.0, help="share of the tests, chosen by id")
    group.addoption("--results", type=Path, help="JSON file to write")


def pytest_configure(config: pytest.Config) -> None:
    conformance = Conformance(config)
    monkeypatch = pytest.MonkeyPatch()
    config.add_cleanup(monkeypatch.undo)
    conformance.serve(monkeypatch)
    config.add_cleanup(patch_coremltools(conformance.engine).undo)
    config.pluginmanager.register(conformance, "conformance-run")


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, *attributes: str) -> None:
    """Let a module be imported that is not installed, and that only other tests need."""
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(attributes))
        monkeypatch.setitem(sys.modules, name, module)


def in_sample(test: str, share: float) -> bool:
    """Whether a test belongs to the sample of that share; a larger sample holds every smaller."""
    return int.from_bytes(_digest(test)[:8], "big") < share * 2**64


def _digest(test: str) -> bytes:
    return hashlib.sha256(test.encode()).digest()


def _op_types(block: Any) -> Iterator[str]:
    for op in block.operations:
        if op.type != "const":
            yield op.type
        for nested in op.blocks:
            yield from _op_types(nested)


def _outcome(report: pytest.TestReport, evidence: Evidence) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.skipped:
        return "unsupported" if evidence.declined else "skipped"
    if not evidence.reached:
        return "not-reached" if report.passed else "error"
    return "passed" if report.passed else "failed"


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "")
    return " ".join(text.split())[:400]

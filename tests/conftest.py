"""Fixtures and hooks for every test."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch._export.utils
import torch.export.exported_program
from support.sample import Recorder, checksum, sample_of
from torch._subclasses import fake_impls

from coreml_delegate import ops
from coreml_delegate.formats.caches import CACHE_VARIABLE
from coreml_delegate.formats.entry_cache import LIMIT_VARIABLE
from coreml_delegate.patches.executorch import forget_lowered
from coreml_delegate.patches.openvino import import_openvino
from coreml_delegate.patches.third_party import coremltools

_OWN_CACHE = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run one in N of the tests")
    parser.addoption(
        "--part", choices=["sample", "rest"], help="run the sample of make test, or the other tests"
    )
    parser.addoption(
        "--record-times", action="store_true", help="record the times that the sample is drawn by"
    )


_SUBJECTS = ("core_opset", "documents", "op_records_account", "op_rules", "regressions", "site")
_WITH_ALL_RECORDS = frozenset(f"test_{subject}.py" for subject in _SUBJECTS)


@pytest.fixture(autouse=True, scope="module")
def operators_on_the_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep ``asinh`` and ``acosh`` on the CPU, except where records or documents are tested.

    Many tests need an elementwise operator that ExecuTorch's runtime has and Core ML does not.
    There is none: these two are treated as if they had no record.
    """
    if request.path.name in _WITH_ALL_RECORDS:
        ops.translations.cache_clear()  # other tests may have made them without the two
        yield
        return
    others = {
        target: record
        for target, record in ops.RECORDS.items()
        if target not in ("aten.asinh.default", "aten.acosh.default")
    }
    with mock.patch.object(ops, "RECORDS", others):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a cache of its own, which its workers inherit and share.

    The user's is neither read, which would hide what a change does to trials, nor filled. Tests
    convert and compile; only those of these caches find what others have left.
    """
    import_openvino()  # before tests do, whose import would fork a process for its telemetry
    os.environ.setdefault(LIMIT_VARIABLE, "off")
    if config.getoption("record_times") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
    if CACHE_VARIABLE not in os.environ:
        config.stash[_OWN_CACHE] = Path(tempfile.mkdtemp(prefix="coreml-delegate-tests-"))
        os.environ[CACHE_VARIABLE] = str(config.stash[_OWN_CACHE])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Torch traces itself at DEBUG; its records would bury every failure report.

    An option of pytest has this effect too, and makes each test empty the caches of some thousand
    loggers.
    """
    reports: Any = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (reports.caplog_handler, reports.report_handler):
        handler.setLevel(logging.WARNING)


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(_OWN_CACHE, None)
    if folder is not None:
        del os.environ[CACHE_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what ``share(n)`` leaves out: of each test, all but one in n of its cases.

    ``--one-in`` then takes a sample of all tests, and ``--part`` the sample of the tests that are
    not slow, or the others. All depend on nothing but the names and ``times.txt``.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("share") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same_test in cases.values():
        marker = same_test[0].get_closest_marker("share")
        assert marker is not None
        kept = -(-len(same_test) // marker.args[0])
        by_name = sorted(same_test, key=lambda item: checksum(item.nodeid.partition("[")[2]))
        for item in by_name[kept:]:
            item.add_marker(pytest.mark.slow)
    left_out = {item for item in items if checksum(item.nodeid) % config.getoption("one_in")}
    if (part := config.getoption("part")) is not None:
        sample = sample_of(item for item in items if item.get_closest_marker("slow") is None)
        left_out |= set(items) - sample if part == "sample" else sample
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Random numbers drawn while a module is imported, for its cases, are the same each time."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    coremltools()
    gc.get_freeze_count = _some_are_frozen
    for module in (torch.export.exported_program, torch.export.decomp_utils):
        module._collect_all_valid_cia_ops = _known_composite_ops
    torch.export.exported_program._override_composite_implicit_decomp = _composite_ops_overridden
    torch._ops.Callable = _AnyCallable
    _freeze()


_collect_composite_ops = torch._export.utils._collect_all_valid_cia_ops
_composite_ops: dict[tuple[str, ...], set[Any]] = {}


def _known_composite_ops() -> set[Any]:
    """Return the composite ops, which torch collects at each decomposition: a sixth of all time."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    key = tuple(registered)
    if key not in _composite_ops:
        _composite_ops[key] = _collect_composite_ops()
    return _composite_ops[key]


_override_composite_ops = torch.export.exported_program._override_composite_implicit_decomp
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@dataclass(frozen=True)
class _Override:
    """The tables of one composite op while its kernels are overridden.

    Torch adds a rule for fake tensors if the op has none, and removes the rule afterwards in both
    cases.

    Attributes:
        before: The op's Python kernels without the override.
        had_rule: Whether the op had a rule for fake tensors before.
        meanwhile: The op's Python kernels during the override.
        rule: The op's rule for fake tensors during the override.
    """

    before: dict[Any, Any]
    had_rule: bool
    meanwhile: dict[Any, Any]
    rule: Any

    def is_of(self, op: Any) -> bool:
        return self.before == op.py_kernels and self.had_rule == _has_rule(op)


_overrides: dict[Any, _Override] = {}
_has_rule = fake_impls._is_op_registered_to_fake_rule


@contextmanager
def _composite_ops_overridden(callables: Mapping[Any, Any]) -> Iterator[None]:
    """Override the kernels of composite ops as torch does, with tables that it makes once.

    It makes them for a thousand ops at each decomposition, a twentieth of the suite's time.
    """
    new = [op for op in callables if op not in _overrides or not _overrides[op].is_of(op)]
    before = {op: (dict(op.py_kernels), _has_rule(op)) for op in new}
    with _override_composite_ops({op: callables[op] for op in new}):
        for op in new:
            rule = fake_impls.op_implementations_dict[op]
            _overrides[op] = _Override(*before[op], dict(op.py_kernels), rule)
    for op, kernel in callables.items():
        op.py_kernels.update(_overrides[op].meanwhile)
        op.py_kernels[_COMPOSITE] = kernel
        op._dispatch_cache.clear()
        fake_impls.op_implementations_dict[op] = _overrides[op].rule
    try:
        yield
    finally:
        for op in callables:
            op.py_kernels.clear()
            op.py_kernels.update(_overrides[op].before)
            op._dispatch_cache.clear()
            fake_impls._deregister_op_impl(op)


class _Any(type):
    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:
        return callable(instance)


class _AnyCallable(metaclass=_Any):
    """``Callable`` for annotations that torch evaluates 12,000 times in each decomposition."""


_count_frozen = gc.get_freeze_count


@functools.wraps(_count_frozen)
def _some_are_frozen() -> int:
    """Answer whether any object is frozen, as conversions ask, without walking over all of them."""
    return 1


def pytest_runtest_logfinish() -> None:
    forget_lowered()  # a frozen program would never be collected
    _freeze()


def _freeze() -> None:
    """Keep the garbage collector off the objects that live on, which tests share.

    Coremltools collects garbage after each conversion; without this, a third of the suite's time
    goes to modules and programs that are no garbage.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_same_values_in_any_order(request: pytest.FixtureRequest) -> None:
    """Start the generators anew for each test, torch's and a module's ``_RNG``."""
    torch.default_generator.manual_seed(0)
    generator = getattr(request.module, "_RNG", None)
    if generator is not None:
        generator.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.fixture(autouse=True)
def _logs_have_open_streams() -> Iterator[None]:
    """Loggers of torch keep the stderr of the test that first used them, which it closes."""
    yield
    loggers = logging.Logger.manager.loggerDict.values()
    for handler in (h for log in loggers for h in getattr(log, "handlers", ())):
        if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
            handler.stream = sys.__stderr__

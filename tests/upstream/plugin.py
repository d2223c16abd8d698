"""The pytest plugin: what the tests import of the backend is ours, and programs are executed.

It must be loaded by ``-p``, before the test modules.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from typing import Any

import pytest
import torch
from executorch.runtime import Runtime

from coreml_delegate import runtime
from coreml_delegate.scripts.inputs.vision import import_torchvision

_BACKEND = "executorch.backends.apple.coreml"
# Theirs by module: ours by name.
_OURS = {
    "compiler": ("coreml_delegate", ("CoreMLBackend",)),
    "compiler.coreml_preprocess": (
        "coreml_delegate.backend",
        ("CoreMLBackend", "MULTIMETHOD_WEIGHT_SHARING_STRATEGY"),
    ),
    "partition": ("coreml_delegate", ("CoreMLPartitioner",)),
    "quantizer": ("coreml_delegate.quantizer", ("CoreMLQuantizer",)),
    "recipes": ("coreml_delegate.recipes", ("CoreMLRecipeProvider", "CoreMLRecipeType")),
}
# What ours does otherwise, and better; the tests must fail, or they go from this list.
_DIFFERENT = {
    "test_argmax_argmin_dim_none_is_skipped": "flattened before, which is the cure for "
    "pytorch/executorch#11715, argmax and argmin without a dimension are delegated",
    "test_aten_rand_default_falls_back_to_portable": "delegated by a translation of ours",
    "test_minimum_deployment_target_validation": "the target that is needed is called by its "
    "name, iOS17, not by the number 8",
}
# Of these, the subtests fail and the test as a whole does not, which no strict mark allows.
_DIFFERENT_IN_SUBTESTS = frozenset({"test_minimum_deployment_target_validation"})
# One of the tests listens to their logger.
_LOGGERS = {f"{_BACKEND}.partition.coreml_partitioner": "coreml_delegate.partition.partitioner"}
# What the test modules set where programs can be executed.
_RUNTIME_FLAGS = ("_TEST_RUNTIME", "IS_VALID_TEST_RUNTIME")


def _substitute() -> None:
    for name, (source, exported) in _OURS.items():
        module = types.ModuleType(f"{_BACKEND}.{name}")
        ours = importlib.import_module(source)
        for attribute in exported:
            if hasattr(ours, attribute):
                setattr(module, attribute, getattr(ours, attribute))
        sys.modules[module.__name__] = module


def _without_downloads() -> None:
    """Weights are random wherever a model of torchvision is asked for trained ones."""
    import_torchvision()
    from torchvision import models

    for name in models.list_models(module=models):
        build = getattr(models, name)
        setattr(models, name, functools.wraps(build)(_untrained(build)))


def _untrained(build: Any) -> Any:
    def built(*arguments: Any, weights: Any = None, **keywords: Any) -> Any:
        return build(*arguments, weights=None, **keywords)

    return built


class _Forwarded(logging.Handler):
    """Passes records on to another logger's handlers."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self._to = logging.getLogger(to)

    def emit(self, record: logging.LogRecord) -> None:
        self._to.handle(record)


def pytest_configure() -> None:
    _substitute()
    _without_downloads()
    for theirs, ours in _LOGGERS.items():
        logging.getLogger(ours).addHandler(_Forwarded(theirs))
    runtime.register()


def pytest_runtest_setup() -> None:
    # Their models are random, and some of their bounds next to what 4 bits give such a one.
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = _DIFFERENT.get(item.name)
        if reason is not None:
            strict = item.name not in _DIFFERENT_IN_SUBTESTS
            item.add_marker(pytest.mark.xfail(reason=reason, strict=strict))
    for module in {getattr(item, "module", None) for item in items}:
        for flag in _RUNTIME_FLAGS:
            if hasattr(module, flag):
                setattr(module, flag, True)
                module.Runtime = Runtime

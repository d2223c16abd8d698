"""A pytest plugin that falsifies every prediction, to show that tests notice."""

from __future__ import annotations

from coreml_delegate.runtime.coremltools_patch import ModelProxy

_right = ModelProxy.predict


def _wrong(proxy, data, state=None):
    return {name: array + 100 for name, array in _right(proxy, data, state).items()}


def pytest_configure():
    ModelProxy.predict = _wrong


def pytest_unconfigure():
    ModelProxy.predict = _right

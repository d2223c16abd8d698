"""The conditions under which tests are skipped, each in one place."""

from __future__ import annotations

import pytest

from coreml_delegate.runtime.program import stock

needs_compiler = pytest.mark.skipif(
    stock.unavailable_reason() is not None, reason=str(stock.unavailable_reason())
)

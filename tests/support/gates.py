"""The conditions under which tests are skipped, each in one place."""

from __future__ import annotations

import platform
import shutil

import pytest

from coreml_delegate.runtime.engines.openvino.engine import _core
from coreml_delegate.runtime.engines.openvino.session import compilation
from coreml_delegate.runtime.program import stock

needs_compiler = pytest.mark.skipif(
    stock.unavailable_reason() is not None, reason=str(stock.unavailable_reason())
)

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on this machine")


def _has_bf16() -> bool:
    native = "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return native or compilation.emulates_precision("bf16")


needs_bf16 = pytest.mark.skipif(not _has_bf16(), reason="the CPU neither has nor emulates bf16")

IS_X86 = platform.machine() in ("x86_64", "AMD64")

needs_x86 = pytest.mark.skipif(not IS_X86, reason="other CPUs convert floats otherwise")

needs_vnni = pytest.mark.skipif(
    not IS_X86 or compilation.int8_sums_saturate(), reason="the CPU has no VNNI"
)

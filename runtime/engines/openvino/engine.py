"""The OpenVINO engine; OpenVINO is imported when first used, so the package may be missing."""

from __future__ import annotations

import functools
from typing import Any

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.patches.openvino import import_openvino
from coreml_delegate.runtime.engines.base import CompiledFunction, Engine, EngineOptions
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.mil.program import Function


class OpenVinoEngine:
    """Executes a function as one OpenVINO graph on the CPU.

    Values are computed in fp32, or in bf16 on request, not in the declared dtypes: fp16 inputs,
    outputs and states are converted at the boundary, and a cast to fp16 in between does nothing.
    """

    name = "openvino"
    python_reason = None

    def unavailable_reason(self) -> str | None:
        """Return the reason why OpenVINO cannot be used on this machine, or None if it can."""
        try:
            _core()
        except ImportError as error:
            return f"the openvino package cannot be imported ({error})"
        except RuntimeError as error:
            return f"openvino does not start ({error})"
        return None

    def unsupported(self, function: Function) -> list[str]:
        """Return one reason for each op of ``function`` without a translation, with its output."""
        self._require()
        from coreml_delegate.runtime.engines.openvino.session import compilation

        return compilation.unsupported(function)

    def compile(
        self, function: Function, options: EngineOptions, source: ProgramSource | None = None
    ) -> CompiledFunction:
        """Translate and compile ``function``, or load it from the cache; see ``Engine``.

        Raises:
            EngineUnavailableError: OpenVINO, or the precision asked for, cannot be used here.
            UnsupportedOpError: An op, or a mode or type of it, has no translation.
        """
        self._require()
        from coreml_delegate.runtime.engines.openvino.session import compilation

        return compilation.compile_function(_core(), function, options, source)

    def _require(self) -> None:
        reason = self.unavailable_reason()
        if reason is not None:
            raise EngineUnavailableError(
                "the openvino engine cannot be used", got=reason, remedy="pip install openvino"
            )


@functools.cache
def _core() -> Any:
    core = import_openvino().Core()
    core.get_property(DEVICE, "FULL_DEVICE_NAME")  # loads the CPU plugin
    return core


OPENVINO: Engine = OpenVinoEngine()
"""The engine, a singleton."""

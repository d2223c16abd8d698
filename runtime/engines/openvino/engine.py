"""The OpenVINO engine; OpenVINO is imported when first used, so the package may be missing."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.runtime.engines.base import CompiledFunction, Engine, EngineOptions
from coreml_delegate.runtime.mil.program import Function

_logger = logging.getLogger(__name__)

_DEVICE = "CPU"


class OpenVinoEngine:
    """Executes a function as one OpenVINO graph on the CPU.

    Values are computed in fp32 whatever the program declares: fp16 inputs, outputs and states are
    converted at the boundary, and a cast to fp16 in between does nothing.
    """

    name = "openvino"

    def unavailable_reason(self) -> str | None:
        """Why OpenVINO cannot be used on this machine, or None if it can."""
        try:
            _core()
        except ImportError as error:
            return f"the openvino package cannot be imported ({error})"
        except RuntimeError as error:
            return f"openvino does not start ({error})"
        return None

    def unsupported(self, function: Function) -> list[str]:
        """What in ``function`` has no translation: one reason each, naming op and output."""
        self._require()
        from coreml_delegate.runtime.engines.openvino import translate

        return translate.unsupported(function)

    def compile(self, function: Function, options: EngineOptions) -> CompiledFunction:
        """Translate and compile ``function``.

        Raises:
            EngineUnavailableError: OpenVINO cannot be used here.
            UnsupportedOpError: An op, or a mode or type of it, has no translation.
        """
        self._require()
        from coreml_delegate.runtime.engines.openvino import session, translate

        translated = translate.translate(function)
        compiled = _core().compile_model(translated.model, _DEVICE, _config(options))
        _logger.debug(
            "compiled %s for %s: %d nodes",
            function.name,
            _DEVICE,
            len(translated.model.get_ops()),
        )
        return session.OpenVinoFunction(translated, compiled)

    def _require(self) -> None:
        reason = self.unavailable_reason()
        if reason is not None:
            raise EngineUnavailableError(
                "the openvino engine cannot be used", got=reason, remedy="pip install openvino"
            )


@functools.cache
def _core() -> Any:
    core = importlib.import_module("openvino").Core()
    core.get_property(_DEVICE, "FULL_DEVICE_NAME")  # loads the CPU plugin
    return core


def _config(options: EngineOptions) -> dict[str, object]:
    config: dict[str, object] = {
        # Without it OpenVINO computes in bf16 wherever the CPU has matrix instructions for it.
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        # Otherwise activations are quantized to int8 where weights are compressed integers.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    if options.threads is not None:
        config["INFERENCE_NUM_THREADS"] = options.threads
    return config


OPENVINO: Engine = OpenVinoEngine()
"""The engine."""

"""OpenVINO's import, and its private interfaces."""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

_TELEMETRY = "openvino_telemetry"


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which other packages may import afterwards.

    The import reports itself over the network from a forked process, in which JAX and other
    libraries with threads may deadlock. Without the module OpenVINO uses a stub of its own.

    Raises:
        ImportError: OpenVINO is not installed.
    """
    modules = cast("dict[str, Any]", sys.modules)
    if _TELEMETRY in modules:
        return importlib.import_module("openvino")
    modules[_TELEMETRY] = None
    try:
        return importlib.import_module("openvino")
    finally:
        modules.pop(_TELEMETRY, None)


def infer_method() -> Any:
    """Return ``infer`` of the extension class of inference requests.

    ``openvino.InferRequest.infer`` wraps it in argument dispatch and a dictionary class.
    """
    classes = import_openvino().InferRequest.__mro__
    return next(vars(base)["infer"] for base in reversed(classes) if "infer" in vars(base))

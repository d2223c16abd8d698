"""The OpenVINO engine: the program as one compiled graph on the CPU."""

from __future__ import annotations

import sys
from typing import Any, cast

from coreml_delegate.runtime.engines.openvino.engine import OPENVINO

# Importing openvino reports the import over the network, from a process that it forks: JAX, and
# whatever else has threads, may deadlock in that. Without this module it has a stand-in.
cast("dict[str, Any]", sys.modules).setdefault("openvino_telemetry", None)

__all__ = ["OPENVINO"]

"""Core ML delegate for ExecuTorch: lower, explain, reproduce and run anywhere.

Names are loaded on first use: importing ExecuTorch and coremltools takes seconds, and a program
that only runs models needs neither.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coreml_delegate import runtime
    from coreml_delegate.backend import MULTIMETHOD_WEIGHT_SHARING_STRATEGY, CoreMLBackend
    from coreml_delegate.opaque_ops.recurrent_layers import dynamic_steps
    from coreml_delegate.options.lowering_options import CompileOptions
    from coreml_delegate.partition import CoreMLPartitioner
    from coreml_delegate.quantizer import CoreMLQuantizer

logging.getLogger(__name__).addHandler(logging.NullHandler())

_LAZY = {
    "CompileOptions": "coreml_delegate.options.lowering_options",
    "CoreMLBackend": "coreml_delegate.backend",
    "CoreMLPartitioner": "coreml_delegate.partition",
    "CoreMLQuantizer": "coreml_delegate.quantizer",
    "MULTIMETHOD_WEIGHT_SHARING_STRATEGY": "coreml_delegate.backend",
    "dynamic_steps": "coreml_delegate.opaque_ops.recurrent_layers",
}

__all__ = [
    "MULTIMETHOD_WEIGHT_SHARING_STRATEGY",
    "CompileOptions",
    "CoreMLBackend",
    "CoreMLPartitioner",
    "CoreMLQuantizer",
    "dynamic_steps",
    "runtime",
]


def __getattr__(name: str) -> Any:
    if name == "runtime":
        return importlib.import_module("coreml_delegate.runtime")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from coreml_delegate.patches.third_party import quiet_import

    with quiet_import():
        return getattr(importlib.import_module(_LAZY[name]), name)

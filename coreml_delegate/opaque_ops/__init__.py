"""Operators that are protected from decomposition: control flow, recurrent layers, weights.

Each module protects calls before ExecuTorch decomposes a program, translates the protected calls to
MIL, and restores the calls that Core ML does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from coreml_delegate.opaque_ops import (
    compressed_weights,
    control_flow_translation,
    recurrent_layers,
)
from coreml_delegate.third_party import coremltools


@cache
def translations() -> Mapping[str, Callable[[Any, Any], None]]:
    """Return translations of all opaque ops; each takes coremltools' context and the node."""
    coremltools()
    from coremltools.converters.mil.mil import Builder

    return {
        **control_flow_translation.translations(Builder),
        **recurrent_layers.translations(Builder),
        **compressed_weights.translations(Builder),
    }

"""Kernels of calls on the CPU, where torch knows them only once a library has registered them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

logger = logging.getLogger(__name__)

# ExecuTorch's memory planning asks for the out variants that these register.
_REGISTERED_BY: Mapping[str, str] = MappingProxyType(
    {"quantized_decomposed": "executorch.kernels.quantized"}
)


def register_kernels(ops: Iterable[str]) -> None:
    """Import the libraries of the ops that stay on the CPU.

    Args:
        ops: Their target names.
    """
    for namespace in sorted({op.partition(".")[0] for op in ops} & set(_REGISTERED_BY)):
        try:
            importlib.import_module(_REGISTERED_BY[namespace])
        except ImportError as error:
            logger.warning(
                "the kernels of %s that stay on the CPU are not registered: %s", namespace, error
            )

"""A graph builder over Core ML: ``Backend``, ``Builder``, ``Executable`` and ``Buffer``."""

from coreml_delegate.graph.backend import Backend
from coreml_delegate.graph.builder import Builder
from coreml_delegate.graph.executable import Buffer, Executable
from coreml_delegate.graph.node import Closure, Value
from coreml_delegate.graph.tensor_types import Dimension, DType, TensorType

__all__ = [
    "Backend",
    "Buffer",
    "Builder",
    "Closure",
    "DType",
    "Dimension",
    "Executable",
    "TensorType",
    "Value",
]

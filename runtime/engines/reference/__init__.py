"""The reference engine: torch computes op by op, in the dtypes of the program."""

from coreml_delegate.runtime.engines.reference.engine import (
    REFERENCE,
    ReferenceEngine,
    ReferenceFunction,
    ReferenceState,
)
from coreml_delegate.runtime.engines.reference.interpreter import Listener

__all__ = ["REFERENCE", "Listener", "ReferenceEngine", "ReferenceFunction", "ReferenceState"]

"""The MIL opset of a program, as engines look kernels up by it."""

from coreml_delegate.targets import Opset

__all__ = ["Opset"]

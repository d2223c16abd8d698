"""Rewrites of whole programs before they are partitioned; numerics do not change."""

from coreml_delegate.transforms.complex_numbers import split_complex_numbers

__all__ = ["split_complex_numbers"]

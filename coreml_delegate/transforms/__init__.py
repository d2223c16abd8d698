"""Program to program, before a program is partitioned; what it computes does not change."""

from coreml_delegate.transforms.complex_numbers import split_complex_numbers

__all__ = ["split_complex_numbers"]

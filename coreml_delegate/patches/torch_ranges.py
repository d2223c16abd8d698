"""Torch's private arithmetic of dynamic sizes: bounds of expressions, and its infinity.

``ExportedProgram.range_constraints``, which is public, has these ranges as values, but their class
has no public name. Apart from ``patches.torch``, because it imports SymPy, which takes a second.
"""

from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["ValueRanges", "bound_sympy", "int_oo"]

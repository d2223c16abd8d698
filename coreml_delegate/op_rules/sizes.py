"""Sizes of tensors and sums, products and quotients of them: numbers that are known at run time.

None can cross the boundary of a partition, where all are tensors: what is computed from shapes is
computed inside the partition that uses it; see ``partition.symbolic_sizes``.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from coreml_delegate.op_rules.rule import ANY, BOUNDARY, NARROW, OpRule


def is_size(node: Node) -> bool:
    """Whether a node is a number computed from shapes, or an input that is one."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


_ARITHMETIC = ("add", "sub", "mul", "floordiv")

RULES = (
    OpRule(
        "aten.sym_size.int",
        "sizes",
        dtypes={"": ANY | BOUNDARY | NARROW},
        preserve=False,
        alone=False,
    ),
    *(
        OpRule(
            f"operator.{op}",
            "sizes",
            symbolic=frozenset({"arg0", "arg1"}),
            preserve=False,
            alone=False,
        )
        for op in _ARITHMETIC
    ),
)

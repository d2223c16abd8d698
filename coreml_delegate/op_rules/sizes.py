"""Sizes of tensors, integers taken out of tensors, and sums, products and quotients of them.

They are numbers that are known at run time. None can cross the boundary of a partition, where all
are tensors: what is computed from them is computed inside the partition that uses it; see
``partition.symbolic_sizes``. Checks of such numbers go where the numbers go, and are dropped, as
ExecuTorch drops them from all that it runs.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from coreml_delegate.op_rules.rule import (
    ANY,
    BOUNDARY,
    NARROW,
    NUMERIC,
    OpRule,
    target_name,
)

CHECK = "aten._assert_scalar.default"


def is_size(node: Node) -> bool:
    """Whether a node is a number computed from shapes or tensors, or an input that is one."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_check(node: Node) -> bool:
    """Whether a node does nothing but check a number, or compares one for a check."""
    return target_name(node.target) == CHECK or isinstance(node.meta.get("val"), torch.SymBool)


_ARITHMETIC = ("add", "sub", "mul", "floordiv")
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
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
        for op in (*_ARITHMETIC, *_COMPARISONS)
    ),
    OpRule(
        "aten._local_scalar_dense.default",
        "sizes",
        dtypes={"": NUMERIC},
        preserve=False,
        alone=False,
    ),
    OpRule(CHECK, "sizes", symbolic=frozenset({"self"}), preserve=False, alone=False),
)

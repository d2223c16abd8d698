"""Sizes of tensors, integers taken out of tensors, and sums, products and quotients of them.

They are numbers that are known at run time. None can cross the boundary of a partition, where all
are tensors: what is computed from them is computed inside the partition that uses it; see
``partition.grouping.symbolic_sizes``. Checks of such numbers go where the numbers go, and are
dropped, as ExecuTorch drops them from all that it runs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Node

from coreml_delegate.ops.call import ANY, BOUNDARY, NARROW, NUMERIC, target_name
from coreml_delegate.ops.edits import ATEN, insert, value_of
from coreml_delegate.ops.flops import nothing
from coreml_delegate.ops.record import OpRecord

_CHECK = "aten._assert_scalar.default"


def is_size(node: Node) -> bool:
    """Whether a node is a number computed from shapes or tensors, or an input that is one."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_check(node: Node) -> bool:
    """Whether a node does nothing but check a number, or compares one for a check."""
    return target_name(node.target) == _CHECK or isinstance(node.meta.get("val"), torch.SymBool)


def _item(node: Node) -> None:
    """The number in a tensor, which coremltools takes for one where it has no dimensions."""
    source = node.args[0]
    if isinstance(source, Node) and value_of(source).dim():
        vector = insert(node, ATEN.view_copy.default, source, [1])
        node.args = (insert(node, ATEN.select_copy.int, vector, 0, 0),)


def _drop(node: Node) -> None:
    """A check, which ExecuTorch does not make either."""
    node.graph.erase_node(node)


_op = partial(OpRecord, preserve=False, alone=False, flops=nothing)

RECORDS = (
    _op("aten.sym_size.int", dtypes={"": ANY | BOUNDARY | NARROW}),
    *(
        _op(f"operator.{name}", symbolic=frozenset({"arg0", "arg1"}))
        for name in (
            *("add", "sub", "mul", "floordiv"),
            *("eq", "ge", "gt", "le", "lt", "ne"),
        )
    ),
    _op("aten._local_scalar_dense.default", dtypes={"": NUMERIC}, rewrite=_item),
    _op(_CHECK, symbolic=frozenset({"self"}), rewrite=_drop),
)

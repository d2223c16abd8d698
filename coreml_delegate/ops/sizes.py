"""Symbolic sizes: sizes of tensors, items of tensors, and arithmetic on these numbers.

The numbers are known at run time, and only tensors can cross the boundary of a partition: each
partition computes the numbers that it uses; see ``partition.grouping.symbolic_sizes``. Checks
of numbers are delegated with them and dropped; ExecuTorch drops all checks.
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
    """Whether a node's value is a symbolic number, not a tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_check(node: Node) -> bool:
    """Whether a node asserts a number, or compares numbers for an assertion."""
    return target_name(node.target) == _CHECK or isinstance(node.meta.get("val"), torch.SymBool)


def _item(node: Node) -> None:
    """Index the only element of a tensor: coremltools takes only scalars for a number."""
    source = node.args[0]
    if isinstance(source, Node) and value_of(source).dim():
        vector = insert(node, ATEN.view_copy.default, source, [1])
        node.args = (insert(node, ATEN.select_copy.int, vector, 0, 0),)


def _drop(node: Node) -> None:
    """Erase a check; ExecuTorch drops it too."""
    node.graph.erase_node(node)


_op = partial(OpRecord, preserve=False, standalone=False, flops=nothing)

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

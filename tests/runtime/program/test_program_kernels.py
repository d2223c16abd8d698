"""The function that computes an operator, and the binding of its arguments."""

from __future__ import annotations

import math

import pytest
from executorch.exir.passes import executorch_prim_ops_registry as prims
from executorch.runtime import Runtime

from coreml_delegate.errors import BlobFormatError, UnsupportedOpError
from coreml_delegate.runtime.program import kernels
from coreml_delegate.runtime.program.instructions import DelegateOnlyValues, bind_method
from coreml_delegate.runtime.program.plan import KernelCall, MethodInfo

_NOTHING = DelegateOnlyValues(frozenset(), frozenset())


def _prim_schemas() -> dict[str, object]:
    ops = prims._EXECUTORCH_SYM_OPS
    return {
        op._schema.name + "." + op._schema.overload_name: op
        for op in ops
        if op._schema.name.startswith("executorch_prim")
    }


@pytest.mark.parametrize("name", sorted(_prim_schemas()))
def test_scalar_operators_equal_executorchs(name: str) -> None:
    op = _prim_schemas()[name]
    kernel = kernels.find_kernel(name)
    short = name.removeprefix("executorch_prim::").removesuffix(".Scalar")
    # Theirs for mod makes a symbolic integer, which cannot be looked into.
    reference = (
        (lambda a, b: a - b * math.floor(a / b))
        if short == "mod"
        else getattr(prims, "builtin_round" if short == "round" else short)
    )
    samples = [(7, 2), (-7, 2), (2.5, 2.0), (-2.5, 3.0), (True, 2), (3, 3)]
    arity = len(op._schema.arguments)
    assert len(kernel.parameters) == arity
    for pair in samples:
        args = (*pair, 5)[:arity]
        assert kernel.function(*args) == reference(*args)


def test_every_operator_of_the_stock_runtime_has_a_kernel() -> None:
    for name in Runtime.get().operator_registry.operator_names:
        kernels.find_kernel(name)


@pytest.mark.parametrize("name", ["aten::__class__", "aten", "a b::c", "aten::add.__init__", "::"])
def test_names_of_no_operator_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedOpError):
        kernels.find_kernel(name)


def test_a_call_with_too_few_arguments_is_refused() -> None:
    call = KernelCall("aten::add.out", (0, 0))
    method = MethodInfo("forward", (1,), (), (), ((call,),), (), ())
    with pytest.raises(BlobFormatError, match="too few arguments: got 2, expected 4: self, other"):
        bind_method(method, [1], [], [], _NOTHING)
    full = KernelCall("aten::add.out", (0, 0, 0, 0, 0))
    method = MethodInfo("forward", (1,), (), (), ((full,),), (), ())
    with pytest.raises(BlobFormatError, match="would write to a value that is not a mutable"):
        bind_method(method, [1], [], [], _NOTHING)

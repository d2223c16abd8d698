"""Kernels of undelegated operators: the function, and how its arguments are passed.

Nearly all are torch's out-variants, found by name. The table ``_OWN`` has the operators that torch
lacks: arithmetic on sizes, views, and copies into a dimension order.

Source: ``kernels/prim_ops`` and ``exir/passes/executorch_prim_ops_registry.py`` of ExecuTorch.
"""

from __future__ import annotations

import importlib
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.patches.torch import OpOverload, OpOverloadPacket, schema_of
from coreml_delegate.runtime.program.plan import dense_strides

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function and its calling convention.

    Attributes:
        name: Operator name with overload, for example ``aten::add.out``.
        function: Called with the first ``positional`` arguments by position, the others by name.
        parameters: Names of all arguments, in schema order.
        positional: Number of arguments passed by position.
        outputs: Positions of arguments that the function resizes and fills.
        mutated: Positions of arguments that the function writes to, ``outputs`` included.
        result_at: Position of the argument whose value the function's result replaces; None if
            the result replaces the value listed after the arguments.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    positional: int
    outputs: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    result_at: int | None = None


def find_kernel(name: str) -> Kernel:
    """Return the kernel of an operator, named with overload: ``aten::add.out``, ``aten::copy_``.

    Raises:
        UnsupportedOpError: The operator has no kernel.
    """
    own = _OWN.get(name)
    if own is not None:
        return own
    overload = _torch_overload(name)
    if overload is None:
        namespace = name.partition("::")[0]
        module = _REGISTERED_BY.get(namespace)
        if module is not None:
            _logger.debug("importing %s for operator %s", module, name)
            overload = _torch_overload(name) if _import(module) else None
    if overload is None:
        raise UnsupportedOpError(
            "no kernel for an operator of the program",
            got=name,
            remedy="Import the library that registers it with torch before loading the program, "
            "or run the program on the stock runtime.",
        )
    return _from_schema(name, overload)


def _import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError as error:
        _logger.debug("cannot import %s: %s", module, error)
        return False
    return True


# Namespace -> library that registers its operators with torch.
_REGISTERED_BY: Final[Mapping[str, str]] = {
    "quantized_decomposed": "executorch.kernels.quantized",
    "llama": "executorch.extension.llm.custom_ops.custom_ops",
}


def _torch_overload(name: str) -> OpOverload | None:
    namespace, _, qualified = name.partition("::")
    base, _, overload = qualified.partition(".")
    if not (namespace.isidentifier() and base.isidentifier()):
        return None
    packet = getattr(getattr(torch.ops, namespace), base, None)
    # A name from a file may be any attribute of the namespace object: accept only operators.
    if not isinstance(packet, OpOverloadPacket):
        return None
    # A packet lists only its initial overloads; libraries may have added others since.
    candidate = getattr(packet, overload or "default", None)
    return candidate if isinstance(candidate, OpOverload) else None


def _from_schema(name: str, overload: OpOverload) -> Kernel:
    arguments = schema_of(overload).arguments
    positional = sum(not argument.kwarg_only for argument in arguments)
    return Kernel(
        name=name,
        function=overload,
        parameters=tuple(argument.name for argument in arguments),
        positional=positional,
        outputs=tuple(i for i, argument in enumerate(arguments) if argument.is_out),
        mutated=tuple(
            i
            for i, argument in enumerate(arguments)
            if argument.is_out or (argument.alias_info and argument.alias_info.is_write)
        ),
    )


# Operator -> number of products summed per element of the result, from the arguments' shapes.
_PRODUCTS: Final[Mapping[str, Callable[[Mapping[str, Sequence[int]]], int]]] = {
    "aten::addmm.out": lambda shapes: shapes["mat1"][-1],
    "aten::baddbmm.out": lambda shapes: shapes["batch1"][-1],
    "aten::bmm.out": lambda shapes: shapes["self"][-1],
    "aten::convolution.out": lambda shapes: math.prod(shapes["weight"][1:]),
    "aten::linear.out": lambda shapes: shapes["weight"][-1],
    "aten::mm.out": lambda shapes: shapes["self"][-1],
}
# About 5 ms on one core of 2.5 GHz; shorter calls are not worth the idle threads' spinning after.
_LONG_ELEMENTS: Final = 1 << 21
_LONG_PRODUCTS: Final = 1 << 27


def is_long(kernel: Kernel, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a call takes so long on one thread that it should use all threads.

    ``shapes`` has the shape of each tensor argument by parameter; an upper bound if it varies.
    """
    if kernel.name not in _PRODUCTS:
        return max(map(math.prod, shapes.values()), default=0) >= _LONG_ELEMENTS
    results = max(math.prod(shapes.get(kernel.parameters[p], ())) for p in kernel.outputs)
    return results * _PRODUCTS[kernel.name](shapes) >= _LONG_PRODUCTS


# --- operators that torch does not have ---------------------------------------------------------


def _et_view(tensor: torch.Tensor, size: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    del out  # replaced, not filled, because a view has no memory of its own
    return tensor.reshape(list(size))


def _et_copy_index(target: torch.Tensor, source: torch.Tensor, index: int) -> None:
    """Set ``target[index] = source``.

    A dynamic ``target`` arrives with zero rows, its data still in memory, and leaves with
    ``index + 1`` rows.
    """
    shape = (max(index + 1, target.shape[0]), *source.shape)
    if tuple(target.shape) != shape:
        target.resize_(shape)
    target[index].copy_(source)


def _copy_out(source: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape != source.shape:
        out.resize_(source.shape)
    out.copy_(source)


def _copy_dim_order_out(
    source: torch.Tensor, non_blocking: bool, dim_order: Sequence[int] | None, out: torch.Tensor
) -> None:
    del non_blocking
    if out.shape != source.shape and dim_order is not None:
        out.resize_(source.shape).as_strided_(source.shape, dense_strides(source.shape, dim_order))
    _copy_out(source, out)


def _empty_dim_order_out(
    size: Sequence[int], dim_order: Sequence[int] | None, out: torch.Tensor
) -> None:
    del dim_order
    if tuple(out.shape) != tuple(size):
        out.resize_(list(size))


def _scalar(name: str, function: Callable[..., Any], arity: int, overload: str) -> Kernel:
    return Kernel(
        name=f"executorch_prim::{name}.{overload}",
        function=function,
        parameters=("a", "b", "c")[:arity],
        positional=arity,
    )


_UNARY: Final[Mapping[str, Callable[..., Any]]] = {
    "ceil": math.ceil,
    "neg": operator.neg,
    "round": round,
    "sym_float": float,
    "sym_int": int,
    "sym_not": operator.not_,
    "trunc": math.trunc,
}
_BINARY: Final[Mapping[str, Callable[..., Any]]] = {
    "add": operator.add,
    "eq": operator.eq,
    "floordiv": operator.floordiv,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "mod": operator.mod,
    "mul": operator.mul,
    "sub": operator.sub,
    "sym_max": max,
    "sym_min": min,
    "truediv": operator.truediv,
}
# Older exporters write these operators with an overload for integers.
_BINARY_INT: Final = ("add", "eq", "floordiv", "ge", "gt", "le", "lt", "mod", "mul", "sub")


def _out_kernel(name: str, function: Callable[..., Any], *parameters: str) -> Kernel:
    out = len(parameters) - 1
    return Kernel(name, function, parameters, len(parameters), outputs=(out,), mutated=(out,))


_OWN_KERNELS: Final[tuple[Kernel, ...]] = (
    *(_scalar(name, function, 1, "Scalar") for name, function in _UNARY.items()),
    *(_scalar(name, function, 2, "Scalar") for name, function in _BINARY.items()),
    *(_scalar(name, _BINARY[name], 2, "int") for name in _BINARY_INT),
    _scalar("sym_ite", lambda condition, yes, no: yes if condition else no, 3, "Scalar"),
    Kernel("executorch_prim::et_view.default", _et_view, ("self", "size", "out"), 3, result_at=2),
    Kernel(
        "executorch_prim::et_copy_index.tensor",
        _et_copy_index,
        ("copy_to", "copy_from", "index"),
        3,
        outputs=(0,),
        mutated=(0,),
    ),
    *(
        _out_kernel(name, _copy_dim_order_out, "self", "non_blocking", "dim_order", "out")
        for name in ("dim_order_ops::_to_dim_order_copy.out", "dim_order_ops::_clone_dim_order.out")
    ),
    _out_kernel(
        "dim_order_ops::_empty_dim_order.out", _empty_dim_order_out, "size", "dim_order", "out"
    ),
    *(
        _out_kernel(f"et_copy::{name}.out", _copy_out, "self", "out")
        for name in ("_d2h_copy", "_h2d_copy")
    ),
)
_OWN: Final[Mapping[str, Kernel]] = {kernel.name: kernel for kernel in _OWN_KERNELS}

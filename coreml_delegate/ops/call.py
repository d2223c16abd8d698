"""A call of an ATen op in a graph, and the reason why Core ML does not take it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coreml_delegate.patches.torch import OpOverload, schema_of

FLOAT = frozenset({torch.float32})
INTEGER = frozenset({torch.int32, torch.int64})
BOOL = frozenset({torch.bool})
BOUNDARY = frozenset({torch.float16, torch.float64})  # cast to and from fp32 by the device runtime
NARROW = frozenset({torch.uint8, torch.int16})  # stored as int32, only moved and cast
NUMERIC = FLOAT | INTEGER
ANY = NUMERIC | BOOL
Dtypes = frozenset[torch.dtype]

_HIGHER: Any = torch.ops.higher_order
_FUNCTIONALIZED = (_HIGHER.auto_functionalized, _HIGHER.auto_functionalized_v2)

MAX_RANK = 5  # of any Core ML tensor
INT32 = torch.iinfo(torch.int32)  # the widest integer of Core ML
GETITEM = "operator.getitem"
QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = frozenset(
    f"quantized_decomposed.dequantize_per_{unit}.default" for unit in ("tensor", "channel")
)
CAST = "aten._to_copy.default"
CASTS = frozenset({CAST, "aten.to.dtype", "dim_order_ops._to_dim_order_copy.default"})
DEQUANTIZE_AFFINE = "torchao.dequantize_affine.default"
DEQUANTIZE_CODEBOOK = "quant.dequantize_codebook.default"
RECORDED_WEIGHT = "coreml_delegate.recorded_weight.default"
DECOMPRESS = frozenset({DEQUANTIZE_AFFINE, DEQUANTIZE_CODEBOOK, RECORDED_WEIGHT})
"""The ops that turn compressed weights into floats: those of ``quantize_``, and
``mil_ops.recorded_weight``."""

_ATEN: Any = torch.ops.aten
RECURRENT: tuple[OpOverload, ...] = (
    _ATEN.lstm.input,
    _ATEN.gru.input,
    _ATEN.rnn_tanh.input,
    _ATEN.rnn_relu.input,
)
"""ATen's recurrent ops; see ``opaque_ops.recurrent_layers`` for the placeholder op of each."""
_ORIGINALS = {str(op).replace("aten.", "coreml_delegate.", 1): op for op in RECURRENT}


class ReasonCode(enum.StrEnum):
    """Why a node is not delegated or not runnable, for programs; ``Reason.text`` is for people."""

    NO_RULE = "no-rule"
    DTYPE = "dtype"
    RANK = "rank"
    SHAPE = "shape"
    LAYOUT = "layout"
    ARGUMENT = "argument"
    SYMBOLIC = "symbolic"
    OPSET = "opset"
    DEVICE = "device"
    SKIPPED = "skipped"
    USE = "use"
    CONVERSION = "conversion"
    PARTITION_SIZE = "partition-size"
    PARTITION_LIMIT = "partition-limit"
    # Of calls on the CPU: ExecuTorch's runtime has no kernel, or ExecuTorch cannot lower the call.
    KERNEL = "kernel"
    OUT_VARIANT = "out-variant"
    UNBOUNDED = "unbounded"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a node is not delegated.

    Attributes:
        code: For programs.
        text: The obstacle, with the offending value.
        remedy: What the user can do, or None.
    """

    code: ReasonCode
    text: str
    remedy: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an ATen op in a graph.

    Attributes:
        arguments: By schema name, defaults included.
        constants: The stored constants of the graph; see ``ops.constants``.
    """

    node: Node
    arguments: Mapping[str, Any]
    constants: Collection[Node] = ()

    @classmethod
    def of(cls, node: Node, constants: Collection[Node] = ()) -> OpCall:
        """Bind a node's arguments to its op's schema, defaults included."""
        schema = schema_of(overload_of(node.target))
        if schema is None:
            names = [f"arg{i}" for i in range(len(node.args))]
            named = dict(zip(names, node.args, strict=True)) | dict(node.kwargs)
            return cls(node, named, constants)
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound.update(zip((a.name for a in schema.arguments), node.args, strict=False))
        bound.update(node.kwargs)
        return cls(node, bound, constants)

    def tensors(self, name: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and fake tensor of all tensor arguments, or of argument ``name`` only."""
        for key, value in self.arguments.items():
            if name is None or key == name:
                yield from ((key, tensor) for tensor in _tensors_in(value))

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the fake tensor of an argument, None if it is omitted or no tensor."""
        return next((tensor for _, tensor in self.tensors(name)), None)

    def outputs(self) -> list[torch.Tensor]:
        """Return the fake tensors of the used results (several results are used by ``getitem``)."""
        value = self.node.meta.get("val")
        if not isinstance(value, list | tuple):
            return list(_tensors_in(value))
        used = self.results_used()
        return [t for i, item in enumerate(value) if i in used for t in _tensors_in(item)]

    def results_used(self) -> list[int]:
        """Return the indices of used results; ``torch.export`` also emits unused ``getitem``."""
        items = (u for u in self.node.users if target_name(u.target) == GETITEM and u.users)
        return sorted({int(str(u.args[1])) for u in items})


def overload_of(target: Any) -> Any:
    """Return the ATen overload of an edge op or placeholder op; other targets unchanged."""
    overload = unwrap_edge_op(target)
    return _ORIGINALS.get(str(overload), overload) if isinstance(overload, OpOverload) else overload


def is_placeholder_op(target: Any) -> bool:
    """Whether a target, in ATen or edge dialect, is a placeholder op of a recurrent layer."""
    overload = unwrap_edge_op(target)
    return isinstance(overload, OpOverload) and str(overload) in _ORIGINALS


def unwrap_edge_op(target: Any) -> Any:
    """Return the overload of an edge op; other targets, and placeholder ops, unchanged."""
    return target if isinstance(target, OpOverload) else getattr(target, "_op", target)


def target_name(target: Any) -> str:
    """Return the canonical name of a target: ``aten.conv2d.default``, ``operator.getitem``."""
    overload = overload_of(target)
    if isinstance(overload, OpOverload):
        return str(overload)
    module = getattr(overload, "__module__", "") or ""
    return f"{module.lstrip('_')}.{getattr(overload, '__name__', overload)}".lstrip(".")


def per_dim(values: int | Sequence[int], dims: int) -> list[int]:
    """Return an argument with a number per spatial dimension, from one number or ``dims``."""
    numbers = [values] if isinstance(values, int) else list(values)
    return numbers * dims if len(numbers) == 1 else numbers


def called_target(node: Node) -> Any:
    """Return the target of a call, unwrapped from ``auto_functionalized``."""
    is_wrapped = node.target in _FUNCTIONALIZED and node.args
    return node.args[0] if is_wrapped else node.target


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    for item in flatten(value):
        yield from tensors_of(item.meta.get("val") if isinstance(item, Node) else item)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a node's ``meta["val"]``, which may be a tuple of them."""
    return (item for item in flatten(value) if isinstance(item, torch.Tensor))


def flatten(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists and tuples."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value


def is_symbolic(value: Any) -> bool:
    """Whether an argument is a number computed from shapes."""
    traced = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(traced, torch.SymInt | torch.SymFloat | torch.SymBool)

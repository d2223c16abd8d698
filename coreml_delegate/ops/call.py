"""A call of an ATen op in a graph, and the reason why Core ML does not take it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from coreml_delegate.placeholder_ops import ORIGINALS

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
DECOMPRESS = frozenset({DEQUANTIZE_AFFINE, DEQUANTIZE_CODEBOOK})
"""The ops that turn weights compressed by ``quantize_`` into floats."""


class ReasonCode(enum.StrEnum):
    """Why a node is not delegated, or runs nowhere, for programs; ``Reason.text`` is for people."""

    NO_RULE = "no-rule"
    DTYPE = "dtype"
    RANK = "rank"
    SHAPE = "shape"
    LAYOUT = "layout"
    ARGUMENT = "argument"
    SYMBOLIC = "symbolic"
    OPSET = "opset"
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
    """One obstacle.

    Attributes:
        code: For programs.
        text: What stands in the way, with the offending value.
        remedy: What the user can do, or None.
        issue: Upstream issue that will lift it, as ``owner/repo#number``, or None.
    """

    code: ReasonCode
    text: str
    remedy: str | None = None
    issue: str | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.issue})" if self.issue else self.text


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an ATen op in a graph.

    Attributes:
        node: The call.
        arguments: By schema name, defaults included.
        constants: The stored constants of the graph; see ``ops.constants``.
    """

    node: Node
    arguments: Mapping[str, Any]
    constants: Collection[Node] = ()

    @classmethod
    def of(cls, node: Node, constants: Collection[Node] = ()) -> OpCall:
        """Bind a node's arguments to the names and defaults of its op's schema."""
        schema = getattr(overload_of(node.target), "_schema", None)
        if schema is None:
            names = [f"arg{i}" for i in range(len(node.args))]
            named = dict(zip(names, node.args, strict=True)) | dict(node.kwargs)
            return cls(node, named, constants)
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound.update(zip((a.name for a in schema.arguments), node.args, strict=False))
        bound.update(node.kwargs)
        return cls(node, bound, constants)

    def tensors(self, name: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and fake tensor of every tensor argument, or of those in argument ``name``."""
        for key, value in self.arguments.items():
            if name is None or key == name:
                yield from ((key, tensor) for tensor in _tensors_in(value))

    def tensor(self, name: str) -> torch.Tensor | None:
        """Fake tensor of one argument, None if it is left out or no tensor."""
        return next((tensor for _, tensor in self.tensors(name)), None)

    def outputs(self) -> list[torch.Tensor]:
        """Fake tensors of the results that are used (of several, by ``getitem``)."""
        value = self.node.meta.get("val")
        if not isinstance(value, list | tuple):
            return list(_tensors_in(value))
        taken = self.results_used()
        return [t for i, item in enumerate(value) if i in taken for t in _tensors_in(item)]

    def results_used(self) -> list[int]:
        """Indices of the results that are used; ``torch.export`` names unused ones too."""
        taken = (u for u in self.node.users if target_name(u.target) == GETITEM and u.users)
        return sorted({int(str(u.args[1])) for u in taken})


def overload_of(target: Any) -> Any:
    """The ATen overload behind an edge op or a stand-in; other targets unchanged."""
    found = unwrap_edge_op(target)
    return ORIGINALS.get(found, found) if isinstance(found, OpOverload) else found


def is_placeholder_op(target: Any) -> bool:
    """Whether a target, perhaps of edge dialect, stands for an ATen op: see ``placeholder_ops``."""
    found = unwrap_edge_op(target)
    return isinstance(found, OpOverload) and found in ORIGINALS


def unwrap_edge_op(target: Any) -> Any:
    """The overload of which an edge op was made, a stand-in as it is; other targets unchanged."""
    return target if isinstance(target, OpOverload) else getattr(target, "_op", target)


def target_name(target: Any) -> str:
    """Canonical name of a call target: ``aten.conv2d.default``, ``operator.getitem``."""
    overload = overload_of(target)
    if isinstance(overload, OpOverload):
        return str(overload)
    module = getattr(overload, "__module__", "") or ""
    return f"{module.lstrip('_')}.{getattr(overload, '__name__', overload)}".lstrip(".")


def called_target(node: Node) -> Any:
    """The target of a call, also if torch wrapped it because it writes its arguments."""
    is_wrapped = node.target in _FUNCTIONALIZED and node.args
    return node.args[0] if is_wrapped else node.target


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    for item in flatten(value):
        found = item.meta.get("val") if isinstance(item, Node) else item
        for tensor in flatten(found):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def flatten(value: Any) -> Iterator[Any]:
    """The items of nested lists and tuples."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value


def is_symbolic(value: Any) -> bool:
    """Whether an argument is a number that is computed from shapes."""
    found = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(found, torch.SymInt | torch.SymFloat | torch.SymBool)

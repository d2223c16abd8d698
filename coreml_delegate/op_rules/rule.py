"""The record of one ATen op, and the verdict on one call of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.fx import Node

from coreml_delegate.targets import Opset

FLOAT = frozenset({torch.float32})
INTEGER = frozenset({torch.int32, torch.int64})
BOOL = frozenset({torch.bool})
BOUNDARY = frozenset({torch.float16, torch.float64})  # cast to and from fp32 by the device runtime
NARROW = frozenset({torch.uint8, torch.int16})  # carried as int32, moved and cast alone
NUMERIC = FLOAT | INTEGER
ANY = NUMERIC | BOOL
Dtypes = frozenset[torch.dtype]

MAX_RANK = 5  # of any Core ML tensor
INT32 = torch.iinfo(torch.int32)  # the widest integer of Core ML
GETITEM = "operator.getitem"
DEQUANTIZE = frozenset(
    f"quantized_decomposed.dequantize_per_{unit}.default" for unit in ("tensor", "channel")
)
CASTS = frozenset(
    {"aten._to_copy.default", "aten.to.dtype", "dim_order_ops._to_dim_order_copy.default"}
)
DEQUANTIZE_AFFINE = "torchao.dequantize_affine.default"
DEQUANTIZE_CODEBOOK = "quant.dequantize_codebook.default"
DECOMPRESS = frozenset({DEQUANTIZE_AFFINE, DEQUANTIZE_CODEBOOK})
"""What makes floats of weights that ``quantize_`` compressed."""


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
        constants: The nodes of the graph that are known when the model is converted.
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
        """Which of several results are used; ``torch.export`` names even those that are not."""
        taken = (u for u in self.node.users if target_name(u.target) == GETITEM and u.users)
        return sorted({int(str(u.args[1])) for u in taken})


class Constraint(Protocol):
    """A condition on a call: None if it holds, else why not."""

    def __call__(self, call: OpCall, /) -> Reason | None:
        """Judge one call."""
        ...


@dataclass(frozen=True, slots=True)
class OpRule:
    """What Core ML takes of one ATen op.

    Attributes:
        target: ``namespace.name.overload`` as in ``aten.conv2d.default``; also stands for the
            copying variant (``aten.view.default`` for ``aten.view_copy.default``).
        family: Module the rule lives in, for documentation.
        dtypes: Accepted dtypes of the tensor arguments, by argument name; ``""`` for all others.
        results: Accepted dtypes of the results.
        constraints: Further conditions, tried in order.
        max_rank: Highest rank of an argument or result.
        symbolic: Arguments, by name, that may be computed from shapes.
        since: First opset that can express it.
        demand: What a call may need beyond that: an opset, and what for.
        preserve: Keep the op from ExecuTorch's decompositions, because Core ML has it as one.
        alone: Whether a program may consist of one such call; its values may be such as cross no
            boundary.
    """

    target: str
    family: str
    dtypes: Mapping[str, Dtypes] = field(default_factory=lambda: {"": FLOAT})
    results: Dtypes = ANY
    constraints: tuple[Constraint, ...] = ()
    symbolic: frozenset[str] = frozenset()
    max_rank: int = MAX_RANK
    since: Opset = Opset.iOS15
    preserve: bool = True
    alone: bool = True
    demand: Callable[[OpCall], tuple[Opset, str] | None] = lambda _: None

    def oldest(self, call: OpCall) -> Opset:
        """The first opset that can express this call."""
        demanded = self.demand(call)
        return self.since if demanded is None else max(self.since, demanded[0])

    def obstacle(self, call: OpCall) -> Reason | None:
        """Why Core ML cannot take this call, or None if it can."""
        checks = (self._symbolic, self._dtypes, self._shapes, numbers_fit, *self.constraints)
        for check in checks:
            reason = check(call)
            if reason is not None:
                return reason
        return None

    def _symbolic(self, call: OpCall) -> Reason | None:
        for name, value in call.arguments.items():
            if name not in self.symbolic and any(_is_symbolic(v) for v in _flatten(value)):
                return Reason(ReasonCode.SYMBOLIC, f"argument {name!r} is computed from shapes")
        return None

    def _dtypes(self, call: OpCall) -> Reason | None:
        for name, tensor in call.tensors():
            accepted = self.dtypes.get(name, self.dtypes.get("", FLOAT))
            if tensor.dtype not in accepted:
                return Reason(
                    ReasonCode.DTYPE,
                    f"argument {name!r} is {_short(tensor.dtype)}, "
                    f"Core ML takes {', '.join(sorted(map(_short, accepted)))} here",
                    remedy="Cast it in the model",
                )
        for tensor in call.outputs():
            if tensor.dtype not in self.results:
                return Reason(
                    ReasonCode.DTYPE, f"the result is {_short(tensor.dtype)}", remedy="Cast before"
                )
        return None

    def _shapes(self, call: OpCall) -> Reason | None:
        named = [*call.tensors(), *(("result", t) for t in call.outputs())]
        for name, tensor in named:
            if tensor.dim() > self.max_rank:
                return Reason(
                    ReasonCode.RANK,
                    f"{name!r} has rank {tensor.dim()}, Core ML takes at most {self.max_rank}",
                )
            if any(isinstance(d, int) and d == 0 for d in tensor.shape):
                return Reason(ReasonCode.SHAPE, f"{name!r} is empty: {tuple(tensor.shape)}")
        return None


def numbers_fit(call: OpCall) -> Reason | None:
    """Integers to compute with fit int32; positions, as the end of a slice, need not."""
    schema = getattr(overload_of(call.node.target), "_schema", None)
    for argument in () if schema is None else schema.arguments:
        value = call.arguments.get(argument.name)
        counts = str(argument.type) in ("number", "Optional[number]", "Tensor")
        if counts and isinstance(value, int) and not INT32.min <= value <= INT32.max:
            return Reason(
                ReasonCode.ARGUMENT,
                f"{argument.name}={value} is beyond int32, the widest of Core ML",
            )
    return None


def overload_of(target: Any) -> Any:
    """The ATen overload behind an edge op; other targets unchanged."""
    if isinstance(target, OpOverload):
        return target
    return getattr(target, "_op", target)


def target_name(target: Any) -> str:
    """Canonical name of a call target: ``aten.conv2d.default``, ``operator.getitem``."""
    overload = overload_of(target)
    if isinstance(overload, OpOverload):
        return str(overload)
    module = getattr(overload, "__module__", "") or ""
    return f"{module.lstrip('_')}.{getattr(overload, '__name__', overload)}".lstrip(".")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    for item in _flatten(value):
        found = item.meta.get("val") if isinstance(item, Node) else item
        for tensor in _flatten(found):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _is_symbolic(value: Any) -> bool:
    found = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(found, torch.SymInt | torch.SymFloat | torch.SymBool)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

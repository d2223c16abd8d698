"""CPU kernels: whether ExecuTorch can lower an undelegated call, and its runtime can run it.

ExecuTorch calls out variants. Its compiler needs an out variant of every undelegated call, its
runtime a kernel of that name, which it has for little more than the core ATen operators. A call
without a kernel still runs on the Python host, by torch's own kernel.
"""

from __future__ import annotations

import functools
import importlib
import logging
import string
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from executorch.exir.dialects.edge.op.api import to_variant
from executorch.exir.passes.executorch_prim_ops_registry import is_sym_op
from executorch.exir.sym_util import eval_upper_bound
from executorch.runtime import Runtime
from torch.export import default_decompositions
from torch.fx import GraphModule, Node
from torchgen.model import SchemaKind

from coreml_delegate.ops import NAMESPACES, Reason, ReasonCode
from coreml_delegate.ops.call import (
    GETITEM,
    RECORDED_WEIGHT,
    called_target,
    overload_of,
    target_name,
)
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.patches.torch import HigherOrderOperator, OpOverload, schema_of

logger = logging.getLogger(__name__)


# Libraries that register the out variants that ExecuTorch's memory planning needs.
_REGISTERED_BY: Mapping[str, str] = MappingProxyType(
    {"quantized_decomposed": "executorch.kernels.quantized"}
)

# Checks, which ExecuTorch removes from every program, and the op that becomes its argument.
_ERASED = frozenset(
    {
        RECORDED_WEIGHT,
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
    }
)

# Ops of which a kernel, of ExecuTorch or of torch, which the Python host runs, takes no fp16 and no
# bfloat16, or computes in it what torch computes in fp32: positions in an image, or sums. A
# convolution of 2,048 terms has 6 dB in bfloat16, and 54 dB in torch.
_WITHOUT_HALF = frozenset(
    {
        "aten._cdist_forward.default",
        "aten._fft_c2r.default",
        "aten._fft_r2c.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._pdist_forward.default",
        "aten._upsample_bilinear2d_aa.default",
        "aten.addmm.default",
        "aten.avg_pool2d.default",
        "aten.convolution.default",
        "aten.cumsum.default",
        "aten.grid_sampler_2d.default",
        "aten.native_layer_norm.default",
        "aten.scatter_add.default",
        "aten.var.correction",
        "aten.var.dim",
        "aten.var_mean.correction",
    }
)


def register_kernels(ops: Iterable[str]) -> None:
    """Import the kernel libraries of undelegated ops.

    Args:
        ops: Their target names.
    """
    for namespace in sorted({op.partition(".")[0] for op in ops} & set(_REGISTERED_BY)):
        try:
            importlib.import_module(_REGISTERED_BY[namespace])
        except ImportError as error:
            logger.warning(
                "the kernels of %s that stay on the CPU are not registered: %s", namespace, error
            )


@functools.cache
def is_composite(op: Any) -> bool:
    """Return whether a target maps tensors to tensors, and ExecuTorch decomposes it.

    Views do not count: ExecuTorch cannot preserve them.
    """
    if not isinstance(op, OpOverload):
        return False
    arguments, results = schema_of(op).arguments, schema_of(op).returns
    return (
        any("Tensor" in str(value.type) for value in arguments)
        and all("Tensor" in str(value.type) for value in results)
        and not any(value.alias_info for value in (*arguments, *results))
        and torch.Tag.core not in op.tags
        and op in default_decompositions()
    )


def has_kernel(op: OpOverload) -> bool:
    """Return whether ExecuTorch's runtime, as installed, has a kernel for an op."""
    return _out_variant(op) in Runtime.get().operator_registry.operator_names


def runs_on_cpu(node: Node) -> bool:
    """Return whether ExecuTorch's runtime has a kernel for a call, or for its decomposition."""
    overload = overload_of(node.target) if node.op == "call_function" else None
    return isinstance(overload, OpOverload) and (has_kernel(overload) or is_composite(overload))


def takes_half(call: Node) -> bool:
    """Return whether ExecuTorch's runtime computes a call in fp16 and in bfloat16.

    Args:
        call: In edge dialect, in any dtype.
    """
    overload, name = overload_of(call.target), target_name(call.target)
    if not isinstance(overload, OpOverload):
        return name == GETITEM
    return name in _ERASED or (name not in _WITHOUT_HALF and has_kernel(overload))


def cpu_obstacles(undelegated: Iterable[Node]) -> dict[Node, Reason]:
    """Return why undelegated calls do not run on the CPU either.

    Args:
        undelegated: Calls of a program in edge dialect that stay on the CPU, in graph order.

    Returns:
        The reasons for calls that ExecuTorch cannot lower (``OUT_VARIANT``, ``UNBOUNDED``), or that
        its runtime cannot load (``KERNEL``).
    """
    reasons = ((node, _unbounded(node) or _kernel_obstacle(node)) for node in undelegated)
    return {node: reason for node, reason in reasons if reason is not None}


def _kernel_obstacle(node: Node) -> Reason | None:
    target = called_target(node)
    if isinstance(target, HigherOrderOperator):
        inner_obstacles = (_kernel_obstacle(call) for call in _calls_inside(node))
        return next(filter(None, inner_obstacles), None) or _effect(node)
    overload, name = overload_of(target), target_name(target)
    if not isinstance(overload, OpOverload) or name in _ERASED or is_sym_op(overload):
        return None
    if has_kernel(overload) or is_composite(overload):  # decomposed after lowering
        return None
    kernel = _out_variant(overload)
    if kernel is None:
        return Reason(
            ReasonCode.OUT_VARIANT,
            f"{name} has no out variant, which ExecuTorch calls",
            remedy=_remedy_without_variant(overload),
        )
    return Reason(
        ReasonCode.KERNEL,
        f"ExecuTorch's runtime has no kernel {kernel}",
        remedy=f"Register a kernel {kernel} with the app that runs the program, or write the model "
        'with other operators; host="python" runs it as it is',
    )


def _out_variant(overload: OpOverload) -> str | None:
    """Return the name of the kernel that ExecuTorch calls for an op, or None."""
    try:
        return _registered_variant(overload)
    except (RuntimeError, AssertionError):  # no variant, or ExecuTorch cannot parse the op's schema
        return None


@functools.cache  # errors are not cached: a library may register a variant later
def _registered_variant(overload: OpOverload) -> str:
    return to_variant(overload, SchemaKind.out).name()


def _remedy_without_variant(overload: OpOverload) -> str:
    if not is_custom(overload) or not _returns_tensors(overload):
        return "Write the model with other operators"
    kernel = f"{overload.name()}{'_' if schema_of(overload).overload_name else '.'}out"
    return (
        f'Register {kernel} before the export, by torch.library.define("{kernel}", '
        f'"{_out_schema(overload)}") and torch.library.impl("{kernel}", '
        '"CompositeExplicitAutograd"), and with the app a kernel of this name'
    )


def is_custom(overload: Any) -> bool:
    """Whether an op belongs to a library other than torch and ExecuTorch."""
    return isinstance(overload, OpOverload) and overload.namespace not in NAMESPACES


def _returns_tensors(overload: OpOverload) -> bool:
    returns = schema_of(overload).returns
    return bool(returns) and all(str(value.type) == "Tensor" for value in returns)


def _out_schema(overload: OpOverload) -> str:
    """Return the schema of the out variant of an op, without its name."""
    schema = schema_of(overload)
    text = str(schema)
    inputs = text[text.index("(") + 1 : text.rindex(") ->")]
    letters = (letter for letter in string.ascii_lowercase if f"({letter}" not in inputs)
    types = [f"Tensor({letter}!)" for letter, _ in zip(letters, schema.returns, strict=False)]
    names = ["out"] if len(types) == 1 else [f"out{n}" for n in range(len(types))]
    outputs = [f"{type} {name}" for type, name in zip(types, names, strict=True)]
    star = [] if any(argument.kwarg_only for argument in schema.arguments) else ["*"]
    results = types[0] if len(types) == 1 else f"({', '.join(types)})"
    return f"({', '.join([*([inputs] if inputs else []), *star, *outputs])}) -> {results}"


def _effect(node: Node) -> Reason | None:
    """Return why a call with an effect token cannot be lowered."""
    if node.target is not torch.ops.higher_order.with_effects:
        return None
    return Reason(
        ReasonCode.OUT_VARIANT,
        f"{node.args[1]} has an effect, which ExecuTorch cannot express",
        remedy="Write the model without it; of functions of torch.linalg that check their result, "
        "take the one that does not, as torch.linalg.inv_ex",
    )


def _calls_inside(node: Node) -> Iterator[Node]:
    """Yield the calls in the branches or the body of a control-flow op."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            module = getattr(argument.graph.owning_module, str(argument.target), None)
            if isinstance(module, GraphModule):
                yield from (n for n in module.graph.nodes if n.op == "call_function")


def _unbounded(node: Node) -> Reason | None:
    """Return why memory cannot be planned for a result, unless an argument is unbounded too."""
    size = _unbounded_size(node)
    if size is None or any(map(_unbounded_size, node.all_input_nodes)):
        return None
    return Reason(
        ReasonCode.UNBOUNDED,
        f"the size {size} of the result of {target_name(node.target)} depends on values, and "
        "nothing bounds it",
        remedy="Bound it in the model: torch._check(result.shape[0] <= 100)",
    )


def _unbounded_size(node: Node) -> str | None:
    for tensor in tensors_of(node.meta.get("val")):
        for size in tensor.shape:
            try:
                eval_upper_bound(size)
            except RuntimeError:
                return str(size)
    return None

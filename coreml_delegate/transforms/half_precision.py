"""Half-precision programs in fp32, cast at their inputs and outputs.

Core ML computes in the precision of the compile options, not of the model, and the op rules expect
fp32. Core ML has no bfloat16. So the weights and the interior of an fp16 or bfloat16 program are
promoted to fp32 first. These keep their dtypes:

- inputs and outputs, and mutable buffers in fp16;
- calls that the user leaves out, for the partitioners that follow, and the constants that they use;
- fp16 constants, if the Core ML model takes them as inputs.

Casts connect them with the interior. A cast belongs to the promoted call, so that Core ML makes it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.traceback import NodeSource

from coreml_delegate.ops.call import CASTS, GETITEM, target_name, tensors_of
from coreml_delegate.ops.constants import state_value
from coreml_delegate.ops.edits import all_nodes
from coreml_delegate.patches.torch import (
    OpOverload,
    detect_fake_mode,
    drop_pending_sizes,
    schema_of,
)

logger = logging.getLogger(__name__)

NARROW = frozenset({torch.float16, torch.bfloat16})

# Ops that reinterpret bits, or set the dtype of a region.
_DTYPE_DEPENDENT = ("aten.view.dtype", "wrap_with_autocast")

_CAST = torch.ops.aten._to_copy.default


def promote_half_to_fp32(
    program: ExportedProgram,
    is_left_out: Callable[[Node], object] = lambda _: False,
    *,
    constants_inside: bool = True,
) -> ExportedProgram:
    """Return ``program`` promoted to fp32, or unchanged if it has no half precision.

    Args:
        program: In ATen dialect; it is not changed.
        is_left_out: Whether the user leaves a call out of Core ML. Such a call keeps its dtypes,
            and so do the constants that it uses.
        constants_inside: Whether the Core ML model has the program's constants.

    Returns:
        A program with the same interface. Its results differ by the rounding of half precision. A
        program that cannot be rewritten is returned unchanged.
    """
    values = (node.meta.get("val") for node in all_nodes(program))
    if not any(tensor.dtype in NARROW for value in values for tensor in tensors_of(value)):
        return program
    dtype_dependent = [n.name for n in all_nodes(program) if _depends_on_dtype(n)]
    if dtype_dependent:
        logger.info("half precision stays as it is because of %s", ", ".join(dtype_dependent))
        return program
    try:
        if _writes_in_place(program):
            program = program.run_decompositions({})  # functional: a write is a result
        return _Promoter(program, is_left_out, constants_inside=constants_inside).run()
    except Exception as error:  # noqa: BLE001 - the program lowers without it, with fewer delegated calls
        logger.warning("half precision stays as it is: %s", error)
        return program


class _Promoter:
    def __init__(
        self,
        program: ExportedProgram,
        is_left_out: Callable[[Node], object],
        *,
        constants_inside: bool,
    ) -> None:
        self._program = program
        self._root = copy.deepcopy(program.graph_module)
        # The copy renames nodes with names of Python builtins (``input``); the signature does not.
        for original, copied in zip(program.graph.nodes, self._root.graph.nodes, strict=True):
            copied.name = original.name
            # As torch does while it decomposes: a call is known by the nodes that it was made of.
            copied.meta["from_node"] = [NodeSource(original, "promote_half_to_fp32")]
        self._signature = copy.deepcopy(program.graph_signature)
        self._constants = dict(program.constants)
        self._kept: dict[Node, None] = {}
        for node in self._root.graph.nodes:
            if node.op == "call_function" and self._stays_half(node, is_left_out):
                self._kept[node] = None
        mutable = set(self._signature.buffers_to_mutate.values())
        self._half: dict[Node, str | None] = {}  # placeholders that keep their dtype, with the name
        for node, spec in zip(self._placeholders, self._signature.input_specs, strict=True):
            is_half = _dtype(node) is torch.float16  # the device runtime does not take bfloat16
            is_passed = is_half and (spec.target in mutable or not constants_inside)
            if spec.kind is InputKind.USER_INPUT or self._is_kept(node) or is_passed:
                self._half[node] = spec.target
        self._promoted: dict[int, Any] = {}
        self._mode = detect_fake_mode([n.meta["val"] for n in self._placeholders])

    @property
    def _placeholders(self) -> list[Node]:
        return [node for node in self._root.graph.nodes if node.op == "placeholder"]

    def run(self) -> ExportedProgram:
        """Return the program in fp32."""
        dtypes = [_dtype(node) for node in self._results()]
        for module in self._root.modules():
            if isinstance(module, GraphModule):
                _promote_literals(module, self._kept)
                module.recompile()
        self._copy_shared_constants()
        self._cast_half_placeholders()
        self._cast_around_kept_calls()
        self._propagate()
        self._cast_outputs(dtypes)
        self._root.graph.lint()
        self._root.recompile()
        program = self._program
        return ExportedProgram(
            root=self._root,
            graph=self._root.graph,
            graph_signature=self._signature,
            state_dict=self._values(program.state_dict),
            range_constraints=copy.deepcopy(program.range_constraints),
            module_call_graph=copy.deepcopy(program.module_call_graph),
            example_inputs=program.example_inputs,
            constants=self._values(self._constants),
            verifiers=[program.verifier],
        )

    def _stays_half(self, node: Node, is_left_out: Callable[[Node], object]) -> bool:
        if target_name(node.target) == GETITEM:
            return node.args[0] in self._kept
        return bool(is_left_out(node))

    def _is_kept(self, placeholder: Node) -> bool:
        """Whether only calls that stay in half precision use a constant."""
        users = placeholder.users
        return bool(users) and all(user in self._kept for user in users)

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values in fp32; a tensor with several names stays shared."""
        half = set(self._half.values())
        for name, tensor in values.items():
            if id(tensor) not in self._promoted:
                self._promoted[id(tensor)] = tensor if name in half else _promote_tensor(tensor)
        return {key: self._promoted[id(tensor)] for key, tensor in values.items()}

    def _results(self) -> tuple[Any, ...]:
        results: Any = self._root.graph.output_node().args[0]
        return tuple(results)

    def _copy_shared_constants(self) -> None:
        """Give calls that stay in half precision a constant of their own, if others use it too.

        The Core ML model stores the constant in its own precision.
        """
        graph, specs = self._root.graph, self._signature.input_specs
        pairs = list(zip(self._placeholders, list(specs), strict=True))
        for index, (node, spec) in reversed(list(enumerate(pairs))):
            half_users = [user for user in node.users if user in self._kept]
            value = state_value(self._program, str(spec.target))
            if node in self._half or value is None or value.dtype not in NARROW or not half_users:
                continue
            name = f"{spec.target}_half"
            with graph.inserting_before(node):
                copied = graph.placeholder(f"{node.name}_half")
            copied.meta = dict(node.meta)
            self._constants[name] = value.detach().clone()
            specs.insert(
                index, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(copied.name), name)
            )
            self._half[copied] = name
            for user in half_users:
                user.replace_input_with(node, copied)

    def _cast_half_placeholders(self) -> None:
        """Cast inputs, buffers and constants in half precision for the promoted calls."""
        for node in self._half:
            if _dtype(node) in NARROW:
                self._cast_for_promoted_calls(node)

    def _cast_around_kept_calls(self) -> None:
        """Cast operands of calls that stay in half precision to their dtypes, and results back."""
        graph = self._root.graph
        for node in self._kept:
            for operand in node.all_input_nodes:
                is_promoted = operand not in self._half and operand not in self._kept
                if _dtype(operand) in NARROW and is_promoted:
                    with graph.inserting_before(node):
                        cast = self._cast(operand, operand, _dtype(operand))
                        node.replace_input_with(operand, cast)
            if _dtype(node) in NARROW:
                self._cast_for_promoted_calls(node)

    def _cast_for_promoted_calls(self, node: Node) -> None:
        """Give each promoted user a cast of its own: one would connect partitions in fp32."""
        for user in list(node.users):
            if user.op != "output" and user not in self._kept and not _casts_to_fp32(user):
                with self._root.graph.inserting_before(user):
                    cast = self._cast(node, user, torch.float32)
                user.replace_input_with(node, cast)

    def _cast(self, node: Node, owner: Node, dtype: torch.dtype | None) -> Node:
        """Return a new cast of ``node``, with the metadata of ``owner``."""
        cast = self._root.graph.call_function(_CAST, (node,), {"dtype": dtype})
        cast.meta = {k: v for k, v in owner.meta.items() if k not in _META_OF_VALUE}
        return cast

    def _propagate(self) -> None:
        """Recompute the value of every node, with states and constants in fp32."""
        values = [
            node.meta["val"] if node in self._half else _promote_tensor(node.meta["val"])
            for node in self._placeholders
        ]
        for node in self._root.graph.nodes:
            node.meta.pop("tensor_meta", None)
        drop_pending_sizes(self._mode)
        FakeTensorProp(self._root, self._mode).propagate_dont_convert_inputs(*values)

    def _cast_outputs(self, dtypes: list[torch.dtype | None]) -> None:
        graph = self._root.graph
        output = graph.output_node()
        results: list[Any] = []
        specs = self._signature.output_specs
        states = {
            spec.target: _dtype(node)
            for node, spec in zip(self._placeholders, self._signature.input_specs, strict=True)
        }
        for node, original, spec in zip(self._results(), dtypes, specs, strict=True):
            is_visible = spec.kind in _VISIBLE
            dtype = original if is_visible else states.get(spec.target, _dtype(node))
            if original in NARROW and _dtype(node) != dtype:
                with graph.inserting_before(output):
                    cast = graph.call_function(_CAST, (node,), {"dtype": dtype})
                cast.meta = {k: v for k, v in node.meta.items() if k not in _META_OF_VALUE}
                cast.meta["val"] = node.meta["val"].to(dtype)
                spec.arg = TensorArgument(cast.name)
                results.append(cast)
            else:
                results.append(node)
        output.args = (tuple(results),)
        output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in results)


_META_OF_VALUE = frozenset({"val", "tensor_meta", "unbacked_bindings"})
_VISIBLE = frozenset({OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION})


def _promote_literals(module: GraphModule, excluded: Mapping[Node, None]) -> None:
    """Replace half-precision dtypes in the arguments of calls by fp32, except of ``excluded``."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node not in excluded:
            node.args = map_aggregate(node.args, _promote_dtype)
            node.kwargs = map_aggregate(node.kwargs, _promote_dtype)


def _promote_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in NARROW else value


def _promote_tensor(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
        return value
    wide = value.detach().to(torch.float32)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(wide, requires_grad=value.requires_grad)
    return wide


def _casts_to_fp32(call: Node) -> bool:
    is_cast = call.op == "call_function" and target_name(call.target) in CASTS
    return is_cast and torch.float32 in (*call.args, call.kwargs.get("dtype"))


def _writes_in_place(program: ExportedProgram) -> bool:
    """Return whether a call changes its arguments in place: readers have casts of their own."""
    return any(
        isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
        for node in program.graph.nodes
    )


def _depends_on_dtype(node: Node) -> bool:
    name = target_name(node.target) if node.op == "call_function" else ""
    return any(part in name for part in _DTYPE_DEPENDENT)


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None

"""Half-precision programs in fp32, cast at their inputs and outputs.

Core ML computes in the precision of the compile options, not of the model, and the op rules expect
fp32. Core ML has no bfloat16. So the weights and the interior of an fp16 or bfloat16 program are
promoted to fp32 first; inputs and outputs keep their dtypes, and so do calls that the user leaves
out, for the partitioners that follow.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from coreml_delegate.ops.call import GETITEM, target_name, tensors_of
from coreml_delegate.ops.edits import all_nodes
from coreml_delegate.patches.torch import detect_fake_mode

logger = logging.getLogger(__name__)

NARROW = frozenset({torch.float16, torch.bfloat16})

# Ops that reinterpret bits, or set the dtype of a region.
_DTYPE_DEPENDENT = ("aten.view.dtype", "wrap_with_autocast")

_CAST = torch.ops.aten._to_copy.default


def promote_half_to_fp32(
    program: ExportedProgram, is_left_out: Callable[[Node], object] = lambda _: False
) -> ExportedProgram:
    """Return ``program`` promoted to fp32, or unchanged if it has no half precision.

    Args:
        program: In ATen dialect; it is not changed.
        is_left_out: Whether the user leaves a call out of Core ML. Such a call keeps its dtypes,
            and so do weights that only such calls use.

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
        return _Promoter(program, is_left_out).run()
    except Exception as error:  # noqa: BLE001 - the program lowers without it, with fewer delegated calls
        logger.warning("half precision stays as it is: %s", error)
        return program


class _Promoter:
    def __init__(self, program: ExportedProgram, is_left_out: Callable[[Node], object]) -> None:
        self._program = program
        self._root = copy.deepcopy(program.graph_module)
        # The copy renames nodes with names of Python builtins (``input``); the signature does not.
        for original, copied in zip(program.graph.nodes, self._root.graph.nodes, strict=True):
            copied.name = original.name
        self._signature = copy.deepcopy(program.graph_signature)
        self._placeholders = [n for n in self._root.graph.nodes if n.op == "placeholder"]
        self._kinds = [spec.kind for spec in self._signature.input_specs]
        self._kept: dict[Node, None] = {}
        for node in self._root.graph.nodes:
            if node.op == "call_function" and self._stays_half(node, is_left_out):
                self._kept[node] = None
        self._promoted: dict[int, Any] = {}
        self._mode = detect_fake_mode([n.meta["val"] for n in self._placeholders])

    def run(self) -> ExportedProgram:
        """Return the program in fp32."""
        dtypes = [_dtype(node) for node in self._results()]
        for module in self._root.modules():
            if isinstance(module, GraphModule):
                _promote_literals(module, self._kept)
                module.recompile()
        self._cast_inputs()
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
            constants=self._values(program.constants),
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
        kept = {
            spec.target
            for node, spec in zip(self._placeholders, self._signature.input_specs, strict=True)
            if self._is_kept(node)
        }
        for name, tensor in values.items():
            if id(tensor) not in self._promoted:
                self._promoted[id(tensor)] = tensor if name in kept else _promote_tensor(tensor)
        return {key: self._promoted[id(tensor)] for key, tensor in values.items()}

    def _results(self) -> tuple[Any, ...]:
        results: Any = self._root.graph.output_node().args[0]
        return tuple(results)

    def _cast_inputs(self) -> None:
        graph = self._root.graph
        for node, kind in zip(self._placeholders, self._kinds, strict=True):
            if kind is not InputKind.USER_INPUT or _dtype(node) not in NARROW:
                continue
            users = [u for u in node.users if u.op != "output" and u not in self._kept]
            if not users:
                continue
            with graph.inserting_before(_first_call(graph)):
                cast = self._cast(node, torch.float32)
            for user in users:
                user.replace_input_with(node, cast)

    def _cast_around_kept_calls(self) -> None:
        """Cast operands of calls that stay in half precision to their dtypes, and results back."""
        graph = self._root.graph
        kinds = dict(zip(self._placeholders, self._kinds, strict=True))
        half = {n for n in kinds if kinds[n] is InputKind.USER_INPUT or self._is_kept(n)}
        for node in self._kept:
            for operand in node.all_input_nodes:
                if _dtype(operand) in NARROW and operand not in half and operand not in self._kept:
                    with graph.inserting_before(node):
                        node.replace_input_with(operand, self._cast(operand, _dtype(operand)))
            users = [u for u in node.users if u not in self._kept and u.op != "output"]
            if _dtype(node) in NARROW and users:
                with graph.inserting_after(node):
                    cast = self._cast(node, torch.float32)
                for user in users:
                    user.replace_input_with(node, cast)

    def _cast(self, node: Node, dtype: torch.dtype | None) -> Node:
        cast = self._root.graph.call_function(_CAST, (node,), {"dtype": dtype})
        cast.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return cast

    def _propagate(self) -> None:
        """Recompute the value of every node, with states and constants in fp32."""
        values = [
            node.meta["val"]
            if kind is InputKind.USER_INPUT or self._is_kept(node)
            else _promote_tensor(node.meta["val"])
            for node, kind in zip(self._placeholders, self._kinds, strict=True)
        ]
        for node in self._root.graph.nodes:
            node.meta.pop("tensor_meta", None)
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
                cast.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
                cast.meta.pop("tensor_meta", None)
                spec.arg = TensorArgument(cast.name)
                results.append(cast)
            else:
                results.append(node)
        output.args = (tuple(results),)
        output.meta["val"] = tuple(n.meta["val"] if isinstance(n, Node) else n for n in results)


_VISIBLE = frozenset({OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION})


def _promote_literals(module: GraphModule, kept: Mapping[Node, None]) -> None:
    """Replace half-precision dtypes in the arguments of calls by fp32, except in ``kept``."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node not in kept:
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


def _depends_on_dtype(node: Node) -> bool:
    name = target_name(node.target) if node.op == "call_function" else ""
    return any(part in name for part in _DTYPE_DEPENDENT)


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _first_call(graph: torch.fx.Graph) -> Node:
    return next(node for node in graph.nodes if node.op != "placeholder")

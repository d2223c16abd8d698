"""Programs of selected calls of another program, for trial conversions.

The calls keep their arguments; an outer value becomes an input or a constant. If the values of
constants are not at hand, because ExecuTorch passes partitioners fake tensors, zeros of the same
shape and dtype that take no memory replace them; ``real_values`` finds the values that exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from coreml_delegate.ops.call import GETITEM, overload_of, target_name
from coreml_delegate.ops.sizes import is_size
from coreml_delegate.patches.torch import FakeTensor, load_verifier, pytree, real_by_fake


def program_of(
    calls: Sequence[Node],
    owner: ExportedProgram,
    *,
    constants: Mapping[Node, torch.Tensor],
    separate: bool = False,
    to_aten: bool = False,
) -> tuple[ExportedProgram, dict[str, Node]]:
    """Return a program of only ``calls``.

    Args:
        calls: Calls of ``owner``, in the order of its graph; missing ``getitem`` calls on their
            results are added.
        owner: The program that has the calls.
        constants: Value of every placeholder that is a constant of ``owner``.
        separate: Give every call separate inputs, so that no call depends on another.
        to_aten: Return a program in ATen dialect, for any dialect of ``owner``.

    Returns:
        The program, and the original of every call in it, by the name of the copy.
    """
    builder = _Builder(constants, separate=separate, to_aten=to_aten)
    calls_and_parts = _with_parts(calls)
    builder.placeholders(calls_and_parts)
    for node in calls_and_parts:
        builder.call(node)
    builder.output(calls_and_parts)
    return builder.program(owner), builder.originals


def without_memory(value: torch.Tensor) -> torch.Tensor:
    """Return zeros like a fake tensor, expanded from one element; real tensors unchanged."""
    if not isinstance(value, FakeTensor):
        return value
    zeros = torch.zeros((), dtype=value.dtype).expand(tuple(value.shape))
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(zeros, requires_grad=False)
    return zeros


def real_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the real tensors that fake tensors were made from, as far as they still exist.

    ``to_backend`` makes the fake state of a program from its real state, and torch's fake mode maps
    each real tensor to its fake tensor, by weak references. Without them, values are missing.

    Args:
        tensors: By name; real tensors are returned unchanged.

    Returns:
        Real tensors by the same names, without missing tensors.
    """
    real_tensors: dict[str, torch.Tensor] = {}
    modes: dict[int, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, FakeTensor):
            real_tensors[name] = tensor
            continue
        mode = tensor.fake_mode
        if id(mode) not in modes:
            modes[id(mode)] = real_by_fake(mode)
        real = modes[id(mode)].get(id(tensor))
        if real is not None and real.shape == tensor.shape and real.dtype == tensor.dtype:
            real_tensors[name] = real
    return real_tensors


def call_of(node: Node) -> Node:
    """Return the call whose result a ``getitem`` selects; other nodes unchanged."""
    source = node.args[0] if target_name(node.target) == GETITEM else None
    return source if isinstance(source, Node) else node


def _with_parts(calls: Sequence[Node]) -> list[Node]:
    """Return the calls, the ``getitem`` calls on their results, and calls that compute sizes."""
    calls_and_parts = dict.fromkeys(calls)
    for node in calls:
        calls_and_parts.update(dict.fromkeys(_sizes_for(node)))
        if isinstance(node.meta.get("val"), list | tuple):
            calls_and_parts.update(
                dict.fromkeys(u for u in node.users if target_name(u.target) == GETITEM)
            )
    order = {node: index for index, node in enumerate(calls[0].graph.nodes)} if calls else {}
    return sorted(calls_and_parts, key=order.__getitem__)


def _sizes_for(call: Node) -> Iterator[Node]:
    for argument in call.all_input_nodes:
        if argument.op == "call_function" and is_size(argument):
            yield argument
            yield from _sizes_for(argument)


class _Builder:
    """Builds the graph of one program; ``_copies`` maps nodes of the owner to its nodes."""

    def __init__(
        self, constants: Mapping[Node, torch.Tensor], *, separate: bool, to_aten: bool
    ) -> None:
        self.graph = Graph()
        self.originals: dict[str, Node] = {}
        self._constants = constants
        self._separate = separate
        self._to_aten = to_aten
        self._values: dict[str, Any] = {}
        self._inputs: list[InputSpec] = []
        self._outputs: list[OutputSpec] = []
        self._copies: dict[Node | tuple[Node, Node], Node] = {}

    def placeholders(self, calls: Sequence[Node]) -> None:
        """Add placeholders for outer values: first constants, then inputs."""
        inside = set(calls)
        outside = dict.fromkeys(
            (self._key(argument, node), argument)
            for node in calls
            for argument in node.all_input_nodes
            if not self._is_inside(argument, node, inside)
        )
        for of_constants in (True, False):
            for key, argument in outside:
                if (argument in self._constants) is of_constants:
                    self._placeholder(key, argument)

    def call(self, node: Node) -> None:
        """Copy one call."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._copy_for(n, node))
        target: Any = overload_of(node.target) if self._to_aten else node.target
        new = self.graph.call_function(target, args, kwargs)
        new.meta = dict(node.meta)
        self._copies[node] = new
        self.originals[new.name] = node

    def output(self, calls: Sequence[Node]) -> None:
        """Make a result of each tensor with users outside, or without users."""
        inside = set(calls)
        results = [
            self._copies[node]
            for node in calls
            if isinstance(node.meta.get("val"), torch.Tensor)
            and (self._separate or not node.users or any(u not in inside for u in node.users))
        ]
        self.graph.output(tuple(results))
        self._outputs = [
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results
        ]

    def program(self, owner: ExportedProgram) -> ExportedProgram:
        """Return the finished program."""
        signature = ExportGraphSignature(self._inputs, self._outputs)
        in_spec = pytree.tree_flatten((tuple(signature.user_inputs), {}))[1]
        out_spec = pytree.tree_flatten(signature.user_outputs)[1]
        is_aten = self._to_aten or owner.dialect == "TRAINING"
        return ExportedProgram(
            root=torch.nn.Module(),
            graph=self.graph,
            graph_signature=signature,
            state_dict={},
            range_constraints=dict(owner.range_constraints),
            module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
            constants=self._values,
            # The dialect of a program fresh from torch.export is not one that coremltools takes.
            verifiers=[load_verifier("ATEN") if is_aten else owner.verifier],
        )

    def _is_inside(self, argument: Node, user: Node, inside: Collection[Node]) -> bool:
        # Items of a result, and sizes, belong to their call even if calls are separate.
        is_inseparable = target_name(user.target) == GETITEM or is_size(argument)
        return argument in inside and (not self._separate or is_inseparable)

    def _key(self, argument: Node, user: Node) -> Node | tuple[Node, Node]:
        return (argument, user) if self._separate else argument

    def _copy_for(self, argument: Node, user: Node) -> Node:
        copied = self._copies.get(self._key(argument, user))
        return self._copies[argument] if copied is None else copied

    def _placeholder(self, key: Node | tuple[Node, Node], argument: Node) -> None:
        node = self.graph.placeholder(f"argument_{len(self._inputs)}")
        value: Any = argument.meta.get("val")
        if isinstance(value, torch.Tensor) and argument not in self._constants:
            # Memory layouts are judged for the whole partition.
            value = value.contiguous()
        node.meta = {"val": value}
        self._copies[key] = node
        if argument in self._constants:
            name = f"constant_{len(self._inputs)}"
            self._values[name] = self._constants[argument]
            spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
        elif isinstance(value, torch.Tensor):
            spec = InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
        else:
            spec = InputSpec(InputKind.USER_INPUT, SymIntArgument(node.name), None)
        self._inputs.append(spec)

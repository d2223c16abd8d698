"""A delegate independent of Core ML: it stores a subgraph and runs it with torch.

It tests the hosts separately. Weights are named data, so that path is covered too.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from coreml_delegate.runtime.program.delegate_interface import DelegatePayload

BACKEND_ID = "EagerTestBackend"
SPECS = [CompileSpec("first", b"\x00\x01"), CompileSpec("second", b"")]


def _save(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _load(data: memoryview) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


class EagerTestBackend(BackendDetails):
    """Stores the nodes of a subgraph: (name, kind, target, arguments)."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        assert [(spec.key, spec.value) for spec in compile_specs] == [
            (spec.key, spec.value) for spec in SPECS
        ]
        signature = edge_program.graph_signature
        owned = signature.inputs_to_parameters | signature.inputs_to_buffers
        weights = {name: edge_program.state_dict[key].detach() for name, key in owned.items()}
        store = NamedDataStore()
        key = "weights-" + "-".join(weights)
        store.add_named_data(key, _save(weights))
        nodes = [_describe(node) for node in edge_program.graph.nodes if node.name not in weights]
        return PreprocessResult(
            processed_bytes=_save({"nodes": nodes, "weights": key}),
            data_store_output=store.get_named_data_store_output(),
        )


def _describe(node: fx.Node) -> tuple[str, str, str, Any, Any]:
    def encode(argument: Any) -> Any:
        return {"node": argument.name}

    if node.op == "call_function" and node.target is not operator.getitem:
        target = str(node.target._op)
    else:
        target = str(node.target)
    args = fx.map_arg(node.args, encode)
    return node.name, node.op, target, _plain(args), _plain(fx.map_arg(node.kwargs, encode))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class EagerDelegate:
    """Runs the nodes that ``EagerTestBackend`` stored."""

    def __init__(self, payload: DelegatePayload) -> None:
        assert payload.backend_id == BACKEND_ID
        assert payload.compile_specs == tuple((spec.key, bytes(spec.value)) for spec in SPECS)
        content = _load(payload.processed)
        weights = payload.named_data(content["weights"])
        assert weights is not None
        assert payload.named_data("no such key") is None
        self.payload = payload
        self.weights = _load(weights)
        self.nodes = content["nodes"]
        self.placeholders = [node[0] for node in self.nodes if node[1] == "placeholder"]
        self.calls = 0

    native = None

    @property
    def input_count(self) -> int:
        return len(self.placeholders)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.calls += 1
        values = dict(self.weights) | dict(zip(self.placeholders, inputs, strict=True))

        def decode(value: Any) -> Any:
            if isinstance(value, dict) and set(value) == {"node"}:
                return values[value["node"]]
            return [decode(item) for item in value] if isinstance(value, list) else value

        for name, op, target, args, kwargs in self.nodes:
            if op == "output":
                return decode(args)[0]
            if op == "call_function":
                function = operator.getitem if "getitem" in target else _aten(target)
                keywords = {key: decode(value) for key, value in kwargs.items()}
                values[name] = function(*decode(args), **keywords)
        raise AssertionError("a graph without output")


def _aten(target: str) -> Any:
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


class _Supported(OperatorSupportBase):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return self.is_node_supported(submodules, node.args[0])
        return node.op == "call_function" and str(getattr(node.target, "_op", "")) in self.names


class EagerTestPartitioner(Partitioner):
    """Delegates operators by name (``aten.add.Tensor``); ``whole`` keeps them undecomposed."""

    def __init__(self, *names: str, whole: bool = False) -> None:
        super().__init__()
        self.whole = [_aten(name) for name in names] if whole else []
        self.support = _Supported(frozenset(names))
        self.delegation = DelegationSpec(BACKEND_ID, SPECS)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        partitions = CapabilityBasedPartitioner(
            exported_program.graph_module, self.support, allows_single_node_partition=True
        ).propose_partitions()
        tags = {}
        for part in partitions:
            tag = f"part{part.id}"
            tags[tag] = self.delegation
            for node in part.nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], None]:
        return ([] if ep.dialect == "EDGE" else self.whole), None


def lower(
    methods: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], Any]], *delegated: str
) -> bytes:
    """A program of several methods (module, example inputs, dynamic shapes) with delegates."""
    exported = {
        name: torch.export.export(module.eval(), example, dynamic_shapes=dynamic)
        for name, (module, example, dynamic) in methods.items()
    }
    return (
        to_edge_transform_and_lower(
            exported,
            partitioner=[EagerTestPartitioner(*delegated)],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        .to_executorch()
        .buffer
    )

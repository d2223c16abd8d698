"""Converting the partitions: the proof that they convert, and the search for what does not.

The blobs are kept for ``CoreMLBackend.preprocess``. If a partition fails, the call at fault is the
one coremltools names, or the last one of the shortest beginning of the partition that fails.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from executorch.exir.backend.utils import (
    _maybe_duplicate_constant_nodes,  # pyright: ignore[reportPrivateUsage]  # no other access
)
from executorch.exir.lowered_backend_module import (
    create_exported_program_from_submodule,
    create_submodule_from_nodes,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.conversion import blob_cache
from coreml_delegate.conversion.convert import check_translation, is_about_the_graph
from coreml_delegate.conversion.prepare import prepare
from coreml_delegate.conversion.subgraph import call_of, program_of, stand_in
from coreml_delegate.errors import ConversionError
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.partition.tagging import tag_constants, tag_of
from coreml_delegate.preprocess.package import build_files, check_enumerated, required_opset

logger = logging.getLogger(__name__)

_TAG = "delegation_tag"
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Confirmation:
    """Conversions of one program's partitions.

    Args:
        program: The tagged program.
        state: Real values of its parameters and buffers by name, as far as they are at hand.
        constants: Value, or stand-in, of every placeholder that is a constant.

    Attributes:
        records: By tag the blobs that were made, or found made.
    """

    program: ExportedProgram
    state: Mapping[str, torch.Tensor]
    constants: Mapping[Node, torch.Tensor]
    records: dict[str, blob_cache.KeptBlob] = field(default_factory=dict[str, blob_cache.KeptBlob])

    @property
    def _stand_ins(self) -> bool:
        """Whether values are missing, so that a translation is all that can be tried."""
        return any(
            isinstance(self.state.get(key, value), FakeTensor)
            for key, value in self.program.state_dict.items()
        )

    def _values(self) -> dict[str, torch.Tensor]:
        held = {**self.program.state_dict, **self.state}
        return {key: stand_in(held[key]) for key in self.program.state_dict}

    def subgraphs(self, tags: Sequence[str]) -> dict[str, ExportedProgram]:
        """The partitions by tag, cut out of a copy of the program as ExecuTorch will cut them."""
        owner = _copy(self.program, self._values())
        if self.constants:
            _split_shared_constants(owner, tags)
        graph_module: Any = owner.graph_module
        found: dict[str, ExportedProgram] = {}
        for tag in tags:
            nodes = [n for n in graph_module.graph.nodes if n.meta.get(_TAG) == tag]
            with graph_module._set_replace_hook(owner.graph_signature.get_replace_hook()):
                submodule, call = create_submodule_from_nodes(graph_module, nodes, tag)
            submodule.graph.output_node().meta = graph_module.graph.output_node().meta
            found[tag], _, _ = create_exported_program_from_submodule(
                submodule, owner, tag, call, False
            )
        return found

    def failures(self, partitions: Mapping[str, CompileOptions]) -> dict[Node, Reason]:
        """Convert every partition.

        Args:
            partitions: How each tag's partition is to be lowered.

        Returns:
            The calls that keep a partition from being converted, at least one for each that fails.

        Raises:
            OptionError: An option coremltools does not take.
            ContractError: See ``check_enumerated``.
        """
        found: dict[Node, Reason] = {}
        nodes = {node.name: node for node in self.program.graph.nodes}
        for tag, subgraph in self.subgraphs(list(partitions)).items():
            check_enumerated(subgraph, partitions[tag])
            # Placeholders are left out: they have the names of calls outside of the partition.
            inside = {
                node.name: nodes[node.name]
                for node in subgraph.graph.nodes
                if node.op == "call_function" and node.name in nodes
            }
            error = self._convert(tag, subgraph, partitions[tag])
            if error is None:
                continue
            calls = list(inside.values())
            culprits = self._culprits(calls, inside, subgraph, error, partitions[tag])
            logger.info(
                "partition %s does not convert because of %s: %s",
                tag,
                ", ".join(node.name for node in culprits),
                error,
            )
            text = f"the partition does not convert with it: {_said(error)}"
            found.update((node, Reason(ReasonCode.CONVERSION, text)) for node in culprits)
        return found

    def _convert(
        self, tag: str, subgraph: ExportedProgram, options: CompileOptions
    ) -> Exception | None:
        """Convert one partition; what went wrong, or None."""
        if self._stand_ins:
            return _failure(subgraph, options, translate_only=True)
        record = blob_cache.find(subgraph, options)
        if record is None:
            record = blob_cache.keep(subgraph, options)
            try:
                record.files = build_files(subgraph, options)
            except Exception as error:
                if not is_about_the_graph(error):
                    raise
                return error
        self.records[tag] = record
        return None

    def _culprits(
        self,
        calls: Sequence[Node],
        inside: Mapping[str, Node],
        subgraph: ExportedProgram,
        error: Exception,
        options: CompileOptions,
    ) -> list[Node]:
        named = _origin(subgraph, inside, error)
        if named is not None:
            return [named]
        low, high = 0, len(calls)
        if not self._fails(calls, options):
            # It fails as a whole alone, by its boundary: no call is more to blame than another.
            return list(calls)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fails(calls[:middle], options):
                high = middle
            else:
                low = middle
        return [call_of(calls[high - 1])]

    def _fails(self, calls: Sequence[Node], options: CompileOptions) -> bool:
        inside = {node: value for node, value in self.constants.items() if tag_of(node)}
        part, _ = program_of(calls, self.program, constants=inside)
        return _failure(part, options, translate_only=self._stand_ins) is not None


def _failure(
    program: ExportedProgram, options: CompileOptions, *, translate_only: bool
) -> Exception | None:
    """What goes wrong when ``program`` is converted, or None."""
    try:
        if translate_only:
            target = options.deployment_target or required_opset(program)
            prepare(program)
            check_translation(program, target)
        else:
            build_files(program, options)
    except Exception as error:
        if not is_about_the_graph(error):
            raise
        return error
    return None


def _copy(program: ExportedProgram, state: dict[str, torch.Tensor]) -> ExportedProgram:
    """A program with a graph of its own and these values for its parameters and buffers."""
    root = copy.deepcopy(program.graph_module)
    return ExportedProgram(
        root=root,
        graph=root.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=state,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _split_shared_constants(owner: ExportedProgram, tags: Sequence[str]) -> None:
    """Give each user of a shared constant a placeholder of its own, as ExecuTorch will.

    It copies the value for each of them, which nothing reads: here it is given hollow ones.
    """
    tables: Any = owner
    state, constants = tables._state_dict, tables._constants
    tables._state_dict, tables._constants = _hollow(state), _hollow(constants)
    tag_constants(owner)  # the copy of a graph has the users in another order
    for tag in tags:
        _maybe_duplicate_constant_nodes(owner, tag)
    tables._state_dict, tables._constants = state, constants


def _hollow(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of the same kind without elements; other values as they are."""
    return {
        key: type(value)(torch.empty(0)) if type(value) in _TENSORS else value
        for key, value in values.items()
    }


def _origin(subgraph: ExportedProgram, inside: Mapping[str, Node], error: Exception) -> Node | None:
    """The call coremltools failed at, or the one whose rewriting made the call it failed at."""
    if not isinstance(error, ConversionError) or error.node is None:
        return None
    reached = False
    for node in subgraph.graph.nodes:
        reached = reached or node.name == error.node
        original = inside.get(node.name)
        if reached and original is not None:
            return call_of(original)
    return None


def _said(error: Exception) -> str:
    got = error.got if isinstance(error, ConversionError) else None
    return got or str(error) or type(error).__name__

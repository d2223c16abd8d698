"""Proves by trials that Core ML takes the calls and partitions that the rules accept.

A call is translated in a program of its own; see ``lowering.trial``. A partition is converted,
and its blob is cached for ``CoreMLBackend.preprocess``. If it fails, the call at fault is the call
that coremltools names, or the last call of the shortest prefix of the partition that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.formats.fp32_constants import split
from coreml_delegate.lowering import store
from coreml_delegate.lowering.build import build_files, check_translation
from coreml_delegate.lowering.contract import boundary_shapes
from coreml_delegate.lowering.convert import is_about_the_graph
from coreml_delegate.lowering.delegation_tags import cut_partitions, tag_of
from coreml_delegate.lowering.store import CachedBlob
from coreml_delegate.lowering.subgraph import call_of, program_of, without_memory
from coreml_delegate.lowering.trial import TRIALS, blamed_call, message_of, reason_of
from coreml_delegate.ops import Reason, ReasonCode, record_of
from coreml_delegate.ops.call import GETITEM, target_name
from coreml_delegate.ops.constants import is_derived, stored_constants
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.torch import FakeTensor, real_by_fake
from coreml_delegate.targets import Opset

logger = logging.getLogger(__name__)


class ConversionProof:
    """The conversion of one program's calls and partitions.

    Args:
        program: In ATen or edge dialect; its parameters and buffers may be fake.
        constants_inside: Whether the Core ML model has the program's constants.
        records_constants: Whether blobs have all constants that fp16 rounds, to measure with.

    Attributes:
        values: Real values of parameters and buffers by name, as far as they are at hand.
        blobs: Blobs of the partitions converted last, by tag. They stay cached for
            ``CoreMLBackend.preprocess`` as long as they are referenced.
    """

    def __init__(
        self,
        program: ExportedProgram,
        *,
        constants_inside: bool = True,
        records_constants: bool = False,
    ) -> None:
        self.values: Mapping[str, torch.Tensor] = real_values(program.state_dict)
        self.blobs: Mapping[str, CachedBlob] = {}
        self._program = program
        self._records_constants = records_constants
        self._constants = {
            node: without_memory(self.values.get(key, node.meta["val"] if value is None else value))
            for node, key, value in (stored_constants(program) if constants_inside else ())
        }
        # A single call takes dequantized weights as constants of floats.
        self._float_constants = self._constants | {
            node: without_memory(node.meta["val"])
            for node in program.graph.nodes
            if node.op == "call_function" and is_derived(node, self._constants)
        }
        self._since: dict[Node, Opset] = {}

    def untranslatable_calls(
        self, calls: Iterable[Node], target: Opset | None
    ) -> dict[Node, Reason]:
        """Return the calls that coremltools fails to translate one by one, with the reasons.

        Args:
            calls: Accepted by the rules.
            target: Opset of the deployment target; None if any may be demanded.
        """
        candidates = [
            c for c in calls if c not in self._float_constants and _can_be_translated_alone(c)
        ]
        verdicts = TRIALS.verdicts(candidates, self._program, self._float_constants, target)
        self._since.update((call, v.since) for call, v in verdicts.items() if v.since is not None)
        return {call: reason_of(call, v) for call, v in verdicts.items() if v.since is None}

    def since(self, call: Node) -> Opset:
        """Return the oldest opset at which a call was translated."""
        return self._since.get(call, Opset.iOS15)

    def unconvertible_calls(self, partitions: Mapping[str, CompileOptions]) -> dict[Node, Reason]:
        """Convert every partition of the tagged program.

        Args:
            partitions: The compile options of each partition by its tag.

        Returns:
            The calls at fault for partitions that do not convert, at least one per partition.

        Raises:
            OptionError: Coremltools does not take an option.
            ContractError: See ``boundary_shapes``.
        """
        reasons: dict[Node, Reason] = {}
        blobs: dict[str, CachedBlob] = {}
        nodes = {node.name: node for node in self._program.graph.nodes}
        subgraphs = cut_partitions(
            self._program, list(partitions), self.values, constants_inside=bool(self._constants)
        )
        for tag, subgraph in subgraphs.items():
            options = partitions[tag]
            boundary_shapes(subgraph, options)  # raises for every subgraph with such options
            # Without placeholders, which have the names of calls outside of the partition.
            calls_by_name = {
                node.name: nodes[node.name]
                for node in subgraph.graph.nodes
                if node.op == "call_function" and node.name in nodes
            }
            error = self._convert(tag, subgraph, options, blobs)
            if error is None:
                continue
            blamed = blamed_call(subgraph, calls_by_name, error)
            blamed_calls = (
                self._search(list(calls_by_name.values()), options) if blamed is None else [blamed]
            )
            logger.info(
                "partition %s does not convert because of %s: %s",
                tag,
                ", ".join(node.name for node in blamed_calls),
                error,
            )
            text = f"the partition does not convert with it: {message_of(error)}"
            reasons.update((node, Reason(ReasonCode.CONVERSION, text)) for node in blamed_calls)
        # Release the blobs of the last round only now: this round has reused matching blobs.
        self.blobs = blobs
        return reasons

    @property
    def _has_all_values(self) -> bool:
        """Whether partitions can be converted; without values, they are only translated."""
        return not any(
            isinstance(self.values.get(key, value), FakeTensor)
            for key, value in self._program.state_dict.items()
        )

    def _convert(
        self,
        tag: str,
        subgraph: ExportedProgram,
        options: CompileOptions,
        blobs: dict[str, CachedBlob],
    ) -> Exception | None:
        """Convert one partition and add its blob; return the error, or None."""
        if not self._has_all_values:
            return _error_of(check_translation, subgraph, options)
        record, records = store.find(subgraph, options), self._records_constants
        if record is None or (records and record.fp32_constants is None):
            record = store.keep(subgraph, options)
            try:
                record.files, constants = split(
                    build_files(subgraph, options, records_constants=records)
                )
            except Exception as error:
                if not is_about_the_graph(error):
                    raise
                return error
            record.fp32_constants = constants if records else None
        blobs[tag] = record
        return None

    def _search(self, calls: Sequence[Node], options: CompileOptions) -> list[Node]:
        """Return the calls at fault for a partition whose error names no call."""
        low, high = 0, len(calls)
        if not self._fails(calls, options):
            # Only the partition as cut fails, by its boundary: all calls are equally at fault.
            return list(calls)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fails(calls[:middle], options):
                high = middle
            else:
                low = middle
        return [call_of(calls[high - 1])]

    def _fails(self, calls: Sequence[Node], options: CompileOptions) -> bool:
        constants = {node: value for node, value in self._constants.items() if tag_of(node)}
        subprogram, _ = program_of(calls, self._program, constants=constants)
        lower = build_files if self._has_all_values else check_translation
        return _error_of(lower, subprogram, options) is not None


def _can_be_translated_alone(call: Node) -> bool:
    name = target_name(call.target)
    record = record_of(name)
    return name != GETITEM and (record is None or record.standalone)


def _error_of(
    lower: Callable[[ExportedProgram, CompileOptions], object],
    program: ExportedProgram,
    options: CompileOptions,
) -> Exception | None:
    """Return the error if lowering ``program`` fails because of its graph, or None."""
    try:
        lower(program, options)
    except Exception as error:
        if not is_about_the_graph(error):
            raise
        return error
    return None


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

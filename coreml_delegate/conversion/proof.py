"""The proof that Core ML really takes what the rules accept: calls are tried, partitions converted.

A call is translated by itself; see ``conversion.trial``. A partition is converted whole, and its
blob is kept for ``CoreMLBackend.preprocess``. If it fails, the call at fault is the one coremltools
names, or the last one of the shortest beginning of the partition that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.conversion import blob_cache
from coreml_delegate.conversion.blob_cache import KeptBlob
from coreml_delegate.conversion.convert import is_about_the_graph
from coreml_delegate.conversion.delegation_tags import cut_partitions, tag_of
from coreml_delegate.conversion.subgraph import call_of, program_of, without_memory
from coreml_delegate.conversion.trial import TRIALS, blamed_call, message_of, reason_of
from coreml_delegate.formats.blob import Files
from coreml_delegate.ops import Reason, ReasonCode, record_of
from coreml_delegate.ops.call import GETITEM, target_name
from coreml_delegate.ops.constants import is_derived, stored_constants
from coreml_delegate.targets import Opset

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubgraphLowering:
    """The functions that lower a subgraph; ``preprocess``, which is above this package, has them.

    Each takes the subgraph, which it may change, and the compile options.

    Attributes:
        check: Raises if the options cannot be those of this subgraph, whatever coremltools says.
        build: Returns the files of the blob.
        translate: Raises if coremltools does not translate the subgraph, whose values may be
            missing.
    """

    check: Callable[[ExportedProgram, CompileOptions], object]
    build: Callable[[ExportedProgram, CompileOptions], Files]
    translate: Callable[[ExportedProgram, CompileOptions], None]


class ConversionProof:
    """The conversion of one program's calls and partitions.

    Args:
        program: In ATen or edge dialect; its parameters and buffers may be fake.
        lowering: How to lower a partition.
        constants_inside: Whether Core ML is given the program's constants.

    Attributes:
        values: Real values of parameters and buffers by name, as far as they are at hand.
        blobs: By tag the blobs of the partitions converted last. They wait for
            ``CoreMLBackend.preprocess`` as long as they are held here, or elsewhere.
    """

    def __init__(
        self, program: ExportedProgram, lowering: SubgraphLowering, *, constants_inside: bool = True
    ) -> None:
        self.values: Mapping[str, torch.Tensor] = real_values(program.state_dict)
        self.blobs: Mapping[str, KeptBlob] = {}
        self._program = program
        self._lowering = lowering
        self._constants = {
            node: without_memory(self.values.get(key, node.meta["val"] if value is None else value))
            for node, key, value in (stored_constants(program) if constants_inside else ())
        }
        # A call alone is given dequantized weights as the floats that they stand for.
        self._known = self._constants | {
            node: without_memory(node.meta["val"])
            for node in program.graph.nodes
            if node.op == "call_function" and is_derived(node, self._constants)
        }
        self._since: dict[Node, Opset] = {}

    def untranslatable_calls(
        self, calls: Iterable[Node], target: Opset | None
    ) -> dict[Node, Reason]:
        """Return the calls that coremltools fails to translate by themselves, with the reasons.

        Args:
            calls: Accepted by the rules.
            target: Opset of the deployment target; None if any may be demanded.
        """
        tried = [c for c in calls if c not in self._known and _can_be_tried_alone(c)]
        verdicts = TRIALS.verdicts(tried, self._program, self._known, target)
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
            The calls that keep a partition from being converted, at least one for each that fails.

        Raises:
            OptionError: An option coremltools does not take.
            ContractError: See ``SubgraphLowering.check``.
        """
        found: dict[Node, Reason] = {}
        blobs: dict[str, KeptBlob] = {}
        nodes = {node.name: node for node in self._program.graph.nodes}
        subgraphs = cut_partitions(
            self._program, list(partitions), self.values, constants_inside=bool(self._constants)
        )
        for tag, subgraph in subgraphs.items():
            options = partitions[tag]
            self._lowering.check(subgraph, options)
            # Placeholders are left out: they have the names of calls outside of the partition.
            inside = {
                node.name: nodes[node.name]
                for node in subgraph.graph.nodes
                if node.op == "call_function" and node.name in nodes
            }
            error = self._convert(tag, subgraph, options, blobs)
            if error is None:
                continue
            blamed = blamed_call(subgraph, inside, error)
            culprits = self._search(list(inside.values()), options) if blamed is None else [blamed]
            logger.info(
                "partition %s does not convert because of %s: %s",
                tag,
                ", ".join(node.name for node in culprits),
                error,
            )
            text = f"the partition does not convert with it: {message_of(error)}"
            found.update((node, Reason(ReasonCode.CONVERSION, text)) for node in culprits)
        # The blobs of the last round are let go now only: this one has taken over those that fit.
        self.blobs = blobs
        return found

    @property
    def _has_all_values(self) -> bool:
        """Whether partitions can be converted; if values are missing, they are translated only."""
        return not any(
            isinstance(self.values.get(key, value), FakeTensor)
            for key, value in self._program.state_dict.items()
        )

    def _convert(
        self,
        tag: str,
        subgraph: ExportedProgram,
        options: CompileOptions,
        blobs: dict[str, KeptBlob],
    ) -> Exception | None:
        """Convert one partition and add its blob; return what went wrong, or None."""
        if not self._has_all_values:
            return _error_of(self._lowering.translate, subgraph, options)
        record = blob_cache.find(subgraph, options)
        if record is None:
            record = blob_cache.keep(subgraph, options)
            try:
                record.files = self._lowering.build(subgraph, options)
            except Exception as error:
                if not is_about_the_graph(error):
                    raise
                return error
        blobs[tag] = record
        return None

    def _search(self, calls: Sequence[Node], options: CompileOptions) -> list[Node]:
        """Return the calls at fault of a partition that fails without a call being named."""
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
        inside = {node: value for node, value in self._constants.items() if tag_of(node)}
        part, _ = program_of(calls, self._program, constants=inside)
        lower = self._lowering.build if self._has_all_values else self._lowering.translate
        return _error_of(lower, part, options) is not None


def _can_be_tried_alone(call: Node) -> bool:
    name = target_name(call.target)
    record = record_of(name)
    return name != GETITEM and (record is None or record.alone)


def _error_of(
    lower: Callable[[ExportedProgram, CompileOptions], object],
    program: ExportedProgram,
    options: CompileOptions,
) -> Exception | None:
    """Return what goes wrong, by the graph, when ``program`` is lowered; None if nothing does."""
    try:
        lower(program, options)
    except Exception as error:
        if not is_about_the_graph(error):
            raise
        return error
    return None


def real_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the real tensors that fake ones were made from, as far as they still exist.

    ``to_backend`` makes the fake state of a program from the real one, and torch's fake mode
    remembers for each real tensor the fake it made of it, weakly. Where it does not, nothing is
    found, and the caller does without values.

    Args:
        tensors: By name; those that are real are returned as they are.

    Returns:
        Real tensors by the same names, without those that were not found.
    """
    found: dict[str, torch.Tensor] = {}
    modes: dict[int, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, FakeTensor):
            found[name] = tensor
            continue
        mode = tensor.fake_mode
        if id(mode) not in modes:
            modes[id(mode)] = _real_by_fake(mode)
        real = modes[id(mode)].get(id(tensor))
        if real is not None and real.shape == tensor.shape and real.dtype == tensor.dtype:
            found[name] = real
    return found


def _real_by_fake(mode: Any) -> dict[int, torch.Tensor]:
    """Return the real tensors of a fake mode by the identity of their fakes."""
    # Private to torch, whose release this project pins.
    converter = getattr(mode.fake_tensor_converter, "meta_converter", None)
    described = getattr(getattr(converter, "describer", None), "lookup_tensor", None)
    fakes = getattr(converter, "tensor_memo", None)
    if described is None or fakes is None:
        return {}
    return {
        id(fake): real
        for real, number in described.items()
        if (fake := fakes.get(number)) is not None and isinstance(real, torch.Tensor)
    }

"""Trial translation by coremltools of the calls that the rules accept.

Every distinct signature (op, dtypes, shapes, arguments) is translated once, many per program,
without weights. Verdicts are cached in memory and on disk.

A partition whose calls were all translated may fail to convert. The call at fault is the call that
coremltools names, or the last call of the shortest prefix of the partition that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.errors import ConversionError
from coreml_delegate.formats.caches import cache_folder
from coreml_delegate.lowering.build import build_files, check_translation, translate
from coreml_delegate.lowering.delegation_tags import cut_partitions, tag_of
from coreml_delegate.lowering.diagnostics import is_about_the_graph
from coreml_delegate.lowering.prepare import prepare
from coreml_delegate.lowering.store import digest, keep_verdicts, read_verdicts
from coreml_delegate.lowering.subgraph import call_of, program_of, real_values, without_memory
from coreml_delegate.ops import Reason, ReasonCode, record_of, required_opset
from coreml_delegate.ops.call import GETITEM, OpCall, target_name
from coreml_delegate.ops.constants import is_derived, stored_constants
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.torch import FakeTensor
from coreml_delegate.targets import Opset

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial.

    Attributes:
        since: The oldest opset that translates the call, or None.
        error: Message of coremltools at the oldest opset that was tried, empty if it succeeded.
    """

    since: Opset | None
    error: str = ""


@dataclass(slots=True)
class Trials:
    """Verdicts by signature and target, shared by all partitioners of a process."""

    cached: dict[str, Verdict] = field(default_factory=dict[str, Verdict])
    loaded_from: str | None = None

    def verdicts(
        self,
        calls: Iterable[Node],
        program: ExportedProgram,
        constants: Mapping[Node, torch.Tensor],
        target: Opset | None,
    ) -> dict[Node, Verdict]:
        """Return a verdict on every call.

        Args:
            calls: Calls of ``program`` that the rules accept.
            program: A program in edge dialect.
            constants: Value, or zeros of its shape, of every placeholder that is a constant.
            target: Opset of the deployment target; None if any may be demanded.
        """
        self._load()
        keys = {call: signature_of(call, constants, target) for call in calls}
        new: dict[str, Node] = {}
        for call, key in keys.items():
            if key not in self.cached:
                new.setdefault(key, call)
        if new:
            new_verdicts = _Trial(program, constants, target).run(list(new.values()))
            self.cached.update((key, new_verdicts[call]) for key, call in new.items())
            failed = sum(verdict.since is None for verdict in new_verdicts.values())
            logger.debug("tried %d signatures, %d failed", len(new), failed)
            keep_verdicts(_encode(self.cached))
        return {call: self.cached[key] for call, key in keys.items()}

    def _load(self) -> None:
        """Read the verdicts on disk, again if the folder of all caches has changed."""
        folder = str(cache_folder())
        if folder != self.loaded_from:
            self.loaded_from = folder
            self.cached = _decode(read_verdicts()) | self.cached


TRIALS = Trials()
"""The verdicts of this process."""


# Trying


@dataclass(frozen=True, slots=True)
class _Trial:
    program: ExportedProgram
    constants: Mapping[Node, torch.Tensor]
    target: Opset | None

    def run(self, calls: Sequence[Node]) -> dict[Node, Verdict]:
        """Translate every call, in one program per opset."""
        verdicts: dict[Node, Verdict] = {}
        by_opset: dict[Opset, list[Node]] = {}
        for call in calls:
            by_opset.setdefault(self._oldest(call), []).append(call)
        for opset, group in sorted(by_opset.items()):
            errors = self._errors(group, opset)
            for call in group:
                verdicts[call] = (
                    self._try_later(call, opset, errors[call]) if call in errors else Verdict(opset)
                )
        return verdicts

    def _oldest(self, call: Node) -> Opset:
        return required_opset([call]) if self.target is None else self.target

    def _try_later(self, call: Node, failed: Opset, error: str) -> Verdict:
        """Return the verdict on a call that fails at an opset: later opsets may translate it."""
        if self.target is None:
            for opset in (opset for opset in Opset if opset > failed):
                if not self._errors([call], opset):
                    return Verdict(opset, error)
        return Verdict(None, error)

    def _errors(self, calls: Sequence[Node], opset: Opset) -> dict[Node, str]:
        """Return the calls that fail at an opset, with coremltools' message."""
        if not calls:
            return {}
        blamed: Node | None = None
        try:
            program, originals = program_of(
                calls, self.program, constants=self.constants, separate=True
            )
            prepare(program, opset)
            try:
                # Without a target coremltools takes the oldest opset.
                translate(program, opset if opset > Opset.iOS15 else None)
            except ConversionError as error:
                blamed = blamed_call(program, originals, error)
                raise
        except Exception as error:
            if not is_about_the_graph(error):
                raise  # a verdict on disk would outlast the cause
            return self._isolate(calls, opset, blamed, message_of(error))
        return {}

    def _isolate(
        self, calls: Sequence[Node], opset: Opset, blamed: Node | None, message: str
    ) -> dict[Node, str]:
        """Find the failing calls after a translation of all failed."""
        if len(calls) == 1:
            return {calls[0]: message}
        if blamed is not None and blamed in calls:
            other_calls = [call for call in calls if call is not blamed]
            return {blamed: message} | self._errors(other_calls, opset)
        half = len(calls) // 2
        return self._errors(calls[:half], opset) | self._errors(calls[half:], opset)


def blamed_call(
    program: ExportedProgram, originals: Mapping[str, Node], error: Exception
) -> Node | None:
    """Return the call that coremltools failed at, or whose rewrite inserted the failing call.

    Args:
        program: The translated program, with rewritten calls.
        originals: The original of each of its calls by name.
        error: The error of the translation; the result is None if it names no call.
    """
    if not isinstance(error, ConversionError) or error.node is None:
        return None
    is_reached = False
    for node in program.graph.nodes:
        is_reached = is_reached or node.name == error.node
        # Rewrites insert calls before the rewritten call.
        if is_reached and node.name in originals:
            return call_of(originals[node.name])
    return None


def message_of(error: Exception) -> str:
    """Return coremltools' message about a failed conversion."""
    got = error.got if isinstance(error, ConversionError) else None
    return got or str(error) or type(error).__name__


# Trials of one program


class ProgramTrials:
    """The trials of one program: of its calls, and of its partitions if they do not convert.

    Args:
        program: In ATen or edge dialect; its parameters and buffers may be fake.
        constants_inside: Whether the Core ML model has the program's constants.

    Attributes:
        values: Real values of parameters and buffers by name, as far as they are at hand.
        has_all_values: Whether partitions can be converted; without values, they are only
            translated.
    """

    def __init__(self, program: ExportedProgram, *, constants_inside: bool = True) -> None:
        self.values: Mapping[str, torch.Tensor] = real_values(program.state_dict)
        self.has_all_values = not any(
            isinstance(self.values.get(key, value), FakeTensor)
            for key, value in program.state_dict.items()
        )
        self._program = program
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

    def untranslatable(self, calls: Iterable[Node], target: Opset | None) -> dict[Node, Reason]:
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
        return {
            call: Reason(
                ReasonCode.CONVERSION,
                f"coremltools fails to convert this call of {target_name(call.target)}: {v.error}",
            )
            for call, v in verdicts.items()
            if v.since is None
        }

    def since(self, call: Node) -> Opset:
        """Return the oldest opset at which a call was translated."""
        return self._since.get(call, Opset.iOS15)

    def partitions(self, tags: Sequence[str]) -> dict[str, tuple[ExportedProgram, dict[str, Node]]]:
        """Return the partitions of the tagged program, with their calls in it by name."""
        nodes = {node.name: node for node in self._program.graph.nodes}
        subgraphs = cut_partitions(
            self._program, tags, self.values, constants_inside=bool(self._constants)
        )
        # Without placeholders, which have the names of calls outside of the partition.
        return {
            tag: (
                subgraph,
                {
                    node.name: nodes[node.name]
                    for node in subgraph.graph.nodes
                    if node.op == "call_function" and node.name in nodes
                },
            )
            for tag, subgraph in subgraphs.items()
        }

    def at_fault(
        self,
        partition: ExportedProgram,
        calls: Mapping[str, Node],
        error: Exception,
        options: CompileOptions,
    ) -> dict[Node, Reason]:
        """Return the calls at fault for a partition that does not convert, at least one.

        Args:
            partition: As the conversion has left it.
            calls: Its calls in the program, by name.
            error: The error of the conversion.
            options: Its compile options.
        """
        blamed = blamed_call(partition, calls, error)
        blamed_calls = self._search(list(calls.values()), options) if blamed is None else [blamed]
        text = f"the partition does not convert with it: {message_of(error)}"
        return {node: Reason(ReasonCode.CONVERSION, text) for node in blamed_calls}

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
        lower = build_files if self.has_all_values else check_translation
        try:
            lower(subprogram, options)
        except Exception as error:
            if not is_about_the_graph(error):
                raise
            return True
        return False


def _can_be_translated_alone(call: Node) -> bool:
    name = target_name(call.target)
    record = record_of(name)
    return name != GETITEM and (record is None or record.standalone)


# Signatures


def signature_of(call: Node, constants: Mapping[Node, torch.Tensor], target: Opset | None) -> str:
    """Return a digest of op, arguments without values of tensors, results and target."""
    bound = OpCall.of(call)
    parts = [target_name(call.target), "any" if target is None else target.name]
    parts += [
        f"{name}={_describe(value, constants)}" for name, value in sorted(bound.arguments.items())
    ]
    parts += [f"-> {_tensor(value)}" for value in bound.outputs()]
    return digest(*parts)


def _describe(value: Any, constants: Mapping[Node, torch.Tensor]) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(item, constants) for item in value)}]"
    if isinstance(value, Node):
        traced = value.meta.get("val")
        text = _tensor(traced) if isinstance(traced, torch.Tensor) else repr(traced)
        return f"constant {text}" if value in constants else text
    return repr(value)


def _tensor(value: torch.Tensor) -> str:
    return f"{value.dtype}[{', '.join(str(size) for size in value.shape)}]"


# Verdicts on disk


def _encode(verdicts: Mapping[str, Verdict]) -> dict[str, tuple[int | None, str]]:
    return {
        key: (None if verdict.since is None else int(verdict.since), verdict.error)
        for key, verdict in verdicts.items()
    }


def _decode(content: Mapping[str, Any]) -> dict[str, Verdict]:
    return {
        key: Verdict(None if since is None else Opset(since), error)
        for key, (since, error) in content.items()
    }

"""Whether coremltools converts what the rules accept: calls are tried, partitions converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.conversion.blob_cache import KeptBlob
from coreml_delegate.conversion.real_values import real_values
from coreml_delegate.conversion.subgraph import stand_in
from coreml_delegate.conversion.trial import TRIALS, reason_of
from coreml_delegate.ops import Reason, part_of, record_of
from coreml_delegate.ops.call import GETITEM, target_name
from coreml_delegate.ops.constants import is_derived, stored_constants
from coreml_delegate.partition.confirmation import Confirmation
from coreml_delegate.targets import Opset


class Convertibility:
    """What becomes of one program in coremltools.

    Args:
        program: In ATen or edge dialect; its parameters and buffers may be fake.
        inside: Whether Core ML is given the program's constants.
    """

    def __init__(self, program: ExportedProgram, *, inside: bool = True) -> None:
        self._program = program
        self._state = real_values(program.state_dict)
        self._constants = {
            node: stand_in(self._state.get(key, node.meta["val"] if value is None else value))
            for node, key, value in (stored_constants(program) if inside else ())
        }
        # A call alone is given dequantized weights as the floats that they stand for.
        self._known = self._constants | {
            node: stand_in(node.meta["val"])
            for node in program.graph.nodes
            if node.op == "call_function" and is_derived(node, self._constants)
        }
        self._since: dict[Node, Opset] = {}
        self.kept: Mapping[str, KeptBlob] = {}

    def failed(self, calls: Iterable[Node], target: Opset | None) -> dict[Node, Reason]:
        """The calls that coremltools fails to translate by themselves, each with the reason.

        Args:
            calls: Accepted by the rules.
            target: Opset of the deployment target; None if any may be demanded.
        """
        tried = [c for c in calls if c not in self._known and _is_possible_alone(c)]
        verdicts = TRIALS.verdicts(tried, self._program, self._known, target)
        self._since.update((call, v.since) for call, v in verdicts.items() if v.since is not None)
        return {call: reason_of(call, v) for call, v in verdicts.items() if v.since is None}

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """Real values of parameters and buffers by name, as far as they are at hand."""
        return self._state

    def since(self, call: Node) -> Opset:
        """The oldest opset at which a call was translated."""
        return self._since.get(call, Opset.iOS15)

    def failures(self, partitions: Mapping[str, CompileOptions]) -> dict[Node, Reason]:
        """Convert every partition of the tagged program; see ``Confirmation.failures``.

        The blobs wait for ``CoreMLBackend.preprocess`` as long as what is in ``kept`` lives.
        """
        confirmation = Confirmation(self._program, self._state, self._constants)
        found = confirmation.failures(partitions)
        # Only now that this round has taken over what still fits are those of the last let go.
        self.kept = confirmation.records
        return found


def _is_possible_alone(call: Node) -> bool:
    name = target_name(call.target)
    rule = record_of(name)
    return name != GETITEM and (rule is None or rule.alone)


def parts_of(refused: Mapping[Node, Reason]) -> dict[Node, Reason]:
    """The results of refused calls: none can be delegated without its call."""
    return {
        user: part_of(call, reason)
        for call, reason in refused.items()
        for user in call.users
        if target_name(user.target) == GETITEM
    }

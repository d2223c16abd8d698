"""What the user keeps out of Core ML: by op, by module, by node, or by a mark on a node.

A filter says of one call why it stays on the CPU. Calls that only take a part of another's results
are never asked about: they follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.module_scope import ModulePattern, Scope, scopes_of
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.call import target_name
from coreml_delegate.partition.grouping import is_part
from coreml_delegate.partition.op_names import normalize_op_names, spellings

MARK = "coreml_do_not_delegate"
"""Key below ``node.meta["custom"]``, which decompositions and ``torch.export.save`` keep."""

NodePredicate = Callable[[Node], bool]


def do_not_delegate(node: Node) -> None:
    """Keep one call of an exported program on the CPU, with all that it is decomposed to.

    The mark is on the program: it holds for every partitioner and survives ``torch.export.save``.

    Args:
        node: A call in the graph of an ``ExportedProgram``.

    Raises:
        OptionError: The node is no call.
    """
    if node.op != "call_function":
        raise OptionError("only calls are delegated", got=f"{node.name}, a node of kind {node.op}")
    while is_part(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    # A new dictionary: tracing gives the same one to many nodes.
    node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: True}


class NodeFilter(Protocol):
    """One condition of the user's."""

    def refusal(self, node: Node, /) -> Reason | None:
        """Why a call is kept out, or None if this filter lets it pass."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """Refuses the calls that ``do_not_delegate`` marked."""

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if not (node.meta.get("custom") or {}).get(MARK):
            return None
        return _kept_out("marked by do_not_delegate", remedy="Do not mark it")


@dataclass(frozen=True, slots=True)
class SkippedOps:
    """Refuses ops by name.

    Attributes:
        names: From ``normalize_op_names``.
        option: What the list is called.
    """

    names: frozenset[str]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if not spellings(node) & self.names:
            return None
        return _kept_out(f"{target_name(node.target)} is in {self.option}", _REMOVE)


@dataclass(frozen=True, slots=True)
class OnlyOps:
    """Refuses all ops but those named; see ``SkippedOps``."""

    names: frozenset[str]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if spellings(node) & self.names:
            return None
        return _kept_out(f"{target_name(node.target)} is not in {self.option}", _ADD)


@dataclass(frozen=True, slots=True)
class SkippedModules:
    """Refuses what was traced in certain modules.

    Attributes:
        patterns: The modules.
        option: What the list is called.
    """

    patterns: tuple[ModulePattern, ...]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        scopes = scopes_of(node)
        for pattern in self.patterns:
            if pattern.covers(scopes):
                return _kept_out(f"{pattern.text!r} is in {self.option}", _REMOVE)
        return None


@dataclass(frozen=True, slots=True)
class OnlyModules:
    """Refuses what was traced outside certain modules; see ``SkippedModules``."""

    patterns: tuple[ModulePattern, ...]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        scopes = scopes_of(node)
        if any(pattern.covers(scopes) for pattern in self.patterns):
            return None
        where = next((scope.path for scope in reversed(scopes) if scope.path), "the root module")
        return _kept_out(f"{where} is not in {self.option}", _ADD)


@dataclass(frozen=True, slots=True)
class Predicate:
    """Refuses the calls that a function of the user's does not want.

    Attributes:
        wanted: True for a call that may be delegated.
        option: What the function is given as.
    """

    wanted: NodePredicate
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if self.wanted(node):
            return None
        return _kept_out(f"{self.option} is false for it", "Change the predicate")


_REMOVE = "Remove it from the list"
_ADD = "Add it to the list"


def _kept_out(text: str, remedy: str) -> Reason:
    return Reason(ReasonCode.SKIPPED, text, remedy=remedy)


@dataclass(slots=True)
class Filters:
    """All filters of one partitioner, in the order in which they are asked.

    Attributes:
        filters: The conditions.
        modules_seen: Modules of the programs shown so far: a pattern has to mean one of them.
    """

    filters: tuple[NodeFilter, ...]
    modules_seen: set[Scope] = field(default_factory=set[Scope])

    @classmethod
    def of(
        cls,
        *,
        skip_ops: Collection[str] | None,
        only_ops: Collection[str] | None,
        skip_modules: Collection[str | type[nn.Module]] | None,
        only_modules: Collection[str | type[nn.Module]] | None,
        node_filter: NodePredicate | None,
    ) -> Filters:
        """The filters for a partitioner's options.

        Raises:
            OptionError: An unknown op name, or what is no module pattern.
        """
        chosen: list[NodeFilter] = [Marked()]
        for ops, option, by_op in (
            (skip_ops, "skip_ops_for_coreml_delegation", SkippedOps),
            (only_ops, "only_ops", OnlyOps),
        ):
            if ops is not None:
                names = normalize_op_names(ops, option)
                chosen.append(by_op(names, option))
        for modules, option, by_module in (
            (skip_modules, "skip_modules", SkippedModules),
            (only_modules, "only_modules", OnlyModules),
        ):
            if modules is not None:
                patterns = tuple(ModulePattern.of(m, option) for m in modules)
                chosen.append(by_module(patterns, option))
        if node_filter is not None:
            chosen.append(Predicate(node_filter, "node_filter"))
        return cls(tuple(chosen))

    def anew(self) -> Filters:
        """The same filters, which have seen no program yet."""
        return Filters(self.filters)

    def refusal(self, node: Node) -> Reason | None:
        """Why the user keeps a call out, or None."""
        if is_part(node):
            return None
        reasons = (condition.refusal(node) for condition in self.filters)
        return next((reason for reason in reasons if reason is not None), None)

    def note(self, program: ExportedProgram) -> None:
        """Learn which modules a program has."""
        for node in program.graph.nodes:
            self.modules_seen.update(scopes_of(node))

    def check_patterns(self) -> None:
        """Refuse a pattern that means no module of any program noted.

        Raises:
            OptionError: There is one; names near matches.
        """
        for condition in self.filters:
            if isinstance(condition, SkippedModules | OnlyModules):
                for pattern in condition.patterns:
                    if not pattern.covers(self.modules_seen):
                        raise _unknown_module(condition.option, pattern, self.modules_seen)


def _unknown_module(option: str, pattern: ModulePattern, seen: Collection[Scope]) -> OptionError:
    names = _names(seen)
    return OptionError(
        f"{option} names no module of the program",
        got=repr(pattern.text),
        expected=near_matches(pattern.text, names, "a path or class of its modules"),
    )


def _names(scopes: Iterable[Scope]) -> list[str]:
    found = {scope.path for scope in scopes} | {scope.class_name for scope in scopes}
    found |= {scope.class_name.rpartition(".")[2] for scope in scopes}
    return sorted(found - {""})

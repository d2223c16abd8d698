"""The user's filters, which exclude calls by op, by module, by node or by a mark.

A filter returns why a call stays on the CPU. Filters are not applied to parts, which follow their
call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.fx import Graph, Node
from torch.fx.traceback import NodeSource

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.exported.module_scope import ModulePattern, Scope, scopes_of
from coreml_delegate.ops import NAMESPACES, Reason, ReasonCode
from coreml_delegate.ops.call import DEQUANTIZE, QUANTIZE, target_name
from coreml_delegate.partition.verdicts.parts import is_part, owning_call
from coreml_delegate.patches.torch import all_schemas

MARK = "coreml_do_not_delegate"
"""Key below ``node.meta["custom"]``, which decompositions and ``torch.export.save`` keep."""

NodePredicate = Callable[[Node], bool]

_MAX_LISTED = 12  # names that an error lists in full


def do_not_delegate(node: Node, reason: str | None = None) -> None:
    """Keep one call of an exported program, and its decomposition, on the CPU.

    The mark is part of the program: it applies to every partitioner and survives
    ``torch.export.save``.

    Args:
        node: A call in the graph of an ``ExportedProgram``.
        reason: Why, for the report; None names this function.

    Raises:
        OptionError: The node is no call.
    """
    if node.op != "call_function":
        raise OptionError("only calls are delegated", got=f"{node.name}, a node of kind {node.op}")
    node = owning_call(node)
    # A new dictionary: traced nodes share theirs.
    node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: reason or True}


class NodeFilter(Protocol):
    """One filter of the user."""

    def refusal(self, node: Node, /) -> Reason | None:
        """Return why a call is excluded, or None if the filter accepts it."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """Refuses the calls that ``do_not_delegate`` marked."""

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        mark = (node.meta.get("custom") or {}).get(MARK)
        if not mark:
            return None
        if isinstance(mark, str):
            return Reason(ReasonCode.SKIPPED, mark)
        return _exclusion("marked by do_not_delegate", remedy="Do not mark it")


@dataclass(frozen=True, slots=True)
class SkippedOps:
    """Refuses ops by name, and their decompositions.

    Attributes:
        names: From ``normalize_op_names``.
        option: The name of the option, for the reason.
    """

    names: frozenset[str]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        names = (target_name(node.target), *(str(source.target) for source in sources_of(node)))
        name = next((name for name in names if _spellings(name.lower()) & self.names), None)
        return None if name is None else _exclusion(f"{name} is in {self.option}", _REMOVE)


@dataclass(frozen=True, slots=True)
class OnlyOps:
    """Refuses all ops but the named ops; see ``SkippedOps``."""

    names: frozenset[str]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if spellings(node) & self.names:
            return None
        return _exclusion(f"{target_name(node.target)} is not in {self.option}", _ADD)


@dataclass(frozen=True, slots=True)
class SkippedModules:
    """Refuses calls traced in certain modules.

    Attributes:
        patterns: The modules.
        option: The name of the option, for the reason.
    """

    patterns: tuple[ModulePattern, ...]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        scopes = scopes_of(node)
        for pattern in self.patterns:
            if pattern.covers(scopes):
                return _exclusion(f"{pattern.text!r} is in {self.option}", _REMOVE)
        return None


@dataclass(frozen=True, slots=True)
class OnlyModules:
    """Refuses calls traced outside of certain modules; see ``SkippedModules``."""

    patterns: tuple[ModulePattern, ...]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        scopes = scopes_of(node)
        if any(pattern.covers(scopes) for pattern in self.patterns):
            return None
        where = next((scope.path for scope in reversed(scopes) if scope.path), "the root module")
        return _exclusion(f"{where} is not in {self.option}", _ADD)


@dataclass(frozen=True, slots=True)
class Predicate:
    """Refuses the calls for which the user's function is false.

    Attributes:
        accepts: Returns true for a call that may be delegated.
        option: The name of the option, for the reason.
    """

    accepts: NodePredicate
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if self.accepts(node):
            return None
        return _exclusion(f"{self.option} is false for it", "Change the predicate")


class NotedCalls:
    """Refuses calls that were noted in ATen dialect, and their decompositions.

    Torch records the original call of each part.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, int], Reason] = {}
        # References keep the ids of graphs valid.
        self._graphs: dict[int, Graph] = {}

    def note(self, call: Node, reason: Reason) -> None:
        """Note a call in ATen dialect, and why it stays on the CPU."""
        self._reasons[call.name, id(call.graph)] = reason
        self._graphs[id(call.graph)] = call.graph

    def refusal(self, node: Node) -> Reason | None:
        """See ``NodeFilter``."""
        sources = sources_of(node) if self._reasons else ()
        keys = ((source.name, source.graph_id) for source in sources)
        return next((self._reasons[key] for key in keys if key in self._reasons), None)


def sources_of(node: Node) -> Iterator[NodeSource]:
    """Yield the nodes of earlier graphs that a node was derived from, latest first."""
    pending: list[NodeSource] = list(node.meta.get("from_node") or ())
    while pending:
        source = pending.pop()
        yield source
        pending += source.from_node


_REMOVE = "Remove it from the list"
_ADD = "Add it to the list"


def _exclusion(text: str, remedy: str) -> Reason:
    return Reason(ReasonCode.SKIPPED, text, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Filters:
    """All filters of one partitioner, in the order of their application."""

    filters: tuple[NodeFilter, ...]

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
        """Return the filters for a partitioner's options.

        Raises:
            OptionError: An unknown op name, or an invalid module pattern.
        """
        filters: list[NodeFilter] = [Marked()]
        for ops, option, op_filter in (
            (skip_ops, "skip_ops_for_coreml_delegation", SkippedOps),
            (only_ops, "only_ops", OnlyOps),
        ):
            if ops is not None:
                names = normalize_op_names(ops, option)
                filters.append(op_filter(names, option))
        for modules, option, module_filter in (
            (skip_modules, "skip_modules", SkippedModules),
            (only_modules, "only_modules", OnlyModules),
        ):
            if modules is not None:
                patterns = tuple(ModulePattern.of(m, option) for m in modules)
                filters.append(module_filter(patterns, option))
        if node_filter is not None:
            filters.append(Predicate(node_filter, "node_filter"))
        return cls(tuple(filters))

    def with_filter(self, node_filter: NotedCalls) -> Filters:
        """Return these filters with a further filter."""
        return Filters((*self.filters, node_filter))

    def refusal(self, node: Node) -> Reason | None:
        """Return why the user excludes a call, or None."""
        if is_part(node):
            return None
        calls = (node, *_quantized_calls(node))
        reasons = (condition.refusal(call) for call in calls for condition in self.filters)
        return next((reason for reason in reasons if reason is not None), None)

    def check_patterns(self, modules: Collection[Scope]) -> None:
        """Check that every pattern matches a module.

        Args:
            modules: The modules of the programs so far.

        Raises:
            OptionError: A pattern matches no module; the error has near matches.
        """
        for condition in self.filters:
            if isinstance(condition, SkippedModules | OnlyModules):
                for pattern in condition.patterns:
                    if not pattern.covers(modules):
                        raise _unknown_module(condition.option, pattern, modules)


def _quantized_calls(node: Node) -> Iterator[Node]:
    """Yield the calls whose arguments or result a node quantizes or dequantizes.

    Backends take these nodes together: an excluded quantized call keeps its integers.
    """
    makes_integers = target_name(node.target) == QUANTIZE
    neighbours = node.all_input_nodes if makes_integers else []
    for call in (node, *node.users) if makes_integers else (node,):
        if target_name(call.target) in DEQUANTIZE:
            neighbours += call.users
    yield from (owning_call(call) for call in neighbours if call.op == "call_function")


def _unknown_module(option: str, pattern: ModulePattern, modules: Collection[Scope]) -> OptionError:
    names = _names(modules)
    return OptionError(
        f"{option} names no module of the program",
        got=repr(pattern.text),
        expected=near_matches(pattern.text, names, "a path or class of its modules"),
    )


def _names(scopes: Iterable[Scope]) -> list[str]:
    names = {scope.path for scope in scopes} | {scope.class_name for scope in scopes}
    names |= {scope.class_name.rpartition(".")[2] for scope in scopes}
    return sorted(names - {""})


# Operator names


def normalize_op_names(names: Iterable[str], option: str) -> frozenset[str]:
    """Check and normalize the op names of an option.

    Args:
        names: Any of ``aten.add.Tensor``, ``aten::add.Tensor``, ``add.Tensor``, ``aten.add`` (every
            overload) and ``add``; case does not matter.
        option: Name of the option, for the message.

    Returns:
        Lower-case names, as in the ``spellings`` of the matching calls.

    Raises:
        OptionError: A name matches no operator; the error has near matches.
    """
    return frozenset(_normalize_op_name(name, option) for name in names)


def spellings(node: Node) -> frozenset[str]:
    """Return all lower-case names that match the op of a call.

    The name of a view also matches its ``_copy`` variant, with which ExecuTorch replaces it.
    """
    return _spellings(target_name(node.target).lower())


@functools.cache
def _spellings(full: str) -> frozenset[str]:
    namespace, _, qualified = full.partition(".")
    op, _, overload = qualified.partition(".")
    names = {full, qualified, op, f"{namespace}.{op}"}
    if op.endswith("_copy"):
        view = op.removesuffix("_copy")
        names |= {f"{namespace}.{view}.{overload}", f"{view}.{overload}"}
        names |= {view, f"{namespace}.{view}"}
    return frozenset(names)


def _normalize_op_name(name: str, option: str) -> str:
    dotted = name.strip().replace("::", ".").lower()
    namespace, _, qualified = dotted.partition(".")
    if namespace not in NAMESPACES:
        namespace, qualified = "aten", dotted
    op, _, overload = qualified.partition(".")
    overloads = _overloads_of(namespace)
    if op not in overloads:
        raise _unknown_op(option, "operator", name, op, overloads)
    if overload and overload not in overloads[op]:
        raise _unknown_op(option, "overload", name, overload, overloads[op])
    return dotted


def _unknown_op(option: str, kind: str, name: str, part: str, names: Iterable[str]) -> OptionError:
    candidates = sorted(names)
    few = len(candidates) <= _MAX_LISTED
    otherwise = f"perhaps {', '.join(candidates)}" if few else f"an {kind} PyTorch has"
    return OptionError(
        f"{option} names an unknown {kind}",
        got=repr(name),
        expected=near_matches(part, candidates, otherwise, cutoff=0.6),
    )


def _overloads_of(namespace: str) -> Mapping[str, set[str]]:
    """Return the operators of a namespace with their overloads, all in lower case."""
    overloads: dict[str, set[str]] = {}
    for schema in all_schemas():
        prefix, _, op = schema.name.partition("::")
        if prefix == namespace:
            overloads.setdefault(op.lower(), set()).add(schema.overload_name.lower() or "default")
    return overloads

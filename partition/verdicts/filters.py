"""The user's filters: calls kept out of Core ML by op, by module, by node or by a mark.

A filter says why a call stays on the CPU. No filter is asked about a part of a call: it follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.traceback import NodeSource

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.module_scope import ModulePattern, Scope, scopes_of
from coreml_delegate.ops import NAMESPACES, Reason, ReasonCode
from coreml_delegate.ops.call import DEQUANTIZE, QUANTIZE, target_name
from coreml_delegate.partition.verdicts.parts import is_part, whole_call

MARK = "coreml_do_not_delegate"
"""Key below ``node.meta["custom"]``, which decompositions and ``torch.export.save`` keep."""

NodePredicate = Callable[[Node], bool]

_FEW = 12  # names that an error lists in full


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
    node = whole_call(node)
    # A new dictionary: tracing gives the same one to many nodes.
    node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: True}


class NodeFilter(Protocol):
    """One condition of the user's."""

    def refusal(self, node: Node, /) -> Reason | None:
        """Return why a call is kept out, or None if this filter lets it pass."""
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
    """Refuses ops by name, and the parts that they are decomposed to.

    Attributes:
        names: From ``normalize_op_names``.
        option: The name of the option, for the reason.
    """

    names: frozenset[str]
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        names = (target_name(node.target), *(str(source.target) for source in _sources(node)))
        name = next((name for name in names if _spellings(name.lower()) & self.names), None)
        return None if name is None else _kept_out(f"{name} is in {self.option}", _REMOVE)


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
    """Refuses calls that were traced in certain modules.

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
                return _kept_out(f"{pattern.text!r} is in {self.option}", _REMOVE)
        return None


@dataclass(frozen=True, slots=True)
class OnlyModules:
    """Refuses calls that were traced outside certain modules; see ``SkippedModules``."""

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
    """Refuses the calls for which a function of the user's is false.

    Attributes:
        wanted: Returns true for a call that may be delegated.
        option: The name of the option, for the reason.
    """

    wanted: NodePredicate
    option: str

    def refusal(self, node: Node, /) -> Reason | None:
        """See ``NodeFilter``."""
        if self.wanted(node):
            return None
        return _kept_out(f"{self.option} is false for it", "Change the predicate")


class LeftOut:
    """Refuses the parts of composite calls that the user left out of the program in ATen dialect.

    A partitioner beside ours may have such a call decomposed. Torch notes which call a part was
    made of.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, int], Reason] = {}
        # A graph is kept for as long as its id is looked for, so that no other graph gets it.
        self._graphs: dict[int, Graph] = {}

    def note(self, call: Node, reason: Reason) -> None:
        """Note a call in ATen dialect, and why it is left out."""
        self._reasons[call.name, id(call.graph)] = reason
        self._graphs[id(call.graph)] = call.graph

    def refusal(self, node: Node) -> Reason | None:
        """See ``NodeFilter``."""
        sources = _sources(node) if self._reasons else ()
        keys = ((source.name, source.graph_id) for source in sources)
        return next((self._reasons[key] for key in keys if key in self._reasons), None)


def _sources(node: Node) -> Iterator[NodeSource]:
    """Yield the nodes of earlier graphs that a node was made of, the latest first."""
    pending: list[NodeSource] = list(node.meta.get("from_node") or ())
    while pending:
        source = pending.pop()
        yield source
        pending += source.from_node


_REMOVE = "Remove it from the list"
_ADD = "Add it to the list"


def _kept_out(text: str, remedy: str) -> Reason:
    return Reason(ReasonCode.SKIPPED, text, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Filters:
    """All filters of one partitioner, in the order in which they are asked."""

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
            OptionError: An unknown op name, or a value that is no module pattern.
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

    def beside(self, left_out: LeftOut) -> Filters:
        """Return these filters, and one that keeps out the parts of calls left out before."""
        return Filters((*self.filters, left_out))

    def refusal(self, node: Node) -> Reason | None:
        """Return why the user keeps a call out, or None."""
        if is_part(node):
            return None
        calls = (node, *_quantized_calls(node))
        reasons = (condition.refusal(call) for call in calls for condition in self.filters)
        return next((reason for reason in reasons if reason is not None), None)

    def check_patterns(self, modules: Collection[Scope]) -> None:
        """Check that every pattern names a module.

        Args:
            modules: Those of the programs shown so far.

        Raises:
            OptionError: A pattern names none; the error has near matches.
        """
        for condition in self.filters:
            if isinstance(condition, SkippedModules | OnlyModules):
                for pattern in condition.patterns:
                    if not pattern.covers(modules):
                        raise _unknown_module(condition.option, pattern, modules)


def _quantized_calls(node: Node) -> Iterator[Node]:
    """Yield the calls of whose arguments or result a node makes integers, or floats again.

    Backends take these together: a quantized call that is left out keeps its integers.
    """
    makes_integers = target_name(node.target) == QUANTIZE
    around = node.all_input_nodes if makes_integers else []
    for call in (node, *node.users) if makes_integers else (node,):
        if target_name(call.target) in DEQUANTIZE:
            around += call.users
    yield from (whole_call(call) for call in around if call.op == "call_function")


def _unknown_module(option: str, pattern: ModulePattern, modules: Collection[Scope]) -> OptionError:
    names = _names(modules)
    return OptionError(
        f"{option} names no module of the program",
        got=repr(pattern.text),
        expected=near_matches(pattern.text, names, "a path or class of its modules"),
    )


def _names(scopes: Iterable[Scope]) -> list[str]:
    found = {scope.path for scope in scopes} | {scope.class_name for scope in scopes}
    found |= {scope.class_name.rpartition(".")[2] for scope in scopes}
    return sorted(found - {""})


# Names of operators, as users write them


def normalize_op_names(names: Iterable[str], option: str) -> frozenset[str]:
    """Check the op names that a user gives, and bring them to one form.

    Args:
        names: Any of ``aten.add.Tensor``, ``aten::add.Tensor``, ``add.Tensor``, ``aten.add`` (every
            overload) and ``add``; upper and lower case alike.
        option: The option they are given to, for the message.

    Returns:
        Lower-case names, each of them among the ``spellings`` of the calls that it means.

    Raises:
        OptionError: A name that no operator has; the error has near matches.
    """
    return frozenset(_normalize_op_name(name, option) for name in names)


def spellings(node: Node) -> frozenset[str]:
    """Return every name, in lower case, by which a user may mean the op of a call.

    The name of a view stands for its copying variant too, which ExecuTorch puts in its place.
    """
    return _spellings(target_name(node.target).lower())


@functools.cache
def _spellings(full: str) -> frozenset[str]:
    namespace, _, rest = full.partition(".")
    op, _, overload = rest.partition(".")
    found = {full, rest, op, f"{namespace}.{op}"}
    if op.endswith("_copy"):
        view = op.removesuffix("_copy")
        found |= {f"{namespace}.{view}.{overload}", f"{view}.{overload}"}
        found |= {view, f"{namespace}.{view}"}
    return frozenset(found)


def _normalize_op_name(name: str, option: str) -> str:
    dotted = name.strip().replace("::", ".").lower()
    namespace, _, rest = dotted.partition(".")
    if namespace not in NAMESPACES:
        namespace, rest = "aten", dotted
    op, _, overload = rest.partition(".")
    known = _overloads_of(namespace)
    if op not in known:
        raise _unknown_op(option, "operator", name, op, known)
    if overload and overload not in known[op]:
        raise _unknown_op(option, "overload", name, overload, known[op])
    return dotted


def _unknown_op(option: str, kind: str, name: str, part: str, known: Iterable[str]) -> OptionError:
    candidates = sorted(known)
    few = len(candidates) <= _FEW
    otherwise = f"perhaps {', '.join(candidates)}" if few else f"an {kind} PyTorch has"
    return OptionError(
        f"{option} names an unknown {kind}",
        got=repr(name),
        expected=near_matches(part, candidates, otherwise, cutoff=0.6),
    )


def _overloads_of(namespace: str) -> Mapping[str, set[str]]:
    """Return the operators of a namespace with their overloads, all in lower case."""
    found: dict[str, set[str]] = {}
    schemas: Any = torch._C._jit_get_all_schemas()  # pyright: ignore[reportPrivateUsage]
    for schema in schemas:
        prefix, _, op = schema.name.partition("::")
        if prefix == namespace:
            found.setdefault(op.lower(), set()).add(schema.overload_name.lower() or "default")
    return found

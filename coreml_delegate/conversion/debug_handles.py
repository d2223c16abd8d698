"""Debug handles: they tie the operations of a model to the calls that they were made from.

Coremltools hands the debug handle of a call on to the operations that it translates it to, and its
passes to those that take their place. Of several calls that become one operation, only the last is
known that way; so a call that has left no operation is counted among those of the first of its
users that has.

A conversion is kept and found again by the content of a subgraph, whatever handles its calls have.
So a conversion numbers the calls, in the order of the graph, and the handles of the subgraph at
hand take the place of the numbers when the blob is made.

Source: coremltools 9.0, ``ScopeSource.EXIR_DEBUG_HANDLE`` and
``Program.construct_debug_handle_to_ops_mapping``, which has the same paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.formats.blob import Files
from coreml_delegate.formats.blob_layout import (
    DEBUG_INFO,
    DebugInfo,
    OperationPath,
    debug_info_in,
    debug_symbol,
)
from coreml_delegate.ops.call import GETITEM, target_name

HANDLE = "debug_handle"
"""Key of a node's metadata: ExecuTorch's, and coremltools'."""


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call of a subgraph.

    Attributes:
        users: Numbers of the calls that use its result.
        sources: Numbers of the calls whose results it uses.
        shapes: Shapes of its results, with None for sizes that vary.
    """

    users: tuple[int, ...]
    sources: tuple[int, ...]
    shapes: tuple[tuple[int | None, ...], ...]


def number_calls(program: ExportedProgram) -> dict[int, NumberedCall]:
    """Give every call of a subgraph a debug handle of its own, before calls are rewritten.

    An item of a result has the number of the call.

    Returns:
        The calls by number, from 1, in the order of the graph.
    """
    number: dict[Node, int] = {}
    following = itertools.count(1)
    for node in _calls(program):
        number[node] = number[_producer(node)] if _is_item(node) else next(following)
        node.meta[HANDLE] = number[node]
    users: dict[int, dict[int, None]] = {n: {} for n in number.values()}
    sources: dict[int, dict[int, None]] = {n: {} for n in number.values()}
    for node, own in number.items():
        for source in (number[n] for n in node.all_input_nodes if n in number):
            if source != own:
                users[source][own] = sources[own][source] = None
    return {
        own: NumberedCall(
            tuple(users[own]), tuple(sources[own]), tuple(_shapes(node.meta.get("val")))
        )
        for node, own in number.items()
        if not _is_item(node)
    }


def operation_calls(program: Any) -> dict[str, int]:
    """Return the number of the call that each operation of a MIL program was translated from.

    Args:
        program: A ``mil.Program`` of one function.

    Returns:
        Numbers by the operation's first output, for those that have one.
    """
    from coremltools.converters.mil.mil.scope import ScopeSource

    found: dict[str, int] = {}
    for function in program.functions.values():
        for operation in function.operations:
            handles: Any = operation.scopes.get(ScopeSource.EXIR_DEBUG_HANDLE) or (None,)
            if handles[0] is not None and operation.outputs:
                found[operation.outputs[0].name] = handles[0]
    return found


def describe(
    spec: Any, calls: Mapping[int, NumberedCall], translated: Mapping[str, int], version: str
) -> DebugInfo:
    """Describe the operations of a converted model.

    Args:
        spec: Its ``Model`` message.
        calls: The calls of the subgraph.
        translated: See ``operation_calls``.
        version: Of coremltools.

    Returns:
        The debug info, with the numbers of calls in the place of handles.
    """
    places: dict[str, OperationPath] = {}
    numbers: dict[str, tuple[int, ...]] = {}
    last: dict[int, str] = {}
    shapes: dict[str, list[list[int | None]]] = {}
    operations = [
        (symbol, path, translated[output], shape)
        for symbol, path, output, shape in _operations(spec)
        if translated.get(output) in calls
    ]
    merged = _merged(calls, {number for *_, number, _ in operations})
    for symbol, path, number, shape in operations:
        places[symbol] = path
        numbers[symbol] = merged[number]
        last[number] = symbol
        shapes[symbol] = shape
    return DebugInfo(
        version,
        places,
        numbers,
        {
            symbol: len(calls[number].shapes)
            for number, symbol in last.items()
            if _agree(calls[number].shapes, shapes[symbol])
        },
    )


def with_handles(files: Files, handles: Sequence[int | None]) -> Files:
    """Return the files of a blob with the handles of the calls that it stands for.

    Args:
        files: The files; debug info has the numbers of calls.
        handles: Handle of each call, see ``handles_of``; debug info of no handle is left out.
    """
    numbered = debug_info_in(files)
    if numbered is None:
        return files
    others = {name: held for name, held in files.items() if name != DEBUG_INFO}
    info = renumber(numbered, handles)
    return {**others, DEBUG_INFO: info.encode()} if info.handles else others


def of_function(info: DebugInfo | None, function: str) -> DebugInfo | None:
    """Return the debug info of a model's one function, once it is a function among others.

    Operations of several functions may have one name: the function's comes before their symbols.
    """
    if info is None:
        return None
    renamed = {symbol: f"{function}:{symbol}" for symbol in info.paths}
    return DebugInfo(
        info.version,
        {
            renamed[symbol]: [
                {**step, "Name": function} if step.get("Type") == "Function" else step
                for step in path
            ]
            for symbol, path in info.paths.items()
        },
        {renamed[symbol]: listed for symbol, listed in info.handles.items()},
        {renamed[symbol]: count for symbol, count in info.with_value.items()},
    )


def united(infos: Iterable[DebugInfo | None]) -> DebugInfo | None:
    """Return the debug info of a model from that of its functions; None if none has any."""
    found = [info for info in infos if info is not None]
    if not found:
        return None
    return DebugInfo(
        found[0].version,
        {symbol: path for info in found for symbol, path in info.paths.items()},
        {symbol: listed for info in found for symbol, listed in info.handles.items()},
        {symbol: count for info in found for symbol, count in info.with_value.items()},
    )


def handle_map(info: DebugInfo | None) -> Any:
    """Return the map of symbols to handles that ExecuTorch keeps; None if there is no info.

    ExecuTorch annotates one handle for each symbol, but takes several.
    """
    return None if info is None else {s: tuple(listed) for s, listed in info.handles.items()}


def handles_of(program: ExportedProgram) -> tuple[int | None, ...]:
    """Return the debug handle of each numbered call of a subgraph; None if a call has none."""
    found = (node.meta.get(HANDLE) for node in _calls(program) if not _is_item(node))
    return tuple(handle if isinstance(handle, int) and handle > 0 else None for handle in found)


def renumber(info: DebugInfo, handles: Sequence[int | None]) -> DebugInfo:
    """Put handles in the place of the numbers of calls.

    An operation's last handle is that of the call whose value it has. Several calls may have one
    handle, of the call that they were decomposed from: the value is that of the last.
    """
    latest = {handle: number for number, handle in enumerate(handles, start=1)}
    found: dict[str, tuple[int, ...]] = {}
    values: dict[str, int] = {}
    for symbol, numbers in info.handles.items():
        own = [(n, handle) for n in numbers if (handle := handles[n - 1]) is not None]
        if not own:
            continue
        # Of a handle that comes twice, the last one stays.
        found[symbol] = tuple(dict.fromkeys(handle for _, handle in reversed(own)))[::-1]
        number, handle = own[-1]
        if symbol in info.with_value and number == numbers[-1] == latest[handle]:
            values[symbol] = info.with_value[symbol]
    paths = {symbol: info.paths[symbol] for symbol in found}
    return replace(info, paths=paths, handles=found, with_value=values)


def _calls(program: ExportedProgram) -> Iterator[Node]:
    return (node for node in program.graph.nodes if node.op == "call_function")


def _is_item(node: Node) -> bool:
    return target_name(node.target) == GETITEM and isinstance(node.args[0], Node)


def _producer(item: Node) -> Node:
    return item.all_input_nodes[0]


def _shapes(value: Any) -> Iterator[tuple[int | None, ...]]:
    for tensor in value if isinstance(value, list | tuple) else (value,):
        if isinstance(tensor, torch.Tensor):
            yield tuple(size if isinstance(size, int) else None for size in tensor.shape)


def _merged(
    calls: Mapping[int, NumberedCall], present: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Return the calls that the operations of each call stand for, its own last.

    Each call is in one place: several would tie operations together that have nothing in common.

    Args:
        calls: The calls by number.
        present: Those that operations come from.
    """
    owner: dict[int, int | None] = {number: number for number in present}
    for number in sorted(calls.keys() - owner.keys(), reverse=True):
        owner[number] = _first(owner[user] for user in calls[number].users)
    for number in sorted(calls):
        # Nothing computes with it: a change of nothing at the end.
        if owner[number] is None:
            owner[number] = _first(owner[source] for source in calls[number].sources)
    found: dict[int, list[int]] = {number: [] for number in present}
    for number in sorted(calls):
        holder = owner[number]
        if holder is not None and holder != number:
            found[holder].append(number)
    return {number: (*absorbed, number) for number, absorbed in found.items()}


def _first(owners: Iterable[int | None]) -> int | None:
    return min((owner for owner in owners if owner is not None), default=None)


def _operations(
    spec: Any,
) -> Iterator[tuple[str, OperationPath, str, list[list[int | None]]]]:
    """Yield the debug symbol, path, first output and results' shapes of each operation."""
    for name, function in spec.mlProgram.functions.items():
        block = function.block_specializations[function.opset]
        for operation in block.operations:
            if operation.type == "const" or not operation.outputs:
                continue
            output = operation.outputs[0].name
            path = (
                {"Type": "Program"},
                {"Type": "Function", "Name": name},
                {"Type": "Block"},
                {"Type": "Operation", "Operator": operation.type, "Output": output},
            )
            shapes = [_declared_shape(value.type) for value in operation.outputs]
            yield debug_symbol(output, operation.type), path, output, shapes


def _declared_shape(type_: Any) -> list[int | None]:
    return [
        size.constant.size if size.WhichOneof("dimension") == "constant" else None
        for size in type_.tensorType.dimensions
    ]


def _agree(
    results: Sequence[Sequence[int | None]], outputs: Sequence[Sequence[int | None]]
) -> bool:
    """Whether an operation has the results of a call, as far as shapes tell.

    The statistics of a norm in inference, for one, are empty results.
    """
    whole = [result for result in results if 0 not in result]
    return len(whole) == len(outputs) and all(
        len(result) == len(output)
        and all(a == b or None in (a, b) for a, b in zip(result, output, strict=True))
        for result, output in zip(whole, outputs, strict=True)
    )

"""Debug handles, which map the operations of a model to the calls that they were translated from.

Coremltools copies the debug handle of a call to its operations, and its passes copy it to their
replacements. An operation fused from several calls only has the handle of the last; so a call
without operations is assigned to the operations of its first user that has some.

Conversions are cached by the content of a subgraph, without debug handles. So a conversion numbers
the calls, in the order of the graph, and the handles of the subgraph at hand replace the numbers
when the blob is made.

Source: coremltools 9.0, ``ScopeSource.EXIR_DEBUG_HANDLE`` and
``Program.construct_debug_handle_to_ops_mapping``, which has the same paths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

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
from coreml_delegate.mil.compose import mb
from coreml_delegate.ops.call import GETITEM, target_name, tensors_of

HANDLE = "debug_handle"
"""Key in a node's metadata, of ExecuTorch and of coremltools."""


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call of a subgraph.

    Attributes:
        users: Numbers of the calls that use its result.
        sources: Numbers of the calls whose results it uses.
        shapes: Shapes of its results, with None for dynamic sizes.
    """

    users: tuple[int, ...]
    sources: tuple[int, ...]
    shapes: tuple[tuple[int | None, ...], ...]


def number_calls(program: ExportedProgram) -> dict[int, NumberedCall]:
    """Give every call of a subgraph a distinct debug handle, before calls are rewritten.

    A ``getitem`` has the number of its call.

    Returns:
        The calls by number, from 1, in the order of the graph.
    """
    number: dict[Node, int] = {}
    numbers = itertools.count(1)
    for node in _calls(program):
        number[node] = number[node.all_input_nodes[0]] if _is_item(node) else next(numbers)
        node.meta[HANDLE] = number[node]
    users: dict[int, dict[int, None]] = {n: {} for n in number.values()}
    sources: dict[int, dict[int, None]] = {n: {} for n in number.values()}
    for node, number_of_node in number.items():
        for source in (number[n] for n in node.all_input_nodes if n in number):
            if source != number_of_node:
                users[source][number_of_node] = sources[number_of_node][source] = None
    return {
        number_of_node: NumberedCall(
            tuple(users[number_of_node]),
            tuple(sources[number_of_node]),
            tuple(_shapes(node.meta.get("val"))),
        )
        for node, number_of_node in number.items()
        if not _is_item(node)
    }


def numbered(number: int) -> AbstractContextManager[None]:
    """Give the operations that a block makes with coremltools' builder the number of a call."""
    from coremltools.converters.mil.mil import scope

    info: Any = scope.ScopeInfo
    return mb.scope(info(scope.ScopeSource.EXIR_DEBUG_HANDLE, [number]))


def operation_calls(program: Any) -> dict[str, int]:
    """Return the number of the call that each operation of a MIL program was translated from.

    Args:
        program: A ``mil.Program`` of one function.

    Returns:
        Numbers by the operation's first output, for operations with a number, except constants.
    """
    from coremltools.converters.mil.mil.scope import ScopeSource

    calls: dict[str, int] = {}
    for function in program.functions.values():
        for operation in function.operations:
            handles: Any = operation.scopes.get(ScopeSource.EXIR_DEBUG_HANDLE) or (None,)
            is_computed = operation.outputs and operation.op_type != "const"
            if is_computed and handles[0] is not None:
                calls[operation.outputs[0].name] = handles[0]
    return calls


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
        The debug info, with the numbers of calls instead of handles.
    """
    paths: dict[str, OperationPath] = {}
    numbers: dict[str, tuple[int, ...]] = {}
    last_symbols: dict[int, str] = {}
    shapes: dict[str, list[list[int | None]]] = {}
    operations = [
        (symbol, path, translated[output], shape)
        for symbol, path, output, shape in _operations(spec)
        if translated.get(output) in calls
    ]
    merged = absorb_calls(calls, {number for *_, number, _ in operations})
    for symbol, path, number, shape in operations:
        paths[symbol] = path
        numbers[symbol] = merged[number]
        last_symbols[number] = symbol
        shapes[symbol] = shape
    return DebugInfo(
        version,
        paths,
        numbers,
        {
            symbol: len(calls[number].shapes)
            for number, symbol in last_symbols.items()
            if _have_equal_shapes(calls[number].shapes, shapes[symbol])
        },
    )


def with_handles(files: Files, handles: Sequence[int | None]) -> Files:
    """Return the files of a blob with handles instead of numbers in its debug info.

    Args:
        files: The files; debug info has the numbers of calls.
        handles: Handle of each call, see ``handles_of``; without any, debug info is dropped.
    """
    numbered = debug_info_in(files)
    if numbered is None:
        return files
    other_files = {name: content for name, content in files.items() if name != DEBUG_INFO}
    info = renumber(numbered, handles)
    return {**other_files, DEBUG_INFO: info.encode()} if info.handles else other_files


def of_function(info: DebugInfo | None, function: str) -> DebugInfo | None:
    """Return the debug info of a single-function model as a function of a larger model.

    Functions may have operations of the same name: the function's name prefixes their symbols.
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


def merge_infos(infos: Iterable[DebugInfo | None]) -> DebugInfo | None:
    """Merge the debug info of a model's functions; None without any debug info."""
    present = [info for info in infos if info is not None]
    if not present:
        return None
    return DebugInfo(
        present[0].version,
        {symbol: path for info in present for symbol, path in info.paths.items()},
        {symbol: listed for info in present for symbol, listed in info.handles.items()},
        {symbol: count for info in present for symbol, count in info.with_value.items()},
    )


def handle_map(info: DebugInfo | None) -> Any:
    """Return ExecuTorch's map of symbols to handles; None without debug info.

    ExecuTorch's annotation is one handle per symbol, but it takes several.
    """
    return None if info is None else {s: tuple(listed) for s, listed in info.handles.items()}


def handles_of(program: ExportedProgram) -> tuple[int | None, ...]:
    """Return the debug handle of each numbered call of a subgraph, None if missing."""
    handles = (node.meta.get(HANDLE) for node in _calls(program) if not _is_item(node))
    return tuple(handle if isinstance(handle, int) and handle > 0 else None for handle in handles)


def renumber(info: DebugInfo, handles: Sequence[int | None]) -> DebugInfo:
    """Replace the numbers of calls by handles.

    An operation has the value of the call of its last handle. Calls decomposed from one call share
    a handle: the value is that of the last call.
    """
    latest = {handle: number for number, handle in enumerate(handles, start=1)}
    handles_by_symbol: dict[str, tuple[int, ...]] = {}
    values: dict[str, int] = {}
    for symbol, numbers in info.handles.items():
        numbers_and_handles = [
            (n, handle) for n in numbers if (handle := handles[n - 1]) is not None
        ]
        if not numbers_and_handles:
            continue
        # Keep the last occurrence of a repeated handle.
        handles_by_symbol[symbol] = tuple(
            dict.fromkeys(handle for _, handle in reversed(numbers_and_handles))
        )[::-1]
        number, handle = numbers_and_handles[-1]
        if symbol in info.with_value and number == numbers[-1] == latest[handle]:
            values[symbol] = info.with_value[symbol]
    paths = {symbol: info.paths[symbol] for symbol in handles_by_symbol}
    return replace(info, paths=paths, handles=handles_by_symbol, with_value=values)


def _calls(program: ExportedProgram) -> Iterator[Node]:
    return (node for node in program.graph.nodes if node.op == "call_function")


def _is_item(node: Node) -> bool:
    return target_name(node.target) == GETITEM and isinstance(node.args[0], Node)


def _shapes(value: Any) -> Iterator[tuple[int | None, ...]]:
    for tensor in tensors_of(value):
        yield tuple(size if isinstance(size, int) else None for size in tensor.shape)


def absorb_calls(
    calls: Mapping[int, NumberedCall], present: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Return the calls assigned to the operations of each call, its own number last.

    Each call is assigned once: otherwise it would connect unrelated operations.

    Args:
        calls: The calls by number.
        present: Numbers of calls with operations.
    """
    owner: dict[int, int | None] = {number: number for number in present}
    for number in sorted(calls.keys() - owner.keys(), reverse=True):
        owner[number] = _first(owner[user] for user in calls[number].users)
    for number in sorted(calls):
        # No user has operations: the call at the end computes nothing new.
        if owner[number] is None:
            owner[number] = _first(owner[source] for source in calls[number].sources)
    absorbed_calls: dict[int, list[int]] = {number: [] for number in present}
    for number in sorted(calls):
        absorbing = owner[number]
        if absorbing is not None and absorbing != number:
            absorbed_calls[absorbing].append(number)
    return {number: (*absorbed, number) for number, absorbed in absorbed_calls.items()}


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


def _have_equal_shapes(
    results: Sequence[Sequence[int | None]], outputs: Sequence[Sequence[int | None]]
) -> bool:
    """Whether an operation's outputs and a call's results have equal shapes.

    Empty results, as the statistics of a norm in inference, do not count.
    """
    nonempty = [result for result in results if 0 not in result]
    return len(nonempty) == len(outputs) and all(
        len(result) == len(output)
        and all(a == b or None in (a, b) for a, b in zip(result, output, strict=True))
        for result, output in zip(nonempty, outputs, strict=True)
    )

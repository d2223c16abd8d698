"""Calls on tensors of more than five dimensions, as calls on tensors of fewer.

Core ML has at most five dimensions. Most ops treat neighbouring dimensions alike, so that these can
be merged: a softmax over the last of seven dimensions is that of a matrix. A record says which
dimensions its op tells apart; ``ops.high_rank`` makes the calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coreml_delegate.ops.call import MAX_RANK, OpCall, Reason, ReasonCode

Sizes = Sequence[Any]
"""Sizes of a tensor, numbers or symbols."""


@dataclass(frozen=True, slots=True)
class MergedCall:
    """A call on tensors whose dimensions are merged; row-major, the values are the same.

    Attributes:
        shapes: Merged shapes of the tensors in each argument, by argument name.
        arguments: New values of further arguments, by name.
    """

    shapes: Mapping[str, Sequence[Sizes]]
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


Merge = Callable[[OpCall], Sequence[MergedCall]]
"""Returns the calls that replace a call, each on the result of the previous one.

An empty sequence: the result is a view of the first argument.
"""


def obstacle_to_merging(call: OpCall, merge: Merge) -> Reason | None:
    """Return why a call cannot be made on tensors of at most five dimensions, or None."""
    merged = [s for step in merge(call) for shapes in step.shapes.values() for s in shapes]
    highest = max(map(len, merged), default=0)
    if highest > MAX_RANK:
        return Reason(
            ReasonCode.RANK,
            f"it tells {highest} dimensions apart, Core ML has at most {MAX_RANK}",
        )
    # A view names its sizes; of other results, a view can infer one size (-1).
    has_sizes = merge is view and not {"size", "shape"}.isdisjoint(call.arguments)
    results = [] if has_sizes else [t.shape for t in call.outputs() if t.dim() <= MAX_RANK]
    if any(sum(not isinstance(size, int) for size in shape) > 1 for shape in [*merged, *results]):
        return Reason(
            ReasonCode.SYMBOLIC,
            f"several dimensions of a tensor of more than {MAX_RANK} are dynamic",
        )
    return None


def view(call: OpCall) -> Sequence[MergedCall]:
    """The result has the elements of the first argument in their order."""
    del call
    return ()


def permutation(call: OpCall) -> Sequence[MergedCall]:
    """Merge dimensions that stay neighbours; permute more than five groups in several steps."""
    sizes, order = _sizes(call, "self"), order_of(call)
    steps = (
        MergedCall({"self": [shape]}, {"dims": dims}) for shape, dims in transposes(sizes, order)
    )
    return tuple(steps)


def order_of(call: OpCall) -> list[int]:
    """Return the order of dimensions after a call of ``permute`` or ``transpose``."""
    rank, arguments = len(_sizes(call, "self")), call.arguments
    if "dims" in arguments:
        return [dim % rank for dim in arguments["dims"]]
    order = list(range(rank))
    first, second = arguments["dim0"], arguments["dim1"]
    order[first], order[second] = order[second], order[first]
    return order


def transposes(sizes: Sizes, order: Sequence[int]) -> Iterator[tuple[list[Any], list[int]]]:
    """Yield transposes of at most five dimensions that permute a tensor, one after the other.

    Args:
        sizes: Of the tensor.
        order: Its dimensions in their new order.

    Yields:
        The shape to view the tensor in, and the order of that shape's dimensions.
    """
    sizes, order = _merge_runs(sizes, order)
    while len(order) > MAX_RANK:
        # Move the first misplaced group to the front, or behind the group that is in its place.
        done = int(order[0] == 0)
        moved = order[done]
        before, after = math.prod(sizes[done:moved]), math.prod(sizes[moved + 1 :])
        yield (
            [*sizes[:done], before, sizes[moved], after],
            [*range(done), done + 1, done, done + 2],
        )
        new_order = [*range(done), moved, *(d for d in range(done, len(sizes)) if d != moved)]
        sizes, order = _merge_runs(
            [sizes[index] for index in new_order], [new_order.index(dim) for dim in order]
        )
    if len(order) > 1:
        yield list(sizes), list(order)


def _merge_runs(sizes: Sizes, order: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Merge dimensions if they are neighbours before and after; drop dimensions of size 1."""
    dims = [dim for dim in range(len(sizes)) if not _is_one(sizes[dim])]
    runs: list[list[int]] = []
    for dim in (dims.index(dim) for dim in order if dim in dims):
        if runs and runs[-1][-1] + 1 == dim:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    sorted_runs = sorted(runs)
    merged = [math.prod(sizes[dims[dim]] for dim in run) for run in sorted_runs]
    return merged, [sorted_runs.index(run) for run in runs]


def along(name: str, tensors: str = "self") -> Merge:
    """Return a merge of all dimensions but those named by an argument.

    Args:
        name: Argument with a dimension or a list; None and an empty list exclude no dimension.
        tensors: The argument with the tensors.
    """

    def merge(call: OpCall) -> Sequence[MergedCall]:
        value = call.arguments[name]
        shapes = [tensor.shape for _, tensor in call.tensors(tensors)]
        rank = len(shapes[0])
        dims = [value] if isinstance(value, int) else value or []
        named = {dim % rank for dim in dims}
        groups = _groups(rank, [dim if dim in named else -1 for dim in range(rank)])
        new_dims = [groups.index((dim % rank,)) for dim in dims]
        changed = {name: new_dims[0] if isinstance(value, int) else new_dims} if new_dims else {}
        return (MergedCall({tensors: [_merged_sizes(s, groups) for s in shapes]}, changed),)

    return merge


def over(name: str) -> Merge:
    """Return a merge of neighbouring reduced dimensions, and of neighbouring unreduced dimensions.

    Args:
        name: Of the argument with the dimensions; None and an empty list stand for all.
    """

    def merge(call: OpCall) -> Sequence[MergedCall]:
        sizes = _sizes(call, "self")
        dims = call.arguments[name]
        reduced = {dim % len(sizes) for dim in dims} if dims else set(range(len(sizes)))
        groups = _groups(len(sizes), [dim in reduced for dim in range(len(sizes))])
        new_dims = [n for n, group in enumerate(groups) if group[0] in reduced]
        return (MergedCall({"self": [_merged_sizes(sizes, groups)]}, {name: new_dims}),)

    return merge


def stacking(call: OpCall) -> Sequence[MergedCall]:
    """Merge the dimensions before the new dimension, and the dimensions after it."""
    shapes = [tensor.shape for _, tensor in call.tensors("tensors")]
    dim = call.arguments["dim"] % (len(shapes[0]) + 1)
    merged = [[math.prod(shape[:dim]), math.prod(shape[dim:])] for shape in shapes]
    return (MergedCall({"tensors": merged}, {"dim": 1}),)


def leading(tensor: str, count_trailing: Callable[[OpCall], int]) -> Merge:
    """Return a merge of all dimensions but the last.

    Args:
        tensor: The argument.
        count_trailing: Returns the number of dimensions that stay.
    """

    def merge(call: OpCall) -> Sequence[MergedCall]:
        sizes = _sizes(call, tensor)
        start = len(sizes) - count_trailing(call)
        return (MergedCall({tensor: [[math.prod(sizes[:start]), *sizes[start:]]]}),)

    return merge


def pointwise(call: OpCall) -> Sequence[MergedCall]:
    """Merge neighbouring dimensions in which the same tensors are broadcast."""
    return _broadcast(call, trailing=0)


def matrices(call: OpCall) -> Sequence[MergedCall]:
    """Merge neighbouring dimensions before the last two in which the same tensors are broadcast."""
    return _broadcast(call, trailing=2)


def _broadcast(call: OpCall, trailing: int) -> Sequence[MergedCall]:
    shape = call.outputs()[0].shape
    rank = len(shape) - trailing
    if any(tensor.dim() < trailing for _, tensor in call.tensors()):
        return (MergedCall({name: [tensor.shape] for name, tensor in call.tensors()}),)
    aligned: dict[str, list[Any]] = {
        name: [1] * (len(shape) - tensor.dim()) + list(tensor.shape)
        for name, tensor in call.tensors()
    }
    is_broadcast = [tuple(_is_one(sizes[dim]) for sizes in aligned.values()) for dim in range(rank)]
    groups = _groups(rank, is_broadcast, anywhere=[d for d in range(rank) if _is_one(shape[d])])
    shapes = {
        name: [[*itertools.dropwhile(_is_one, _merged_sizes(sizes, groups)), *sizes[rank:]]]
        for name, sizes in aligned.items()
    }
    return (MergedCall(shapes),)


def expansion(call: OpCall) -> Sequence[MergedCall]:
    """Merge neighbouring dimensions in which the tensor is broadcast, or is not."""
    shape = call.outputs()[0].shape
    rank = len(shape)
    sizes = [1] * (rank - len(_sizes(call, "self"))) + list(_sizes(call, "self"))
    unit_dims = [d for d in range(rank) if _is_one(shape[d])]
    groups = _groups(rank, [_is_one(size) for size in sizes], anywhere=unit_dims)
    size = view_sizes(_merged_sizes(shape, groups))
    return (MergedCall({"self": [_merged_sizes(sizes, groups)]}, {"size": size}),)


def view_sizes(sizes: Sizes) -> list[int]:
    """Return sizes for a view: -1 in place of a dynamic size."""
    return [size if isinstance(size, int) else -1 for size in sizes]


def _groups(
    rank: int, keys: Sequence[object], anywhere: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Group neighbouring dimensions of equal keys; dimensions ``anywhere`` join any group."""
    groups: list[list[int]] = []
    key: object = None
    for dim in range(rank):
        if groups and (dim in anywhere or keys[dim] == key):
            groups[-1].append(dim)
            continue
        if groups and all(d in anywhere for d in groups[-1]):
            groups[-1].append(dim)
        else:
            groups.append([dim])
        key = None if dim in anywhere else keys[dim]
    return [tuple(group) for group in groups]


def _merged_sizes(sizes: Sizes, groups: Sequence[Sequence[int]]) -> list[Any]:
    return [math.prod(sizes[dim] for dim in group) for group in groups]


def _sizes(call: OpCall, name: str) -> Sizes:
    return tuple(next(call.tensors(name))[1].shape)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1

"""A guard against kernels that allocate more memory than one request may take.

The sizes of results can depend on the values of a program (``fill``, ``tile``, ``pad``) or on
broadcasting, and need not be the declared sizes. So every torch operator that may have a large
result is first run on meta tensors, which have shapes and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from coreml_delegate.patches.torch import TorchDispatchMode, pytree, schema_of
from coreml_delegate.runtime.engines.limits import largest_request

_FREE_ELEMENTS = 1 << 25
"""Results of up to this many elements (256 MB at 8 bytes each) are not checked."""

_Bound = Callable[..., float]


def _matrix_product(x: Tensor, y: Tensor, *_: Any) -> float:
    return math.prod(x.shape[:-1]) * float(y.shape[-1])


def _pooling(
    x: Tensor, kernel: Sequence[int], _: Sequence[int] = (), padding: Sequence[int] = (), *__: Any
) -> float:
    spatial = x.dim() - len(kernel)
    pads = [*padding, *[0] * (len(kernel) - len(padding))]
    sizes = (size + 2.0 * pad for size, pad in zip(x.shape[spatial:], pads, strict=True))
    return math.prod(x.shape[:spatial]) * math.prod(sizes)


def _convolution(
    x: Tensor,
    weight: Tensor,
    _: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> float:
    sizes = [size + 2.0 * pad for size, pad in zip(x.shape[2:], padding, strict=False)]
    channels = weight.shape[0]
    if transposed:
        channels = weight.shape[1] * groups
        windows = zip(x.shape[2:], weight.shape[2:], stride, dilation, output_padding, strict=False)
        sizes = [float(size * s + k * d + extra) for size, k, s, d, extra in windows]
    return x.shape[0] * channels * math.prod(sizes)


_aten = torch.ops.aten
# Close bounds for frequent operators, for which the product of all sizes is far off. Without such a
# bound a meta kernel is run; the first in a process takes a second, because torch imports them.
_BOUNDS: dict[Any, _Bound] = {
    _aten.mm.default: _matrix_product,
    _aten.bmm.default: _matrix_product,
    _aten.addmm.default: lambda _, x, y, *__: _matrix_product(x, y),
    _aten.baddbmm.default: lambda _, x, y, *__: _matrix_product(x, y),
    _aten.convolution.default: _convolution,
    _aten.index_select.default: lambda x, dim, index: (
        x.numel() / max(x.shape[dim], 1) * index.numel()
    ),
    _aten.cat.default: lambda tensors, *_: sum(tensor.numel() for tensor in tensors),
    _aten.repeat.default: lambda x, repeats: math.prod(repeats, start=float(x.numel())),
    _aten.avg_pool2d.default: _pooling,
    _aten.max_pool2d_with_indices.default: _pooling,
    _aten.stack.default: lambda tensors, *_: sum(tensor.numel() for tensor in tensors),
    **dict.fromkeys(
        (
            _aten._native_batch_norm_legit_no_training.default,
            _aten._softmax.default,
            _aten._to_copy.default,
            _aten.amax.default,
            _aten.amin.default,
            _aten.argmax.default,
            _aten.argmin.default,
            _aten.clone.default,
            _aten.cumsum.default,
            _aten.mean.dim,
            _aten.native_batch_norm.default,
            _aten.native_group_norm.default,
            _aten.native_layer_norm.default,
            _aten.sort.stable,
            _aten.sum.dim_IntList,
        ),
        lambda x, *_: x.numel(),
    ),
}


class MemoryGuard(TorchDispatchMode):
    """While active, a torch operator whose result would be too large raises ``MemoryError``."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check one operator, then run it."""
        keywords = dict(kwargs or {})
        if func._can_decompose():
            with self:  # checks the parts of the operator
                return func.decompose(*args, **keywords)
        # Otherwise the operator returns views, or changes tensors in place.
        allocates = all(result.alias_info is None for result in schema_of(func).returns)
        if allocates and _most_elements(func, args, keywords) > _FREE_ELEMENTS:
            nbytes = _result_bytes(func, args, keywords)
            if nbytes > _FREE_ELEMENTS and nbytes > (limit := largest_request()):
                raise MemoryError(f"{nbytes} bytes are needed, at most {limit} may be requested")
        return func(*args, **keywords)


def memory_signature(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the shapes and literals of a kernel's arguments, which determine its memory."""
    return tuple(_shape_of(value) for value in arguments.values())


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, tuple):
        return tuple(_shape_of(item) for item in value)
    return value


def _most_elements(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    """Return an upper bound of the number of elements of the result."""
    if func in _BOUNDS:
        # Keywords are dtypes and the like; if an operand is a keyword, the bound raises TypeError.
        with suppress(TypeError, IndexError):
            return _BOUNDS[func](*args)
    leaves = list(pytree.tree_iter((args, keywords)))
    if torch.Tag.pointwise in func.tags:
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
        return math.prod(float(max(aligned)) for aligned in sizes)
    return math.prod(_factors(leaves), start=1.0)


def _factors(leaves: Iterable[Any]) -> Iterator[float]:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # Not numel, which is 0 if one size is; the result of a matrix product may not be empty.
            yield from (max(size, 1) for size in leaf.shape)
        elif isinstance(leaf, int):
            yield abs(leaf) + 1.0
        elif isinstance(leaf, float):
            # A float may divide, as the step of a range does.
            size = abs(leaf)
            yield max(size, 1 / size) if size and math.isfinite(size) else 1.0


def _result_bytes(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    try:
        # The keywords that determine the device of the result.
        placed = {"device": torch.device("meta"), "generator": None, "pin_memory": None}
        placement = {name: value for name, value in placed.items() if name in keywords}
        results = func(*_on_meta(args), **{**_on_meta(keywords), **placement})
    except Exception:  # noqa: BLE001 - operators raise anything
        # Either the operator fails on real operands too and is reported then, or the size of its
        # result depends on values; such operators of torch only select elements of their operands.
        return 0
    tensors = (result for result in pytree.tree_iter(results) if isinstance(result, Tensor))
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _on_meta(operands: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, operands
    )

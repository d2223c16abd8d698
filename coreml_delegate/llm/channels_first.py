"""Tensors whose channels lie before their tokens, for the neural engine.

Modules of ``transformers`` compute with [B, L, C] and [B, heads, L, width]. The neural engine
prefers [B, C, 1, L] (Apple, "Deploying Transformers on the Apple Neural Engine"). A
``ChannelsFirst`` has the shape that a module expects, and its elements in the other order: a
transposition changes the order of the dimensions and moves no element, and a linear layer is a
convolution. So the code of ``transformers`` runs as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch.nn import functional

from coreml_delegate.errors import LoweringError

_RANK = 4
_TOKENS_CHANNELS = (0, 3, 1)  # [B, L, C] of [B, C, 1, L]
_TOKENS_HEADS = (0, 3, 1, 2)  # [B, L, heads, width] of [B, heads, width, L]


class Operand:
    """An operand of torch's functions that is not a tensor."""

    def __getattr__(self, name: str) -> Any:
        """Return a method of tensors.

        Raises:
            AttributeError: Tensors have no such attribute.
        """
        method = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: self.apply(method, (self, *args), kwargs)

    def __add__(self, other: Any) -> Any:
        """Return ``self + other``."""
        return self.apply(operator.add, (self, other), {})

    def __radd__(self, other: Any) -> Any:
        """Return ``other + self``."""
        return self.apply(operator.add, (other, self), {})

    def __sub__(self, other: Any) -> Any:
        """Return ``self - other``."""
        return self.apply(operator.sub, (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        """Return ``other - self``."""
        return self.apply(operator.sub, (other, self), {})

    def __mul__(self, other: Any) -> Any:
        """Return ``self * other``."""
        return self.apply(operator.mul, (self, other), {})

    def __rmul__(self, other: Any) -> Any:
        """Return ``other * self``."""
        return self.apply(operator.mul, (other, self), {})

    def __truediv__(self, other: Any) -> Any:
        """Return ``self / other``."""
        return self.apply(operator.truediv, (self, other), {})

    def __rtruediv__(self, other: Any) -> Any:
        """Return ``other / self``."""
        return self.apply(operator.truediv, (other, self), {})

    def __pow__(self, other: Any) -> Any:
        """Return ``self ** other``."""
        return self.apply(operator.pow, (self, other), {})

    def __neg__(self) -> Any:
        """Return ``-self``."""
        return self.apply(torch.neg, (self,), {})

    def __getitem__(self, index: Any) -> Any:
        """Return a part."""
        return self.apply(torch.Tensor.__getitem__, (self, index), {})

    @classmethod
    def apply(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of one of torch's functions."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Return the result of one of torch's functions."""
        del types
        return cls.apply(func, args, kwargs or {})


class ChannelsFirst(Operand):
    """A tensor in another order of dimensions.

    Args:
        data: The elements; rank 4.
        order: The dimension of ``data`` for each dimension. Dimensions that are left out have
            size 1.
    """

    def __init__(self, data: torch.Tensor, order: Sequence[int]) -> None:
        self.data = data
        self.order = tuple(order)

    @classmethod
    def of_channels(cls, data: torch.Tensor) -> Self:
        """Return [B, L, C] with the elements [B, C, 1, L]."""
        return cls(data, _TOKENS_CHANNELS)

    @classmethod
    def of_heads(cls, data: torch.Tensor) -> Self:
        """Return [B, L, heads, width] with the elements [B, heads, width, L]."""
        return cls(data, _TOKENS_HEADS)

    @property
    def shape(self) -> torch.Size:
        """The sizes that a module sees."""
        return torch.Size(self.data.shape[axis] for axis in self.order)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self.data.device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.order)

    def size(self, dim: int | None = None) -> Any:
        """Return the sizes, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def axis(self, dim: int) -> int:
        """Return the dimension of ``data`` for a dimension, which may be negative."""
        return self.order[dim]

    def in_order(self, order: Sequence[int]) -> torch.Tensor:
        """Return the elements in the order of another tensor with as many dimensions."""
        if self.order == tuple(order):
            return self.data
        return _arrange(self.tensor(), order)

    def tensor(self) -> torch.Tensor:
        """Return a tensor in the order of the dimensions."""
        absent = [axis for axis in range(_RANK) if axis not in self.order]
        data = self.data.permute(*absent, *self.order)
        return data.squeeze(tuple(range(len(absent)))) if absent else data

    @classmethod
    def apply(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of one of torch's functions.

        Raises:
            LoweringError: The function, or its use, has no form with the channels first.
        """
        rule = _RULES.get(function)
        if rule is None:
            raise _unsupported(function, args)
        if rule is _elementwise:
            return _elementwise(function, *args, **kwargs)
        return rule(*args, **kwargs)


class Parts(Operand):
    """A tensor in parts along its last dimension, for functions of single elements.

    Args:
        parts: The parts.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def apply(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of one of torch's functions.

        Raises:
            LoweringError: The function combines elements, or operands beside numbers.
        """
        (parts,) = [arg for arg in args if isinstance(arg, Parts)]
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
        if _RULES.get(function) is not _elementwise or tensors:
            raise _unsupported(function, args)
        return cls(
            [function(*(p if a is parts else a for a in args), **kwargs) for p in parts.parts]
        )


def _unsupported(function: Any, args: Sequence[Any]) -> LoweringError:
    shapes = [str(list(arg.shape)) for arg in args if isinstance(arg, ChannelsFirst)]
    name = getattr(function, "__name__", str(function))
    return LoweringError(
        "a call of the model has no form for the neural engine",
        got=f"{name} of {', '.join(shapes)}" if shapes else name,
        remedy="Export it without --for",
    )


def _arrange(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the elements of a tensor, which is broadcast from the right, in an order of 4."""
    tensor = tensor.reshape((1,) * (len(order) - tensor.dim()) + tuple(tensor.shape))
    present = [order.index(axis) for axis in range(_RANK) if axis in order]
    tensor = tensor.permute(present)
    for axis in range(_RANK):
        if axis not in order:
            tensor = tensor.unsqueeze(axis)
    return tensor


# Rules


def _elementwise(function: Any, *args: Any, **kwargs: Any) -> ChannelsFirst:
    operands = [arg for arg in args if isinstance(arg, ChannelsFirst)]
    order = max((operand.order for operand in operands), key=len)

    def elements(arg: Any) -> Any:
        if isinstance(arg, ChannelsFirst):
            return arg.in_order(order)
        if isinstance(arg, torch.Tensor) and arg.dim():
            return _arrange(arg, order)
        return arg

    return ChannelsFirst(function(*map(elements, args), **kwargs), order)


def _cast(x: ChannelsFirst, *args: Any, **kwargs: Any) -> ChannelsFirst:
    """A conversion to another type, which Core ML's precision decides."""
    del args, kwargs
    return x


def _type_as(x: ChannelsFirst, other: Any) -> ChannelsFirst:
    del other
    return x


def _linear(
    x: ChannelsFirst, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> ChannelsFirst:
    if x.order != _TOKENS_CHANNELS:
        raise _unsupported(functional.linear, (x,))
    return ChannelsFirst(functional.conv2d(x.data, weight[:, :, None, None], bias), x.order)


def _conv1d(
    x: ChannelsFirst,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> ChannelsFirst:
    if x.order != (0, 1, 3) or stride != 1:
        raise _unsupported(functional.conv1d, (x,))
    data = functional.conv2d(
        x.data,
        weight.unsqueeze(2),
        bias,
        padding=(0, padding),
        dilation=(1, dilation),
        groups=groups,
    )
    return ChannelsFirst(data, x.order)


def _layer_norm(
    x: ChannelsFirst,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if tuple(normalized_shape) != tuple(x.shape[-1:]):
        raise _unsupported(functional.layer_norm, (x,))
    axis = x.axis(-1)
    deviations = x.data - x.data.mean(axis, keepdim=True)
    variance = deviations.square().mean(axis, keepdim=True)
    y: Any = ChannelsFirst(deviations * torch.rsqrt(variance + eps), x.order)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _mean(x: ChannelsFirst, dim: int, *, keepdim: bool = False) -> ChannelsFirst:
    if not keepdim or not isinstance(dim, int):
        raise _unsupported(torch.mean, (x,))
    return ChannelsFirst(x.data.mean(x.axis(dim), keepdim=True), x.order)


def _reshape(x: ChannelsFirst, *shape: Any) -> ChannelsFirst:
    sizes = [int(size) for size in (shape[0] if not isinstance(shape[0], int) else shape)]
    if -1 in sizes:
        product = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(x.shape) // product
    if sizes == list(x.shape):
        return x
    same = sizes[:2] == list(x.shape[:2])
    length = x.shape[1]
    if same and x.order == _TOKENS_CHANNELS and len(sizes) == _RANK:
        return ChannelsFirst.of_heads(x.data.reshape(-1, sizes[2], sizes[3], length))
    if same and x.order == _TOKENS_HEADS and len(sizes) == _RANK - 1:
        return ChannelsFirst.of_channels(x.data.reshape(-1, sizes[2], 1, length))
    raise _unsupported(torch.Tensor.reshape, (x,))


def _transpose(x: ChannelsFirst, dim0: int, dim1: int) -> ChannelsFirst:
    order = list(x.order)
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return ChannelsFirst(x.data, order)


def _unsqueeze(x: ChannelsFirst, dim: int) -> ChannelsFirst:
    free = [axis for axis in range(_RANK) if axis not in x.order]
    if not free:
        raise _unsupported(torch.unsqueeze, (x,))
    at = dim if dim >= 0 else len(x.order) + 1 + dim
    return ChannelsFirst(x.data, (*x.order[:at], free[0], *x.order[at:]))


def _slice(x: ChannelsFirst, index: Any) -> ChannelsFirst:
    indices = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in indices:
        at = indices.index(Ellipsis)
        missing = x.dim() - (len(indices) - 1)
        indices[at : at + 1] = [slice(None)] * missing
    data = x.data
    for dim, item in enumerate(indices):
        if not isinstance(item, slice) or item.step not in (None, 1):
            raise _unsupported(torch.Tensor.__getitem__, (x,))
        start, stop, _ = item.indices(x.shape[dim])
        if (start, stop) != (0, x.shape[dim]):
            data = data.narrow(x.axis(dim), start, max(0, stop - start))
    return ChannelsFirst(data, x.order)


def _chunk(x: ChannelsFirst, chunks: int, dim: int = 0) -> tuple[ChannelsFirst, ...]:
    return tuple(ChannelsFirst(data, x.order) for data in x.data.chunk(chunks, x.axis(dim)))


def _split(x: ChannelsFirst, sizes: Any, dim: int = 0) -> tuple[ChannelsFirst, ...]:
    return tuple(ChannelsFirst(data, x.order) for data in x.data.split(sizes, x.axis(dim)))


def _concatenate(tensors: Sequence[ChannelsFirst], dim: int = 0) -> ChannelsFirst:
    first = tensors[0]
    parts = [tensor.in_order(first.order) for tensor in tensors if tensor.shape[dim]]
    data = parts[0] if len(parts) == 1 else torch.cat(parts, dim=first.axis(dim))
    return ChannelsFirst(data, first.order)


def _unchanged(x: ChannelsFirst, *args: Any, **kwargs: Any) -> ChannelsFirst:
    del args, kwargs
    return x


_ELEMENTWISE = (
    *("abs", "add", "clamp", "div", "erf", "exp", "gelu", "mul", "neg", "pow", "reciprocal"),
    *("relu", "rsqrt", "sigmoid", "silu", "softplus", "sqrt", "square", "sub", "tanh", "truediv"),
)

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "chunk": _chunk,
    "cat": _concatenate,
    "contiguous": _unchanged,
    "conv1d": _conv1d,
    "dropout": _unchanged,
    "float": _cast,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "mean": _mean,
    "reshape": _reshape,
    "split": _split,
    "to": _cast,
    "transpose": _transpose,
    "type_as": _type_as,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
    "__getitem__": _slice,
}


def _rules() -> dict[Any, Callable[..., Any]]:
    """Return the rule of each function, under all of its names in torch."""
    rules = {name: _elementwise for name in _ELEMENTWISE} | dict(_FUNCTIONS)
    homes = (torch, torch.Tensor, functional, operator)
    return {
        getattr(home, name): rule
        for name, rule in rules.items()
        for home in homes
        if hasattr(home, name) and not (home is operator and rule is not _elementwise)
    }


_RULES = _rules()

"""Weights that stay in their files until an operator reads them.

A model of a billion parameters takes 5 GB in fp32. While it is checked and quantized layer by
layer, only one of its matrices has to be in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from coreml_delegate.patches.torch import pytree, schema_of

_ATEN: Any = torch.ops.aten
_VIEWS = (_ATEN.detach.default, _ATEN.alias.default)
"""Operators that return their argument unchanged."""

_MOVES = (
    _ATEN.cat.default,
    _ATEN.permute.default,
    _ATEN.slice.Tensor,
    _ATEN.stack.default,
    _ATEN.transpose.int,
    _ATEN.view.default,
)
"""Operators that only select or move elements; they run when their result is read.

``transformers`` stacks the matrices of experts while it loads them.
"""


class StoredWeight(torch.Tensor):
    """An fp32 tensor in files, which is read each time an operator uses it.

    Args:
        read: Reads the files; returns a contiguous fp32 tensor.
        shape: Its shape.
    """

    @staticmethod
    def __new__(cls: Any, read: Callable[[], torch.Tensor], shape: torch.Size) -> StoredWeight:
        """Return a tensor without memory."""
        del read
        base: Any = torch.Tensor
        return base._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, read: Callable[[], torch.Tensor], shape: torch.Size) -> None:
        super().__init__()
        del shape
        self.read = read

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Return the shape, without reading."""
        del tensor_contents
        return f"{type(self).__name__}({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the weights, which are read only for this operator.

        Raises:
            TypeError: The operator writes to its arguments; the result would be lost.
        """
        if func in _VIEWS:
            return cls(args[0].read, args[0].shape)
        if func in _MOVES:
            return _lazy_result(func, args, kwargs or {})
        if schema_of(func).is_mutable:
            raise TypeError(f"{func} would write to a weight that is in a file")
        return func(
            *pytree.tree_map_only(cls, in_memory, args),
            **pytree.tree_map_only(cls, in_memory, kwargs or {}),
        )


def _lazy_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StoredWeight:
    """Return an operator's result as a stored weight, which runs the operator when it is read."""

    def read() -> torch.Tensor:
        return func(
            *pytree.tree_map_only(StoredWeight, in_memory, args),
            **pytree.tree_map_only(StoredWeight, in_memory, kwargs),
        ).contiguous()

    def without_memory(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, device="meta")

    empty = pytree.tree_map_only(torch.Tensor, without_memory, (args, kwargs))
    return StoredWeight(read, func(*empty[0], **empty[1]).shape)


def stored_weights(files: Iterable[Path]) -> Mapping[str, torch.Tensor]:
    """Return the weights of ``safetensors`` files by name, floats in fp32.

    Tensors of two or more dimensions are instances of ``StoredWeight``; vectors are in memory.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        # Mapped files would count as memory, in addition to the tensors made of them.
        file: Any = safe_open(path, framework="pt", backend="pread")
        for name in file.keys():  # noqa: SIM118 - not a mapping
            shape = torch.Size(file.get_slice(name).get_shape())
            read = partial(_read, file, name)
            weights[name] = StoredWeight(read, shape) if len(shape) >= 2 else read()
    return weights


def in_memory(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight; read a ``StoredWeight``."""
    return weight.read() if isinstance(weight, StoredWeight) else weight


def read_weights(model: nn.Module) -> None:
    """Read the stored weights of a model into memory; tied weights stay tied."""
    read: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, StoredWeight):
                if parameter not in read:
                    read[parameter] = nn.Parameter(in_memory(parameter), requires_grad=False)
                setattr(module, name, read[parameter])


def _read(file: Any, name: str) -> torch.Tensor:
    weight = file.get_tensor(name)
    return weight.to(torch.float32) if weight.is_floating_point() else weight

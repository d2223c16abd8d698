"""Operators of our own: what MIL has, and what no op that coremltools translates comes out as.

Rewrites put them into a subgraph, and coremltools is told how to translate them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from coreml_delegate.third_party import coremltools

_NAMESPACE = "coreml_delegate"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define("floor_divide(Tensor self, Tensor other) -> Tensor")


def _floor_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


_LIBRARY.impl("floor_divide", _floor_divide, "CompositeImplicitAutograd")


def floor_divide() -> Any:
    """Quotients rounded down, of integers as integers; coremltools' own passes them through floats.

    Returns:
        The operator, taking two tensors of one dtype.
    """
    _translate()
    return torch.ops.coreml_delegate.floor_divide.default


@cache
def _translate() -> None:
    """Tell coremltools, once."""
    coremltools()
    from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op
    from coremltools.converters.mil.mil import Builder

    builder: Any = Builder

    def coreml_delegate_floor_divide(context: Any, node: Any) -> None:
        x, y = (context[name] for name in node.inputs)
        context.add(builder.floor_div(x=x, y=y, name=node.name))

    register_torch_op(
        coreml_delegate_floor_divide, torch_alias=[f"{_NAMESPACE}::floor_divide"], override=True
    )

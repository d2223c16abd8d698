"""torchao quantization specs from settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torchao.quantization.pt2e import ObserverOrFakeQuantize
from torchao.quantization.pt2e.fake_quantize import FakeQuantize
from torchao.quantization.pt2e.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from coreml_delegate.quantizer.config import LayerSettings

# (observer, per channel) -> class
_OBSERVERS: dict[tuple[str, bool], Any] = {
    ("min_max", False): MinMaxObserver,
    ("min_max", True): PerChannelMinMaxObserver,
    ("moving_average_min_max", False): MovingAverageMinMaxObserver,
    ("moving_average_min_max", True): MovingAveragePerChannelMinMaxObserver,
}
# (symmetric, per channel) -> scheme
_SCHEMES: dict[tuple[bool, bool], torch.qscheme] = {
    (True, False): torch.per_tensor_symmetric,
    (True, True): torch.per_channel_symmetric,
    (False, False): torch.per_tensor_affine,
    (False, True): torch.per_channel_affine,
}

Concrete = QuantizationSpec | FixedQParamsQuantizationSpec | DerivedQuantizationSpec


@dataclass(frozen=True, slots=True)
class SpecFactory:
    """Makes the specs of a layer's settings.

    Attributes:
        settings: The settings.
    """

    settings: LayerSettings

    def activation(self, *, not_negative: bool = False) -> QuantizationSpec | None:
        """Return the spec of an activation, or None if activations stay in float.

        Args:
            not_negative: Whether the tensor has no negative values; then the scheme is affine, so
                that all integers represent its values.
        """
        dtype = self.settings.activation
        if dtype is None:
            return None
        symmetric = self.settings.symmetric and not not_negative
        low, high = integer_range(dtype)
        return _spec(
            dtype, (low, high), self.settings.activation_observer, symmetric=symmetric, axis=None
        )

    def weight(self, axis: int) -> QuantizationSpec | None:
        """Return the spec of a weight, or None if weights stay in float.

        Args:
            axis: Axis of the output channels.
        """
        dtype = self.settings.weight
        if dtype is None:
            return None
        low, high = integer_range(dtype, self.settings.weight_bits)
        if self.settings.symmetric and low < 0:
            low = -high  # symmetric: -127 to 127 for int8
        return _spec(
            dtype,
            (low, high),
            self.settings.weight_observer,
            symmetric=self.settings.symmetric,
            axis=axis if self.settings.per_channel else None,
        )

    def fixed(self, low: float, high: float) -> FixedQParamsQuantizationSpec | None:
        """Return the spec of an activation with the fixed range ``low`` to ``high``.

        scale = (high - low) / 2^bits, and the zero point is rounded, so that 0 is exact.
        """
        dtype = self.settings.activation
        if dtype is None:
            return None
        first, last = integer_range(dtype)
        steps = last - first + 1
        scale = (high - low) / steps
        return FixedQParamsQuantizationSpec(
            dtype=dtype,
            scale=scale,
            zero_point=first - round(low / scale),
            quant_min=first,
            quant_max=last,
            qscheme=torch.per_tensor_affine,
        )


def derived_spec(source: Node, spec: Concrete) -> DerivedQuantizationSpec:
    """Return the spec of a tensor that only has values of ``source``, whose spec is ``spec``."""
    low, high = integer_range(spec.dtype)
    return DerivedQuantizationSpec(
        derived_from=[source],
        derive_qparams_fn=_source_qparams,
        dtype=spec.dtype,
        quant_min=low if spec.quant_min is None else spec.quant_min,
        quant_max=high if spec.quant_max is None else spec.quant_max,
        qscheme=spec.qscheme,
        is_dynamic=spec.is_dynamic,
    )


def annotation_of(node: Node) -> QuantizationAnnotation | None:
    """Return the annotation of a node, or None."""
    return node.meta.get(Q_ANNOTATION_KEY)


def output_spec(node: Node) -> Concrete | None:
    """Return the spec of a node's result, with shared specs resolved; None for float."""
    annotation = annotation_of(node)
    return None if annotation is None else resolve(annotation.output_qspec)


def resolve(spec: QuantizationSpecBase | None) -> Concrete | None:
    """Follow shared specs to a concrete spec; None for a dangling or circular reference."""
    seen: set[EdgeOrNode] = set()
    while isinstance(spec, SharedQuantizationSpec):
        if spec.edge_or_node in seen:
            return None
        seen.add(spec.edge_or_node)
        spec = spec_at(spec.edge_or_node)
    return spec if isinstance(spec, Concrete) else None


def spec_at(edge_or_node: EdgeOrNode) -> QuantizationSpecBase | None:
    """Return the spec of a node's result or of an edge (node, user), or None."""
    if isinstance(edge_or_node, Node):
        annotation = annotation_of(edge_or_node)
        return None if annotation is None else annotation.output_qspec
    source, user = edge_or_node
    annotation = annotation_of(user)
    return None if annotation is None else annotation.input_qspec_map.get(source)


def integer_range(dtype: torch.dtype, bits: int = 8) -> tuple[int, int]:
    """Return the range of integers of ``bits`` bits: unsigned for uint8, else two's complement."""
    if dtype is torch.uint8:
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _spec(
    dtype: torch.dtype, limits: tuple[int, int], observer: str, *, symmetric: bool, axis: int | None
) -> QuantizationSpec:
    per_channel = axis is not None
    # Observers treat an explicit range as a custom range, and change zero points.
    low, high = (None, None) if limits == integer_range(dtype) else limits
    kind = _OBSERVERS[observer, per_channel]
    # torchao passes the axis to observers, not to the fake quantization around them.
    constructor = kind.with_args(ch_axis=axis) if per_channel else kind
    return QuantizationSpec(
        dtype=dtype,
        observer_or_fake_quant_ctr=FakeQuantize.with_args(observer=constructor),
        quant_min=low,
        quant_max=high,
        qscheme=_SCHEMES[symmetric, per_channel],
        ch_axis=axis,
    )


def _source_qparams(sources: list[ObserverOrFakeQuantize]) -> tuple[Tensor, Tensor]:
    observer: Any = sources[0]
    return observer.calculate_qparams()

"""Reads and checks coremltools' ``LinearQuantizerConfig``: every setting takes effect or raises.

Source: coremltools/optimize/torch/quantization/quantization_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from coreml_delegate.errors import OptionError
from coreml_delegate.patches.third_party import coremltools, quiet_import

_ACTIVATION_DTYPES: Mapping[torch.dtype, torch.dtype | None] = MappingProxyType(
    {
        torch.quint8: torch.uint8,
        torch.qint8: torch.int8,
        torch.uint8: torch.uint8,
        torch.int8: torch.int8,
        torch.float32: None,
    }
)
_WEIGHT_DTYPES = _ACTIVATION_DTYPES
_WEIGHT_BITS = (4, 8)
_OBSERVERS = ("moving_average_min_max", "min_max")
_SCHEMES = ("symmetric", "affine")
# Settings of ``LinearQuantizerConfig`` for models that coremltools traces.
_UNUSED = ("non_traceable_module_names", "preserved_attributes")
_MILESTONES = 4


@dataclass(frozen=True, slots=True)
class Milestones:
    """Training steps, from 0, at which a part of quantization is switched; None for never.

    Attributes:
        observe: Start to observe ranges.
        quantize: Start to simulate quantization.
        stop_observing: Stop to observe ranges.
        freeze_norms: Normalize by the running statistics of batch norms.
    """

    observe: int | None
    quantize: int | None
    stop_observing: int | None
    freeze_norms: int | None


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Settings of one entry of a configuration.

    Attributes:
        weight: int8 or uint8; None for weights in float.
        weight_bits: 4 or 8.
        per_channel: Whether each output channel of a weight has its own scale.
        weight_observer: ``min_max`` or ``moving_average_min_max``.
        activation: int8 or uint8; None for activations in float.
        activation_observer: ``min_max`` or ``moving_average_min_max``.
        symmetric: Whether the zero point is fixed: 0, or mid-range for unsigned types.
        milestones: Milestones of training, or None.
    """

    weight: torch.dtype | None
    weight_bits: int
    per_channel: bool
    weight_observer: str
    activation: torch.dtype | None
    activation_observer: str
    symmetric: bool
    milestones: Milestones | None

    @property
    def quantizes(self) -> bool:
        """Whether weights or activations are quantized."""
        return self.weight is not None or self.activation is not None


ModuleType = str | type | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class QuantizerSettings:
    """A complete configuration; None leaves layers in float.

    Attributes:
        everywhere: Settings of calls without another entry.
        by_type: Settings by module class, name of a class, or function.
        by_name: Settings by regular expression over module paths.
    """

    everywhere: LayerSettings | None
    by_type: Mapping[ModuleType, LayerSettings | None]
    by_name: Mapping[str, LayerSettings | None]

    @property
    def has_milestones(self) -> bool:
        """Whether any layer has milestones."""
        layers = (self.everywhere, *self.by_type.values(), *self.by_name.values())
        return any(layer is not None and layer.milestones is not None for layer in layers)


def read_config(config: Any) -> QuantizerSettings:
    """Read and check a ``LinearQuantizerConfig``.

    Raises:
        OptionError: It is another type, or has a setting without effect on exported programs.
    """
    coremltools()
    with quiet_import():
        from coremltools.optimize.torch.quantization import LinearQuantizerConfig

    if not isinstance(config, LinearQuantizerConfig):
        raise OptionError(
            "CoreMLQuantizer takes a configuration of coremltools",
            got=type(config).__name__,
            expected="coremltools.optimize.torch.quantization.LinearQuantizerConfig",
            remedy="LinearQuantizerConfig() quantizes everything by its defaults",
        )
    options: Any = config
    for option in _UNUSED:
        if getattr(options, option):
            raise OptionError(
                f"{option} has no effect on an exported program",
                got=repr(getattr(options, option)),
                remedy="Leave it out",
            )
    for name in options.module_name_configs:
        _check_name(name)
    for kind in options.module_type_configs:
        _check_type(kind)
    return QuantizerSettings(
        everywhere=_layer(options.global_config, "global_config"),
        by_type=_layers(options.module_type_configs, "module_type_configs"),
        by_name=_layers(options.module_name_configs, "module_name_configs"),
    )


def _layers(configs: Mapping[Any, Any], option: str) -> Mapping[Any, LayerSettings | None]:
    return MappingProxyType(
        {key: _layer(value, f"{option}[{key!r}]") for key, value in configs.items()}
    )


def _layer(config: Any, where: str) -> LayerSettings | None:
    if config is None:
        return None
    if config.algorithm != "vanilla":
        raise OptionError(
            f"{where}: algorithm is not available for exported programs",
            got=repr(config.algorithm),
            expected="'vanilla'",
            remedy="Learn scales with coremltools' LinearQuantizer, before the export",
        )
    activation = _accepted_dtype(
        _ACTIVATION_DTYPES, config.activation_dtype, f"{where}: activation_dtype"
    )
    weight = _accepted_dtype(_WEIGHT_DTYPES, config.weight_dtype, f"{where}: weight_dtype")
    bits = 8 if weight is None else config.weight_n_bits
    if bits not in _WEIGHT_BITS:
        raise OptionError(f"{where}: weight_dtype", got=f"{bits} bits", expected="4 or 8 bits")
    scheme = str(config.quantization_scheme.value)
    if scheme not in _SCHEMES:
        raise OptionError(
            f"{where}: quantization_scheme", got=scheme, expected=_choices_text(_SCHEMES)
        )
    return LayerSettings(
        weight=weight,
        weight_bits=bits,
        per_channel=config.weight_per_channel,
        weight_observer=_observer(config.weight_observer, f"{where}: weight_observer"),
        activation=activation,
        activation_observer=_observer(config.activation_observer, f"{where}: activation_observer"),
        symmetric=scheme == "symmetric",
        milestones=_milestones(config.milestones, where),
    )


def _accepted_dtype(
    table: Mapping[torch.dtype, torch.dtype | None], value: Any, option: str
) -> torch.dtype | None:
    if value not in table:
        raise OptionError(
            option, got=str(value), expected="torch.quint8, torch.qint8 or torch.float32"
        )
    return table[value]


def _observer(observer: Any, option: str) -> str:
    name = str(observer.value)
    if name not in _OBSERVERS:
        raise OptionError(
            f"{option} is not available for exported programs",
            got=repr(name),
            expected=_choices_text(_OBSERVERS),
        )
    return name


def _milestones(milestones: list[int] | None, where: str) -> Milestones | None:
    if milestones is None:
        return None
    steps = [None if step == -1 else step for step in milestones]
    are_valid = all(step is None or step >= 0 for step in steps)
    if len(steps) != _MILESTONES or not are_valid:
        raise OptionError(
            f"{where}: milestones",
            got=repr(milestones),
            expected="four steps, each from 0, or -1 for never",
        )
    observe, quantize, stop, freeze = steps
    if observe is None or (stop is not None and stop <= observe):
        raise OptionError(
            f"{where}: the milestones never enable observers",
            got=repr(milestones),
            expected="a first milestone that comes before the third",
        )
    return Milestones(observe, quantize, stop, freeze)


def _check_name(name: str) -> None:
    try:
        re.compile(name)
    except re.error as error:
        raise OptionError(
            "module_name_configs has a name that is not a regular expression",
            got=f"{name!r} ({error})",
            expected="a module's path such as 'layers.0', or an expression for several",
        ) from error


def _check_type(kind: Any) -> None:
    if not (isinstance(kind, str) or callable(kind)):
        raise OptionError(
            "module_type_configs has a key that is neither a class nor a function",
            got=repr(kind),
            expected="torch.nn.Linear, 'Linear' or torch.add",
        )


def _choices_text(names: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in names)

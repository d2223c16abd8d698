"""Weight compression after conversion: coremltools' ``OptimizationConfig`` as JSON.

A stage is a dictionary for ``OptimizationConfig.from_dict``::

    {"config_type": "OpPalettizerConfig", "global_config": {"nbits": 4},
     "op_type_configs": {"gather": None}, "op_name_configs": {...}}

Several stages are applied in turn to the same weights: sparse weights can be quantized.

Source: coremltools 9.0, ``coremltools.optimize.coreml``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.targets import Opset

Stage = Mapping[str, Any]

OPTION: Final = "weight_compression"
LINEAR_OPTION: Final = "op_linear_quantizer_config"
LINEAR: Final = "OpLinearQuantizerConfig"
PALETTE: Final = "OpPalettizerConfig"
THRESHOLD: Final = "OpThresholdPrunerConfig"
MAGNITUDE: Final = "OpMagnitudePrunerConfig"

_TYPE = "config_type"
_GLOBAL = "global_config"
_TABLES = ("op_type_configs", "op_name_configs")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of compression.

    Attributes:
        function: Function of ``coremltools.optimize.coreml`` that applies it.
        keys: Its parameters with a JSON representation.
        newer: Yields the features of a configuration that need iOS18; all others need iOS16.
    """

    function: str
    keys: tuple[str, ...]
    newer: Callable[[Mapping[str, Any]], Iterator[str]]


def _newer_linear(config: Mapping[str, Any]) -> Iterator[str]:
    if str(config.get("dtype", "int8")) in ("int4", "uint4"):
        yield "weights of 4 bits"
    if config.get("granularity") == "per_block":
        yield "a scale per block"


def _newer_palette(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("nbits") == 3:
        yield "indices of 3 bits"
    if config.get("granularity") == "per_grouped_channel":
        yield "a table per group of channels"
    if (config.get("cluster_dim") or 1) > 1:
        yield "tables of vectors"
    if config.get("enable_per_channel_scale"):
        yield "a scale per channel"


def _newer_pruning(_: Mapping[str, Any]) -> Iterator[str]:
    yield from ()


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        LINEAR: Kind(
            "linear_quantize_weights",
            ("mode", "dtype", "granularity", "block_size", "weight_threshold"),
            _newer_linear,
        ),
        PALETTE: Kind(
            "palettize_weights",
            (
                *("mode", "nbits", "granularity", "group_size", "channel_axis", "cluster_dim"),
                *("enable_per_channel_scale", "num_kmeans_workers", "weight_threshold"),
            ),
            _newer_palette,
        ),
        MAGNITUDE: Kind(
            "prune_weights",
            ("target_sparsity", "block_size", "n_m_ratio", "dim", "weight_threshold"),
            _newer_pruning,
        ),
        THRESHOLD: Kind(
            "prune_weights",
            ("threshold", "minimum_sparsity_percentile", "weight_threshold"),
            _newer_pruning,
        ),
    }
)


def stages_of(value: Stage | Sequence[Stage]) -> tuple[Stage, ...]:
    """Check and copy a stage or a list of stages.

    Raises:
        OptionError: The structure is wrong, or a key or kind does not exist.
    """
    is_listed = isinstance(value, list | tuple)
    stages = list(cast("Sequence[Stage]", value)) if is_listed else [cast("Stage", value)]
    if not stages:
        raise OptionError(f"{OPTION} has no stage", got=repr(value), expected="at least one")
    for stage in stages:
        _check_stage(stage)
    return tuple(copy.deepcopy(dict(stage)) for stage in stages)


def checked_linear(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Check the keys of an ``op_linear_quantizer_config``.

    Raises:
        OptionError: A key is unknown; the message has near matches.
    """
    if config is not None:
        _check_keys(config, KINDS[LINEAR].keys, LINEAR_OPTION)
    return config


def demand(
    linear: Mapping[str, Any] | None, stages: Sequence[Stage] | None
) -> tuple[Opset, str] | None:
    """Return the oldest opset that can express the compression, and the feature that needs it.

    Args:
        linear: Value of ``op_linear_quantizer_config``.
        stages: Stages of ``weight_compression``.
    """
    features = [] if linear is None else [(LINEAR_OPTION, list(_newer_linear(linear)))]
    newer = [text for stage in stages or () for text in _newer_features(stage)]
    if len(stages or ()) > 1 or (linear is not None and stages):
        newer.append("several kinds for one weight")
    if stages:
        features.append((OPTION, newer))
    if not features:
        return None
    for option, texts in features:
        if texts:
            return Opset.iOS18, f"{option} with {texts[0]}"
    return Opset.iOS16, features[0][0]


def require_target(target: Opset, required: Opset, feature: str) -> None:
    """Refuse a deployment target that cannot express the compression.

    Raises:
        OptionError: The target is too old.
    """
    if required > target:
        raise OptionError(
            "the deployment target is too low for the compression of weights",
            got=target.name,
            expected=f"{required.name} or later, for {feature}",
            remedy=f"Pass minimum_deployment_target=ct.target.{required.name}, or none",
        )


def configs_in(stage: Stage) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the kind and parameters of every configuration in a stage, except None."""
    tables = (cast("Mapping[str, Any]", stage.get(name) or {}) for name in _TABLES)
    for config in (stage.get(_GLOBAL), *(c for table in tables for c in table.values())):
        if config is not None:
            yield config.get(_TYPE, stage[_TYPE]), config


def config_of(stage: Stage, op_type: str, name: str) -> Mapping[str, Any] | None:
    """Return the kind and parameters for the weights of a MIL op; None for no compression."""
    config = stage.get(_GLOBAL)
    for table, key in zip(_TABLES, (op_type, name), strict=True):
        configs = cast("Mapping[str, Any]", stage.get(table) or {})
        config = configs.get(key, config)
    return None if config is None else {_TYPE: stage[_TYPE], **config}


def _newer_features(stage: Stage) -> Iterator[str]:
    for kind, config in configs_in(stage):
        yield from KINDS[kind].newer(config)


def _check_stage(stage: object) -> None:
    if not isinstance(stage, Mapping):
        raise OptionError(f"{OPTION} is a dictionary, or a list of them", got=repr(stage))
    typed = cast("Mapping[str, Any]", stage)
    _check_keys(typed, (_TYPE, _GLOBAL, *_TABLES), OPTION)
    _check_kind(typed.get(_TYPE))
    for name in _TABLES:
        table = typed.get(name)
        if table is not None and not isinstance(table, Mapping):
            raise OptionError(f"{OPTION}: {name!r} is a dictionary", got=repr(table))
    functions: set[str] = set()
    for kind, config in configs_in(typed):
        _check_kind(kind)
        _check_keys(config, (*KINDS[kind].keys, _TYPE), f"{OPTION}: {kind}")
        functions.add(KINDS[kind].function)
    if len(functions) != 1:
        raise OptionError(
            f"a stage of {OPTION} does one thing",
            got=", ".join(sorted(functions)) or "nothing to do",
            expected="quantization, palettization or pruning",
            remedy="Give several kinds as a list of stages",
        )


def _check_kind(kind: object) -> None:
    if kind not in KINDS:
        raise OptionError(
            f"{OPTION}: {_TYPE!r} is not a kind of compression",
            got=repr(kind),
            expected=near_matches(kind, tuple(KINDS)),
        )


def _check_keys(config: object, accepted: Sequence[str], where: str) -> None:
    if not isinstance(config, Mapping):
        raise OptionError(f"{where} is a dictionary", got=repr(config))
    for key in cast("Mapping[object, Any]", config):
        if key not in accepted:
            raise OptionError(
                f"{where} has an unknown key", got=repr(key), expected=near_matches(key, accepted)
            )

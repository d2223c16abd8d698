"""Compression of a converted model's weights by ``coremltools.optimize``."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from threadpoolctl import threadpool_limits

from coreml_delegate.errors import OptionError
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.options.weight_compression import (
    KINDS,
    LINEAR,
    LINEAR_OPTION,
    OPTION,
    PALETTE,
    Stage,
    config_of,
    configs_in,
)
from coreml_delegate.patches import patched
from coreml_delegate.patches.coremltools import PALETTES_WITH_SCALES, mil_program
from coreml_delegate.patches.third_party import coremltools

Compress = Callable[[Any], Any]
"""Takes an ``MLModel`` and returns it with compressed weights."""


def compression_passes(ct: Any, options: CompileOptions) -> list[Compress]:
    """Return the compression passes to apply to a converted model, in order.

    Args:
        ct: Coremltools.
        options: How to lower.

    Raises:
        OptionError: Coremltools does not take a value. The passes raise it for a weight of several
            ops with different configurations.
    """
    optimize = ct.optimize.coreml
    stages: list[tuple[Stage, str]] = []
    if options.op_linear_quantizer_config is not None:
        # Embedding tables (gather) keep their precision, as in ExecuTorch's own backend.
        stage = {
            "config_type": LINEAR,
            "global_config": options.op_linear_quantizer_config,
            "op_type_configs": {"gather": None},
        }
        stages.append((stage, LINEAR_OPTION))
    stages.extend((stage, OPTION) for stage in options.weight_compression or ())
    for stage, option in stages:
        _config(optimize, stage, option)
    # Later stages compress the result of earlier stages further, rather than skip it.
    return [
        partial(_compress, optimize, stage, option, {"joint_compression": True} if i else {})
        for i, (stage, option) in enumerate(stages)
    ]


def linear_config(keywords: Mapping[str, Any]) -> Any:
    """Return coremltools' ``OpLinearQuantizerConfig`` with these keywords.

    Raises:
        OptionError: See ``compression_passes``.
    """
    stage = {"config_type": LINEAR, "global_config": keywords}
    return _config(coremltools().optimize.coreml, stage, LINEAR_OPTION).global_config


def _compress(
    optimize: Any, stage: Stage, option: str, keywords: Mapping[str, Any], model: Any
) -> Any:
    kind, _ = next(configs_in(stage))
    apply = getattr(optimize, KINDS[kind].function)
    names = {**(stage.get("op_name_configs") or {}), **_shared_weights(model, stage, option)}
    config = _config(optimize, {**stage, "op_name_configs": names}, option)
    scaled = any(c.get("enable_per_channel_scale") for _, c in configs_in(stage))
    with (
        _one_thread() if kind == PALETTE else nullcontext(),
        patched(*(PALETTES_WITH_SCALES if scaled else ())),
    ):
        return apply(model, config=config, **keywords)


@contextmanager
def _one_thread() -> Generator[None]:
    """Compute on one thread.

    The k-means of scikit-learn, which coremltools uses for weights in fp32 and for small weights,
    adds the sums of its threads: the bytes of a table would depend on their number.
    """
    with suppress(ImportError):  # coremltools says what is missing, if it needs it
        importlib.import_module("sklearn.cluster")  # has the library whose threads are limited
    with threadpool_limits(1, user_api="openmp"):
        yield


def _shared_weights(model: Any, stage: Stage, option: str) -> dict[str, Mapping[str, Any] | None]:
    """Return configurations, by name, of weights whose users have different configurations.

    Coremltools refuses such a weight, and with it the model. Here, a weight is compressed if one
    user has a configuration and the other users have not: an embedding table tied to the output
    layer.

    Raises:
        OptionError: Two users have different configurations.
    """
    configs_by_name: dict[str, Mapping[str, Any] | None] = {}
    for op in _constants(mil_program(model)):
        users = [user for output in op.outputs for user in output.child_ops]
        configs = [config_of(stage, user.op_type, user.name) for user in users]
        if op.name in (stage.get("op_name_configs") or {}) or all(c == configs[0] for c in configs):
            continue
        distinct = [c for i, c in enumerate(configs) if c is not None and c not in configs[:i]]
        if len(distinct) == 1:
            configs_by_name[op.name] = distinct[0]
        elif not _is_compressed(op, distinct):
            configs_by_name[op.name] = None
        else:
            names = " and ".join(f"{user.op_type} {user.name!r}" for user in users)
            raise OptionError(
                f"{option} asks for different compressions of one weight",
                got=f"{op.name!r}, which is read by {names}",
                expected="one config for all that read it",
                remedy=f"Give {op.name!r} a config, or None, in 'op_name_configs'",
            )
    return configs_by_name


def _constants(program: Any) -> Iterator[Any]:
    """Yield constant ops without ``constexpr_`` users."""
    for function in program.functions.values():
        for op in function.operations:
            if op.op_type == "const" or op.op_type.startswith("constexpr_"):
                users = [user for output in op.outputs for user in output.child_ops]
                if not any(user.op_type.startswith("constexpr_") for user in users):
                    yield op


def _is_compressed(op: Any, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a constant is larger than the threshold of a configuration."""
    shape = op.outputs[0].shape
    smallest = min(config.get("weight_threshold", 2048) for config in configs)
    return len(shape) > 1 and math.prod(shape) > smallest


def _config(optimize: Any, stage: Stage, option: str) -> Any:
    stage_copy = copy.deepcopy(dict(stage))  # coremltools removes its items
    try:
        return optimize.OptimizationConfig.from_dict(stage_copy)
    except Exception as error:
        raise OptionError(
            f"coremltools does not accept {option}",
            got=f"{dict(stage)} ({'; '.join(_messages(error))})",
        ) from error


def _messages(error: BaseException) -> Iterator[str]:
    """Yield the messages of an error, or of the errors that it groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _messages(inner)
    else:
        yield f"{type(error).__name__}: {error}"

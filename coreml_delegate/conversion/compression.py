"""Compression of the weights of a converted model, through coremltools' own passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from coreml_delegate.compile_options import CompileOptions
from coreml_delegate.errors import OptionError
from coreml_delegate.third_party import coremltools
from coreml_delegate.weight_compression import KINDS, LINEAR, LINEAR_OPTION, OPTION, configs_in

Apply = Callable[[Any], Any]
"""Makes a compressed ``MLModel`` of one."""


def passes_of(ct: Any, options: CompileOptions) -> list[Apply]:
    """What is to be done to a converted model, in order.

    Args:
        ct: Coremltools.
        options: How to lower.

    Raises:
        OptionError: A value that coremltools does not take.
    """
    optimize = ct.optimize.coreml
    found: list[Apply] = []
    if options.op_linear_quantizer_config is not None:
        # Embedding tables (gather) keep their precision, as in ExecuTorch's own backend.
        stage = {
            "config_type": LINEAR,
            "global_config": options.op_linear_quantizer_config,
            "op_type_configs": {"gather": None},
        }
        found.append(
            partial(
                optimize.linear_quantize_weights, config=_config(optimize, stage, LINEAR_OPTION)
            )
        )
    for stage in options.weight_compression or ():
        kind, _ = next(configs_in(stage))
        # What an earlier stage left is compressed further, not skipped.
        joint = {"joint_compression": True} if found else {}
        apply = getattr(optimize, KINDS[kind].function)
        found.append(partial(apply, config=_config(optimize, stage, OPTION), **joint))
    return found


def linear_config(given: Mapping[str, Any]) -> Any:
    """Coremltools' ``OpLinearQuantizerConfig`` of keywords.

    Raises:
        OptionError: See ``passes_of``.
    """
    stage = {"config_type": LINEAR, "global_config": given}
    return _config(coremltools().optimize.coreml, stage, LINEAR_OPTION).global_config


def _config(optimize: Any, stage: Mapping[str, Any], option: str) -> Any:
    given = copy.deepcopy(dict(stage))  # which coremltools takes apart
    try:
        return optimize.OptimizationConfig.from_dict(given)
    except Exception as error:
        raise OptionError(
            f"{option} is not what coremltools takes",
            got=f"{dict(stage)} ({'; '.join(_leaves(error))})",
        ) from error


def _leaves(error: BaseException) -> Iterator[str]:
    """What went wrong in the end: the messages of an error, or of those it groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield f"{type(error).__name__}: {error}"

"""Quantization modes as configurations of the libraries that apply them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.options.weight_compression import (
    LINEAR,
    MAGNITUDE,
    OPTION,
    PALETTE,
    Stage,
)
from coreml_delegate.patches.third_party import coremltools, quiet_import
from coreml_delegate.quantization.assignment import QuantizationAssignment, path_pattern
from coreml_delegate.quantization.modes import Method, QuantizationMode
from coreml_delegate.targets import Opset

FULL = -1
"""The full dimension in a block size of torchao."""

PALETTE_OUTPUTS = 16
"""Usual number of output channels that share a table of values."""

_PALETTE_BITS = (1, 2, 3, 4, 6, 8)


def linear_quantizer_config(
    mode: QuantizationMode | None, modules: Mapping[str, QuantizationMode | None] | None = None
) -> Any:
    """Return the configuration of ``CoreMLQuantizer`` for modes by module.

    Args:
        mode: Mode of the modules that ``modules`` does not list; None leaves them in float.
        modules: Modes by module path, which may contain ``*``; of several paths that apply to a
            module the first decides.

    Returns:
        coremltools' ``LinearQuantizerConfig``.

    Raises:
        OptionError: The mode has another method.
    """
    coremltools()
    with quiet_import():
        from coremltools.optimize.torch.quantization import LinearQuantizerConfig

    by_name = {path_pattern(path): _module_config(own) for path, own in (modules or {}).items()}
    return LinearQuantizerConfig(global_config=_module_config(mode), module_name_configs=by_name)


def quantizer_config_of(assignment: QuantizationAssignment) -> Any:
    """Return the ``LinearQuantizerConfig`` of an assignment; see ``linear_quantizer_config``."""
    return linear_quantizer_config(assignment.mode, assignment.ordered())


def torchao_config(mode: QuantizationMode, *, block_size: list[int] | None = None) -> Any:
    """Return the configuration of torchao's ``quantize_`` for a mode.

    Args:
        mode: A mode of the method ``MODULES``.
        block_size: Rows and columns that share a codebook, -1 for all.

    Raises:
        OptionError: The mode has another method.
    """
    import torch

    _require_method(mode, Method.MODULES)
    coremltools()
    with quiet_import():
        from torchao.prototype.quantization.codebook_coreml import CodebookWeightOnlyConfig
        from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup

    if mode.codebook:
        return CodebookWeightOnlyConfig(
            dtype=getattr(torch, f"uint{mode.bits}"),
            block_size=block_size or [mode.rows_per_table or FULL, FULL],
        )
    granularity = PerAxis(0) if mode.group_size is None else PerGroup(mode.group_size)
    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{mode.bits}"), granularity=granularity
    )


def compile_keywords(assignment: QuantizationAssignment, target: Opset | None) -> dict[str, Any]:
    """Return the keywords of ``CoreMLBackend.generate_compile_specs`` that a quantization sets.

    Args:
        assignment: How the model is quantized.
        target: The user's deployment target; None for the oldest that model and quantization
            allow.
    """
    mode = assignment.mode
    keywords: dict[str, Any] = {
        "minimum_deployment_target": target or assignment.newest.lowering_target
    }
    if mode.method is not Method.CONVERSION:
        return keywords
    if mode.codebook:
        stage = {"config_type": PALETTE, "global_config": {"mode": "kmeans", "nbits": mode.bits}}
    else:
        stage = {"config_type": MAGNITUDE, "global_config": {"target_sparsity": mode.sparsity}}
    return {**keywords, OPTION: stage}


def neural_engine_stage(mode: QuantizationMode) -> Stage:
    """Return the compression after conversion that stores weights in the form of a mode.

    The neural engine takes a scale for each output channel, and tables of values for some of them.

    Raises:
        OptionError: The mode has other scales or tables.
    """
    if mode.codebook and mode.rows_per_table is not None and mode.bits in _PALETTE_BITS:
        table = {
            "mode": "kmeans",
            "granularity": "per_grouped_channel",
            "group_size": mode.rows_per_table,
            "nbits": mode.bits,
        }
        return {"config_type": PALETTE, "global_config": table}
    if mode.codebook or mode.group_size is not None:
        raise OptionError(
            "the neural engine does not compute with weights of this mode",
            got=mode.name,
            expected="int8-channel, int4-channel, or codebook-N-groupM with N of "
            + ", ".join(map(str, _PALETTE_BITS)),
        )
    scales = {
        "mode": "linear_symmetric",
        "granularity": "per_channel",
        "dtype": f"int{mode.bits}",
    }
    return {"config_type": LINEAR, "global_config": scales}


def _module_config(mode: QuantizationMode | None) -> Any:
    if mode is None:
        return None
    import torch
    from coremltools.optimize.torch.quantization import ModuleLinearQuantizerConfig

    _require_method(mode, Method.PT2E)
    return ModuleLinearQuantizerConfig(
        quantization_scheme="symmetric",
        activation_dtype=torch.quint8 if mode.activations else torch.float32,
        weight_dtype=torch.qint8 if mode.bits == 8 else f"qint{mode.bits}",
        weight_per_channel=True,
        # On a small data set a moving average would forget the first samples.
        activation_observer="min_max",
    )


def _require_method(mode: QuantizationMode, method: Method) -> None:
    if mode.method is not method:
        raise OptionError(
            f"{mode.name} has another method", got=mode.method.value, expected=method.value
        )


def has_rows(module: Any) -> bool:
    """Whether a module is a linear layer or an embedding, which torchao quantizes."""
    from torch import nn

    return isinstance(module, nn.Linear | nn.Embedding)


def is_weight_of_attention(module: Any) -> bool:
    """Whether a linear layer is only a container of a weight of ``nn.MultiheadAttention``.

    Quantized tensors of torchao support the calls of a linear layer, not the calls of attention.
    """
    from torch import nn

    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)

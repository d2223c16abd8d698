"""Quantization modes as configurations of the libraries that apply them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.options.weight_compression import MAGNITUDE, OPTION, PALETTE
from coreml_delegate.patches.third_party import coremltools, quiet_import
from coreml_delegate.quantization.assignment import QuantizationAssignment, path_pattern
from coreml_delegate.quantization.modes import Method, QuantizationMode

FULL = -1
"""The full dimension in a block size of torchao."""


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


def compile_keywords(mode: QuantizationMode) -> dict[str, Any]:
    """Return the mode's keywords for ``CoreMLBackend.generate_compile_specs``."""
    if mode.method is not Method.CONVERSION:
        return {}
    if mode.codebook:
        stage = {"config_type": PALETTE, "global_config": {"mode": "kmeans", "nbits": mode.bits}}
    else:
        stage = {"config_type": MAGNITUDE, "global_config": {"target_sparsity": mode.sparsity}}
    return {OPTION: stage}


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

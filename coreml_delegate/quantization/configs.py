"""The modes as configurations of the libraries that carry them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.quantization.assignment import QuantizationAssignment
from coreml_delegate.quantization.modes import Method, QuantizationMode
from coreml_delegate.third_party import coremltools, quiet_import
from coreml_delegate.weight_compression import MAGNITUDE, OPTION, PALETTE

WHOLE = -1
"""In a block size of torchao: the whole of that dimension."""


def linear_quantizer_config(
    mode: QuantizationMode | None, modules: Mapping[str, QuantizationMode | None] | None = None
) -> Any:
    """What ``CoreMLQuantizer`` takes.

    Args:
        mode: For all that ``modules`` does not mean; None leaves it in float.
        modules: By path.

    Returns:
        coremltools' ``LinearQuantizerConfig``.

    Raises:
        OptionError: A mode of another method.
    """
    coremltools()
    with quiet_import():
        from coremltools.optimize.torch.quantization import LinearQuantizerConfig

    named = {re.escape(path): _layer(given) for path, given in (modules or {}).items()}
    return LinearQuantizerConfig(global_config=_layer(mode), module_name_configs=named)


def quantizer_config_of(assignment: QuantizationAssignment) -> Any:
    """The ``LinearQuantizerConfig`` of an assignment; see ``linear_quantizer_config``."""
    return linear_quantizer_config(assignment.mode, assignment.modules)


def torchao_config(mode: QuantizationMode, *, block_size: list[int] | None = None) -> Any:
    """What torchao's ``quantize_`` takes.

    Args:
        mode: Of the method ``MODULES``.
        block_size: For a codebook: rows and columns that share a table, -1 for all.

    Raises:
        OptionError: A mode of another method.
    """
    import torch

    _require(mode, Method.MODULES)
    coremltools()
    with quiet_import():
        from torchao.prototype.quantization.codebook_coreml import CodebookWeightOnlyConfig
        from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup

    if mode.codebook:
        return CodebookWeightOnlyConfig(
            dtype=getattr(torch, f"uint{mode.bits}"), block_size=block_size or [WHOLE, WHOLE]
        )
    granularity = PerAxis(0) if mode.group_size is None else PerGroup(mode.group_size)
    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{mode.bits}"), granularity=granularity
    )


def compile_keywords(mode: QuantizationMode) -> dict[str, Any]:
    """What the mode adds to the keywords of ``CoreMLBackend.generate_compile_specs``."""
    if mode.method is not Method.CONVERSION:
        return {}
    if mode.codebook:
        stage = {"config_type": PALETTE, "global_config": {"mode": "kmeans", "nbits": mode.bits}}
    else:
        stage = {"config_type": MAGNITUDE, "global_config": {"target_sparsity": mode.sparsity}}
    return {OPTION: stage}


def _layer(mode: QuantizationMode | None) -> Any:
    if mode is None:
        return None
    import torch
    from coremltools.optimize.torch.quantization import ModuleLinearQuantizerConfig

    _require(mode, Method.PT2E)
    return ModuleLinearQuantizerConfig(
        quantization_scheme="symmetric",
        activation_dtype=torch.quint8 if mode.activations else torch.float32,
        weight_dtype=torch.qint8 if mode.bits == 8 else f"qint{mode.bits}",
        weight_per_channel=True,
        # A moving average forgets what the first samples of a small set have shown.
        activation_observer="min_max",
    )


def _require(mode: QuantizationMode, method: Method) -> None:
    if mode.method is not method:
        raise OptionError(
            f"{mode.name} is carried out otherwise", got=mode.method.value, expected=method.value
        )


def has_rows(module: Any) -> bool:
    """Whether a module is a linear layer or an embedding: a kind that torchao quantizes."""
    from torch import nn

    return isinstance(module, nn.Linear | nn.Embedding)


def is_weight_of_attention(module: Any) -> bool:
    """Whether a linear layer does but hold the weight that ``nn.MultiheadAttention`` multiplies by.

    Quantized tensors of torchao know what layers do with them, and not what attention does.
    """
    from torch import nn

    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)

"""Weights of a decoder in few bits: linear layers by groups, embeddings by rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts.llm.decoder import Decoder
from coreml_delegate.third_party import quiet_import

# torch's stubs do not know the former.
_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("int4", "int8")}


def quantize(decoder: Decoder, *, linear: str, embedding: str, group: int) -> None:
    """Quantize weights in place; activations stay in floating point.

    A head that shares the embedding's weight is quantized as the embedding is.

    Args:
        decoder: Changed.
        linear: ``int4``, a scale for each group of inputs of each output; ``int8``, a scale for
            each output; or ``none``.
        embedding: ``int8``, a scale for each token; or ``none``.
        group: Inputs of a group; divides the inputs of every linear layer.

    Raises:
        OptionError: Groups do not divide a layer.
    """
    tied = decoder.settings.tied

    def is_linear(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and not (tied and module is decoder.head)

    def is_embedding(module: nn.Module) -> bool:
        return module is decoder.embedding or (tied and module is decoder.head)

    if linear != "none":
        size = group if linear == "int4" else 0
        if size:
            _check_groups(decoder, is_linear, size)
        _quantize(decoder, linear, size, is_linear)
    if embedding != "none":
        _quantize(decoder, embedding, 0, is_embedding)


def _quantize(
    decoder: Decoder, dtype: str, group: int, chosen: Callable[[nn.Module], bool]
) -> None:
    with quiet_import():
        torchao: Any = importlib.import_module("torchao.quantization")
        granularity: Any = importlib.import_module("torchao.quantization.granularity")
    config = torchao.IntxWeightOnlyConfig(
        weight_dtype=_DTYPES[dtype],
        granularity=granularity.PerGroup(group) if group else granularity.PerAxis(0),
    )
    torchao.quantize_(decoder, config, lambda module, _: chosen(module))


def _check_groups(decoder: Decoder, chosen: Callable[[nn.Module], bool], group: int) -> None:
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and chosen(module) and module.in_features % group:
            raise OptionError(
                f"groups of weights do not divide {name}",
                got=f"groups of {group} for {module.in_features} inputs",
                remedy="Choose another --group-size",
            )

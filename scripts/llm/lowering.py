"""From a decoder to the methods of a ``.pte``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.scripts.llm.decoder import Decoder
from coreml_delegate.scripts.llm.layout import DECODE, FORWARD, PREFILL, CacheKind, Layout
from coreml_delegate.scripts.llm.methods import Decode, Forward, Prefill
from coreml_delegate.scripts.lowering import lower_methods


def export_methods(decoder: Decoder, layout: Layout) -> dict[str, ExportedProgram]:
    """The methods in ATen dialect, which share the decoder's weights.

    Args:
        decoder: In eval mode.
        layout: What the methods take.
    """
    # One each: torch.export takes inputs that are the same object for one input.
    position, last = torch.tensor([0]), torch.tensor([0])
    chunk = torch.zeros(1, layout.chunk, dtype=torch.long)
    methods: dict[str, tuple[nn.Module, tuple[Any, ...]]]
    if layout.cache is CacheKind.STATE:
        forward = Forward(decoder, layout.chunk, layout.context)
        methods = {FORWARD: (forward, (chunk, position, last))}
    else:
        caches = _caches(decoder, layout.context)
        token = torch.zeros(1, 1, dtype=torch.long)
        methods = {
            DECODE: (Decode(decoder), (token, position, caches)),
            PREFILL: (Prefill(decoder, layout.chunk), (chunk, position, last, caches)),
        }
    with torch.no_grad():
        return {
            name: torch.export.export(module.eval(), inputs)
            for name, (module, inputs) in methods.items()
        }


def _caches(decoder: Decoder, context: int) -> list[torch.Tensor]:
    settings = decoder.settings
    shape = (1, settings.kv_heads, context, settings.head_dim)
    return [torch.zeros(shape) for _ in range(2 * settings.layers)]


def lower(
    methods: Mapping[str, ExportedProgram], layout: Layout, partitioner: CoreMLPartitioner
) -> Any:
    """Lower the methods, and put the layout beside them.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte``.

    Raises:
        CoreMLDelegateError: Our part of the lowering refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    return lower_methods(methods, partitioner, layout.constants())

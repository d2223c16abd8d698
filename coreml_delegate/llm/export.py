"""A decoder's way into a ``.pte``: quantized weights, exported methods, lowering.

``decode`` takes one token, ``prefill`` a chunk of them, padded at its end. Both take the position
of their first token and the caches, and return logits and the keys and values of their own tokens
only, which the caller writes into the caches: a step thus moves no cache out of the model.

``forward`` keeps the caches itself, as buffers that become states, and otherwise takes the inputs
of ``prefill``. It is the only method, because methods share no state on a device; a single token is
a chunk with one token in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import Call, Segment
from coreml_delegate.llm.caches import kept_caches, new_rows, passed_caches
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.encoder_decoder import EncoderDecoder
from coreml_delegate.llm.layout import DECODE, FORWARD, PREFILL, CacheKind, Layout
from coreml_delegate.llm.stored_weights import in_memory, read_weights
from coreml_delegate.lowering import lower_methods
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.third_party import quiet_import, wrap_errors

# The stubs of torch do not have int4.
_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("int4", "int8")}

_CHUNK = 2**24  # elements that are quantized at once


def quantize_weights(
    decoder: Decoder | EncoderDecoder, *, linear: str, embedding: str, group: int
) -> None:
    """Quantize weights in place; activations stay in floating point.

    What shares the embedding's weight, a head for example, is quantized as the embedding is.

    Args:
        decoder: Changed.
        linear: ``int4`` with a scale per group of inputs of each output, ``int8`` with a scale per
            output, or ``none``.
        embedding: ``int8`` with a scale per token, or ``none``.
        group: Number of inputs in a group; divides the inputs of every linear layer.

    Raises:
        OptionError: Groups do not divide a layer.
    """
    table: Any = decoder.embedding.weight
    vocabulary = [m for m in decoder.modules() if getattr(m, "weight", None) is table]
    linears = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and module not in vocabulary
    }
    if linear != "none":
        size = group if linear == "int4" else 0
        if size:
            _check_groups(linears, size)
        for module in linears.values():
            _replace_weight([module], _quantized(module.weight, linear, size))
    if embedding != "none":
        _replace_weight(vocabulary, _quantized(table, embedding, 0))


def export_methods(decoder: Decoder, layout: Layout) -> dict[str, ExportedProgram]:
    """Export the methods in ATen dialect; they share the decoder's weights.

    Args:
        decoder: In eval mode; weights that are in files are read.
        layout: Kind of the caches, chunk and context.

    Raises:
        LoweringError: ``torch.export`` cannot capture the model.
    """
    read_weights(decoder)
    # Two tensors, because torch.export takes inputs that are the same object for one input.
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
            PREFILL: (Prefill(decoder), (chunk, position, last, caches)),
        }
    with torch.no_grad(), wrap_errors("torch.export cannot capture the model", kind=LoweringError):
        return {
            name: torch.export.export(module.eval(), inputs)
            for name, (module, inputs) in methods.items()
        }


def lower(
    methods: Mapping[str, ExportedProgram], layout: Layout, partitioner: CoreMLPartitioner
) -> Any:
    """Lower the methods, and add the layout as constant methods.

    Returns:
        ExecuTorch's program manager, which writes the ``.pte``.

    Raises:
        CoreMLDelegateError: The partitioner or the backend refuses the model.
        LoweringError: ExecuTorch fails; the cause is chained.
    """
    return lower_methods(methods, partitioner, layout.constants())


class _Method(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def _advance(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        caches: Sequence[torch.Tensor],
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        call, decoder = Call(), self.decoder
        cache = passed_caches(
            decoder.layers, caches, position, call, length=tokens.shape[1], placed=decoder.placed
        )
        return (decoder.advance(tokens, position, cache, call, last), *new_rows(cache))


class Decode(_Method):
    """Method ``decode``: one token."""

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V], then keys and values [1, kv_heads, 1, head_dim] of each layer.

        Args:
            tokens: [1, 1], int64.
            position: [1], int64: how many tokens the caches hold.
            caches: Keys and values of each layer in turn, each [1, kv_heads, S, head_dim].
        """
        return self._advance(tokens, position, caches)


class Prefill(_Method):
    """Method ``prefill``: a chunk of tokens."""

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        caches: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [1, V] of one token, and keys and values [1, kv_heads, L, head_dim].

        Args:
            tokens: [1, L], int64; what follows the last token is ignored.
            position: [1], int64: how many tokens the caches hold.
            last: [1], int64: index of the last token.
            caches: As for ``Decode``.
        """
        return self._advance(tokens, position, caches, last)


class Forward(nn.Module):
    """Method ``forward``: a chunk of tokens whose keys and values stay in buffers.

    No token attends to keys that padding wrote: the tokens at those positions overwrite them
    first. The caches have room for padding behind the last token of the context.
    """

    def __init__(self, decoder: Decoder, length: int, context: int) -> None:
        super().__init__()
        self.decoder = decoder
        for index, layer in enumerate(decoder.layers):
            segment = layer.zeros(layer.rows(context, length - 1))
            for kind, empty in zip(("keys", "values"), segment, strict=True):
                self.register_buffer(f"{kind}_{index}", empty)

    def caches(self, layer: int) -> Segment:
        """Return the keys and values of a layer."""
        return self.get_buffer(f"keys_{layer}"), self.get_buffer(f"values_{layer}")

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [1, V] of one token.

        Args:
            tokens: [1, L], int64; what follows the last token is ignored.
            position: [1], int64: how many tokens came before.
            last: [1], int64: index of the last token.
        """
        decoder = self.decoder
        buffers = [self.caches(index) for index in range(len(decoder.layers))]
        cache = kept_caches(decoder.layers, buffers, position, length=tokens.shape[1])
        return decoder.advance(tokens, position, cache, Call(), last)


def _caches(decoder: Decoder, context: int) -> list[torch.Tensor]:
    return [empty for layer in decoder.layers for empty in layer.zeros(layer.rows(context, 0))]


def _quantized(weight: torch.Tensor, dtype: str, group: int) -> torch.Tensor:
    """Return a quantized matrix [outputs, inputs]; all rows at once would need several copies."""
    with quiet_import():
        torchao: Any = importlib.import_module("torchao.quantization")
        granularity: Any = importlib.import_module("torchao.quantization.granularity")
    config = torchao.IntxWeightOnlyConfig(
        weight_dtype=_DTYPES[dtype],
        granularity=granularity.PerGroup(group) if group else granularity.PerAxis(0),
    )
    parts: list[Any] = []
    for rows in in_memory(weight).detach().split(max(1, _CHUNK // weight.shape[1])):
        layer = nn.Linear(*reversed(rows.shape), bias=False, device="meta")
        layer.weight = nn.Parameter(rows, requires_grad=False)
        torchao.quantize_(layer, config)
        parts.append(layer.weight)
    tensors = [
        torch.cat([getattr(part, name) for part in parts]) for name in parts[0].tensor_data_names
    ]
    options = [getattr(parts[0], name) for name in parts[0].tensor_attribute_names]
    return type(parts[0].data)(*tensors, *options)


def _replace_weight(modules: Iterable[Any], weight: torch.Tensor) -> None:
    for module in modules:
        module.weight = nn.Parameter(weight, requires_grad=False)


def _check_groups(linears: Mapping[str, nn.Linear], group: int) -> None:
    for name, module in linears.items():
        if module.in_features % group:
            raise OptionError(
                f"groups of weights do not divide {name}",
                got=f"groups of {group} for {module.in_features} inputs",
                remedy="Choose another --group-size",
            )

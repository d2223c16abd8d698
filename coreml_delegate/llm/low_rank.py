"""Modules of a decoder with a LoRA branch: y = W x + B (A x) (arXiv:2106.09685).

W is not changed, so that all adapters and the base model share it; each adapter adds two small
matrices.

In fp16 a product A x must not overflow where W x does not, and small numbers must not underflow. So
the scale is part of B, and row i of A is multiplied by a power of two and column i of B by its
inverse, so that their largest elements are about equal. This is exact: B A does not change.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.adapters import AdapterFile, Update
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.stored_weights import StoredWeight, in_memory
from coreml_delegate.patches.third_party import wrap_errors

_PROBE_TOKENS = 3  # of the text computed with branches and with merged weights
_TOLERANCE = 1e-3  # relative to the largest logit


class LowRankLinear(nn.Module):
    """A linear layer with a low-rank branch: W x + B (A x), with DoRA g * (W x) + B (A x).

    Args:
        base: The layer.
        down: A [r, inputs].
        up: B [outputs, r], including the scale and g.
        gain: DoRA's g = m / norm of the rows of W + scale * B A, [outputs], or None.
    """

    def __init__(
        self, base: nn.Module, down: torch.Tensor, up: torch.Tensor, gain: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.base: Any = base
        self.down, self.up = _parameter(down), _parameter(up)
        self.gain = None if gain is None else _parameter(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs] of ``x`` [..., inputs]."""
        branch = functional.linear(functional.linear(x, self.down), self.up)
        if self.gain is None:
            return self.base(x) + branch
        y = functional.linear(x, self.base.weight) * self.gain + branch
        return y if self.base.bias is None else y + self.base.bias


class LowRankEmbedding(nn.Module):
    """An embedding with a low-rank branch: E[t] + B A[:, t].

    Args:
        base: The embedding.
        down: A [r, tokens].
        up: B [width, r], including the scale.
    """

    def __init__(self, base: nn.Module, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.base: Any = base
        self.rows, self.up = _parameter(down.t().contiguous()), _parameter(up)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [..., width] of ``tokens`` [...], integers."""
        rows = functional.embedding(tokens, self.rows)
        return self.base(tokens) + functional.linear(rows, self.up)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter fitted to a decoder.

    Attributes:
        modules: Modules that replace the decoder's modules, by name in its model.
        ranks: The distinct ranks in ascending order.
    """

    name: str
    modules: Mapping[str, nn.Module]
    ranks: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Total number of elements of all branches."""
        return sum(
            parameter.numel()
            for module in self.modules.values()
            for parameter in module.parameters(recurse=False)
        )


def fit_adapter(decoder: Decoder, file: AdapterFile) -> Adapter:
    """Make the modules of an adapter, and check them.

    The logits of a short text are compared with the logits of merged weights, so that a model that
    uses a weight in another way is not exported wrongly.

    Args:
        decoder: In fp32, not quantized; it is not changed.
        file: The saved adapter.

    Raises:
        OptionError: The adapter does not fit the model.
        LoweringError: The logits differ.
    """
    updates = file.updates(decoder.model)
    adapter = Adapter(
        file.name,
        {
            name: _low_rank_module(decoder.model.get_submodule(name), up)
            for name, up in updates.items()
        },
        tuple(sorted({update.rank for update in updates.values()})),
    )
    _check(decoder, adapter, updates)
    return adapter


@contextmanager
def attached(decoder: Decoder, adapter: Adapter | None) -> Generator[None]:
    """Replace a decoder's modules by an adapter's; None for the base model."""
    modules = {} if adapter is None else adapter.modules
    originals = {name: decoder.model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            decoder.model.set_submodule(name, module)
        yield
    finally:
        for name, module in originals.items():
            decoder.model.set_submodule(name, module)


def _low_rank_module(base: Any, update: Update) -> nn.Module:
    up = update.up * update.scale
    if isinstance(base, nn.Embedding):
        # Gemma scales its embeddings.
        factor = float(getattr(base, "embed_scale", 1.0))
        return LowRankEmbedding(base, *_balance(update.down, up * factor)).eval()
    if update.magnitude is None:
        return LowRankLinear(base, *_balance(update.down, up), None).eval()
    gain = _gain(base.weight, update, update.magnitude)
    return LowRankLinear(base, *_balance(update.down, up * gain[:, None]), gain).eval()


def _balance(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale row i of A and column i of B by 2^k and 2^-k, so that their largest elements match."""
    largest = down.abs().amax(1), up.abs().amax(0)
    exponents = zip(*(torch.frexp(values)[1].tolist() for values in largest), strict=True)
    used = ((largest[0] > 0) & (largest[1] > 0)).tolist()
    factors = torch.tensor(
        [
            math.ldexp(1.0, (up_exponent - down_exponent) // 2) if is_used else 1.0
            for (down_exponent, up_exponent), is_used in zip(exponents, used, strict=True)
        ]
    )
    return down * factors[:, None], up / factors


def _gain(weight: torch.Tensor, update: Update, magnitude: torch.Tensor) -> torch.Tensor:
    """Return DoRA's g = m / norm of the rows of W + scale * B A, [outputs]."""
    lengths = torch.linalg.vector_norm(_updated_weight(weight, update), dim=1)
    return (magnitude.double() / lengths).float()


def _updated_weight(weight: torch.Tensor, update: Update) -> torch.Tensor:
    """Return W + scale * B A of a linear layer in fp64, without DoRA."""
    return in_memory(weight).double() + update.scale * (update.up.double() @ update.down.double())


def _merged_weight(weight: torch.Tensor, update: Update) -> torch.Tensor:
    """Return the merged weight of a linear layer, with DoRA if the update has it."""
    changed = _updated_weight(weight, update)
    if update.magnitude is not None:
        changed *= (update.magnitude / torch.linalg.vector_norm(changed, dim=1))[:, None]
    return changed.float()


def _merged_embedding(weight: torch.Tensor, update: Update) -> torch.Tensor:
    """Return the merged weight [tokens, width] of an embedding."""
    product = update.down.double().t() @ update.up.double().t()
    return (in_memory(weight).double() + update.scale * product).float()


@torch.no_grad()
def _check(decoder: Decoder, adapter: Adapter, updates: Mapping[str, Update]) -> None:
    tokens = torch.arange(min(_PROBE_TOKENS, decoder.context))[None]
    with wrap_errors(
        f"{type(decoder.model).__name__} does not compute with adapter {adapter.name!r}",
        kind=LoweringError,
    ):
        with attached(decoder, adapter):
            logits = decoder(tokens)
        with _merged_weights(decoder, updates):
            expected = decoder(tokens)
    bound = _TOLERANCE * float(expected.abs().max())
    if not torch.allclose(logits, expected, rtol=0, atol=bound):
        raise LoweringError(
            f"{type(decoder.model).__name__} computes something else with adapter {adapter.name!r}",
            got=f"logits that differ by {float((logits - expected).abs().max()):.2g}",
            remedy="Merge the adapter into a checkpoint with peft, and export that",
        )


@contextmanager
def _merged_weights(decoder: Decoder, updates: Mapping[str, Update]) -> Generator[None]:
    """Merge updates into the weights; a merged weight is in memory only while it is used."""
    originals: list[tuple[Any, Any]] = []
    try:
        for name, update in updates.items():
            module: Any = decoder.model.get_submodule(name)
            weight = module.weight
            originals.append((module, weight))
            change = _merged_embedding if isinstance(module, nn.Embedding) else _merged_weight
            merged = StoredWeight(partial(change, weight, update), weight.shape)
            module.weight = nn.Parameter(merged, requires_grad=False)
        yield
    finally:
        for module, weight in originals:
            module.weight = weight


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

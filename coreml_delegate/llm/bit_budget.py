"""A mode for each linear layer, so that a text keeps a perplexity.

Every layer begins in few bits. The layers that lose most get more bits, as few layers as suffice.
The loss of a layer is the mean of -log p over the tokens of the text, with only this layer in few
bits, less the loss of the model in float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.evaluation import Predict, perplexity
from coreml_delegate.llm.export import linear_layers, quantized_weight
from coreml_delegate.llm.stored_weights import read_weights
from coreml_delegate.quantization import QuantizationAssignment, QuantizationMode, mode_of


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """The result of ``assign_bits``.

    Attributes:
        assignment: Mode of each layer.
        in_float: Perplexity of the model in float.
        quantized: Perplexity with the weights of the assignment.
        losses: Loss of each layer in few bits, in nats for each token, by path.
    """

    assignment: QuantizationAssignment
    in_float: float
    quantized: float
    losses: Mapping[str, float]


@torch.no_grad()
def assign_bits(
    decoder: Decoder,
    tokens: Sequence[int],
    budget: float,
    mode: QuantizationMode,
) -> BudgetResult:
    """Choose the layers that get more bits than the others.

    Perplexities are computed in PyTorch and fp32, with the values of quantized weights.

    Args:
        decoder: The model; its weights are read into memory, and are the same afterwards.
        tokens: The text.
        budget: Largest perplexity of the text.
        mode: Mode of the layers; those that lose most get its finer mode, ``mode.relief``.

    Raises:
        OptionError: The mode has no finer mode; or not even the finer mode keeps the perplexity.
        InputError: The text has fewer than 2 tokens.
    """
    if mode.relief is None:
        raise OptionError("a budget needs a mode with a finer one", got=mode.name)
    finer = mode_of(mode.relief)
    read_weights(decoder)
    layers = linear_layers(decoder)
    size = min(decoder.context, len(tokens))

    def measure(modes: Mapping[str, QuantizationMode]) -> float:
        with _weights(layers, modes):
            return perplexity(_predict(decoder), tokens, context=size)

    in_float = measure({})
    losses = {path: math.log(measure({path: mode}) / in_float) for path in layers}
    order = sorted(losses, key=lambda path: (-losses[path], path))

    def modes_of(count: int) -> dict[str, QuantizationMode]:
        return {path: finer if n < count else mode for n, path in enumerate(order)}

    count, value = _fewest(len(order), lambda count: measure(modes_of(count)), budget)
    if value > budget:
        raise OptionError(
            f"weights in {finer.name} do not keep the perplexity",
            got=f"{value:.4g}, in float {in_float:.4g}",
            expected=f"at most {budget:.4g}",
        )
    assignment = QuantizationAssignment(mode, dict.fromkeys(sorted(order[:count]), finer))
    return BudgetResult(assignment, in_float, value, losses)


def _fewest(most: int, measure: Callable[[int], float], budget: float) -> tuple[int, float]:
    """Return the smallest number up to ``most`` that keeps the budget, and its perplexity.

    Perplexities fall with the number but for noise; bisection finds a number that keeps the budget
    while the one below it does not. If none keeps it, the result is ``most``.
    """
    low, high = 0, most
    value = measure(0)
    if value <= budget:
        return 0, value
    value = measure(most)
    while value <= budget and high - low > 1:
        middle = (low + high) // 2
        at_middle = measure(middle)
        if at_middle <= budget:
            high, value = middle, at_middle
        else:
            low = middle
    return high, value


def _predict(decoder: Decoder) -> Predict:
    return lambda tokens, count: [decoder(torch.tensor([list(tokens)]))[0, -count:]]


@contextmanager
def _weights(layers: Mapping[str, Any], modes: Mapping[str, QuantizationMode]) -> Generator[None]:
    """Give layers the values of quantized weights, and afterwards their own weights again."""
    before = {path: layers[path].weight for path in modes}
    try:
        for path, mode in modes.items():
            values = quantized_weight(layers[path], mode).dequantize()
            layers[path].weight = nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for path, weight in before.items():
            layers[path].weight = weight

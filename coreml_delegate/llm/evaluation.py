"""Perplexity of a language model on a text, in windows of a fixed number of tokens.

The perplexity is exp(-(1/N) sum log p(t)), where p(t) is the probability that the model gives to a
token t after the tokens before it in the same window, and N is the number of such tokens. A window
begins ``stride`` tokens after the one before. Of overlapping windows only the tokens that the
earlier one did not have are counted, so that each token is counted once, and has at least
``context - stride`` tokens before it.

Source: "Perplexity of fixed-length models" in the documentation of ``transformers``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from coreml_delegate.errors import InputError, OptionError, ProgramError
from coreml_delegate.llm.generator import Generator

Predict = Callable[[Sequence[int], int], Iterable[torch.Tensor]]
"""A model, as a function of tokens and a count.

It yields logits [n, V], in order and together for each of the last ``count`` tokens: of the token
that follows it.
"""

_ROWS = 128  # of logits, converted to fp64 at a time


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens from ``start`` to ``stop`` of a text; the last ``count`` tokens are predicted."""

    start: int
    stop: int
    count: int


def windows(length: int, context: int, stride: int | None = None) -> list[Window]:
    """Divide a text into windows.

    Args:
        length: Number of tokens of the text.
        context: Number of tokens of a window.
        stride: Tokens between the starts of two windows; None for ``context``, without overlap.

    Raises:
        OptionError: The context has fewer than 2 tokens, or the stride is not between 1 and the
            context.
        InputError: The text has fewer than 2 tokens, so no token is predicted.
    """
    stride = context if stride is None else stride
    if context < 2:
        raise OptionError("the context is too short", got=str(context), expected="2 or more")
    if not 1 <= stride <= context:
        raise OptionError("the stride is out of range", got=str(stride), expected=f"1 to {context}")
    if length < 2:
        raise InputError("the text is too short", got=f"{length} tokens", expected="2 or more")
    result: list[Window] = []
    before = 0  # end of the window before
    for start in range(0, length, stride):
        stop = min(start + context, length)
        count = stop - max(before, start + 1)  # the first token of a window is not predicted
        if count:
            result.append(Window(start, stop, count))
        if stop == length:
            break
        before = stop
    return result


@torch.no_grad()
def window_loss(predict: Predict, tokens: Sequence[int], window: Window) -> float:
    """Return the sum of -log p(t) over the predicted tokens t of a window, in nats.

    Args:
        predict: The model.
        tokens: The whole text.
        window: The window.

    Raises:
        ProgramError: A logit is NaN.
        CoreMLDelegateError: The model refuses the tokens.
    """
    text = tokens[window.start : window.stop]
    targets = torch.tensor(text[-window.count :])
    total, done = 0.0, 0
    for logits in predict(text[:-1], window.count):
        for part in logits.split(_ROWS):
            expected = targets[done : done + len(part)]
            total += float(functional.cross_entropy(part.double(), expected, reduction="sum"))
            done += len(part)
    if math.isnan(total):
        raise ProgramError(
            "the model's logits are not numbers",
            got=f"NaN in the window of the tokens {window.start} to {window.stop - 1}",
            remedy="Look for the operation with coreml-delegate trace, or export in float32",
        )
    return total


def perplexity(
    predict: Predict, tokens: Sequence[int], *, context: int, stride: int | None = None
) -> float:
    """Return the perplexity of a model on a text; infinite if a token has the probability 0.

    Args:
        predict: The model, such as ``predict_with_program(generator)``.
        tokens: The text.
        context: Number of tokens of a window.
        stride: Tokens between the starts of two windows; None for ``context``, without overlap.

    Raises:
        CoreMLDelegateError: See ``windows`` and ``window_loss``.
    """
    parts = windows(len(tokens), context, stride)
    return perplexity_of([window_loss(predict, tokens, part) for part in parts], parts)


def perplexity_of(losses: Iterable[float], windows: Sequence[Window]) -> float:
    """Return the perplexity of windows; infinite if a token has the probability 0.

    Args:
        losses: Result of ``window_loss`` for each window.
        windows: The windows.
    """
    mean = math.fsum(losses) / sum(window.count for window in windows)
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def predict_with_program(generator: Generator) -> Predict:
    """Return a program as a model; its context has to hold a window.

    Tokens that are not predicted are computed in chunks. A program that returns the logits of the
    last token only, as the files of ``export-llm`` do, is called once for each predicted token.

    Raises:
        ProgramError: The program is an encoder-decoder model.
    """
    if generator.layout.source is not None:
        raise ProgramError("a model with an encoder has no perplexity of a text by itself")

    def predict(tokens: Sequence[int], count: int) -> Iterator[torch.Tensor]:
        generator.reset()
        first = len(tokens) - count
        if first:
            generator.feed(tokens[:first])
        yield from generator.follow(tokens[first:])

    return predict


def predict_with_module(model: Any) -> Predict:
    """Return a causal language model of ``transformers`` as a model."""

    def predict(tokens: Sequence[int], count: int) -> Iterator[torch.Tensor]:
        yield model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -count:]

    return predict

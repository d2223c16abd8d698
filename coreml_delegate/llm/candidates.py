"""Selection of the next token's candidates inside an exported language model.

A model with a selection returns one or a few tokens, so that no vector as long as the vocabulary
leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coreml_delegate.errors import OptionError

_ARGMAX, _TOP_K = "argmax", "top-k:"
FORMS = f"{_ARGMAX} or {_TOP_K}K"
"""Syntax of a selection, for messages."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The candidates that a model returns in place of the logits of all tokens.

    Attributes:
        top_k: Return this many tokens with the largest logits, and their logits; None to return
            only the token with the largest logit.

    Raises:
        OptionError: ``top_k`` is below 1.
    """

    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise _unknown_selection(str(self))

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        return _ARGMAX if self.top_k is None else f"{_TOP_K}{self.top_k}"

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read ``argmax`` or ``top-k:K``.

        Raises:
            OptionError: The text is neither.
        """
        if text == _ARGMAX:
            return cls()
        count = text.removeprefix(_TOP_K)
        if count == text or not (count.isascii() and count.isdigit()):
            raise _unknown_selection(text)
        return cls(int(count))

    def check(self, vocabulary: int) -> None:
        """Refuse to select more tokens than the vocabulary has.

        Raises:
            OptionError: The vocabulary has fewer tokens.
        """
        if self.top_k is not None and self.top_k > vocabulary:
            raise OptionError(
                "the vocabulary has fewer tokens than the selection",
                got=str(self),
                expected=f"at most {_TOP_K}{vocabulary}",
            )

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the model's results in place of its logits; part of the exported graph.

        Args:
            logits: [1, V].

        Returns:
            The token with the largest logit, [1], int32; or the K largest logits in descending
            order, [1, K], and their tokens, [1, K], int32. Equal logits: lowest token first.
        """
        if self.top_k is None:
            return (logits.argmax(-1).to(torch.int32),)
        largest, tokens = logits.topk(self.top_k)
        return largest, tokens.to(torch.int32)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for the next token, by descending logit.

    Equal logits are in the order of their tokens, so that the order does not depend on the file.

    Attributes:
        tokens: [K], int64.
        logits: [K]; None if the model returns one token without its logit.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None

    @classmethod
    def read(cls, results: Sequence[torch.Tensor]) -> Candidates:
        """Return the candidates of the results of ``Selection.select``."""
        if len(results) == 1:
            return cls(results[0].long(), None)
        return cls.in_order(results[1][0].long(), results[0][0])

    @classmethod
    def in_order(cls, tokens: torch.Tensor, logits: torch.Tensor) -> Candidates:
        """Return candidates of tokens [K] and their logits [K], which may have any order."""
        by_token = tokens.argsort()
        order = by_token[logits[by_token].argsort(descending=True, stable=True)]
        return cls(tokens[order], logits[order])

    @classmethod
    def of_logits(cls, logits: torch.Tensor, top_k: int | None = None) -> Candidates:
        """Return all tokens by logits [V], or the ``top_k`` tokens with the largest logits."""
        if top_k is None or top_k >= len(logits):
            ordered, tokens = logits.sort(descending=True, stable=True)
            return cls(tokens, ordered)
        # topk gives the K-th largest logit, but orders equal logits arbitrarily.
        least = logits.topk(top_k).values[-1]
        tokens = (~(logits < least)).nonzero()[:, 0]
        ordered, indices = logits[tokens].sort(descending=True, stable=True)
        return cls(tokens[indices[:top_k]], ordered[:top_k])


def _unknown_selection(text: str) -> OptionError:
    return OptionError(
        "the model cannot select tokens in this way",
        got=text,
        expected=f"{FORMS}, where K is at least 1",
    )

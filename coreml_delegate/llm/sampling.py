"""Choice of the next token from a model's logits: penalties, temperature, filters, a draw.

With logits l and the tokens of the text so far, in this order:

1. repetition penalty r (arXiv:1909.05858): l / r if l > 0, otherwise l * r, for tokens of the text;
   presence penalty a: l - a, for generated tokens; -inf for tokens that a grammar does not allow;
2. probabilities p = softmax(l / temperature) of the ``top_k`` most probable tokens;
3. of these the fewest whose probabilities sum to ``top_p`` (nucleus sampling, arXiv:1904.09751) and
   whose probabilities are at least ``min_p`` times the largest (arXiv:2407.01082).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

import torch

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.candidates import Candidates, Selection
from coreml_delegate.llm.grammar import Grammar

_NO_PENALTY = 1.0  # of repetition


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose the next token.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Sample from this many most probable tokens; None for all.
        top_p: Sample from the fewest most probable tokens whose probabilities sum to at least this.
        seed: Seed of the random numbers.
        min_p: Sample from tokens whose probability is at least this share of the largest.
        repetition_penalty: Divides positive logits of tokens of the text, and multiplies negative
            logits; 1 changes nothing.
        presence_penalty: Subtracted from the logits of generated tokens; 0 changes nothing.

    Raises:
        OptionError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = _NO_PENALTY
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        infinity = float("inf")
        checks = (
            ("temperature", 0 <= self.temperature < infinity, "a number of at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "an integer of at least 1"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < infinity, "a number above 0"),
            ("presence_penalty", abs(self.presence_penalty) < infinity, "a number"),
        )
        for name, is_valid, expected in checks:
            if not is_valid:
                raise OptionError(
                    f"{name} is out of range", got=str(getattr(self, name)), expected=expected
                )

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the text so far."""
        return self.repetition_penalty != _NO_PENALTY or self.presence_penalty != 0

    def check(self, selection: Selection | None) -> None:
        """Refuse settings that need more tokens than a model returns.

        Without ``top_k`` all tokens that the model returns are sampled from.

        Args:
            selection: Which tokens the model returns; None for the logits of all.

        Raises:
            OptionError: The model returns only one token, and the settings sample; or ``top_k`` is
                larger than the number of tokens that it returns.
        """
        if selection is None:
            return
        if selection.top_k is None:
            for field in fields(self):
                if field.name != "seed" and getattr(self, field.name) != field.default:
                    raise OptionError(
                        "the model returns only the token with the largest logit, so there is "
                        "nothing to sample",
                        got=f"{field.name} {getattr(self, field.name)}",
                        remedy="Export it with --sample-in-model top-k:K, or without that option",
                    )
        elif (self.top_k or 0) > selection.top_k:
            raise OptionError(
                f"the model returns {selection.top_k} tokens to sample from",
                got=f"top_k {self.top_k}",
                expected=f"at most {selection.top_k}",
                remedy="Export it with a larger K in --sample-in-model top-k:K",
            )


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Natural logarithms of the model's probabilities, without penalties, grammar and temperature.

    Attributes:
        token: The chosen token.
        chosen: Of the chosen token.
        most_probable: Of the most probable tokens, which are the keys, in descending order.
    """

    token: int
    chosen: float
    most_probable: dict[int, float]


class Sampler:
    """Chooses tokens from logits; equal settings, texts and logits give equal tokens.

    Args:
        sampling: The settings.
        logprobs: Number of most probable tokens in ``log_probabilities``; None to keep it empty.
        grammar: Limits the tokens; None for all.

    Attributes:
        log_probabilities: An entry for each token that was chosen after ``begin``.

    Raises:
        OptionError: ``logprobs`` is below 0.
    """

    def __init__(
        self, sampling: Sampling, *, logprobs: int | None = None, grammar: Grammar | None = None
    ) -> None:
        if logprobs is not None and logprobs < 0:
            raise OptionError("logprobs is out of range", got=str(logprobs), expected="0 or more")
        self.sampling = sampling
        self.log_probabilities: list[LogProbabilities] = []
        self._most_probable = logprobs
        self._grammar = grammar
        self._random = torch.Generator().manual_seed(sampling.seed)
        self._text: set[int] = set()
        self._generated: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether the text follows the grammar, and no longer text does; False without one."""
        return self._grammar is not None and self._grammar.complete

    def check(self, selection: Selection | None) -> None:
        """Refuse a model whose results are too few for the settings; see ``Sampling.check``."""
        self.sampling.check(selection)
        if self._grammar is not None and selection is not None:
            raise OptionError(
                "the model returns no logits of all tokens, and the grammar may allow none of its "
                "candidates",
                got=f"a program exported with --sample-in-model {selection}",
                remedy="Export without --sample-in-model",
            )
        if self._most_probable is not None and selection is not None:
            raise OptionError(
                "the model returns no logits of all tokens, so probabilities are unknown",
                got=f"a program exported with --sample-in-model {selection}",
                remedy="Leave logprobs out, or export without --sample-in-model",
            )

    def begin(self, text: Iterable[int], ends: Collection[int] = ()) -> None:
        """Begin to generate.

        Args:
            text: Tokens before, which count for the repetition penalty.
            ends: Tokens that end the text: a grammar allows them only where the text may end.
        """
        self._text, self._generated = set(text), set()
        self.log_probabilities = []
        if self._grammar is not None:
            self._grammar.begin(ends)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the token chosen from ``logits`` [V] of any floating-point type.

        Raises:
            InputError: No token may follow; see ``Grammar``.
        """
        adjusted = self._penalized(torch.arange(len(logits)), logits)
        if self._grammar is not None:
            adjusted = adjusted.masked_fill(~self._grammar.allowed(), -torch.inf)
        if self.sampling.temperature == 0:
            token = int(adjusted.argmax())
        else:
            token = self._draw(Candidates.of_logits(adjusted, self.sampling.top_k))
        if self._most_probable is not None:
            shares = logits.double().log_softmax(0)
            best = Candidates.of_logits(shares).tokens[: self._most_probable]
            listed = dict(zip(best.tolist(), shares[best].tolist(), strict=True))
            self.log_probabilities.append(LogProbabilities(token, float(shares[token]), listed))
        self._generated.add(token)
        if self._grammar is not None:
            self._grammar.accept(token)
        return token

    def choose(self, candidates: Candidates) -> int:
        """Return the token chosen from candidates."""
        if candidates.logits is not None and self.sampling.has_penalties:
            logits = self._penalized(candidates.tokens, candidates.logits)
            candidates = Candidates.in_order(candidates.tokens, logits)
        token = self._draw(candidates)
        self._generated.add(token)
        return token

    def _draw(self, candidates: Candidates) -> int:
        settings, tokens, logits = self.sampling, candidates.tokens, candidates.logits
        if settings.temperature == 0 or logits is None:
            return int(tokens[0])
        considered = logits[: settings.top_k].double()
        shares = torch.softmax((considered - considered[0]) / settings.temperature, dim=0)
        before = shares.cumsum(0) - shares
        if settings.top_p < 1 or settings.min_p > 0:
            # Shares descend, so both conditions hold for the first tokens only.
            shares = shares[(before < settings.top_p) & (shares >= settings.min_p * shares[0])]
        return int(tokens[torch.multinomial(shares, 1, generator=self._random)])

    def _penalized(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [K] of tokens [K] with penalties."""
        if not self.sampling.has_penalties:
            return logits
        logits = logits.float()
        penalty = self.sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(_is_among(tokens, self._text | self._generated), repeated, logits)
        return logits - self.sampling.presence_penalty * _is_among(tokens, self._generated)


def _is_among(tokens: torch.Tensor, texts: Collection[int]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(sorted(texts), dtype=tokens.dtype))

"""Speculative decoding: tokens that are proposed cheaply, and verified together in one call.

A call of a model with the proposals d1 to dk after a text gives the logits after each of them. The
next token is chosen from the first logits, as without proposals; if it is d1, the following
token is chosen from the second logits, and so on up to the first difference. So the tokens are the
same, whatever the choice depends on, and each call gives at least one of them.

Sources: arXiv:2211.17192 (draft models); "prompt lookup decoding", as ``transformers`` has it. For
proposals that are not drawn at random the draw of a token that is then compared is the rejection
sampling of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.generator import Generator


class PromptLookup:
    """Proposes the tokens that followed the last tokens of a text where it had them before.

    Args:
        longest: Number of last tokens to look for first; then fewer.
    """

    def __init__(self, longest: int = 3) -> None:
        if longest < 1:
            raise OptionError("longest is out of range", got=str(longest), expected="1 or more")
        self._longest = longest

    def __call__(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most ``most`` proposals; of several places the latest counts."""
        text = list(tokens)
        for size in range(min(self._longest, len(text) - 1), 0, -1):
            ending = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == ending:
                    return text[start + size : start + size + most]
        return []


class Draft:
    """Proposes the most probable tokens of a smaller model.

    Args:
        generator: The smaller model, with the same tokens; its context is changed.
        most: Largest number of proposals at a time.

    Raises:
        OptionError: The model reads images or has an encoder, or no token can be taken back from
            its context.
    """

    def __init__(self, generator: Generator, most: int = 4) -> None:
        layout = generator.layout
        if most < 1:
            raise OptionError("most is out of range", got=str(most), expected="1 or more")
        if layout.image is not None or layout.source is not None:
            raise OptionError("a draft model takes text only")
        generator.require_rewindable()
        self.generator = generator
        self._most = most

    def __call__(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most ``most`` proposals for the tokens after ``tokens``."""
        generator = self.generator
        new = tokens[generator.resume(tokens) :]
        proposals: list[int] = []
        while len(new) <= generator.room and len(proposals) < min(most, self._most):
            token = int(generator.propose(new).tokens[0])
            if token in generator.layout.eos:
                break
            proposals.append(token)
            new = [token]
        return proposals

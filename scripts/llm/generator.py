"""``Generator``: a language model in a ``.pte``, fed with tokens and asked for the next."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coreml_delegate import runtime
from coreml_delegate.errors import InputError
from coreml_delegate.runtime.engines.limits import require_memory
from coreml_delegate.runtime.program.plan import TensorSpec
from coreml_delegate.scripts.llm.layout import DECODE, CacheKind, Layout

Choose = Callable[[torch.Tensor], int]


class Ending(enum.Enum):
    """Why a text ends."""

    STOP = "stop"
    LIMIT = "limit"
    CONTEXT = "context"


@dataclass(slots=True)
class Pace:
    """How many tokens were computed in how much time.

    Attributes:
        tokens: Tokens.
        seconds: Of computing them.
    """

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0 without any."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Generator:
    """A loaded language model with the tokens it has seen.

    Args:
        program: As ``runtime.load_program`` gives it.

    Attributes:
        layout: What the program says of itself.
        prefill: Pace of tokens that were given.
        decode: Pace of tokens fed one by one.
        ending: Why the text generated last ended, once it did.

    Raises:
        ProgramError: It is no language model exported by this package.
    """

    def __init__(self, program: runtime.PythonProgram | runtime.StockProgram) -> None:
        self._program = program
        self.layout = Layout.read(program.method_names, lambda name: program.run(name, []))
        self._caches = self._empty_caches()
        self._position = 0
        self.prefill, self.decode = Pace(), Pace()
        self.ending: Ending | None = None

    @classmethod
    def load(cls, path: Path | str | bytes, **options: Any) -> Generator:
        """Load a ``.pte``, and compile its methods.

        Args:
            path: The file, or its bytes.
            options: ``host``, ``engine`` and ``options`` of ``runtime.load_program``.

        Raises:
            CoreMLDelegateError: See ``runtime.load_program``, and the class.
        """
        program = runtime.load_program(path, **options)
        made = cls(program)
        for name in made.layout.methods:
            program.load_method(name)
        return made

    @property
    def position(self) -> int:
        """How many tokens it has seen."""
        return self._position

    @property
    def room(self) -> int:
        """How many more it can see."""
        return self.layout.context - self._position

    def reset(self) -> None:
        """Forget all tokens.

        What the caches hold stays there: no token sees beyond the position it has itself.
        """
        self._position = 0

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Let the model see tokens.

        Args:
            tokens: At least one.

        Returns:
            Logits [V] of the token that comes next.

        Raises:
            InputError: No token, one that the model has not, or more than the context has room for.
        """
        self._check(tokens)
        logits = torch.empty(0)
        pace = self.decode if len(tokens) == 1 else self.prefill
        start = time.perf_counter()
        for place in range(0, len(tokens), self.layout.chunk):
            logits = self._step(list(tokens[place : place + self.layout.chunk]))
        pace.seconds += time.perf_counter() - start
        pace.tokens += len(tokens)
        return logits[0]

    def generate(
        self,
        prompt: Sequence[int],
        choose: Choose,
        *,
        limit: int | None = None,
        stops: Collection[int] = (),
    ) -> Iterator[int]:
        """Tokens that follow a prompt, as they are chosen.

        Args:
            prompt: Tokens, after those seen already.
            choose: The next token of logits [V].
            limit: Most tokens to generate; None for as many as the context has room for.
            stops: Tokens that end the text, besides the model's own; they are not yielded.

        Yields:
            Tokens.

        Raises:
            InputError: See ``feed``; or ``limit`` tokens do not fit behind the prompt.
        """
        if limit is not None:
            self._check_room(len(prompt) + limit - 1, f"a prompt of {len(prompt)} and {limit} more")
        ends = {*stops, *self.layout.eos}
        self.ending = None
        logits = self.feed(prompt)
        for made in itertools.count(1):
            token = choose(logits)
            if token in ends:
                self.ending = Ending.STOP
                return
            yield token
            if made == limit or not self.room:
                self.ending = Ending.LIMIT if made == limit else Ending.CONTEXT
                return
            logits = self.feed([token])

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputError("no token to begin with", remedy="Give a prompt that is not empty")
        strangers = [token for token in tokens if not 0 <= token < self.layout.vocabulary]
        if strangers:
            raise InputError(
                "the model has no such token",
                got=str(strangers[0]),
                expected=f"0 to {self.layout.vocabulary - 1}",
                remedy="Check that the tokenizer is the model's own",
            )
        self._check_room(len(tokens), f"{len(tokens)} more")

    def _check_room(self, count: int, what: str) -> None:
        if count > self.room:
            seen = f"{self._position} tokens seen, " if self._position else ""
            raise InputError(
                f"the context of {self.layout.context} tokens is too short",
                got=f"{seen}{what}",
                expected=f"at most {self.room} more",
                remedy="Shorten the prompt or the answer, or export with a larger --context",
            )

    def _step(self, tokens: list[int]) -> torch.Tensor:
        """One call; what is new is written into the caches, by the model itself if it has them."""
        count, at = len(tokens), torch.tensor([self._position])
        if count == 1 and DECODE in self.layout.methods:
            results = self._run(DECODE, [torch.tensor([tokens]), at, *self._caches])
        else:
            chunk = torch.zeros(1, self.layout.chunk, dtype=torch.long)
            chunk[0, :count] = torch.tensor(tokens)
            last = torch.tensor([count - 1])
            results = self._run(self.layout.methods[-1], [chunk, at, last, *self._caches])
        logits, *new = results
        for cache, values in zip(self._caches, new, strict=True):
            cache[:, :, self._position : self._position + count] = values[:, :, :count]
        self._position += count
        return logits

    def _run(self, method: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.as_tensor(value) for value in self._program.run(method, inputs)]

    def _empty_caches(self) -> list[torch.Tensor]:
        if self.layout.cache is CacheKind.STATE:
            return []
        given = self._program.program.method(DECODE).input_specs[2:]
        specs = [spec for spec in given if isinstance(spec, TensorSpec)]
        require_memory(sum(spec.nbytes for spec in specs), "the caches")
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]

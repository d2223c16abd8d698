"""Run a language model in a ``.pte`` token by token, and choose the next token."""

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
from coreml_delegate.errors import InputError, OptionError
from coreml_delegate.llm.layout import DECODE, CacheKind, Layout
from coreml_delegate.runtime.engines.limits import require_memory
from coreml_delegate.runtime.program.plan import TensorSpec

Choose = Callable[[torch.Tensor], int]


class Ending(enum.Enum):
    """Why a text ended: an end token, the limit given, or a full context."""

    STOP = "stop"
    LIMIT = "limit"
    CONTEXT = "context"


@dataclass(slots=True)
class Pace:
    """Number of tokens computed, and the time it took.

    Attributes:
        tokens: Number of tokens.
        seconds: Time of computing them.
    """

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if there are none."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose the next token.

    Attributes:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Draw from this many most probable tokens; None for all.
        top_p: Draw from the fewest most probable tokens whose probabilities sum to it.
        seed: Seed of the draws.

    Raises:
        OptionError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < float("inf"), "a number of at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "an integer of at least 1"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
        )
        for name, holds, expected in checks:
            if not holds:
                raise OptionError(
                    f"{name} is out of range", got=str(getattr(self, name)), expected=expected
                )


class Sampler:
    """Chooses tokens from logits; equal settings and logits give equal tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the token chosen from ``logits`` [V] of any floating-point type."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        scores, tokens = logits.double().sort(descending=True, stable=True)
        kept = scores[: self._sampling.top_k]
        shares = torch.softmax((kept - kept[0]) / self._sampling.temperature, dim=0)
        if self._sampling.top_p < 1:
            before = shares.cumsum(0) - shares
            shares = shares[before < self._sampling.top_p]
        return int(tokens[torch.multinomial(shares, 1, generator=self._random)])


class Generator:
    """A loaded language model, its caches and its position.

    Args:
        program: A program of ``runtime.load_program``.

    Attributes:
        layout: Methods and sizes that the program declares.
        prefill: Pace of tokens fed in chunks.
        decode: Pace of tokens fed one by one.
        ending: Why the last generated text ended; None before.

    Raises:
        ProgramError: The program is no language model exported by this package.
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
        """Load a ``.pte`` and compile its methods.

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
        """Number of tokens in the context."""
        return self._position

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the context."""
        return self.layout.context - self._position

    def reset(self) -> None:
        """Begin a new text.

        The caches keep their values: no token attends to positions beyond its own, and at position
        0 the model takes states that it replaces for zeros.
        """
        self._position = 0

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the context.

        Args:
            tokens: One token at least.

        Returns:
            Logits [V] of the next token.

        Raises:
            InputError: There is no token, one is not in the vocabulary, or they do not fit.
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
        """Generate tokens after a prompt.

        Args:
            prompt: Tokens appended to the context first.
            choose: Returns the next token, given logits [V]; a ``Sampler`` for example.
            limit: Most tokens to generate; None for as many as fit into the context.
            stops: Tokens that end the text, besides the model's own; they are not yielded.

        Yields:
            Each token as it is chosen.

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
            raise InputError("there is no token", remedy="Give a prompt that is not empty")
        unknown = [token for token in tokens if not 0 <= token < self.layout.vocabulary]
        if unknown:
            raise InputError(
                "the token is not in the model's vocabulary",
                got=str(unknown[0]),
                expected=f"0 to {self.layout.vocabulary - 1}",
                remedy="Check that the tokenizer is the model's own",
            )
        self._check_room(len(tokens), f"{len(tokens)} more")

    def _check_room(self, count: int, what: str) -> None:
        if count > self.room:
            seen = f"{self._position} tokens in it, " if self._position else ""
            raise InputError(
                f"the context of {self.layout.context} tokens is too short",
                got=f"{seen}{what}",
                expected=f"at most {self.room} more",
                remedy="Shorten the prompt or the answer, or export with a larger --context",
            )

    def _step(self, tokens: list[int]) -> torch.Tensor:
        """Call the model once, and write the new keys and values into caches passed as inputs."""
        count, at = len(tokens), torch.tensor([self._position])
        if count == 1 and DECODE in self.layout.methods:
            results = self._run(DECODE, [torch.tensor([tokens]), at, *self._caches])
        else:
            chunk = torch.zeros(1, self.layout.chunk, dtype=torch.long)
            chunk[0, :count] = torch.tensor(tokens)
            last = torch.tensor([count - 1])
            results = self._run(self.layout.methods[-1], [chunk, at, last, *self._caches])
        logits, *new = results
        for number, (cache, values) in enumerate(zip(self._caches, new, strict=True)):
            whole = number in self.layout.replaced
            write_cache(cache, values, self._position, count, whole=whole)
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


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, position: int, count: int, *, whole: bool
) -> None:
    """Write what a call has made into a cache: as a whole, or its rows as ``write_rows`` does."""
    if whole:
        cache.copy_(values)
    else:
        write_rows(cache, values, position, count)


def write_rows(cache: torch.Tensor, values: torch.Tensor, position: int, count: int) -> None:
    """Write the first tokens of a call into a cache, each in the row of its position modulo all.

    Args:
        cache: [1, heads, rows, width]; it is changed.
        values: [1, heads, tokens, width], as many as the call has.
        position: That of the first token.
        count: Number of tokens to write; of more than there are rows the last ones stay.
    """
    rows = cache.shape[2]
    kept = min(count, rows)
    start = (position + count - kept) % rows
    before_end = min(kept, rows - start)
    for to, at, size in (
        (start, count - kept, before_end),
        (0, count - kept + before_end, kept - before_end),
    ):
        if size:
            cache.narrow(2, to, size).copy_(values.narrow(2, at, size))

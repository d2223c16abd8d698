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
from coreml_delegate.llm.layout import DECODE, ENCODE, CacheKind, Layout
from coreml_delegate.llm.source import Source, SourceKind
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
        encoder: Pace of source tokens, or of frames of spectrograms.
        ending: Why the last generated text ended; None before.

    Raises:
        ProgramError: The program is no language model exported by this package.
    """

    def __init__(self, program: runtime.PythonProgram | runtime.StockProgram) -> None:
        self._program = program
        self.layout = Layout.read(program.method_names, lambda name: program.run(name, []))
        self._caches = self._empty_caches()
        self._source: list[torch.Tensor] = []  # further inputs, which encode has made
        self._position = 0
        self.prefill, self.decode, self.encoder = Pace(), Pace(), Pace()
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

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of what the encoder takes: tokens [1, N] or a spectrogram [1, bins, frames].

        Raises:
            InputError: The model has no encoder.
        """
        self._require_source()
        spec = self._program.program.method(ENCODE).input_specs[0]
        return spec.shape if isinstance(spec, TensorSpec) else ()

    def reset(self) -> None:
        """Begin a new text, about the same source if the model has an encoder.

        The caches keep their values: no token attends to positions beyond its own.
        """
        self._position = 0

    def encode(self, source: Sequence[int] | torch.Tensor) -> None:
        """Give an encoder-decoder model its source, and begin a new text.

        Args:
            source: Tokens of a text, or a spectrogram [1, bins, frames] of fp32.

        Raises:
            InputError: The model has no encoder, or the source does not fit it.
        """
        takes_audio = self._require_source().kind is SourceKind.AUDIO
        shape = self.source_shape
        start = time.perf_counter()
        if takes_audio:
            inputs = [_spectrogram(source, shape)]
            count = shape[-1]
        else:
            count = len(source)
            inputs = [self._padded_source(source, shape), torch.tensor([count])]
        made = self._run(ENCODE, inputs)
        self._source = [*made, *inputs[1:]]
        self.encoder.seconds += time.perf_counter() - start
        self.encoder.tokens += count
        self.reset()

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the context.

        Args:
            tokens: One token at least.

        Returns:
            Logits [V] of the next token.

        Raises:
            InputError: There is no token, one is not in the vocabulary, or they do not fit; or no
                source has been given to a model that takes one.
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

        Tokens that the layout suppresses are not generated.

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
        logits, source = self.feed(prompt), self.layout.source
        for made in itertools.count(1):
            token = choose(logits if source is None else source.suppress(logits, first=made == 1))
            if token in ends:
                self.ending = Ending.STOP
                return
            yield token
            if made == limit or not self.room:
                self.ending = Ending.LIMIT if made == limit else Ending.CONTEXT
                return
            logits = self.feed([token])

    def _require_source(self) -> Source:
        if self.layout.source is None:
            raise InputError("the model has no encoder", remedy="Give it a prompt alone")
        return self.layout.source

    def _padded_source(
        self, source: Sequence[int] | torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        tokens = [int(token) for token in source]
        self._check_known(tokens)
        if len(tokens) > shape[1]:
            raise InputError(
                "the source text is too long",
                got=f"{len(tokens)} tokens",
                expected=f"at most {shape[1]}",
                remedy="Shorten it, or export with a larger --source-length",
            )
        return torch.tensor([tokens + [0] * (shape[1] - len(tokens))])

    def _check(self, tokens: Sequence[int]) -> None:
        if self.layout.source is not None and not self._source:
            raise InputError("the model has no source yet", remedy="Call encode first")
        self._check_known(tokens)
        self._check_room(len(tokens), f"{len(tokens)} more")

    def _check_known(self, tokens: Sequence[int]) -> None:
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
            given = [torch.tensor([tokens]), at, *self._caches, *self._source]
            results = self._run(DECODE, given)
        else:
            chunk = torch.zeros(1, self.layout.chunk, dtype=torch.long)
            chunk[0, :count] = torch.tensor(tokens)
            last = torch.tensor([count - 1])
            given = [chunk, at, last, *self._caches, *self._source]
            results = self._run(self.layout.methods[-1], given)
        logits, *new = results
        for cache, values in zip(self._caches, new, strict=True):
            write_rows(cache, values, self._position, count)
        self._position += count
        return logits

    def _run(self, method: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.as_tensor(value) for value in self._program.run(method, inputs)]

    def _empty_caches(self) -> list[torch.Tensor]:
        if self.layout.cache is CacheKind.STATE:
            return []
        program = self._program.program
        given = program.method(DECODE).input_specs[2:]
        if self.layout.source is not None:  # whose keys and values are there from encode
            encoder = program.method(ENCODE)
            given = given[: -(len(encoder.outputs) + len(encoder.inputs) - 1)]
        specs = [spec for spec in given if isinstance(spec, TensorSpec)]
        require_memory(sum(spec.nbytes for spec in specs), "the caches")
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]


def _spectrogram(source: Sequence[int] | torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    found = tuple(source.shape) if isinstance(source, torch.Tensor) else f"{len(source)} tokens"
    if not isinstance(source, torch.Tensor) or found != tuple(shape):
        raise InputError(
            "the model takes a spectrogram",
            got=str(found),
            expected=f"a tensor of shape {tuple(shape)}",
            remedy="Make it with llm.audio.spectrogram",
        )
    return source.float()


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

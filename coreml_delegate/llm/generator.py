"""Text generation with a language model in a ``.pte``: its context, and the choice of tokens."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coreml_delegate import runtime
from coreml_delegate.errors import InputError, OptionError, ProgramError
from coreml_delegate.llm.audio import checked_spectrogram, padded_samples
from coreml_delegate.llm.cached_decoder import CachedDecoder, shape_of
from coreml_delegate.llm.candidates import Candidates
from coreml_delegate.llm.images import refuse_images
from coreml_delegate.llm.layout import Layout
from coreml_delegate.llm.prompt_cache import PromptCache
from coreml_delegate.llm.sampling import Sampler
from coreml_delegate.llm.source import Source, SourceKind

Choose = Callable[[torch.Tensor], int]
Propose = Callable[[Sequence[int], int], Sequence[int]]
"""Returns tokens that may follow a text: at most the given number."""
Advance = Callable[[Sequence[int], Sequence[torch.Tensor] | None], int]


class Ending(enum.Enum):
    """Why a text ended: an end token, the limit of tokens, or a full context."""

    STOP = "stop"
    LIMIT = "limit"
    CONTEXT = "context"


@dataclass(slots=True)
class Throughput:
    """Number of computed tokens, and the time."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Speculation:
    """Calls of the model for tokens after the first, and proposals in them."""

    calls: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_call(self) -> float:
        """Tokens that a call gives on average; 0 before the first."""
        return (self.calls + self.accepted) / self.calls if self.calls else 0.0


class Generator:
    """A loaded language model, its caches and its position.

    Args:
        program: A program of ``runtime.load_program``.
        adapter: Name of the adapter to compute with; None for the base model.

    Attributes:
        prefill: Throughput of tokens fed in chunks.
        decode: Throughput of tokens fed one by one.
        encoder: Throughput of source tokens, frames of spectrograms, or samples.
        speculation: Calls and proposals since ``speculate``.
        ending: Why the last generated text ended; None before the first.

    Raises:
        ProgramError: The program is no language model of this package or for ExecuTorch's runners.
        OptionError: It has no such adapter.
    """

    def __init__(
        self,
        program: runtime.HostProgram,
        *,
        adapter: str | None = None,
    ) -> None:
        self._program = program
        self.layout = Layout.read(program.method_names, lambda name: program.run(name, []))
        self._methods = self.layout.methods_of(adapter)
        self._adapter = adapter or ""
        if not self.layout.vocabulary:
            (logits,) = program.program.method(self._methods[-1]).output_specs[:1]
            self.layout = replace(self.layout, vocabulary=shape_of(logits)[-1])
        self._decoder = CachedDecoder(program, self.layout, self._methods)
        self._tokens: list[int] = []  # of the context
        self._propose: Propose | None = None
        self.speculation = Speculation()
        self.prefill, self.decode, self.encoder = Throughput(), Throughput(), Throughput()
        self.ending: Ending | None = None

    @classmethod
    def load(
        cls, path: Path | str | bytes, *, adapter: str | None = None, **options: Any
    ) -> Generator:
        """Load a ``.pte`` and compile the methods of the adapter or base model.

        Args:
            path: The file, or its bytes.
            adapter: Name of the adapter to compute with; None for the base model.
            options: ``host``, ``engine`` and ``options`` of ``runtime.load_program``.

        Raises:
            CoreMLDelegateError: See ``runtime.load_program``, and the class.
        """
        program = runtime.load_program(path, **options)
        generator = cls(program, adapter=adapter)
        for name in (*generator.layout.input_methods, *generator._methods):
            program.load_method(name)
        return generator

    @property
    def position(self) -> int:
        """Number of tokens in the context."""
        return self._decoder.position

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the context."""
        return self.layout.context - self._decoder.position

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the encoder's input: tokens or samples [1, N], a spectrogram [1, bins, frames].

        Raises:
            InputError: The model has no encoder.
        """
        self._require_source()
        return shape_of(self._program.program.method(self._encoder).input_specs[0])

    @property
    def _encoder(self) -> str:
        """Name of the method that encodes a source."""
        return self.layout.input_methods[0]

    def reset(self) -> None:
        """Begin a new text; an encoder-decoder model keeps its source.

        The caches keep their values: no token attends to positions after its own, and at position 0
        the model reads recurrent states as zeros.
        """
        self._decoder.position = 0
        self._tokens = []

    def resume(self, tokens: Sequence[int]) -> int:
        """Keep the part of the context that a new text begins with, and forget the rest.

        Args:
            tokens: The new text. At least its last token is not kept, so that there is one to feed.

        Returns:
            Number of tokens kept. If no token can be taken back from the context, which may be
            longer than ``Layout.rewindable`` or have images, that is all tokens or none.
        """
        pairs = zip(self._tokens, tokens[:-1], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        surplus = len(self._tokens) - common
        is_rewindable = self.position <= self.layout.rewindable and self._has_text_only
        if surplus and not is_rewindable:
            self.reset()
            return 0
        self._take_back(surplus)
        return common

    def speculate(self, propose: Propose | None) -> None:
        """Let ``generate`` verify proposed tokens, several in one call.

        Args:
            propose: Such as ``PromptLookup`` or ``Draft``; None for no proposals.

        Raises:
            OptionError: The program does not return the logits of all tokens of a call, or no token
                can be taken back from its context.
        """
        if propose is not None:
            if not self._decoder.returns_all:
                raise OptionError(
                    "the program returns the logits of one token only, so no proposal can be "
                    "verified",
                    remedy="Export it with --logits all",
                )
            self.require_rewindable()
        self._propose = propose
        self.speculation = Speculation()

    def require_rewindable(self) -> None:
        """Check that tokens can be taken back from the context.

        Raises:
            OptionError: They cannot.
        """
        if not self.layout.rewindable:
            raise OptionError(
                "tokens cannot be taken back from the context of the program",
                got="a model with recurrences or rows of images that it counts, or a file of "
                "another exporter or an earlier version",
                remedy="Export it again, if it is an older file",
            )

    def save_context(self, path: Path) -> None:
        """Write the caches and tokens of the context to a file, in place of a file of that name.

        Raises:
            InputError: The context has images, or the model has a source.
            ProgramError: The host has no access to the caches.
            OSError: The folder cannot be written.
        """
        if not self._has_text_only:
            raise InputError("only a context of text can be kept in a file")
        tokens, caches = tuple(self._tokens), self._decoder.snapshot()
        PromptCache(self._program.program.digest(), self._adapter, tokens, caches).write(path)

    def load_context(self, path: Path) -> bool:
        """Replace the context by the context in a file.

        Returns:
            Whether the file is of this program and adapter; otherwise the context is as before.

        Raises:
            InputError: It is no file of ``save_context``, or damaged.
            ProgramError: The host has no access to the caches.
            OSError: It cannot be read.
        """
        stored = PromptCache.read(path)
        if (stored.program, stored.adapter) != (self._program.program.digest(), self._adapter):
            return False
        self._check_tokens(stored.tokens)
        if len(stored.tokens) > self.layout.context:
            raise InputError(
                f"{path} does not fit into the context",
                got=f"{len(stored.tokens)} tokens",
                expected=f"at most {self.layout.context}",
            )
        self._decoder.restore(stored.caches, len(stored.tokens))
        self._tokens = list(stored.tokens)
        return True

    @property
    def _has_text_only(self) -> bool:
        return self.layout.source is None and len(self._tokens) == self.position

    def _take_back(self, count: int) -> None:
        """Take the last tokens back from the context."""
        self._decoder.position -= count
        del self._tokens[len(self._tokens) - count :]

    def encode(self, source: Sequence[int] | torch.Tensor) -> None:
        """Encode the source of an encoder-decoder model, and begin a new text.

        Args:
            source: Tokens of a text; a spectrogram [1, bins, frames] of fp32; or samples [n].

        Raises:
            InputError: The model has no encoder, or the source does not fit it.
        """
        kind = self._require_source().kind
        shape = self.source_shape
        start = time.perf_counter()
        if kind is SourceKind.AUDIO:
            inputs = [checked_spectrogram(source, shape)]
            count = shape[-1]
        else:
            count = len(source)
            inputs = (
                [self._pad_source(source, shape), torch.tensor([count])]
                if kind is SourceKind.TOKENS
                else [*padded_samples(source, shape)]
            )
        results = self._decoder.run(self._encoder, inputs)
        self._decoder.source = [*results, *inputs[1:]]
        self.encoder.seconds += time.perf_counter() - start
        self.encoder.tokens += count
        self.reset()

    def feed(
        self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Append tokens to the context, and images in place of image tokens.

        Args:
            tokens: At least one token.
            images: Pixels [1, 3, H, W] of each image, in the order of the image tokens; None feeds
                an image token as any other token, which is right for generated tokens.

        Returns:
            Logits [V] of the next token.

        Raises:
            InputError: There is no token, a token is not in the vocabulary, or the context is full;
                the images do not match the tokens or the model; or an encoder-decoder model has no
                source yet.
            ProgramError: The model returns selected tokens in place of logits.
        """
        return self._logits(tokens, images)[-1]

    def follow(self, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        """Append tokens to the context, and yield the logits [n, V] after each of them, in order.

        A program that returns the logits of the last token only is called for each token.

        Raises:
            CoreMLDelegateError: See ``feed``.
        """
        size = self.layout.chunk if self._decoder.returns_all else 1
        for start in range(0, len(tokens), size):
            yield self._logits(tokens[start : start + size], None)

    def _logits(self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Append tokens; return the logits [n, V] that the last call of the program returns."""
        if self.layout.selection is not None:
            raise ProgramError(
                "the model returns no logits of all tokens",
                got=f"a program exported with --sample-in-model {self.layout.selection}",
                remedy="Call Generator.propose, or export without --sample-in-model",
            )
        return self._feed(tokens, images)[0]

    def propose(
        self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None = None
    ) -> Candidates:
        """Append tokens to the context, and return candidates for the next token.

        Args:
            tokens: At least one token.
            images: See ``feed``.

        Returns:
            The tokens that the model has selected, or all tokens.

        Raises:
            InputError: See ``feed``.
        """
        results = self._feed(tokens, images)
        if self.layout.selection is None:
            return Candidates.of_logits(results[0][-1])
        return Candidates.read(results)

    def generate(
        self,
        prompt: Sequence[int],
        choose: Choose,
        *,
        limit: int | None = None,
        stops: Collection[int] = (),
        images: Sequence[torch.Tensor] = (),
        before_last: Callable[[], None] | None = None,
    ) -> Iterator[int]:
        """Generate tokens after a prompt.

        Tokens that the layout suppresses are not generated.

        Args:
            prompt: Tokens appended to the context first.
            choose: Returns the next token of logits [V], such as a ``Sampler``. It has to be a
                ``Sampler`` if the model selects tokens itself.
            limit: Largest number of tokens to generate; None for as many as fit into the context.
            stops: Tokens that end the text, besides the model's end tokens; they are not yielded.
            images: Pixels [1, 3, H, W] of each image, in the order of the prompt's image tokens.
            before_last: Called when the context has all tokens of the prompt but the last, unless
                the prompt is one token; for ``save_context``.

        Yields:
            Each token as it is chosen. The context has all tokens before it.

        Raises:
            InputError: See ``feed``; or ``limit`` tokens do not fit behind the prompt.
            OptionError: ``choose`` cannot choose from the results of the model.
        """
        begin, advance = (self._advance_by(choose, first=first) for first in (True, False))
        if limit is not None:
            length = self._prompt_length(prompt, images)
            self._check_room(length + limit - 1, f"a prompt of {length} and {limit} more")
        ends = {*stops, *self.layout.eos}
        self.ending = None
        sampler = choose if isinstance(choose, Sampler) else None
        if sampler is not None:
            sampler.begin([*self._tokens, *prompt], ends)
        if before_last is not None and len(prompt) > 1:
            self._feed(prompt[:-1], images)
            before_last()
            prompt, images = prompt[-1:], ()
        first = begin(prompt, images)
        following = self._following(first, choose, advance, limit)
        for count, token in enumerate(itertools.chain([first], following), 1):
            if token in ends:
                self.ending = Ending.STOP
                return
            yield token
            if sampler is not None and sampler.complete:
                self.ending = Ending.STOP
                return
            if count == limit or not self.room:
                self.ending = Ending.LIMIT if count == limit else Ending.CONTEXT
                return

    def _following(
        self, token: int, choose: Choose, advance: Advance, limit: int | None
    ) -> Iterator[int]:
        """Yield the tokens after the first, ``token``, without an end.

        Args:
            token: The token.
            choose: See ``generate``.
            advance: Result of ``_advance_by``.
            limit: Tokens to generate at most, the first included; None for no limit.
        """
        count = 1
        while True:
            room = self.room if limit is None else min(self.room, limit - count)
            proposals = self._propose_after(token, min(self.layout.chunk, room) - 1)
            new = self._verify(token, proposals, choose) if proposals else [advance([token], None)]
            for token in new:
                count += 1
                yield token

    def _propose_after(self, token: int, most: int) -> list[int]:
        """Return at most ``most`` proposals for the tokens after ``token``."""
        if self._propose is None:
            return []
        most = min(most, self._decoder.verifiable)
        proposals = self._propose([*self._tokens, token], most) if most > 0 else ()
        valid = itertools.takewhile(lambda other: other < self.layout.vocabulary, proposals)
        listed = list(valid)[:most]
        self.speculation.calls += 1
        self.speculation.proposed += len(listed)
        return listed

    def _verify(self, token: int, proposals: Sequence[int], choose: Choose) -> Iterator[int]:
        """Append ``token`` and yield the tokens after it, up to the first unlike its proposal.

        While a token is yielded, the context has the tokens before it, although the caches have the
        rows of all proposals.
        """
        (logits,) = self._feed([token, *proposals], None, self.decode)
        self._take_back(len(proposals))
        self.decode.tokens -= len(proposals)
        for row, proposal in itertools.zip_longest(logits, proposals):
            chosen = choose(row)
            yield chosen
            if chosen != proposal:
                return
            self._tokens.append(chosen)
            self._decoder.position += 1
            self.decode.tokens += 1
            self.speculation.accepted += 1

    def _advance_by(self, choose: Choose, *, first: bool) -> Advance:
        """Return the function that appends tokens to the context and chooses the next token.

        Args:
            choose: See ``generate``.
            first: Whether it is the first generated token.
        """
        selection, source = self.layout.selection, self.layout.source
        if source is not None:
            return lambda tokens, images: choose(
                source.suppress(self.feed(tokens, images), first=first)
            )
        if selection is None:
            return lambda tokens, images: choose(self.feed(tokens, images))
        if not isinstance(choose, Sampler):
            raise OptionError(
                "only a Sampler chooses among tokens that the model has selected",
                got=type(choose).__name__,
                remedy="Pass a Sampler, or export without --sample-in-model",
            )
        choose.check(selection)
        return lambda tokens, images: choose.choose(self.propose(tokens, images))

    def _feed(
        self,
        tokens: Sequence[int],
        images: Sequence[torch.Tensor] | None,
        throughput: Throughput | None = None,
    ) -> list[torch.Tensor]:
        """Append tokens to the context; return the model's results without the caches.

        Args:
            tokens: At least one token.
            images: See ``feed``.
            throughput: To add to; None for ``decode`` if there is one token, else ``prefill``.
        """
        self._check(tokens, images)
        results: list[torch.Tensor] = []
        start = time.perf_counter()
        parts = self._decoder_inputs(tokens, images)
        count = sum(len(part) for part in parts)
        throughput = throughput or (self.decode if count == 1 else self.prefill)
        for part in parts:
            results = self._decoder.advance(part)
        self._tokens += tokens
        throughput.seconds += time.perf_counter() - start
        throughput.tokens += count
        return results

    def _prompt_length(self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None) -> int:
        """Return how many positions tokens and images take; check that images match tokens."""
        if self.layout.image is None:
            refuse_images(images or ())
        elif images is not None:
            self.layout.image.check(tokens, images)
            return self.layout.image.length(tokens, len(images))
        return len(tokens)

    def _decoder_inputs(
        self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None
    ) -> Sequence[torch.Tensor]:
        """Return the decoder's input for each call: tokens [L], or rows [L, channels]."""
        indices, chunk = torch.tensor(tokens), self.layout.chunk
        if self.layout.image is None:
            return indices.split(chunk)
        rows = torch.cat([self._embed(part) for part in indices.split(chunk)])
        parts: list[torch.Tensor] = []
        first_rows: list[int] = []
        start = 0
        positions = (indices == self.layout.image.token).nonzero().flatten().tolist()
        for position, pixels in zip(positions, images or (), strict=False):
            (image,) = self._decoder.run(self.layout.input_methods[0], [pixels.float()])
            parts += [rows[start:position], image[0]]
            first_rows.append(sum(map(len, parts[:-1])))
            start = position + 1
        inputs = torch.cat([*parts, rows[start:]])
        return inputs.split(list(self.layout.image.calls(len(inputs), first_rows, chunk)))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows [L, channels] of tokens [L], at most a chunk."""
        size = len(tokens) if self.layout.standard else self.layout.chunk
        chunk = torch.zeros(1, size, dtype=torch.long)
        chunk[0, : len(tokens)] = tokens
        (rows,) = self._decoder.run(self.layout.input_methods[1], [chunk])
        return rows[0, : len(tokens)]

    def _require_source(self) -> Source:
        if self.layout.source is None:
            raise InputError("the model has no encoder", remedy="Give it only a prompt")
        return self.layout.source

    def _pad_source(
        self, source: Sequence[int] | torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        tokens = [int(token) for token in source]
        self._check_tokens(tokens)
        if len(tokens) > shape[1]:
            raise InputError(
                "the source text is too long",
                got=f"{len(tokens)} tokens",
                expected=f"at most {shape[1]}",
                remedy="Shorten it, or export with a larger --source-length",
            )
        return torch.tensor([tokens + [0] * (shape[1] - len(tokens))])

    def _check(self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None) -> None:
        if self.layout.source is not None and not self._decoder.source:
            raise InputError("the model has no source yet", remedy="Call encode first")
        self._check_tokens(tokens)
        length = self._prompt_length(tokens, images)
        self._check_room(length, f"{length} more")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
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

    def _check_room(self, count: int, description: str) -> None:
        if count > self.room:
            used = f"{self._decoder.position} tokens in it, " if self._decoder.position else ""
            raise InputError(
                f"the context of {self.layout.context} tokens is too short",
                got=f"{used}{description}",
                expected=f"at most {self.room} more",
                remedy="Shorten the prompt or the answer, or export with a larger --context",
            )

"""Text generation with a language model in a ``.pte``: caches, calls and sampling."""

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
from coreml_delegate.llm.candidates import Candidates
from coreml_delegate.llm.images import refuse_images
from coreml_delegate.llm.layout import DECODE, ENCODE, CacheKind, Layout
from coreml_delegate.llm.sampling import Sampler
from coreml_delegate.llm.source import Source, SourceKind
from coreml_delegate.runtime.engines.limits import require_memory
from coreml_delegate.runtime.program.plan import TensorSpec

Choose = Callable[[torch.Tensor], int]
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


class Generator:
    """A loaded language model, its caches and its position.

    Args:
        program: A program of ``runtime.load_program``.
        adapter: Name of the adapter to compute with; None for the base model.

    Attributes:
        prefill: Throughput of tokens fed in chunks.
        decode: Throughput of tokens fed one by one.
        encoder: Throughput of source tokens, or of frames of spectrograms.
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
        if not self.layout.vocabulary:
            (logits,) = program.program.method(self._methods[-1]).output_specs[:1]
            self.layout = replace(self.layout, vocabulary=_sizes(logits)[-1])
        self._caches = self._empty_caches()
        self._source: list[torch.Tensor] = []  # results of encode, further inputs of the decoder
        self._position = 0
        self._tokens: list[int] = []  # of the context
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
        return self._position

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the context."""
        return self.layout.context - self._position

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the encoder's input: tokens [1, N] or a spectrogram [1, bins, frames].

        Raises:
            InputError: The model has no encoder.
        """
        self._require_source()
        return _sizes(self._program.program.method(self._encoder).input_specs[0])

    @property
    def _encoder(self) -> str:
        """Name of the method that encodes a source."""
        return self.layout.input_methods[0]

    def reset(self) -> None:
        """Begin a new text; an encoder-decoder model keeps its source.

        The caches keep their values: no token attends to positions after its own, and at position 0
        the model reads recurrent states as zeros.
        """
        self._position = 0
        self._tokens = []

    def encode(self, source: Sequence[int] | torch.Tensor) -> None:
        """Encode the source of an encoder-decoder model, and begin a new text.

        Args:
            source: Tokens of a text, or a spectrogram [1, bins, frames] of fp32.

        Raises:
            InputError: The model has no encoder, or the source does not fit it.
        """
        takes_audio = self._require_source().kind is SourceKind.AUDIO
        shape = self.source_shape
        start = time.perf_counter()
        if takes_audio:
            inputs = [_checked_spectrogram(source, shape)]
            count = shape[-1]
        else:
            count = len(source)
            inputs = [self._pad_source(source, shape), torch.tensor([count])]
        results = self._run(self._encoder, inputs)
        self._source = [*results, *inputs[1:]]
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
        (logits,) = self._program.program.method(self._methods[-1]).output_specs[:1]
        returns_all = len(_sizes(logits)) == 3 and _sizes(logits)[1] > 1
        size = self.layout.chunk if returns_all else 1
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

        Yields:
            Each token as it is chosen.

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
        if isinstance(choose, Sampler):
            choose.begin([*self._tokens, *prompt])
        token = begin(prompt, images)
        for count in itertools.count(1):
            if token in ends:
                self.ending = Ending.STOP
                return
            yield token
            if count == limit or not self.room:
                self.ending = Ending.LIMIT if count == limit else Ending.CONTEXT
                return
            token = advance([token], None)

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
        self, tokens: Sequence[int], images: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Append tokens to the context; return the model's results without the caches."""
        self._check(tokens, images)
        results: list[torch.Tensor] = []
        start = time.perf_counter()
        parts = self._decoder_inputs(tokens, images)
        count = sum(len(part) for part in parts)
        throughput = self.decode if count == 1 else self.prefill
        for part in parts:
            results = self._step(part)
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
            (image,) = self._run(self.layout.input_methods[0], [pixels.float()])
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
        (rows,) = self._run(self.layout.input_methods[1], [chunk])
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
        if self.layout.source is not None and not self._source:
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
            used = f"{self._position} tokens in it, " if self._position else ""
            raise InputError(
                f"the context of {self.layout.context} tokens is too short",
                got=f"{used}{description}",
                expected=f"at most {self.room} more",
                remedy="Shorten the prompt or the answer, or export with a larger --context",
            )

    def _step(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Call the model once, and write new keys, values and states into the caches.

        Returns:
            The results without the caches: logits [n, V], or the results of the layout's selection.
        """
        if self.layout.standard:
            return [self._standard_logits(inputs)]
        count, at = len(inputs), torch.tensor([self._position])
        if count == 1 and self.layout.cache is CacheKind.IO:
            arguments = [inputs[None], at, *self._caches, *self._source]
            results = self._run(self._methods[0], arguments)
        else:
            chunk = inputs.new_zeros(1, self.layout.chunk, *inputs.shape[1:])
            chunk[0, :count] = inputs
            last = torch.tensor([count - 1])
            arguments = [chunk, at, last, *self._caches, *self._source]
            results = self._run(self._methods[-1], arguments)
        first_cache = len(results) - len(self._caches)
        for number, (cache, values) in enumerate(
            zip(self._caches, results[first_cache:], strict=True)
        ):
            replace = number in self.layout.replaced
            write_cache(cache, values, self._position, count, replace=replace)
        self._position += count
        return results[:first_cache]

    def _standard_logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call ``forward`` or ``text_decoder`` once; return its logits [n, V].

        They are the last token's, n = 1. Other exporters take the position of every token in place
        of the first one's, and may return the logits of all tokens.
        """
        count, method = len(inputs), self._methods[0]
        specs = self._program.program.method(method).input_specs
        if len(specs) != 2 + len(self._source):
            raise ProgramError(
                "the program is no language model with a cache",
                got=f"{len(specs)} inputs of {method}",
                expected="tokens and their position",
            )
        positions = torch.arange(self._position, self._position + count)
        if _sizes(specs[-1]) == (1,):
            positions = positions[:1]
        arguments = [
            tensor.to(spec.dtype) if isinstance(spec, TensorSpec) else tensor
            for tensor, spec in zip((inputs[None], *self._source, positions), specs, strict=True)
        ]
        logits = self._run(method, arguments)[0]
        self._position += count
        return logits.reshape(-1, logits.shape[-1])

    def _run(self, method: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.as_tensor(value) for value in self._program.run(method, inputs)]

    def _empty_caches(self) -> list[torch.Tensor]:
        if self.layout.cache is not CacheKind.IO:
            return []
        program = self._program.program
        inputs = program.method(DECODE).input_specs[2:]
        if self.layout.source is not None:  # without the inputs that encode computes
            encoder = program.method(ENCODE)
            inputs = inputs[: -(len(encoder.outputs) + len(encoder.inputs) - 1)]
        specs = [spec for spec in inputs if isinstance(spec, TensorSpec)]
        require_memory(sum(spec.nbytes for spec in specs), "the caches")
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]


def _sizes(spec: object) -> tuple[int, ...]:
    return spec.shape if isinstance(spec, TensorSpec) else ()


def _checked_spectrogram(
    source: Sequence[int] | torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    got = tuple(source.shape) if isinstance(source, torch.Tensor) else f"{len(source)} tokens"
    if not isinstance(source, torch.Tensor) or got != tuple(shape):
        raise InputError(
            "the model takes a spectrogram",
            got=str(got),
            expected=f"a tensor of shape {tuple(shape)}",
            remedy="Make it with llm.audio.spectrogram",
        )
    return source.float()


def write_cache(
    cache: torch.Tensor, values: torch.Tensor, position: int, count: int, *, replace: bool
) -> None:
    """Write a call's result into a cache: replace the cache, or write rows with ``write_rows``."""
    if replace:
        cache.copy_(values)
    else:
        write_rows(cache, values, position, count)


def write_rows(cache: torch.Tensor, values: torch.Tensor, position: int, count: int) -> None:
    """Write the first tokens of a call into a ring buffer: position p into row p mod R.

    Args:
        cache: [1, heads, R, width]; it is changed.
        values: [1, heads, tokens, width] of the call's tokens.
        position: Position of the first token.
        count: Number of tokens to write; if it is above R, only the last R tokens are written.
    """
    rows = cache.shape[2]
    new_rows = min(count, rows)
    start = (position + count - new_rows) % rows
    before_end = min(new_rows, rows - start)
    for to, at, size in (
        (start, count - new_rows, before_end),
        (0, count - new_rows + before_end, new_rows - before_end),
    ):
        if size:
            cache.narrow(2, to, size).copy_(values.narrow(2, at, size))

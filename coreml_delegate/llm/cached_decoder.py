"""Calls of the decoding methods of a language model's ``.pte``, with caches and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from coreml_delegate import runtime
from coreml_delegate.errors import ProgramError
from coreml_delegate.llm.layout import DECODE, ENCODE, CacheKind, Layout
from coreml_delegate.runtime.engines.limits import require_memory
from coreml_delegate.runtime.program.plan import TensorSpec
from coreml_delegate.runtime.snapshots import Array, Snapshot, cast_snapshot


class CachedDecoder:
    """The decoding methods of a program, and the caches of a text.

    Args:
        program: A program of ``runtime.load_program``.
        layout: Its layout.
        methods: Names of the decoding methods; the last takes a chunk.

    Attributes:
        position: Number of tokens in the caches. It may be set to a lower number, as far as the
            caches are rewindable: no token attends to positions after its own.
        source: Results of the encoder, further inputs of the decoder.
    """

    def __init__(
        self, program: runtime.HostProgram, layout: Layout, methods: Sequence[str]
    ) -> None:
        self._program = program
        self._layout = layout
        self._methods = tuple(methods)
        self._caches = self._empty_caches()
        self.source: list[torch.Tensor] = []
        self.position = 0

    @property
    def returns_all(self) -> bool:
        """Whether a call returns the logits of all its tokens, and not of the last only."""
        sizes = shape_of(self._program.program.method(self._methods[-1]).output_specs[0])
        return len(sizes) == 3 and sizes[1] > 1

    @property
    def verifiable(self) -> int:
        """Most tokens of the next call that can be taken back after it."""
        # Core ML states have rows for a whole chunk, padding included, beside those that are seen.
        if self._layout.cache is CacheKind.STATE:
            return self._layout.chunk - 1 if self._layout.rewindable else 0
        return max(0, self._layout.rewindable - self.position - 1)

    def run(self, method: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a method of the program."""
        return [torch.as_tensor(value) for value in self._program.run(method, inputs)]

    def advance(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Call the model once, and write new keys, values and states into the caches.

        Args:
            inputs: Tokens [n] or embeddings [n, width], at most a chunk.

        Returns:
            The results without the caches: logits [n, V] or [1, V] of the last token, or the
            results of the layout's selection.
        """
        if self._layout.standard:
            return [self._standard_logits(inputs)]
        count, at = len(inputs), torch.tensor([self.position])
        if count == 1 and self._layout.cache is CacheKind.IO:
            arguments = [inputs[None], at, *self._caches, *self.source]
            results = self.run(self._methods[0], arguments)
        else:
            chunk = inputs.new_zeros(1, self._layout.chunk, *inputs.shape[1:])
            chunk[0, :count] = inputs
            last = torch.tensor([count - 1])
            arguments = [chunk, at, last, *self._caches, *self.source]
            results = self.run(self._methods[-1], arguments)
        first_cache = len(results) - len(self._caches)
        for number, (cache, values) in enumerate(
            zip(self._caches, results[first_cache:], strict=True)
        ):
            replace = number in self._layout.replaced
            write_cache(cache, values, self.position, count, replace=replace)
        self.position += count
        return results[:first_cache]

    def snapshot(self) -> Snapshot:
        """Return copies of the caches, by name.

        Raises:
            ProgramError: The host has no access to the caches; see ``HostProgram.snapshot_state``.
        """
        if self._layout.cache is CacheKind.IO:
            return {name: cache.clone().numpy() for name, cache in self._caches_by_name().items()}
        return self._program.snapshot_state()

    def restore(self, caches: Mapping[str, Array], position: int) -> None:
        """Replace the content of the caches.

        Args:
            caches: From ``snapshot`` of the same program.
            position: Number of tokens in the caches.

        Raises:
            InputError: A name, shape or dtype differs; then nothing is replaced.
            ProgramError: See ``snapshot``.
        """
        if self._layout.cache is CacheKind.IO:
            own = self._caches_by_name()
            checked = cast_snapshot({name: cache.numpy() for name, cache in own.items()}, caches)
            for name, cache in own.items():
                cache.copy_(torch.from_numpy(checked[name]))
        else:
            self._program.restore_state(caches)
        self.position = position

    def _caches_by_name(self) -> dict[str, torch.Tensor]:
        return {f"cache.{number}": cache for number, cache in enumerate(self._caches)}

    def _standard_logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call ``forward`` or ``text_decoder`` once; return its logits [n, V].

        They are the last token's, n = 1, or the logits of all tokens. Other exporters take the
        position of every token in place of the first one's.
        """
        count, method = len(inputs), self._methods[0]
        specs = self._program.program.method(method).input_specs
        if len(specs) != 2 + len(self.source):
            raise ProgramError(
                "the program is no language model with a cache",
                got=f"{len(specs)} inputs of {method}",
                expected="tokens and their position",
            )
        positions = torch.arange(self.position, self.position + count)
        if shape_of(specs[-1]) == (1,):
            positions = positions[:1]
        arguments = [
            tensor.to(spec.dtype) if isinstance(spec, TensorSpec) else tensor
            for tensor, spec in zip((inputs[None], *self.source, positions), specs, strict=True)
        ]
        logits = self.run(method, arguments)[0]
        self.position += count
        return logits.reshape(-1, logits.shape[-1])

    def _empty_caches(self) -> list[torch.Tensor]:
        if self._layout.cache is not CacheKind.IO:
            return []
        program = self._program.program
        inputs = program.method(DECODE).input_specs[2:]
        if self._layout.source is not None:  # without the inputs that encode computes
            encoder = program.method(ENCODE)
            inputs = inputs[: -(len(encoder.outputs) + len(encoder.inputs) - 1)]
        specs = [spec for spec in inputs if isinstance(spec, TensorSpec)]
        require_memory(sum(spec.nbytes for spec in specs), "the caches")
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs]


def shape_of(spec: object) -> tuple[int, ...]:
    """Return the sizes of a tensor's specification; none for another value."""
    return spec.shape if isinstance(spec, TensorSpec) else ()


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

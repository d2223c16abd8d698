"""A language model of ``transformers``, prepared for export.

The modules stay those of ``transformers``. Attention and masks are replaced through its interfaces,
and rotary embeddings by tables. The logits are compared before and after, so that an untested
architecture is not exported wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from coreml_delegate.errors import LoweringError, OptionError
from coreml_delegate.llm.attention import NAME, Call, active_call
from coreml_delegate.llm.cached_decoder import write_cache
from coreml_delegate.llm.caches import LayerCache, input_caches, new_tensors, read_layers
from coreml_delegate.llm.experts import stack_experts
from coreml_delegate.llm.positions import tabulate_positions
from coreml_delegate.llm.recurrences import use_own_recurrences
from coreml_delegate.patches.third_party import transformers, without_kernel_advice, wrap_errors
from coreml_delegate.patches.transformers import set_attention

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

_PROBE_TOKENS = 5  # of the text whose logits are compared
_TOLERANCE = 1e-3  # relative to the largest logit; fp32 kernels differ by a thousandth of it

_REFUSED: Mapping[str, str] = {
    "afmoe": "it takes the result of attention only if it is in one piece of memory",
    "mpt": "its biases are cut at the number of earlier tokens, a number at run time",
}
"""Reasons for refusing architectures whose caches are of a supported kind."""


class Decoder(nn.Module):
    """Language model from tokens to logits.

    Args:
        model: A causal language model of ``transformers`` in fp32 and eval mode; changed.
        context: Number of tokens of the longest text.

    Attributes:
        ordered: Whether cached keys have to be in the order of their positions.
        probe_tokens: A short text, [1, T].
        probe_logits: Its logits [1, T, V] by the unchanged model.

    Raises:
        LoweringError: The model has an unsupported part, which the error names.
        OptionError: The context is too long for the model.
    """

    def __init__(self, model: Any, *, context: int) -> None:
        super().__init__()
        if context < 2:
            raise OptionError("the context is too short", got=str(context), expected="2 or more")
        self.context = context
        self.model = model
        if (reason := _REFUSED.get(model.config.model_type)) is not None:
            raise LoweringError(f"{type(model).__name__} is not supported", got=reason)
        self.probe_tokens = torch.arange(min(_PROBE_TOKENS, context))[None]
        self.layers, expected = _probe(model, self.probe_tokens)
        self.probe_logits = expected
        _use_linear_layers(model)
        stack_experts(model)
        use_own_recurrences(model, self.layers)
        tabulate_positions(model, context)
        use_our_attention(model)
        self._accepted = inspect.signature(model.forward).parameters
        with wrap_errors(_refusal(model), kind=LoweringError):
            text = self.probe_tokens
            self.ordered = self._check_whole(expected, text)
            self._refuse_windows()
            self._check_steps(expected, text)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the model; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.model.config.get_text_config(decoder=True).vocab_size

    @property
    def bos(self) -> int | None:
        """Token that begins a text, or None."""
        return self.model.config.get_text_config(decoder=True).bos_token_id

    @property
    def replaced(self) -> tuple[int, ...]:
        """Indices of the caches that each call replaces as a whole."""
        flags = [flag for layer in self.layers for flag in layer.replaced]
        return tuple(number for number, flag in enumerate(flags) if flag)

    @property
    def least_chunk(self) -> int:
        """Least number of tokens of a chunk."""
        return 1

    @property
    def rewindable(self) -> int:
        """Number of tokens of the longest text from which tokens can be taken back.

        Layers with a window have rows for its tokens only, a recurrence has only its last state.
        """
        windows = (layer.window for layer in self.layers if layer.window)
        return 0 if self.replaced else min((self.context, *windows))

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return self.model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        """The projection to logits."""
        return self.model.get_output_embeddings()

    def language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that compute with tokens, by name."""
        yield from self.named_modules()

    def inputs(self, length: int) -> torch.Tensor:
        """Return example tokens or embeddings of ``length`` tokens for ``advance``."""
        return (torch.arange(length) % self.vocabulary)[None]

    def input_modules(self, chunk: int) -> list[tuple[nn.Module, torch.Tensor]]:
        """Return the modules that compute the inputs of ``advance``, each with an example input."""
        del chunk
        return []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, L, V] of all tokens of complete texts.

        Args:
            tokens: [B, L], integers; or their embeddings [B, L, width].
        """
        call = Call()
        inputs = self.model_inputs(tokens, call, torch.arange(tokens.shape[1]))
        with active_call(call, self.model):
            return self.model(**inputs, use_cache=False).logits

    def model_inputs(
        self,
        inputs: torch.Tensor,
        call: Call,
        positions: torch.Tensor,
        cache: Cache | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return tokens or embeddings as keyword arguments of the model.

        Args:
            inputs: Tokens [B, L], or embeddings [B, L, width].
            call: May get more about them.
            positions: Their positions in the context, [L].
            cache: See ``advance``; None for complete texts.
        """
        del call, positions, cache
        return {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}

    def advance(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        cache: Cache,
        call: Call,
        last: torch.Tensor | None = None,
        *,
        all_logits: bool = False,
    ) -> torch.Tensor:
        """Return the logits [1, V] of one token, or [1, L, V] of every token.

        Args:
            tokens: [1, L], integers; or their embeddings [1, L, width].
            position: Position of the first token, [1], integers.
            cache: Keys and values of earlier tokens; the call adds its own.
            call: Records the segments of the cache.
            last: Index of the token whose logits are returned, [1]; None for a single token.
            all_logits: Return the logits of every token; ``last`` is then not read.
        """
        length = tokens.shape[1]
        last = None if all_logits else last
        positions = position + torch.arange(length)
        if length > 1:
            # Padding after the end of the context has no position of its own.
            positions = positions.clamp(max=self.context - 1)
        options: dict[str, Any] = {"position_ids": positions[None], "logits_to_keep": last}
        if self.ordered:
            columns = cache.get_mask_sizes(length, 0)[0]
            options["attention_mask"] = torch.ones(1, columns, dtype=torch.long)
        accepted = {
            name: value
            for name, value in options.items()
            if value is not None and name in self._accepted
        }
        accepted |= self.model_inputs(tokens, call, positions, cache)
        with active_call(call, self.model):
            outputs = self.model(**accepted, cache=cache, use_cache=True)
        if last is not None and "logits_to_keep" not in accepted:
            return outputs.logits.index_select(1, last)[:, 0]
        return outputs.logits if all_logits else outputs.logits[:, 0]

    @torch.no_grad()
    def _check_whole(self, expected: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Compare the logits of a text with the unchanged model's.

        Args:
            expected: Logits [1, T, V] of the unchanged model.
            inputs: Tokens [1, T], or embeddings [1, T, width].

        Returns:
            Whether cached keys have to be in the order of their positions: the model has attention
            and does not call the attention function.

        Raises:
            LoweringError: The logits differ.
        """
        call = Call()
        arguments = self.model_inputs(inputs, call, torch.arange(inputs.shape[1]))
        with active_call(call, self.model):
            logits = self.model(**arguments, use_cache=False).logits
        require_equal(self.model, logits, expected)
        return not call.attended and any(layer.keys for layer in self.layers)

    @torch.no_grad()
    def _check_steps(
        self, expected: torch.Tensor, inputs: torch.Tensor, share: int | None = None
    ) -> None:
        """Compare the logits of several calls: padded chunks, then a single token.

        Args:
            expected: Logits [1, T, V] of the unchanged model.
            inputs: Tokens [1, T], or embeddings [1, T, width].
            share: Tokens of a chunk; None for about half of them.
        """
        past = [empty for layer in self.layers for empty in layer.empty(self.context, 0).values()]
        replaced = self.replaced
        before = inputs.shape[1] - 1
        share = share or max(1, before // 2)
        for start in (*range(0, before, share), before):
            count = 1 if start == before else min(share, before - start)
            length = 1 if start == before else share + 1
            call, position, last = Call(), torch.tensor([start]), torch.tensor([count - 1])
            cache = input_caches(
                self.layers,
                past,
                position,
                call,
                length=length,
                ordered=self.ordered,
                last=last if length > 1 else None,
            )
            chunk = inputs.new_zeros(1, length, *inputs.shape[2:])
            chunk[:, :count] = inputs[:, start : start + count]
            logits = self.advance(chunk, position, cache, call, last)
            require_equal(self.model, logits, expected[:, start + count - 1])
            for number, (rows, new) in enumerate(zip(past, new_tensors(cache), strict=True)):
                write_cache(rows, new, start, count, replace=number in replaced)

    def _refuse_windows(self) -> None:
        window = min((layer.window or self.context for layer in self.layers), default=self.context)
        if self.ordered and window < self.context:
            raise OptionError(
                "sliding windows are not supported for this architecture",
                got=f"a window of {window} tokens for a context of {self.context}",
                remedy=f"Export a context of at most {window} tokens",
            )


def require_equal(model: Any, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits with the ``expected`` logits of the unchanged model.

    Raises:
        LoweringError: They differ by more than ``_TOLERANCE`` of the largest expected logit.
    """
    bound = _TOLERANCE * float(expected.abs().max())
    if not torch.allclose(logits, expected, rtol=0, atol=bound):
        raise LoweringError(
            f"{type(model).__name__} computes something else with caches",
            got=f"logits that differ by {float((logits - expected).abs().max()):.2g}",
        )


def use_our_attention(model: nn.Module, name: str = NAME) -> None:
    """Set the attention and mask functions of this package for a model and its parts.

    Args:
        model: Changed.
        name: Of the functions in the interfaces of ``transformers``.
    """
    for config in {id(config): config for config in _configurations(model)}.values():
        set_attention(config, name)


def _refusal(model: nn.Module) -> str:
    return f"{type(model).__name__} does not compute with a cache of keys and values"


@torch.no_grad()
def _probe(model: Any, tokens: torch.Tensor) -> tuple[tuple[LayerCache, ...], torch.Tensor]:
    """Return the shapes of the layers' caches, and the logits [1, T, V] of a text of T tokens."""
    with wrap_errors(_refusal(model), kind=LoweringError), without_kernel_advice():
        cache = transformers().DynamicCache(config=model.config)
        outputs = model(input_ids=tokens, cache=cache, use_cache=True)
        if getattr(outputs, "cache", None) is not cache:
            raise LoweringError(_refusal(model))
        return read_layers(cache), outputs.logits


def _use_linear_layers(model: nn.Module) -> None:
    """Replace GPT-2's ``Conv1D`` by ``nn.Linear``, which can be quantized."""
    transposed = transformers().pytorch_utils.Conv1D
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, transposed):
                setattr(parent, name, _to_linear(module))


def _to_linear(layer: Any) -> nn.Linear:
    inputs, outputs = layer.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear


def _configurations(model: nn.Module) -> Iterator[Any]:
    """Yield the configurations of a model and of its parts."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            yield config

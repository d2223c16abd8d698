"""Models that compute a vector or a score of a text: checkpoint, pooling, export.

A text of n tokens is padded behind to a fixed length L. With the hidden states h [L, D] of the
model and the mask m [L] (1 for the n tokens, 0 for padding) the vector v [D] is, by pooling:

- ``cls``: h of the first token; ``last``: h of token n - 1;
- ``mean``: sum(m h) / n; ``max``: the largest h of the n tokens, for each dimension.

A checkpoint of sentence-transformers says in ``modules.json`` which pooling it needs, and which
dense layers and normalization v / |v| follow. Cross-encoders (``...ForSequenceClassification``)
have no pooling; they compute the logits of their labels, of one text or of a pair. A reranker that
answers a question by one of two tokens (Qwen3-Reranker) has the score logit(yes) - logit(no) of
the token behind the text, whose sigmoid is the probability of yes among both.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional

from coreml_delegate import runtime
from coreml_delegate.errors import InputError, LoweringError, OptionError, ProgramError
from coreml_delegate.llm.checkpoint import (
    CONFIG,
    load_model,
    random_model,
    read_any_config,
    read_json,
)
from coreml_delegate.llm.stored_weights import in_memory, read_weights, stored_weights
from coreml_delegate.llm.tokenizer import FileTokenizer
from coreml_delegate.patches.third_party import transformers, wrap_errors

LENGTH = 512
"""Tokens of the longest text by default."""

_MODULES = "modules.json"
_WEIGHTS = "model.safetensors"
_SCORES = "ForSequenceClassification"
_OPTIONAL = ("pooler",)  # it computes no hidden state
_HEADS = ("cls", "decoder", "head", "lm_head", "pooler", "predictions", "qa_outputs", "score")
"""Parts that a checkpoint of another task has besides a base model."""
_TOLERANCE = 1e-3  # of the largest value; padding changes the order of sums
_PROBE_TOKENS = 5
_FORWARD = "forward"
_LENGTHS, _PAD, _VOCABULARY = "get_lengths", "get_pad_id", "get_vocab_size"


class Pooling(enum.Enum):
    """From the hidden states of a text to one vector; the module has the formulas."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    MAX = "max"


# Keys of a pooling's config.json in sentence-transformers, and values of ``pooling_mode``.
_POOLINGS: Mapping[str, Pooling] = MappingProxyType(
    {
        "cls_token": Pooling.CLS,
        "mean_tokens": Pooling.MEAN,
        "max_tokens": Pooling.MAX,
        "lasttoken": Pooling.LAST,
    }
)
_ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.SiLU)}
)


@dataclass(frozen=True, slots=True)
class Head:
    """The steps from the hidden states of a model to a vector.

    Attributes:
        pooling: The pooling; None if the checkpoint does not say it.
        layers: Dense layers and activations after the pooling.
        normalizes: Whether the vector is divided by its length.
        summary: Description of the layers; empty to list them.
    """

    pooling: Pooling | None = None
    layers: Sequence[nn.Module] = field(default=())
    normalizes: bool = True
    summary: str = ""


class TextEncoder(nn.Module):
    """A model of ``transformers`` that computes a vector or scores of a padded text.

    Args:
        model: A base model, or one for sequence classification.
        head: Pooling and what follows; None for the model's own logits.
        lengths: Numbers of tokens L that the exported methods take.

    Raises:
        LoweringError: Padding changes the result of the model.
        OptionError: A length is longer than the model supports; or the pooling is unknown.
    """

    def __init__(self, model: Any, head: Head | None, lengths: Sequence[int]) -> None:
        super().__init__()
        if head is not None and head.pooling is None:
            raise OptionError(
                "the checkpoint does not say how its hidden states become one vector",
                expected=f"{_MODULES} of sentence-transformers",
                remedy=f"Pass --pooling {'|'.join(pooling.value for pooling in Pooling)}",
            )
        self.model = model
        self.lengths = tuple(sorted(set(lengths)))
        self._head = head
        self._layers = nn.Sequential(*(() if head is None else head.layers))
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and self.lengths[-1] > most:
            raise OptionError(
                "the length is longer than the model supports",
                got=str(self.lengths[-1]),
                expected=f"at most {most}",
            )
        self._check_padding()

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.model.config.get_text_config().vocab_size

    @property
    def padding(self) -> int:
        """Token behind a text that is shorter than the length."""
        return getattr(self.model.config, "pad_token_id", None) or 0

    @property
    def takes_pairs(self) -> bool:
        """Whether an input marks the tokens of the second text of a pair."""
        kinds = getattr(self.model.config, "type_vocab_size", None) or 0
        return self._head is None and kinds > 1

    @property
    def outputs(self) -> int:
        """Number of values of a result."""
        return self._outputs

    def describe_head(self) -> str:
        """Return the steps after the hidden states, for a summary."""
        head = self._head
        if head is None or head.pooling is None:
            return "logits of labels"
        if head.summary:
            return head.summary
        dense = "".join(f", {type(layer).__name__}" for layer in head.layers)
        return f"pooling {head.pooling.value}{dense}{', normalized' if head.normalizes else ''}"

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return self.model.get_input_embeddings()

    def language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that compute with tokens, by name."""
        yield from self.named_modules()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the vector [1, D], or the logits [1, labels].

        Args:
            input_ids: [1, L], int64.
            attention_mask: [1, L], int64: 1 for the tokens of the text, 0 for padding behind them.
            token_type_ids: [1, L], int64: 1 for the second text of a pair, 0 for other tokens.
        """
        kinds = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **kinds)
        if self._head is None:
            return result.logits
        states = result.last_hidden_state
        vector = self._layers(self._pool(states, attention_mask.to(states.dtype)))
        return functional.normalize(vector, dim=-1) if self._head.normalizes else vector

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the vector [1, D] of hidden states [1, L, D] with a mask [1, L]."""
        pooling = None if self._head is None else self._head.pooling
        if pooling is Pooling.CLS:
            return states[:, 0]
        if pooling is Pooling.MAX:
            least = torch.finfo(torch.float16).min
            return torch.where(mask[..., None] > 0, states, least).amax(1)
        if pooling is Pooling.MEAN:
            # Divided before the sum, which may be too large for fp16.
            weights = mask / mask.sum(1, keepdim=True)
        else:
            last = mask.sum(1, keepdim=True) - 1
            weights = (torch.arange(mask.shape[1]) == last).to(states.dtype)
        return (weights[:, None] @ states)[:, 0]

    def inputs(self, length: int, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return example inputs of ``forward``: some tokens, padded to a length."""
        text = torch.arange(length) % self.vocabulary
        mask = (torch.arange(length) < tokens).long()
        kinds = (torch.zeros(1, length, dtype=torch.long),) if self.takes_pairs else ()
        return torch.where(mask > 0, text, self.padding)[None], mask[None], *kinds

    @torch.no_grad()
    def _check_padding(self) -> None:
        length = self.lengths[-1]
        tokens = min(_PROBE_TOKENS, length)
        with wrap_errors(f"{type(self.model).__name__} cannot compute {length} tokens"):
            expected, padded = (self(*self.inputs(size, tokens)) for size in (tokens, length))
        self._outputs = expected.shape[-1]
        bound = _TOLERANCE * float(expected.abs().max())
        if not torch.allclose(padded, expected, rtol=0, atol=bound):
            raise LoweringError(
                f"{type(self.model).__name__} computes something else with padding",
                got=f"values that differ by {float((padded - expected).abs().max()):.2g}",
                remedy="Check that the pad_token_id of its config.json is right",
            )


def load_encoder(
    folder: Path | None,
    config_path: Path,
    *,
    lengths: Sequence[int] = (),
    pooling: Pooling | None = None,
    normalizes: bool | None = None,
    answers: tuple[str, str] | None = None,
    seed: int = 0,
) -> TextEncoder:
    """Return a model with the weights of a checkpoint, in fp32, or with random weights.

    Args:
        folder: Checkpoint as sentence-transformers or transformers save it; None for random
            weights.
        config_path: ``config.json``.
        lengths: Numbers of tokens; empty for the model's own maximum, at most ``LENGTH``.
        pooling: The pooling, in place of the checkpoint's.
        normalizes: Whether vectors have the length 1, in place of the checkpoint's setting.
        answers: Tokens, as texts or numbers, of a causal language model: the score is the logit of
            the first minus the logit of the second. None for vectors and cross-encoders.
        seed: Seed of random weights.

    Raises:
        OptionError: A file is missing or malformed, the architecture is not supported, or the
            options do not fit it.
        LoweringError: See ``TextEncoder``; or the logits are no product of hidden states.
    """
    config = read_any_config(config_path)
    if config.is_encoder_decoder:
        raise OptionError(
            "the model has a decoder", got=config.model_type, expected="a model with one part"
        )
    library = transformers()
    scores = any(name.endswith(_SCORES) for name in config.architectures or ())
    if (scores or answers) and (pooling is not None or normalizes is not None):
        raise OptionError(
            "the model computes scores, and has no pooling", got=str(config.architectures)
        )
    most = getattr(config, "max_position_embeddings", None) or LENGTH
    lengths = lengths or (min(LENGTH, most),)
    if answers is not None:
        if scores:
            raise OptionError("the model has logits of labels, and no answers", got=str(answers))
        model = random_model(config, seed) if folder is None else load_model(folder, config)
        return TextEncoder(model.get_decoder(), _answer_head(model, folder, answers), lengths)
    model_class = library.AutoModelForSequenceClassification if scores else library.AutoModel
    if folder is None:
        model = random_model(config, seed, model_class)
    else:
        parts = {} if scores else {"optional": _OPTIONAL, "foreign": _HEADS}
        model = load_model(folder, config, model_class, **parts)
    head = None if scores else _read_head(folder, pooling, normalizes)
    return TextEncoder(model, head, lengths)


@torch.no_grad()
def _answer_head(model: Any, folder: Path | None, answers: Sequence[str]) -> Head:
    """Return the head of a causal language model that answers by one of two tokens."""
    tokens = [_answer_token(folder, answer) for answer in answers]
    vocabulary = model.config.get_text_config().vocab_size
    if max(tokens) >= vocabulary:
        raise OptionError(
            "an answer is not in the vocabulary", got=str(max(tokens)), expected=f"< {vocabulary}"
        )
    yes, no = in_memory(model.get_output_embeddings().weight)[tokens]
    layer = nn.Linear(len(yes), 1, bias=False).requires_grad_(False)
    layer.weight.copy_(yes - no)
    text = torch.arange(min(_PROBE_TOKENS, vocabulary))[None]
    logits = model(input_ids=text, use_cache=False).logits[0, -1, tokens]
    score = layer(model.get_decoder()(input_ids=text, use_cache=False).last_hidden_state[0, -1])
    bound = _TOLERANCE * float(logits.abs().max())
    if not torch.allclose(score[0], logits[0] - logits[1], rtol=0, atol=bound):
        raise LoweringError(
            f"{type(model).__name__} computes its logits by more than a product",
            got=f"{float(logits[0] - logits[1]):.4g}, by the product {float(score):.4g}",
        )
    summary = "logit of {} minus logit of {}".format(*answers)
    return Head(Pooling.LAST, [layer], normalizes=False, summary=summary)


def _answer_token(folder: Path | None, answer: str) -> int:
    if answer.isdecimal():
        return int(answer)
    if folder is None:
        raise OptionError(
            "random weights have no tokenizer", got=answer, expected="the number of a token"
        )
    tokens = FileTokenizer(folder).encode(answer)
    if len(tokens) != 1:
        raise OptionError(
            "an answer is not one token", got=f"{answer}: {tokens}", expected="the text of a token"
        )
    return tokens[0]


def _read_head(folder: Path | None, pooling: Pooling | None, normalizes: bool | None) -> Head:
    """Return the head of the options, completed by ``modules.json`` of sentence-transformers."""
    listed = None if folder is None else folder / _MODULES
    if folder is None or listed is None or not listed.is_file():
        return Head(pooling, normalizes=normalizes is not False)
    layers: list[nn.Module] = []
    normalizes_by_file = False
    for entry in read_json(listed, kind=list):
        kind = str(entry.get("type", "")).rpartition(".")[2]
        part = folder / str(entry.get("path", ""))
        if kind == "Pooling":
            pooling = pooling or _read_pooling(part / CONFIG)
        elif kind == "Dense":
            layers += _read_dense(part)
        elif kind == "Normalize":
            normalizes_by_file = True
        elif kind != "Transformer":
            raise OptionError(f"{listed} has a module that is not supported", got=str(entry))
    return Head(pooling, layers, normalizes_by_file if normalizes is None else normalizes)


def _read_pooling(path: Path) -> Pooling:
    values = read_json(path)
    modes = [
        key.removeprefix("pooling_mode_")
        for key, value in values.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if "pooling_mode" in values:
        modes = [str(values["pooling_mode"])]
    by_name = {**_POOLINGS, **{pooling.value: pooling for pooling in Pooling}}
    if len(modes) != 1 or modes[0] not in by_name:
        raise OptionError(
            f"{path} has a pooling that is not supported",
            got=", ".join(modes) or "none",
            expected=f"one of {', '.join(by_name)}",
            remedy="Choose one of them with --pooling",
        )
    return by_name[modes[0]]


def _read_dense(folder: Path) -> list[nn.Module]:
    values = read_json(folder / CONFIG)
    name = str(values.get("activation_function", "")).rpartition(".")[2]
    activation = _ACTIVATIONS.get(name)
    if activation is None:
        raise OptionError(
            f"{folder} has an activation that is not supported",
            got=name,
            expected=", ".join(_ACTIVATIONS),
        )
    with wrap_errors(f"cannot read a dense layer from {folder}"):
        layer = nn.Linear(values["in_features"], values["out_features"], values.get("bias", True))
        weights = stored_weights([folder / _WEIGHTS])
        state = {name.removeprefix("linear."): in_memory(w) for name, w in weights.items()}
        layer.load_state_dict(state)
    return [layer.requires_grad_(False), activation()]


def export_encoder(encoder: TextEncoder) -> dict[str, ExportedProgram]:
    """Export a method for each length, in ATen dialect; they share the weights.

    The method is ``forward`` if there is one length, and otherwise ``forward_L``.

    Raises:
        LoweringError: ``torch.export`` cannot capture the model.
    """
    read_weights(encoder)
    methods: dict[str, ExportedProgram] = {}
    with torch.no_grad(), wrap_errors("torch.export cannot capture the model", kind=LoweringError):
        for length, name in _methods(encoder.lengths).items():
            inputs = encoder.inputs(length, length)
            methods[name] = torch.export.export(encoder.eval(), inputs)
    return methods


def constants(encoder: TextEncoder) -> dict[str, Any]:
    """Return the values of constant methods by name."""
    return {
        _LENGTHS: list(encoder.lengths),
        _PAD: encoder.padding,
        _VOCABULARY: encoder.vocabulary,
    }


def _methods(lengths: Sequence[int]) -> dict[int, str]:
    if len(lengths) == 1:
        return {lengths[0]: _FORWARD}
    return {length: f"{_FORWARD}_{length}" for length in lengths}


class Embedder:
    """A ``.pte`` of ``export-embedding``, with its tokenizer.

    Args:
        program: A program of ``runtime.load_program``.
        tokenizer: Tokenizer of the checkpoint; None to take tokens only.

    Attributes:
        lengths: Numbers of tokens of the methods; a text is padded to the next one.

    Raises:
        ProgramError: The program is of another kind.
    """

    def __init__(
        self, program: runtime.HostProgram, tokenizer: FileTokenizer | None = None
    ) -> None:
        if _LENGTHS not in program.method_names:
            raise ProgramError(
                "the program computes no vectors of texts",
                got=f"the methods {', '.join(program.method_names)}",
                expected="a file of coreml-delegate export-embedding",
            )
        self._program, self._tokenizer = program, tokenizer
        lengths, paddings, vocabularies = (
            _integers(program.run(name, [])) for name in (_LENGTHS, _PAD, _VOCABULARY)
        )
        self.lengths = tuple(lengths)
        self._padding, self._vocabulary = paddings[0], vocabularies[0]

    @classmethod
    def load(
        cls, path: Path | str, tokenizer: Path | str | None = None, **options: Any
    ) -> Embedder:
        """Load a ``.pte``.

        Args:
            path: The file.
            tokenizer: ``tokenizer.json`` or its folder; None to take tokens only.
            options: ``host``, ``engine`` and ``options`` of ``runtime.load_program``.

        Raises:
            CoreMLDelegateError: See ``runtime.load_program``, and the class.
        """
        reader = None if tokenizer is None else FileTokenizer(Path(tokenizer))
        return cls(runtime.load_program(Path(path), **options), reader)

    def __call__(self, text: str | Sequence[int], second: str | None = None) -> torch.Tensor:
        """Return the vector [D] of a text, or the logits [labels] of a text or pair.

        Args:
            text: A text, or its tokens with those that begin and end a text.
            second: Second text of a pair, of a cross-encoder.

        Raises:
            InputError: The text is empty or too long, a token is not in the vocabulary, or there is
                no tokenizer.
        """
        tokens, kinds = self._encode(text, second)
        length = next((size for size in self.lengths if size >= len(tokens)), None)
        if not tokens or length is None:
            raise InputError(
                "the text has no token" if not tokens else "the text is too long",
                got=f"{len(tokens)} tokens",
                expected=f"1 to {self.lengths[-1]}",
            )
        unknown = [token for token in tokens if not 0 <= token < self._vocabulary]
        if unknown:
            raise InputError(
                "the token is not in the model's vocabulary",
                got=str(unknown[0]),
                expected=f"0 to {self._vocabulary - 1}",
            )
        padding = length - len(tokens)
        method = _methods(self.lengths)[length]
        zeros = [0] * padding
        rows = (tokens + [self._padding] * padding, [1] * len(tokens) + zeros, kinds + zeros)
        count = len(self._program.program.method(method).inputs)
        inputs = [torch.tensor([row]) for row in rows[:count]]
        return torch.as_tensor(self._program.run(method, inputs)[0])[0]

    def _encode(self, text: str | Sequence[int], second: str | None) -> tuple[list[int], list[int]]:
        """Return the tokens, and for each 1 if it belongs to the second text, otherwise 0."""
        if not isinstance(text, str):
            return list(text), [0] * len(text)
        if self._tokenizer is None:
            raise InputError(
                "there is no tokenizer", remedy="Pass the tokenizer to load, or tokens as the text"
            )
        return self._tokenizer.encode_pair(text, second)


def _integers(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values]

"""Encoder-decoder models from configurations and checkpoints, and their ``Source``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.checkpoint import (
    generation_options,
    load_model,
    main_input,
    random_model,
    read_json,
)
from coreml_delegate.llm.encoder_decoder import EncoderDecoder, source_kind
from coreml_delegate.llm.source import Source, SourceKind, Spectrogram

_PREPROCESSOR = "preprocessor_config.json"
_SUPPRESSED = {"suppressed": "suppress_tokens", "first_suppressed": "begin_suppress_tokens"}

# Names of the number of positions in configurations; T5 has relative positions and no limit.
_ANSWER = ("max_target_positions", "max_position_embeddings")
_SOURCE = ("max_position_embeddings",)
_UNLIMITED = 512
_SECONDS = 30  # of the longest recording
_LARGEST = {"context": 2048, "source length": 1024}
_OPTIONS = {"context": "--context", "source length": "--source-length"}

# Names in preprocessor_config.json.
_SIZES = {"sampling_rate": "sampling_rate", "hop_length": "hop_length", "fft_size": "n_fft"}


def load_encoder_decoder(
    config: Any,
    folder: Path | None,
    *,
    seed: int = 0,
    context: int | None = None,
    source_length: int | None = None,
) -> EncoderDecoder:
    """Return an encoder-decoder model with a checkpoint's weights, or with random weights.

    Args:
        config: Configuration of ``transformers``.
        folder: The checkpoint; None for random weights.
        seed: Seed of random weights.
        context: Tokens of the longest answer; None for the model's own, at most 2048.
        source_length: Tokens of the longest source text; None for the model's own, at most 1024.
            Or samples of the longest recording; None for 30 seconds.

    Raises:
        OptionError: A size does not fit the model, or see ``load_decoder``.
        LoweringError: See ``EncoderDecoder``.
    """
    context = _checked_size(config, "context", context, _ANSWER)
    kind = source_kind(main_input(config))
    takes_audio = kind is SourceKind.AUDIO
    length = (
        source_length or _SECONDS * _read_spectrogram(folder).sampling_rate
        if kind is SourceKind.SAMPLES
        else _checked_size(config, "source length", source_length, _SOURCE)
    )
    if takes_audio and source_length is not None:
        raise OptionError(
            "the model takes spectrograms, whose length its configuration says",
            got=f"--source-length {source_length}",
        )
    model = random_model(config, seed) if folder is None else load_model(folder, config)
    length = None if takes_audio else length
    return EncoderDecoder(model, context=context, source=length)


def describe_source(model: EncoderDecoder, config: Any, folder: Path | None) -> Source:
    """Return the layout's facts about a model's source and the start of its answers.

    Args:
        model: The model.
        config: Its configuration.
        folder: Its checkpoint, or None; ``generation_config.json`` and
            ``preprocessor_config.json`` are read if they exist.

    Raises:
        OptionError: A file is malformed, or no token begins an answer.
    """
    options = {**config.to_dict(), **generation_options(folder)}
    start = options.get("decoder_start_token_id")
    start = options.get("bos_token_id") if start is None else start
    if start is None:
        raise OptionError(
            "the configuration does not say which token begins an answer",
            expected="decoder_start_token_id",
        )
    suppressed = {
        field: tuple(t for t in _read_tokens(options, name) if t < model.vocabulary)
        for field, name in _SUPPRESSED.items()
    }
    return Source(
        kind=model.kind,
        length=model.source,
        start=_read_tokens({"decoder_start_token_id": start}, "decoder_start_token_id"),
        **suppressed,
        spectrogram=_read_spectrogram(folder),
    )


def _checked_size(config: Any, quantity: str, size: int | None, names: tuple[str, ...]) -> int:
    """Return the requested size, or the default; refuse a size above the model's limit."""
    limits = [limit for name in names if isinstance(limit := getattr(config, name, None), int)]
    if size is None:
        return min(_LARGEST[quantity], *limits[:1]) if limits else _UNLIMITED
    if limits and size > limits[0]:
        raise OptionError(
            f"the {quantity} is longer than the model was made for",
            got=f"{_OPTIONS[quantity]} {size}",
            expected=f"at most {limits[0]}",
        )
    return size


def _read_tokens(options: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = options.get(name)
    listed: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    tokens = [token for token in listed if token is not None]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise OptionError(f"{name} has tokens that are not integers", got=json.dumps(value))
    return tuple(tokens)


def _read_spectrogram(folder: Path | None) -> Spectrogram:
    path = None if folder is None else folder / _PREPROCESSOR
    values = read_json(path) if path is not None and path.is_file() else {}
    if values.get("do_normalize") and "feature_size" in values and values["feature_size"] == 1:
        raise OptionError(
            "recordings that are normalized before the encoder are not supported",
            got=f"do_normalize in {path}",
        )
    sizes = {
        field.name: values.get(_SIZES[field.name], field.default) for field in fields(Spectrogram)
    }
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise OptionError(
                f"{path} has a {_SIZES[name]} that is not a positive integer", got=json.dumps(size)
            )
    return Spectrogram(**sizes)

"""Models from checkpoint folders of ``transformers``, or with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.gguf import is_gguf, load_gguf, read_gguf_config
from coreml_delegate.llm.quantized_checkpoint import (
    count_quantized,
    decode,
    require_format,
    warn_of_floats,
)
from coreml_delegate.llm.stored_weights import stored_weights
from coreml_delegate.llm.vision import (
    FAMILIES,
    REFUSED,
    TEXT_REFUSED,
    VisionDecoder,
    leave_out_images,
    reads_images,
)
from coreml_delegate.patches.third_party import transformers, wrap_errors

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_QUANTIZATION = "quantization_config"
_DEFAULT_CONTEXT = 2048  # for models whose configuration has no limit

# Auto classes of transformers, each with the mapping of its configurations.
_DECODERS = (("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),)
_IMAGE_READERS = (("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),)
_ENCODER_DECODERS = (
    ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
)


def config_file(checkpoint: Path) -> Path:
    """Return the file with the configuration of a checkpoint: a folder, or a GGUF file.

    Raises:
        OptionError: The checkpoint does not exist.
    """
    if checkpoint.is_dir():
        return checkpoint / CONFIG
    if is_gguf(checkpoint) and checkpoint.is_file():
        return checkpoint
    raise OptionError(
        "no such checkpoint", got=str(checkpoint), expected="a folder, or a GGUF file"
    )


def read_config(path: Path, *, text_only: bool = False) -> Any:
    """Read the configuration of a language model with ``transformers``.

    The model is a causal language model, an encoder-decoder model, or one of ``vision.FAMILIES``,
    which read images, or one whose images are left out.

    Args:
        path: ``config.json``, or a GGUF file.
        text_only: The model reads images, which are left out. Without it only the images that
            ``unsupported_images`` names are left out.

    Raises:
        OptionError: The file does not exist or is malformed, or describes another kind of model.
    """
    if is_gguf(path):
        config = read_gguf_config(path)
        _refuse_kind(path, config.model_type, text_only=text_only)
    else:
        values = _read_values(path)
        _refuse_kind(path, values["model_type"], text_only=text_only)
        config = _config_of(path, values)
    _refuse_without_head(path, config)
    return config


def read_any_config(path: Path) -> Any:
    """Read the configuration of a model of any kind with ``transformers``.

    Raises:
        OptionError: The file does not exist or is malformed, the architecture is unknown, or the
            checkpoint is quantized in an unknown format.
    """
    if is_gguf(path):
        return read_gguf_config(path)
    return _config_of(path, _read_values(path))


def _read_values(path: Path) -> dict[str, Any]:
    values = read_json(path)
    library, kind = transformers(), values.get("model_type")
    if kind not in library.CONFIG_MAPPING:
        raise OptionError(
            f"{path} has an architecture that is not supported",
            got=f"model_type {kind!r}",
            expected=f"one of transformers {library.__version__}",
        )
    return values


def _config_of(path: Path, values: Mapping[str, Any]) -> Any:
    is_quantized = values.get(_QUANTIZATION) is not None
    if is_quantized:
        require_format(values[_QUANTIZATION])
    with wrap_errors(f"transformers cannot read {path}"):
        config = transformers().AutoConfig.from_pretrained(path, local_files_only=True)
    if is_quantized:
        delattr(config, _QUANTIZATION)  # load_model reads it from the file
    return config


def _refuse_kind(path: Path, kind: str, *, text_only: bool) -> None:
    """Refuse an architecture that ``read_config`` does not support."""
    takes_images = _is_mapped(kind, _IMAGE_READERS)
    if text_only and not takes_images:
        raise OptionError(f"{path}: the model reads no images", got="--text-only")
    has_text_class = _is_mapped(kind, (*_DECODERS, *_ENCODER_DECODERS))
    has_text = kind not in TEXT_REFUSED
    leaves_out = has_text and (text_only or has_text_class or kind in REFUSED)
    if kind in FAMILIES or (leaves_out if takes_images else has_text_class):
        return
    raise OptionError(
        f"{path} has an architecture that is not supported",
        got=f"model_type {kind!r}" + (f", which has {REFUSED[kind]}" if kind in REFUSED else ""),
        expected="a causal language model, an encoder-decoder model, or one that reads images: "
        + ", ".join(FAMILIES),
        remedy="Leave images out with --text-only" if takes_images and has_text else None,
    )


def unsupported_images(config: Any) -> str | None:
    """Return why a model's images are not supported, if its text is; None without images."""
    kind = config.model_type
    if kind in FAMILIES or config.is_encoder_decoder or not _is_mapped(kind, _IMAGE_READERS):
        return None
    return REFUSED.get(kind, "images of an unknown kind")


def _is_mapped(kind: str, classes: Iterable[tuple[str, str]]) -> bool:
    """Whether one of the auto classes has a model for a ``model_type``."""
    library = transformers()
    return any(library.CONFIG_MAPPING[kind] in getattr(library, mapping) for _, mapping in classes)


def _refuse_without_head(path: Path, config: Any) -> None:
    """Refuse the checkpoint of a decoder without a head, for example of embeddings.

    A head that is tied to the embedding would not be missed among the weights.
    """
    base = transformers().MODEL_MAPPING.get(type(config), None)
    names = config.architectures or []
    if base is not None and base.__name__ in names and not config.is_encoder_decoder:
        raise OptionError(
            f"{path} is a model without a head, which generates no text",
            got=f"architectures {names}",
            expected=_loaded_class(config).__name__,
            remedy="Export it with coreml-delegate export-embedding",
        )


def random_decoder(config: Any, seed: int, *, text_only: bool = False, **options: Any) -> Decoder:
    """Return a decoder with random weights; equal seeds give equal weights.

    Args:
        config: Configuration of ``transformers``.
        seed: Seed of the weights.
        text_only: See ``load_decoder``.
        options: Class of the decoder, ``kind``, and further arguments of ``Decoder``.

    Raises:
        OptionError: The configuration contradicts itself.
        LoweringError: See ``Decoder``.
    """
    return _decoder(random_model(config, seed), text_only=text_only, **options)


def load_decoder(folder: Path, config: Any, *, text_only: bool = False, **options: Any) -> Decoder:
    """Return a decoder with the weights of a checkpoint, in fp32; see ``stored_weights``.

    Args:
        folder: Has ``*.safetensors``; an index, if there is one, says which file has a weight. Or
            a GGUF file.
        config: Configuration of ``transformers``.
        text_only: Leave out the parts of the model that read images. Parts for images that are
            not supported are left out in any case.
        options: Class of the decoder, ``kind``, and further arguments of ``Decoder``.

    Raises:
        OptionError: A file is missing or malformed, or the weights do not fit the configuration.
        LoweringError: See ``Decoder``.
    """
    return _decoder(load_model(folder, config), text_only=text_only, **options)


def random_model(config: Any, seed: int, model_class: Any = None) -> Any:
    """Return a model of ``transformers`` with random weights, in fp32 and eval mode.

    Args:
        config: Configuration of ``transformers``.
        seed: Seed of the weights.
        model_class: Auto class of ``transformers``; None for the class of a language model.

    Raises:
        OptionError: The configuration contradicts itself.
    """
    with torch.random.fork_rng(devices=[]), wrap_errors("transformers cannot make the model"):
        torch.manual_seed(seed)
        model = (model_class or _model_class(config)).from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval().requires_grad_(False)


def load_model(
    folder: Path,
    config: Any,
    model_class: Any = None,
    *,
    optional: Sequence[str] = (),
    foreign: Sequence[str] = (),
) -> Any:
    """Return a model of ``transformers`` with the weights of a checkpoint, as ``load_decoder``.

    Args:
        folder: The checkpoint, or a GGUF file.
        config: Configuration of ``transformers``.
        model_class: Auto class of ``transformers``; None for the class of a language model.
        optional: Parts of the model whose weights the checkpoint may lack.
        foreign: Parts that the checkpoint may have besides the model's.

    Raises:
        OptionError: See ``load_decoder``.
    """
    model_class = model_class or _model_class(config)
    if is_gguf(folder):
        model, loaded = load_gguf(folder, config, model_class)
    else:
        model, loaded = _load_files(folder, config, model_class)
    _check_loaded(folder, loaded, optional, foreign)
    return model.eval().requires_grad_(False)


def _load_files(folder: Path, config: Any, model_class: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a model with the weights of ``*.safetensors``, and the report of its loading."""
    files = _weight_files(folder)
    quantization = read_json(folder / CONFIG).get(_QUANTIZATION)
    with torch.device("meta"), wrap_errors("transformers cannot make the model"):
        empty = model_class.from_config(config)
    with wrap_errors(f"cannot read weights from {folder}"):
        weights = stored_weights(files)
        if quantization is not None:
            weights = decode(weights, quantization, files)
        quantized = count_quantized(weights.values())
        model, loaded = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=weights,
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # _check_loaded reports them
            output_loading_info=True,
        )
    warn_of_floats(quantized, model.parameters(), "the model computes others from them")
    return model, loaded


def _decoder(
    model: Any, *, text_only: bool, kind: type[Decoder] = Decoder, **options: Any
) -> Decoder:
    if text_only or unsupported_images(model.config):
        leave_out_images(model)
    elif reads_images(model.config):
        if kind is not Decoder:
            raise OptionError(
                "a model that reads images has no form for the neural engine",
                got=f"model_type {model.config.model_type!r}",
                remedy="Leave images out with --text-only",
            )
        return VisionDecoder(model, **options)
    quantized = count_quantized(model.parameters())
    decoder = kind(model, **options)
    weights = decoder.parameters() if kind is Decoder else ()  # other forms have their own modes
    warn_of_floats(quantized, weights, "the form of the layers changes them")
    return decoder


def most_context(config: Any) -> int:
    """Return the number of positions that a model was trained for."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or _DEFAULT_CONTEXT


def end_tokens(config: Any, folder: Path | None) -> tuple[int, ...]:
    """Return the end-of-text tokens of a configuration and of ``generation_config.json``.

    Raises:
        OptionError: The generation configuration is malformed.
    """
    generation = generation_options(folder)
    text = config.get_text_config(decoder=True)
    tokens: list[int] = []
    for ends in (getattr(text, "eos_token_id", None), generation.get("eos_token_id")):
        listed: list[Any] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(token) is int for token in listed):
            raise OptionError(
                f"{folder} has end tokens that are not integers", got=json.dumps(ends)
            )
        tokens += listed
    return tuple(dict.fromkeys(tokens))


def generation_options(folder: Path | None) -> dict[str, Any]:
    """Read ``generation_config.json``; without a folder or the file, return an empty dictionary.

    Raises:
        OptionError: The file is malformed.
    """
    path = None if folder is None else folder / _GENERATION
    return read_json(path) if path is not None and path.is_file() else {}


def main_input(config: Any) -> str:
    """Return the name of a model's main input (``input_ids``, for example)."""
    return _loaded_class(config).main_input_name


def _loaded_class(config: Any) -> Any:
    """Return the class of ``transformers`` that ``_model_class`` makes for a configuration."""
    return getattr(transformers(), _auto_class(config)[1])[type(config)]


def _model_class(config: Any) -> Any:
    """Return the auto class of ``transformers`` for a configuration."""
    return getattr(transformers(), _auto_class(config)[0])


def _auto_class(config: Any) -> tuple[str, str]:
    """Return the names of the auto class for a configuration, and of its mapping.

    Raises:
        OptionError: The configuration is of another kind of model.
    """
    library = transformers()
    # Models that read images without a class for text have one for both.
    text_classes = _ENCODER_DECODERS if config.is_encoder_decoder else (*_DECODERS, *_IMAGE_READERS)
    for name, mapping in _IMAGE_READERS if reads_images(config) else text_classes:
        if type(config) in getattr(library, mapping):
            return name, mapping
    raise OptionError(
        "the architecture is not supported",
        got=f"model_type {config.model_type!r}",
        expected="a causal language model, or an encoder-decoder model",
    )


def read_json(path: Path, *, kind: type = dict) -> Any:
    """Read a JSON object, or another kind of value.

    Raises:
        OptionError: The file does not exist, or is not JSON of this kind.
    """
    if not path.is_file():
        raise OptionError("no such model configuration", got=str(path))
    try:
        values: object = json.loads(path.read_bytes())
    except ValueError as error:
        raise OptionError(f"{path} is not JSON", got=str(error)) from error
    if not isinstance(values, kind):
        raise OptionError(f"{path} is not a model configuration", got=type(values).__name__)
    return values


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / _INDEX, folder / _WEIGHTS
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise OptionError(f"{index} is not a checkpoint index", got=repr(error)) from error
        missing = [name for name in names if not (folder / name).is_file()]
    else:
        names, missing = [_WEIGHTS], [] if single.is_file() else [f"{_WEIGHTS} or {_INDEX}"]
    if missing:
        raise OptionError(f"{folder} lacks weights", expected=", ".join(missing))
    return [folder / name for name in names]


def _check_loaded(
    folder: Path, loaded: Mapping[str, Any], optional: Sequence[str], foreign: Sequence[str]
) -> None:
    """Refuse a model unless exactly the checkpoint's weights were loaded; see ``load_model``."""
    if loaded["mismatched_keys"]:
        name, shape, expected = min(loaded["mismatched_keys"])
        raise OptionError(
            f"{folder} has a weight whose shape differs from its {CONFIG}",
            got=f"{list(shape)} for {name}",
            expected=str(list(expected)),
        )
    missing = [name for name in loaded["missing_keys"] if not _is_in(name, optional)]
    if missing:
        raise OptionError(f"{folder} lacks a weight", expected=min(missing))
    unknown = sorted(name for name in loaded["unexpected_keys"] if not _is_in(name, foreign))
    if unknown:
        raise OptionError(
            f"{folder} has weights that its architecture does not have",
            got=f"{unknown[0]} and {len(unknown) - 1} more" if len(unknown) > 1 else unknown[0],
        )


def _is_in(name: str, parts: Iterable[str]) -> bool:
    """Whether a weight belongs to one of some parts of a model."""
    return not set(parts).isdisjoint(name.split(".")[:-1])

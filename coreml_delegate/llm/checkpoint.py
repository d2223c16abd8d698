"""Fill a decoder with the weights of a ``transformers`` checkpoint, or with random ones."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.config import Config
from coreml_delegate.llm.decoder import Decoder, DecoderSettings, RMSNorm
from coreml_delegate.llm.families import Family, Stacked

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_INDEX = "model.safetensors.index.json"
_INITIAL_DEVIATION = 0.02
_UNUSED = (".rotary_emb.inv_freq",)  # computed, not learnt; old checkpoints store it


def random_decoder(settings: DecoderSettings, seed: int, **options: Any) -> Decoder:
    """Return a decoder with random weights; equal seeds give equal weights.

    Args:
        settings: Architecture.
        seed: Seed of the weights.
        options: Further arguments of ``Decoder``.
    """
    random = torch.Generator().manual_seed(seed)

    def value(name: str, module: nn.Module, expected: torch.Tensor) -> torch.Tensor:
        if isinstance(module, RMSNorm | nn.LayerNorm):
            return torch.full(expected.shape, float(name.endswith("weight")))
        return torch.empty(expected.shape).normal_(std=_INITIAL_DEVIATION, generator=random)

    return _fill(settings, options, value)


def load_decoder(
    folder: Path, settings: DecoderSettings, family: Family, **options: Any
) -> Decoder:
    """Return a decoder with the weights of a checkpoint, in fp32.

    Args:
        folder: Has ``*.safetensors``; an index, if there is one, says which file has a weight.
        settings: Architecture.
        family: Names of the weights.
        options: Further arguments of ``Decoder``.

    Raises:
        OptionError: A file is missing or malformed, or the weights do not fit the settings.
    """
    with _open(folder) as stored:
        names = _Names(settings, family)

        def value(name: str, module: nn.Module, expected: torch.Tensor) -> torch.Tensor:
            found = names.read(stored, name)
            _check(folder, name, found, expected)
            return found + family.norm_offset if isinstance(module, RMSNorm) else found

        decoder = _fill(settings, options, value)
        stored.refuse_unread(tied=settings.tied)
    return decoder


def end_tokens(folder: Path, settings: DecoderSettings) -> tuple[int, ...]:
    """Return the tokens that end a text: of the settings and of ``generation_config.json``.

    Raises:
        OptionError: The generation configuration is malformed.
    """
    path = folder / _GENERATION
    others = Config.load(path).integers("eos_token_id") if path.is_file() else ()
    return tuple(dict.fromkeys((*settings.eos, *others)))


def _fill(
    settings: DecoderSettings,
    options: Mapping[str, Any],
    value: Callable[[str, nn.Module, torch.Tensor], torch.Tensor],
) -> Decoder:
    """Make a decoder parameter by parameter, without torch's own initialisation.

    Args:
        settings: Architecture.
        options: Further arguments of ``Decoder``.
        value: Returns a parameter, given its name, its module and a tensor of its shape.
    """
    with torch.device("meta"):
        decoder = Decoder(settings, **options)
    for name, expected in list(decoder.named_parameters()):  # a tied parameter comes once
        module_name, _, kind = name.rpartition(".")
        module = decoder.get_submodule(module_name)
        made = value(name, module, expected)
        setattr(module, kind, nn.Parameter(made, requires_grad=False))
    if settings.tied:
        decoder.head.weight = decoder.embedding.weight
    return decoder.eval()


def _check(folder: Path, name: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    if value.shape != expected.shape:
        raise OptionError(
            f"{folder} has a weight whose shape differs from its {CONFIG}",
            got=f"{list(value.shape)} for {name}",
            expected=str(list(expected.shape)),
        )


class _Names:
    """Maps names of the decoder's parameters to those of a checkpoint."""

    def __init__(self, settings: DecoderSettings, family: Family) -> None:
        self._family = family
        kv = settings.kv_heads * settings.head_dim
        self._outputs = {
            "attention.query": settings.heads * settings.head_dim,
            "attention.key": kv,
            "attention.value": kv,
            "feed.gate": settings.hidden,
            "feed.up": settings.hidden,
        }
        self._outside = {
            "embedding": "model.embed_tokens",
            "norm": family.final_norm,
            "head": "lm_head",
        }

    def read(self, stored: _Checkpoint, name: str) -> torch.Tensor:
        """Read a parameter of the decoder, in fp32."""
        module, _, kind = name.rpartition(".")
        if module in self._outside:
            return stored.read(f"{self._outside[module]}.{kind}")
        _, index, inner = module.split(".", 2)
        place = self._family.layer[inner]
        if isinstance(place, str):
            return stored.read(f"model.layers.{index}.{place}.{kind}")
        return self._part(stored.read(f"model.layers.{index}.{place.name}.{kind}"), place, inner)

    def _part(self, whole: torch.Tensor, place: Stacked, inner: str) -> torch.Tensor:
        sizes = [self._outputs[part] for part in place.parts]
        if sum(sizes) != len(whole):
            return whole  # its wrong shape is reported later, with the weight's name
        return whole.split(sizes)[place.parts.index(inner)].clone()


class _Checkpoint:
    """The tensors of a checkpoint's files, which are memory-mapped."""

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        self._folder = folder
        self._files = files
        self._read: set[str] = set()

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor as fp32.

        Raises:
            OptionError: It does not exist, or is not floating point (quantized checkpoints).
        """
        if name not in self._files:
            raise OptionError(f"{self._folder} lacks a weight", expected=name)
        self._read.add(name)
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise OptionError(
                f"{self._folder} has a weight that is not floating point",
                got=f"{tensor.dtype} for {name}",
                expected="float32, float16 or bfloat16",
            )
        return tensor.float()

    def refuse_unread(self, *, tied: bool) -> None:
        """Refuse a checkpoint with weights that the decoder does not have.

        Raises:
            OptionError: There are such weights; it names the first.
        """
        unread = sorted(self._files.keys() - self._read - ({"lm_head.weight"} if tied else set()))
        unknown = [name for name in unread if not name.endswith(_UNUSED)]
        if unknown:
            raise OptionError(
                f"{self._folder} has weights that its architecture does not have",
                got=f"{unknown[0]} and {len(unknown) - 1} more" if len(unknown) > 1 else unknown[0],
            )


@contextmanager
def _open(folder: Path) -> Generator[_Checkpoint]:
    safetensors = _safetensors()
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise OptionError(f"cannot read weights from {path}", got=str(error)) from error
            files |= dict.fromkeys(file.keys(), file)
        yield _Checkpoint(folder, files)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise OptionError(f"{index} is not a checkpoint index", got=repr(error)) from error
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise OptionError(f"{folder} lacks weights", expected=", ".join(missing) or "*.safetensors")
    return paths


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ModuleNotFoundError:
        raise OptionError(
            "reading a checkpoint needs the safetensors package",
            remedy="pip install 'coreml-delegate[llm]'",
        ) from None

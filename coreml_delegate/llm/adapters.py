"""LoRA adapters in folders that ``peft`` has saved.

``adapter_config.json`` names the changed modules, with ranks and scales. For each of them
``adapter_model.safetensors`` has tensors named ``base_model.model.``, the module's name in the
model of ``transformers``, and then:

- for a linear layer ``lora_A.weight`` [r, inputs] and ``lora_B.weight`` [outputs, r], and with
  ``use_dora`` ``lora_magnitude_vector`` [outputs];
- for an embedding ``lora_embedding_A`` [r, tokens] and ``lora_embedding_B`` [width, r];
- for embedding and head, if either changes, a copy of the base model's own weight.

The module then computes W x + scale * B (A x) (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353).
``fan_in_fan_out`` says how the base model stores its weight, and does not change the formula.

Source: peft 0.21, ``LoraConfig`` and ``get_peft_model_state_dict``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.stored_weights import in_memory
from coreml_delegate.patches.third_party import wrap_errors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_ALL_LINEAR = "all-linear"
_MAGNITUDE = "lora_magnitude_vector"
_COPIES = ("base_layer.weight", "weight")
_PARTS = (
    "lora_A.weight",
    "lora_B.weight",
    _MAGNITUDE,
    "lora_embedding_A",
    "lora_embedding_B",
    *_COPIES,
)

# Options that only describe the training, or where the base model is.
_INERT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)

# Values of other options that do not change the result.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    # All other values change the base model's weights before training.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
_OFF = (None, False, [], {}, "")

_REMEDIES: Mapping[str, str] = {
    "modules_to_save": "Whole modules of an adapter cannot share the base model's weights: merge "
    "the adapter into a checkpoint, and export that",
    "init_lora_weights": "The base model was changed before training: save the adapter again with "
    "path_initial_model_for_weight_conversion",
}
_MERGE = "Merge the adapter into a checkpoint with peft, and export that"


@dataclass(frozen=True, slots=True)
class Update:
    """Low-rank update of one module's weight W: scale * B A.

    Attributes:
        down: A [r, inputs], fp32; of an embedding [r, tokens].
        up: B [outputs, r], fp32; of an embedding [width, r].
        scale: Factor of their product.
        magnitude: DoRA's magnitude vector m [outputs], W' = m * (W + scale * B A) / norm by row;
            None without DoRA.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A saved adapter, not yet matched to a model.

    Attributes:
        tensors: fp32 tensors by module and part.
    """

    name: str
    folder: Path
    config: Config
    tensors: Mapping[tuple[str, str], torch.Tensor]

    @classmethod
    def read(cls, name: str, folder: Path) -> AdapterFile:
        """Read a folder.

        Args:
            name: ASCII letters, digits and underscores.
            folder: Written by ``peft``.

        Raises:
            OptionError: The name has other characters, a file is missing or malformed, or the
                adapter has an unsupported feature.
        """
        if not re.fullmatch(r"\w+", name, re.ASCII):
            raise OptionError(
                "the adapter's name cannot be part of a method's name",
                got=repr(name),
                expected="letters, digits and underscores",
                remedy=f"Pass --adapter NAME={folder}",
            )
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise OptionError(
                    f"{folder} is not an adapter that peft has saved", expected=f"a file {file}"
                )
        config = Config.read(folder / CONFIG)
        return cls(name, folder, config, _read_tensors(folder / WEIGHTS))

    def updates(self, model: Any) -> dict[str, Update]:
        """Return the updates of a model's modules, by module name.

        Args:
            model: A model of ``transformers`` whose linear layers are ``nn.Linear``.

        Raises:
            OptionError: The adapter was made for another model, or its files contradict each other.
        """
        targets = self._targets(model)
        used: set[tuple[str, str]] = set()
        updates: dict[str, Update] = {}
        for name, module in targets.items():
            shapes = self._shapes(name, module)
            parts = [self._tensor(name, part, shape) for part, shape in shapes.items()]
            used.update((name, part) for part in shapes)
            updates[name] = Update(parts[0], parts[1], self.config.scale(name), *parts[2:])
        self._refuse_unused(model, self.tensors.keys() - used)
        return updates

    def _targets(self, model: Any) -> dict[str, nn.Module]:
        config, head = self.config, model.get_output_embeddings()
        modules: dict[str, nn.Module] = dict(model.named_modules())
        if config.targets == _ALL_LINEAR:
            linear = (n for n, m in modules.items() if isinstance(m, nn.Linear) and m is not head)
            names = [name for name in linear if not config.is_excluded(name)]
        else:
            names = list(filter(config.is_target, modules))
        targets = {name: modules[name] for name in names}
        if not targets:
            raise OptionError(
                f"adapter {self.name!r} changes no module of the model",
                got=f"target_modules {config.targets}",
                remedy=f"Check that {self.folder} was made for this model",
            )
        return targets

    def _shapes(self, name: str, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the expected shapes of the tensors of a module's update."""
        rank, dora = self.config.rank(name), self.config.dora
        if isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            shapes = {"lora_A.weight": (rank, inputs), "lora_B.weight": (outputs, rank)}
            return {**shapes, _MAGNITUDE: (outputs,)} if dora else shapes
        if isinstance(module, nn.Embedding) and not dora:
            tokens, width = module.weight.shape
            return {"lora_embedding_A": (rank, tokens), "lora_embedding_B": (width, rank)}
        raise OptionError(
            f"adapter {self.name!r} changes a module of a kind that is not supported",
            got=f"{type(module).__name__} at {name}{' with use_dora' if dora else ''}",
            expected="linear layers" if dora else "linear layers and embeddings",
        )

    def _tensor(self, name: str, part: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.tensors.get((name, part))
        if tensor is None:
            raise OptionError(
                f"{self.folder / WEIGHTS} lacks a matrix of a module that its {CONFIG} names",
                expected=f"{_PREFIX}{name}.{part}",
                remedy="Check that the adapter was made for this model",
            )
        if tuple(tensor.shape) != shape:
            raise OptionError(
                f"adapter {self.name!r} does not fit the model",
                got=f"{list(tensor.shape)} for {name}.{part}",
                expected=str(list(shape)),
                remedy="Check that the adapter was made for this model",
            )
        return tensor

    def _refuse_unused(self, model: Any, unused: Iterable[tuple[str, str]]) -> None:
        """Refuse tensors that no update uses, except copies of the base model's weights."""
        vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
        copied = {name: m.weight for name, m in model.named_modules() if m in vocabulary}
        unknown: list[str] = []
        for name, part in sorted(unused):
            if name not in copied or part not in _COPIES:
                unknown.append(f"{_PREFIX}{name}.{part}" if part else name)
            elif not torch.equal(in_memory(copied[name]), self.tensors[name, part]):
                raise OptionError(
                    f"adapter {self.name!r} has another weight for {name} than the base model",
                    remedy=_REMEDIES["modules_to_save"],
                )
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise OptionError(
                f"{self.folder / WEIGHTS} has tensors of modules that the adapter does not change",
                got=f"{unknown[0]}{more}",
                remedy="Check that the adapter was made for this model",
            )


def read_adapters(folders: Sequence[tuple[str, Path]]) -> list[AdapterFile]:
    """Read adapters from pairs of name and folder.

    Raises:
        OptionError: Two adapters have the same name; or see ``AdapterFile.read``.
    """
    names = [name for name, _ in folders]
    for name, folder in folders:
        if names.count(name) > 1:
            raise OptionError(
                "two adapters have the same name",
                got=repr(name),
                remedy=f"Name them, for example --adapter other={folder}",
            )
    return [AdapterFile.read(name, folder) for name, folder in folders]


@dataclass(frozen=True, slots=True)
class Config:
    """The options of an ``adapter_config.json`` that affect the result.

    Attributes:
        targets: Names, or suffixes of names, of the changed modules; or a regular expression.
        excluded: Modules to leave out, in the same form; empty for no exclusion.
        layers: Indices of the changed layers; empty for all.
        lists: Names of the layer lists that ``layers`` indexes; empty for any.
        r: Rank: number of rows of A.
        alpha: Numerator of the scale ``alpha / r``.
        ranks: Ranks that differ from ``r``, by regular expression of module names.
        alphas: Alphas that differ from ``alpha``, likewise.
        rank_stabilized: Scale by ``alpha / sqrt(r)`` (rsLoRA, arXiv:2312.03732).
        dora: The adapter uses DoRA (see ``Update.magnitude``).
    """

    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...]
    lists: tuple[str, ...]
    r: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilized: bool
    dora: bool

    @classmethod
    def read(cls, path: Path) -> Config:
        """Read an ``adapter_config.json``.

        Raises:
            OptionError: The file is malformed, or has an unsupported option.
        """
        try:
            content: object = json.loads(path.read_bytes())
        except ValueError as error:
            raise OptionError(f"{path} is not JSON", got=str(error)) from error
        if not isinstance(content, dict):
            raise OptionError(
                f"{path} is not the configuration of an adapter", got=type(content).__name__
            )
        values = cast("dict[str, Any]", content)
        if values.get("peft_type") != "LORA":
            raise OptionError(
                f"{path} is an adapter of a kind that is not supported",
                got=f"peft_type {values.get('peft_type')!r}",
                expected="'LORA'",
            )
        _refuse_options(path, values)
        options = {name: values.get(name, default) for name, (default, _, _) in _FIELDS.items()}
        _check_options(path, options)
        targets = options["target_modules"]
        if isinstance(targets, str) and options["layers_to_transform"] is not None:
            raise OptionError(
                f"{path} selects layers by layers_to_transform and by a pattern of target_modules",
                expected="one of them",
            )
        return cls(
            targets=targets.lower()
            if str(targets).lower() == _ALL_LINEAR
            else _as_patterns(targets),
            excluded=_as_patterns(options["exclude_modules"] or ()),
            layers=_as_tuple(options["layers_to_transform"]),
            lists=_as_tuple(options["layers_pattern"]),
            r=options["r"],
            alpha=options["lora_alpha"],
            ranks=options["rank_pattern"] or {},
            alphas=options["alpha_pattern"] or {},
            rank_stabilized=options["use_rslora"],
            dora=options["use_dora"],
        )

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return _by_pattern(self.ranks, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank = self.rank(module)
        return _by_pattern(self.alphas, module, self.alpha) / (
            rank**0.5 if self.rank_stabilized else rank
        )

    def is_excluded(self, module: str) -> bool:
        """Whether the configuration excludes a module."""
        return _is_named(self.excluded, module)

    def is_target(self, module: str) -> bool:
        """Whether a module changes; not for targets ``all-linear``."""
        if self.is_excluded(module) or not _is_named(self.targets, module):
            return False
        # peft changes a module named in full in any layer.
        return not self.layers or module in self.targets or self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        for pattern in self.lists or (r"[^.]*",):
            match = re.match(rf".*\.(?:{pattern})\.(?P<index>\d+)\.", module)
            if match:
                return int(match["index"])
        return None


def _read_tensors(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of a file as fp32, by module and part."""
    with wrap_errors(f"cannot read an adapter from {path}"):
        stored = load_file(path)
        tensors = {key: tensor.to(torch.float32) for key, tensor in stored.items()}
    for key, tensor in tensors.items():
        if not stored[key].is_floating_point() or not tensor.isfinite().all():
            raise OptionError(f"{path} has a tensor of values that are not finite floats", got=key)
    return {_split_name(key): tensor for key, tensor in tensors.items()}


def _by_pattern(values: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _is_named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return any(module == name or module.endswith(f".{name}") for name in names)


def _split_name(key: str) -> tuple[str, str]:
    """Split a tensor's name into module and part; without a known part, (name, "")."""
    part = next((part for part in _PARTS if key.endswith(f".{part}")), None)
    if part is None or not key.startswith(_PREFIX):
        return key, ""
    return key.removeprefix(_PREFIX).removesuffix(f".{part}"), part


def _refuse_options(path: Path, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _INERT or name in _FIELDS or value in _NEUTRAL.get(name, _OFF):
            continue
        expected = _NEUTRAL.get(name)
        raise OptionError(
            f"{path} has an option that is not supported",
            got=f"{name} {json.dumps(value)}",
            expected=None if expected is None else ", ".join(map(repr, expected)),
            remedy=_REMEDIES.get(name, _MERGE),
        )


def _check_options(path: Path, values: Mapping[str, Any]) -> None:
    for name, (_, accepts, expected) in _FIELDS.items():
        if not accepts(values[name]):
            raise OptionError(
                f"{path} has a malformed option",
                got=f"{name} {json.dumps(values[name])}",
                expected=expected,
            )


def _as_patterns(names: Any) -> tuple[str, ...] | str:
    return names if isinstance(names, str) else tuple(names)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None or value == "":
        return ()
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else (value,)


_Field = tuple[object, Callable[[Any], bool], str]
"""peft's default of an option, whether a value is valid, and a description of valid values."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")


def _is_pattern(value: Any, template: str = "{}") -> bool:
    try:
        re.compile(template.format(value))
    except re.error:
        return False
    return isinstance(value, str)


def _is_part(value: Any) -> bool:
    """Whether a value is valid inside a regular expression's group."""
    return _is_pattern(value, "(?:{})")


def _is_list(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(accepts, cast("list[Any]", value)))


def _is_mapping(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(_is_part(k) and accepts(v) for k, v in cast("dict[Any, Any]", value).items())
    )


def _are_names(value: Any) -> bool:
    return _is_pattern(value) or _is_list(value, lambda name: isinstance(name, str))


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


_NAMES = "a list of names, or a pattern"
_FIELDS: Mapping[str, _Field] = {
    "r": (8, _is_count, "an integer of at least 1"),
    "lora_alpha": (8, _is_number, "a number"),
    "rank_pattern": (
        None,
        lambda v: _is_mapping(v, _is_count),
        "integers of at least 1 by pattern",
    ),
    "alpha_pattern": (None, lambda v: _is_mapping(v, _is_number), "numbers by pattern"),
    "use_rslora": (False, lambda v: isinstance(v, bool), "true or false"),
    "use_dora": (False, lambda v: isinstance(v, bool), "true or false"),
    "target_modules": (None, lambda v: bool(v) and _are_names(v), _NAMES),
    "exclude_modules": (None, lambda v: v is None or _are_names(v), _NAMES),
    "layers_to_transform": (
        None,
        lambda v: v is None or _is_index(v) or _is_list(v, _is_index),
        "an index of a layer, or a list of them",
    ),
    "layers_pattern": (
        None,
        lambda v: v is None or _is_part(v) or _is_list(v, _is_part),
        "a pattern, or a list of them",
    ),
}

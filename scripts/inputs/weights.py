"""State dicts from files, checked against the model before anything is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from coreml_delegate.errors import OptionError
from coreml_delegate.scripts.console import first_line

_SHOWN = 3


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a state dict into ``module``.

    Args:
        module: Changed in place, or not at all.
        path: ``.safetensors``, or what ``torch.save`` writes (read without running code).

    Raises:
        OptionError: The file cannot be read, or does not fit the model.
    """
    if not path.is_file():
        raise OptionError("no such weights file", got=str(path))
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    expected = module.state_dict()
    _refuse(path, "lacks tensors of the model", [k for k in expected if k not in state])
    _refuse(path, "has tensors the model lacks", [k for k in state if k not in expected])
    _refuse(
        path,
        "has tensors of another shape",
        [
            f"{key} {list(state[key].shape)} for {list(tensor.shape)}"
            for key, tensor in expected.items()
            if state[key].shape != tensor.shape
        ],
    )
    module.load_state_dict(state)


def _refuse(path: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise OptionError(f"{path} {what}", got=", ".join(names[:_SHOWN]) + more)


def _read_torch(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        state: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its reader fails on foreign bytes with whatever comes first
        raise OptionError(
            f"cannot read weights from {path}",
            got=first_line(error),
            expected="a state dict of tensors saved by torch.save",
        ) from error
    items = cast("Mapping[object, object]", state) if isinstance(state, Mapping) else {None: None}
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in items.items()):
        raise OptionError(
            f"{path} is not a state dict",
            got=type(state).__name__,
            expected="tensors by name",
            remedy="Save module.state_dict()",
        )
    return cast("Mapping[str, torch.Tensor]", state)


def _read_safetensors(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        reader: Any = importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise OptionError(
            f"reading {path} needs the safetensors package", remedy="pip install safetensors"
        ) from None
    try:
        return reader.load_file(path)
    except Exception as error:  # its error class lives in its native module
        raise OptionError(f"cannot read weights from {path}", got=str(error)) from error

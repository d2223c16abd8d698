"""Torchvision and timm: their models, and input shapes."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.patches.third_party import (
    import_optional,
    torchvision_importable,
    wrap_errors,
)

_DEFAULT_SIZE = 224  # pixels; the input of torchvision's classifiers without published weights
_VIDEO_FRAMES = 16
# Their random initialisation takes most of a minute (scipy's truncated normal, value by value).
_SLOW_INIT = frozenset({"googlenet", "inception_v3"})


@cache
def import_torchvision() -> Any:
    """Import the ``torchvision`` module.

    Raises:
        OptionError: Torchvision is not installed.
    """
    with torchvision_importable():
        return import_optional("torchvision")


def build_model(name: str) -> nn.Module:
    """Build a torchvision model with random weights, in eval mode.

    Raises:
        OptionError: There is no such model; the error names near matches.
    """
    models = import_torchvision().models
    names = models.list_models()
    if name not in names:
        raise OptionError(
            "torchvision has no such model",
            got=repr(name),
            expected=near_matches(name, names, "one of its list_models()"),
        )
    keywords: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        keywords["weights_backbone"] = None  # by default it would be downloaded
    if name in _SLOW_INIT:
        keywords["init_weights"] = False
    return models.get_model(name, **keywords).eval()


def build_timm_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Build a model of timm with random weights, in eval mode.

    Returns:
        The model, and the input shape [1, C, H, W] that it was trained with, in pixels.

    Raises:
        OptionError: timm is not installed, or has no such model; the error names near matches.
    """
    with torchvision_importable():
        timm = import_optional("timm")
    names = timm.list_models()
    if name.partition(".")[0] not in names:
        raise OptionError(
            "timm has no such model",
            got=repr(name),
            expected=near_matches(name, names, "one of its list_models()"),
        )
    with wrap_errors(f"timm cannot build {name}"):
        model = timm.create_model(name, pretrained=False).eval()
    return model, (1, *model.pretrained_cfg["input_size"])


def input_shape(name: str) -> tuple[int, ...]:
    """Return the input shape that a torchvision model was trained with, batch size 1.

    Returns:
        [1, 3, H, W] in pixels (224 where torchvision publishes no weights); for video models
        [1, 3, frames, H, W].
    """
    models = import_torchvision().models
    try:
        preset = models.get_model_weights(name).DEFAULT.transforms()
    except (ValueError, AttributeError):
        return (1, 3, _DEFAULT_SIZE, _DEFAULT_SIZE)
    sizes = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None)
    height, width = (sizes * 2)[:2] if sizes else (_DEFAULT_SIZE, _DEFAULT_SIZE)
    if type(preset).__name__ == "VideoClassification":
        return (1, 3, _VIDEO_FRAMES, height, width)
    return (1, 3, height, width)

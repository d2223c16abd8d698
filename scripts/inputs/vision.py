"""Torchvision: its import next to a CPU-only torch, its models, and their input shapes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import nn

from coreml_delegate.errors import OptionError, near_matches

_DEFAULT_SIZE = 224  # pixels; what torchvision's classifiers without published weights take
_VIDEO_FRAMES = 16
# Their random initialisation takes most of a minute (scipy's truncated normal, value by value).
_SLOW_INIT = frozenset({"googlenet", "inception_v3"})
_MISSING_OPS = "operator torchvision::nms does not exist"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def import_torchvision() -> Any:
    """Import the ``torchvision`` module.

    Raises:
        OptionError: Torchvision is not installed.
    """
    with torchvision_importable():
        try:
            return importlib.import_module("torchvision")
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise
            raise OptionError(
                "torchvision is not installed", remedy="pip install 'coreml-delegate[vision]'"
            ) from None


@contextmanager
def torchvision_importable() -> Generator[None]:
    """Make torchvision importable next to a CPU-only torch, for all imports in this block.

    A wheel built for CUDA cannot load its operators there, and its Python code then fails because
    the operators it refers to are not declared. Only in that case they are declared here; no model
    outside ``torchvision.models.detection`` calls them. Models of other libraries import
    torchvision too, those of transformers for example.
    """
    finder = _TorchvisionFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _TorchvisionFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torchvision, with a loader that declares its operators if necessary."""
        del target  # which is for reloading
        spec = PathFinder.find_spec(fullname, path) if fullname == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchvisionLoader(spec, spec.loader)
        return spec


class _TorchvisionLoader(Loader):
    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec = spec
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module by its own loader, which it keeps from then on."""
        self._spec.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if _MISSING_OPS not in str(error):
                raise
            _declare_operators()
            self._loader.exec_module(module)


@cache
def _declare_operators() -> torch.library.Library:
    # Cached, because the declarations vanish with the object.
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


def build_model(name: str) -> nn.Module:
    """Build a torchvision model with random weights, in eval mode.

    Args:
        name: As in ``torchvision.models.list_models()``.

    Raises:
        OptionError: There is no such model; the error names near matches.
    """
    models = import_torchvision().models
    known = models.list_models()
    if name not in known:
        raise OptionError(
            "torchvision has no such model",
            got=repr(name),
            expected=near_matches(name, known, "one of its list_models()"),
        )
    keywords: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        keywords["weights_backbone"] = None  # by default it would be downloaded
    if name in _SLOW_INIT:
        keywords["init_weights"] = False
    return models.get_model(name, **keywords).eval()


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

"""Architectures whose precision is measured: modules of torchvision, timm and transformers.

Weights are random, norms have the statistics of a batch, widths are published, repeated layers are
few, and inputs are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models.libraries import Outputs, Segments, randomize
from support.torchvision_models import build as build_classifier
from support.torchvision_models import set_statistics
from torch import Tensor, nn

from coreml_delegate.patches.third_party import transformers
from coreml_delegate.scripts.inputs.vision import build_timm_model, import_torchvision

Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        name: In the table: of torchvision's builder, or the model type of transformers; of timm's
            builder, after ``timm``.
        origin: The library.
        build: Returns the module in eval mode and inputs.
        quick: Whether ``make test`` measures it.
    """

    name: str
    origin: str
    build: Build
    quick: bool = False


# torchvision


def _classifier(name: str, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, image = build_classifier(name, size)
    return model, (image,)


def _video(name: str, frames: int, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = getattr(import_torchvision().models.video, name)(weights=None)
    set_statistics(model, torch.randn(2, 3, frames, size, size))
    return model.eval(), (torch.randn(1, 3, frames, size, size),)


def _segmentation(name: str, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    build = getattr(import_torchvision().models.segmentation, name)
    model = build(weights=None, weights_backbone=None)
    set_statistics(model, torch.randn(2, 3, size, size))
    return Segments(model).eval(), (torch.randn(1, 3, size, size),)


_CLASSIFIERS = {
    "alexnet": 96,
    "vgg11_bn": 64,
    "resnet34": 64,
    "resnext50_32x4d": 64,
    "wide_resnet50_2": 64,
    "regnet_x_400mf": 64,
    "mnasnet1_0": 96,
    "shufflenet_v2_x1_5": 96,
    "squeezenet1_0": 96,
    "mobilenet_v3_large": 96,
    "efficientnet_b1": 64,
    "convnext_small": 64,
    "swin_v2_t": 64,
}
_VIDEOS = {"mc3_18": (8, 56), "r2plus1d_18": (8, 56), "s3d": (16, 224)}
_SEGMENTATIONS = {"deeplabv3_resnet50": 64}


# timm


def timm_model(name: str, size: int | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a model of timm.

    Args:
        name: Of the model.
        size: Of the image, in pixels; None for the size that the model was trained with.
    """
    torch.manual_seed(0)
    model, shape = build_timm_model(name)
    if size is not None:
        shape = (*shape[:2], size, size)
    set_statistics(randomize(model), torch.randn(2, *shape[1:]))
    return model.eval(), (torch.randn(shape),)


# Name -> size of the image, in pixels; None where positions or windows fix it.
_TIMM: Mapping[str, int | None] = {
    "convnextv2_atto": 96,
    "crossvit_9_240": None,
    "dm_nfnet_f0": 64,
    "edgenext_xx_small": 96,
    "efficientvit_b0": 96,
    "eva02_tiny_patch14_224": None,
    "fastvit_t8": 96,
    "ghostnetv2_100": 96,
    "levit_128s": None,
    "mobilevit_xxs": 96,
    "poolformer_s12": 96,
    "repvgg_a0": 96,
    "res2net50_14w_8s": 96,
    "tinynet_e": 96,
    "xcit_nano_12_p16_224": None,
}


# transformers


def _tokens(count: int = 32, names: tuple[str, ...] = ("input_ids",)) -> dict[str, Tensor]:
    tokens = torch.randint(3, 1000, (1, count))
    return {name: tokens if name == "input_ids" else torch.ones_like(tokens) for name in names}


def _masked_tokens() -> dict[str, Tensor]:
    """Tokens of which the last quarter is padding."""
    tokens = _tokens(names=("input_ids", "attention_mask"))
    tokens["attention_mask"][:, 24:] = 0
    return tokens


def _boxes() -> dict[str, Tensor]:
    left = torch.randint(0, 500, (1, 32, 2))
    return {**_tokens(), "bbox": torch.cat((left, left + 100), -1)}


def _pixels(size: int, channels: int = 3) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, channels, size, size)}


def _frames(count: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, count, 3, size, size)}


def _sound(samples: int = 8000) -> dict[str, Tensor]:
    return {"input_values": torch.randn(1, samples)}


def _of_transformers(
    kind: str,
    class_name: str,
    outputs: tuple[str, ...],
    inputs: Callable[[], dict[str, Tensor]],
    settings: Mapping[str, Any],
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    library = transformers()
    config = library.AutoConfig.for_model(kind, **settings)
    build = getattr(library, class_name)
    model = build.from_config(config) if class_name.startswith("Auto") else build(config)
    tensors = inputs()
    module = Outputs(randomize(model), tuple(tensors), outputs).eval()
    _set_statistics(module, tuple(tensors.values()))
    return module.eval(), tuple(tensors.values())


def _set_statistics(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    batch = torch.randn(2, *inputs[0].shape[1:])
    if len(inputs) == 1 and inputs[0].is_floating_point():
        set_statistics(module, batch)


_HIDDEN = ("last_hidden_state",)
_POOLED = ("last_hidden_state", "pooler_output")
_LOGITS = ("logits",)
_TEXT = {"vocab_size": 1000, "num_hidden_layers": 2}
_VISION = {"image_size": 64, "num_hidden_layers": 2}
_SOUND = {"num_hidden_layers": 2, "vocab_size": 32}
_SHALLOW = {"image_size": 64, "depths": [1, 1, 1, 1]}

# Model type -> class, outputs, inputs, and changes of the default configuration.
_TRANSFORMERS: Mapping[str, tuple[str, tuple[str, ...], Callable[[], dict[str, Tensor]], Any]] = {
    "albert": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "roberta": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "distilbert": ("AutoModel", _HIDDEN, _masked_tokens, {"vocab_size": 1000, "n_layers": 2}),
    "electra": ("AutoModel", _HIDDEN, _masked_tokens, _TEXT),
    "deberta": ("AutoModel", _HIDDEN, _masked_tokens, _TEXT),
    "deberta-v2": ("AutoModel", _HIDDEN, _masked_tokens, _TEXT),
    "mpnet": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "squeezebert": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "convbert": ("AutoModel", _HIDDEN, _masked_tokens, _TEXT),
    "mobilebert": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "fnet": ("AutoModel", _POOLED, _tokens, _TEXT),
    "rembert": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "roformer": ("AutoModel", _HIDDEN, _masked_tokens, _TEXT),
    "ibert": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "layoutlm": ("AutoModel", _POOLED, _boxes, _TEXT),
    "lilt": ("AutoModel", _POOLED, _boxes, _TEXT),
    "esm": ("AutoModel", _POOLED, _masked_tokens, _TEXT | {"mask_token_id": 2, "pad_token_id": 1}),
    "modernbert": (
        "AutoModel",
        _HIDDEN,
        _masked_tokens,
        _TEXT
        | {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "xlnet": ("AutoModel", _HIDDEN, _tokens, {"vocab_size": 1000, "n_layer": 2}),
    "xlm": ("AutoModel", _HIDDEN, _tokens, {"vocab_size": 1000, "n_layers": 2, "emb_dim": 512}),
    "canine": ("AutoModel", _POOLED, partial(_tokens, 64), {"num_hidden_layers": 2}),
    "data2vec-text": ("AutoModel", _POOLED, _masked_tokens, _TEXT),
    "nomic_bert": ("AutoModel", _HIDDEN, _masked_tokens, _TEXT),
    "eurobert": (
        "AutoModel",
        _HIDDEN,
        _masked_tokens,
        _TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "vit": ("AutoModel", _POOLED, partial(_pixels, 64), _VISION),
    "deit": ("AutoModel", _POOLED, partial(_pixels, 64), _VISION),
    "beit": (
        "AutoModel",
        _POOLED,
        partial(_pixels, 64),
        _VISION | {"use_relative_position_bias": True},
    ),
    "dinov2_with_registers": (
        "AutoModel",
        _POOLED,
        partial(_pixels, 56),
        _VISION | {"image_size": 56},
    ),
    "dinov3_vit": ("AutoModel", _POOLED, partial(_pixels, 64), _VISION),
    "dinov3_convnext": (
        "AutoModel",
        _POOLED,
        partial(_pixels, 64),
        {"image_size": 64, "depths": [1, 1, 2, 1]},
    ),
    "ijepa": ("AutoModel", _HIDDEN, partial(_pixels, 56), _VISION | {"image_size": 56}),
    "swinv2": (
        "AutoModel",
        _POOLED,
        partial(_pixels, 64),
        {"image_size": 64, "depths": [1, 1, 1, 1], "window_size": 4},
    ),
    "convnextv2": ("AutoModel", _POOLED, partial(_pixels, 64), _SHALLOW),
    "focalnet": ("AutoModel", _POOLED, partial(_pixels, 64), _SHALLOW),
    "poolformer": ("AutoModel", _HIDDEN, partial(_pixels, 64), {"depths": [1, 1, 1, 1]}),
    "pvt_v2": (
        "AutoModel",
        _HIDDEN,
        partial(_pixels, 64),
        {"image_size": 64, "depths": [1, 1, 1, 1]},
    ),
    "mobilevit": ("AutoModel", _POOLED, partial(_pixels, 64), {"image_size": 64}),
    "mobilevitv2": ("AutoModel", _POOLED, partial(_pixels, 64), {"image_size": 64}),
    "mobilenet_v1": ("AutoModel", _POOLED, partial(_pixels, 64), {"image_size": 64}),
    "regnet": ("AutoModel", _POOLED, partial(_pixels, 64), {"depths": [1, 1, 1, 1]}),
    "bit": ("AutoModel", _POOLED, partial(_pixels, 64), {"depths": [1, 1, 1, 1]}),
    "hiera": (
        "AutoModel",
        _POOLED,
        partial(_pixels, 64),
        {"image_size": [64, 64], "depths": [1, 1, 1, 1]},
    ),
    "vit_msn": ("AutoModel", _HIDDEN, partial(_pixels, 64), _VISION),
    "glpn": (
        "GLPNForDepthEstimation",
        ("predicted_depth",),
        partial(_pixels, 64),
        {"depths": [1, 1, 1, 1]},
    ),
    "swiftformer": (
        "AutoModel",
        _HIDDEN,
        partial(_pixels, 64),
        {"image_size": 64, "depths": [1, 1, 2, 1]},
    ),
    "textnet": ("AutoModel", _POOLED, partial(_pixels, 64), {}),
    "hgnet_v2": ("AutoModelForImageClassification", _LOGITS, partial(_pixels, 64), {}),
    "swin2sr": (
        "Swin2SRForImageSuperResolution",
        ("reconstruction",),
        partial(_pixels, 32),
        {"image_size": 32, "depths": [1, 1], "num_heads": [6, 6]},
    ),
    "videomae": (
        "AutoModel",
        _HIDDEN,
        partial(_frames, 4, 32),
        {"image_size": 32, "num_frames": 4, "num_hidden_layers": 2},
    ),
    "timesformer": (
        "AutoModel",
        _HIDDEN,
        partial(_frames, 4, 32),
        {"image_size": 32, "num_frames": 4, "num_hidden_layers": 2},
    ),
    "hubert": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "wavlm": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "sew": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "unispeech": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "unispeech-sat": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "data2vec-audio": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "wav2vec2-conformer": ("AutoModel", _HIDDEN, _sound, _SOUND),
    "audio-spectrogram-transformer": (
        "AutoModel",
        _POOLED,
        lambda: {"input_values": torch.randn(1, 64, 128)},
        {"max_length": 64, "num_hidden_layers": 2},
    ),
    "patchtsmixer": (
        "AutoModel",
        _HIDDEN,
        lambda: {"past_values": torch.randn(1, 64, 3)},
        {"context_length": 64, "num_input_channels": 3},
    ),
    "patchtst": (
        "AutoModel",
        _HIDDEN,
        lambda: {"past_values": torch.randn(1, 64, 3)},
        {"context_length": 64, "num_input_channels": 3, "patch_length": 8, "patch_stride": 8},
    ),
    "clip_vision_model": ("CLIPVisionModel", _POOLED, partial(_pixels, 64), _VISION),
    "siglip_text_model": ("SiglipTextModel", _POOLED, _tokens, _TEXT),
    "opt": ("AutoModel", _HIDDEN, _tokens, _TEXT | {"use_cache": False}),
    "biogpt": ("AutoModel", _HIDDEN, _tokens, _TEXT | {"use_cache": False}),
    "codegen": (
        "AutoModel",
        _HIDDEN,
        _tokens,
        {"vocab_size": 1000, "n_layer": 2, "n_embd": 512, "n_head": 8, "use_cache": False},
    ),
}

_QUICK = frozenset({"patchtsmixer", "squeezenet1_0", "distilbert"})


def _rows(origin: str, builds: Mapping[str, Build]) -> list[Architecture]:
    return [Architecture(name, origin, build, name in _QUICK) for name, build in builds.items()]


ARCHITECTURES: tuple[Architecture, ...] = (
    *_rows(
        "torchvision",
        {
            **{name: partial(_classifier, name, size) for name, size in _CLASSIFIERS.items()},
            **{name: partial(_video, name, *sizes) for name, sizes in _VIDEOS.items()},
            **{name: partial(_segmentation, name, size) for name, size in _SEGMENTATIONS.items()},
        },
    ),
    *_rows(
        "timm",
        {f"timm {name}": partial(timm_model, name, size) for name, size in _TIMM.items()},
    ),
    *_rows(
        "transformers",
        {name: partial(_of_transformers, name, *row) for name, row in _TRANSFORMERS.items()},
    ),
)

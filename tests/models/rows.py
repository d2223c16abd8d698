"""The models of ``docs/models.md``, each with how it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from models import blocks, detectors, libraries
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        name: In the table.
        origin: The library whose module it is, or ``tests/models`` with the module's name.
        size: The input it is lowered with; in parentheses the published one, if that is larger.
        build: Returns the module in eval mode and inputs.
        picks: Whether results are boxes, scores and labels of the best candidates, best first.
            Rounding to fp16 chooses others of about the same score, so they are not compared.
        quick: Whether ``make test`` lowers it.
    """

    name: str
    origin: str
    size: str
    build: Build
    picks: bool = False
    quick: bool = False


_VISION, _LANGUAGE = "torchvision", "transformers"
_DETECTORS, _BLOCKS = "tests/models/detectors.py", "tests/models/blocks.py"


def _detector(name: str, size: int) -> Build:
    return partial(detectors.torchvision_detector, name, size)


ROWS: tuple[Row, ...] = (
    Row(
        "ssdlite320_mobilenet_v3_large",
        _VISION,
        "320 x 320",
        _detector("ssdlite320_mobilenet_v3_large", 320),
        picks=True,
    ),
    Row(
        "retinanet_resnet50_fpn",
        _VISION,
        "256 x 256 (800)",
        _detector("retinanet_resnet50_fpn", 256),
        picks=True,
    ),
    Row(
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        _VISION,
        "320 x 320",
        _detector("fasterrcnn_mobilenet_v3_large_320_fpn", 320),
        picks=True,
    ),
    Row(
        "maskrcnn_resnet50_fpn",
        _VISION,
        "256 x 256 (800)",
        _detector("maskrcnn_resnet50_fpn", 256),
        picks=True,
    ),
    Row("YOLOv8 head", _DETECTORS, "320 x 320 (640)", partial(detectors.yolo_head, 320)),
    Row("DETR, ResNet-50", _LANGUAGE, "256 x 256 (800)", partial(libraries.detr, 256)),
    Row("YOLOS tiny", _LANGUAGE, "256 x 256 (512 x 864)", partial(libraries.yolos, 256)),
    Row("DeepLab v3, MobileNet v3", _VISION, "256 x 256 (520)", partial(libraries.deeplab, 256)),
    Row("SegFormer B0", _LANGUAGE, "256 x 256 (512)", partial(libraries.segformer, 256)),
    Row(
        "SAM base, image encoder",
        _LANGUAGE,
        "256 x 256 (1024)",
        partial(libraries.sam_encoder, 256),
    ),
    Row(
        "Depth Anything small", _LANGUAGE, "196 x 196 (518)", partial(libraries.depth_anything, 196)
    ),
    Row("DPT", _LANGUAGE, "192 x 192 (384)", partial(libraries.dpt, 192)),
    Row("Stable Diffusion 1, UNet", _BLOCKS, "32 x 32 (64)", partial(blocks.diffusion_block, 32)),
    Row("Stable Diffusion, decoder", _BLOCKS, "16 x 16 (64)", partial(blocks.latent_decoder, 16)),
    Row("CLIP base, text encoder", _LANGUAGE, "77 tokens", libraries.clip_text),
    Row("wav2vec 2.0 base, CTC", _LANGUAGE, "1 s", partial(libraries.wav2vec2, 1)),
    Row("Log-mel spectrogram", _BLOCKS, "1 s (30)", partial(blocks.log_mel, 1)),
    Row("RNN-T, a step", _BLOCKS, "1 frame, 1 token", blocks.transducer_step, quick=True),
    Row("PointNet", _BLOCKS, "1024 points", partial(blocks.point_net, 1024), quick=True),
    Row("DGCNN, a layer", _BLOCKS, "512 points (1024)", partial(blocks.edge_convolution, 512)),
    Row("BERT, tied weights", _LANGUAGE, "32 tokens (512)", libraries.tied_weights),
    Row(
        "MobileNet v2, fp16",
        _VISION,
        "224 x 224",
        partial(libraries.half_precision(torch.float16), 224),
    ),
    Row(
        "MobileNet v2, bf16",
        _VISION,
        "224 x 224",
        partial(libraries.half_precision(torch.bfloat16), 224),
    ),
    Row("MobileNet v2, bytes", _VISION, "224 x 224", partial(libraries.byte_pixels, 224)),
    Row("ResNet-18, int8", _VISION, "96 x 96 (224)", partial(libraries.int8_activations, 96)),
)

"""Models of transformers and torchvision with random weights: few layers of published width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.quantization import config, quantized
from support.torchvision_models import build as build_torchvision
from support.torchvision_models import set_statistics
from torch import Tensor, nn

from coreml_delegate.patches.third_party import transformers
from coreml_delegate.scripts.inputs.vision import import_torchvision

Built = tuple[nn.Module, tuple[Tensor, ...]]


class Outputs(nn.Module):
    """A model of transformers that takes tensors by position and returns the named outputs."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found: Any = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(found[name] for name in self.outputs)


def randomize(model: nn.Module) -> nn.Module:
    """Draw what begins as zeros or ones: embeddings of positions, biases and factors of norms.

    Results would not depend on zeros.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _of_transformers(model: str, settings: Any, inputs: dict[str, Tensor], *outputs: str) -> Built:
    module = getattr(transformers(), model)(settings)
    return Outputs(randomize(module), tuple(inputs), outputs).eval(), tuple(inputs.values())


def detr(size: int) -> Built:
    """DETR with ResNet-50, two layers of encoder and decoder, and padding beside the image."""
    torch.manual_seed(0)
    library = transformers()
    backbone = library.ResNetConfig(out_features=["stage4"])
    settings = library.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, encoder_layers=2, decoder_layers=2
    )
    mask = torch.ones(1, size, size, dtype=torch.int64)
    mask[:, :, -size // 4 :] = 0
    inputs = {"pixel_values": torch.randn(1, 3, size, size), "pixel_mask": mask}
    return _of_transformers("DetrForObjectDetection", settings, inputs, "logits", "pred_boxes")


def yolos(size: int) -> Built:
    """YOLOS tiny with two layers."""
    torch.manual_seed(0)
    settings = transformers().YolosConfig(
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        num_hidden_layers=2,
        image_size=[size, size],
    )
    inputs = {"pixel_values": torch.randn(1, 3, size, size)}
    return _of_transformers("YolosForObjectDetection", settings, inputs, "logits", "pred_boxes")


def sam_encoder(size: int) -> Built:
    """The image encoder of SAM base: a layer with windows of 14, and one without."""
    torch.manual_seed(0)
    settings = transformers().SamVisionConfig(
        image_size=size, num_hidden_layers=2, global_attn_indexes=[1], initializer_range=0.02
    )
    inputs = {"pixel_values": torch.randn(1, 3, size, size)}
    return _of_transformers("SamVisionModel", settings, inputs, "last_hidden_state")


def wav2vec2(seconds: float) -> Built:
    """Wav2vec 2.0 base with two layers, and its head for CTC."""
    torch.manual_seed(0)
    settings = transformers().Wav2Vec2Config(num_hidden_layers=2)
    inputs = {"input_values": torch.randn(1, int(16000 * seconds))}
    return _of_transformers("Wav2Vec2ForCTC", settings, inputs, "logits")


def depth_anything(size: int) -> Built:
    """Depth Anything small: four layers of DINOv2, neck and head."""
    torch.manual_seed(0)
    library = transformers()
    backbone = library.Dinov2Config(
        image_size=size,
        hidden_size=384,
        num_attention_heads=6,
        num_hidden_layers=4,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    settings = library.DepthAnythingConfig(backbone_config=backbone)
    inputs = {"pixel_values": torch.randn(1, 3, size, size)}
    built = _of_transformers("DepthAnythingForDepthEstimation", settings, inputs, "predicted_depth")
    with torch.no_grad():  # a depth is positive
        for name, parameter in built[0].named_parameters():
            if name.endswith("head.conv3.bias"):
                parameter.fill_(1.0)
    return built


def dpt(size: int) -> Built:
    """DPT: four layers of a vision transformer, neck and head."""
    torch.manual_seed(0)
    settings = transformers().DPTConfig(
        image_size=size,
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
    )
    inputs = {"pixel_values": torch.randn(1, 3, size, size)}
    return _of_transformers("DPTForDepthEstimation", settings, inputs, "predicted_depth")


def segformer(size: int) -> Built:
    """SegFormer B0, all layers."""
    torch.manual_seed(0)
    settings = transformers().SegformerConfig()
    inputs = {"pixel_values": torch.randn(1, 3, size, size)}
    return _of_transformers("SegformerForSemanticSegmentation", settings, inputs, "logits")


def whisper_encoder() -> Built:
    """The encoder of Whisper tiny, for 30 s of sound: 80 bins, 3,000 frames."""
    torch.manual_seed(0)
    library = transformers()
    config = library.WhisperConfig(
        d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536
    )
    encoder = library.models.whisper.modeling_whisper.WhisperEncoder(config).eval()
    return Outputs(encoder, ("input_features",), ("last_hidden_state",)), (
        torch.randn(1, 80, 3000),
    )


def clip_text() -> Built:
    """The text encoder of CLIP base, which Stable Diffusion has, with two layers."""
    torch.manual_seed(0)
    settings = transformers().CLIPTextConfig(num_hidden_layers=2, vocab_size=4096, eos_token_id=2)
    tokens = torch.randint(3, 4096, (1, 77))
    tokens[:, 20:] = 2
    inputs = {"input_ids": tokens}
    return _of_transformers("CLIPTextModel", settings, inputs, "last_hidden_state", "pooler_output")


def tied_weights() -> Built:
    """BERT for masked words with two layers, whose embeddings are the weights of its last layer."""
    torch.manual_seed(0)
    settings = transformers().BertConfig(
        vocab_size=4096,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
        num_hidden_layers=2,
    )
    mask = torch.ones(1, 32, dtype=torch.int64)
    mask[:, 24:] = 0
    inputs = {"input_ids": torch.randint(0, 4096, (1, 32)), "attention_mask": mask}
    return _of_transformers("BertForMaskedLM", settings, inputs, "logits")


class Segments(nn.Module):
    """A segmentation model of torchvision, without its dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        found: Any = self.model(image)
        return found["out"]


def deeplab(size: int) -> Built:
    """DeepLab v3 with MobileNet v3."""
    torch.manual_seed(0)
    build = import_torchvision().models.segmentation.deeplabv3_mobilenet_v3_large
    model = build(weights=None, weights_backbone=None)
    set_statistics(model, torch.randn(2, 3, size, size))
    return Segments(model).eval(), (torch.randn(1, 3, size, size),)


def half_precision(dtype: torch.dtype) -> Callable[[int], Built]:
    """MobileNet v2 whose weights, input and result are half precision."""

    def build(size: int) -> Built:
        model, image = build_torchvision("mobilenet_v2", size)
        return model.to(dtype), (image.to(dtype),)

    return build


class Pixels(nn.Module):
    """A model of images that takes bytes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model((pixels.float() / 255 - self.mean) / self.deviation)


def byte_pixels(size: int) -> Built:
    """MobileNet v2 with an image of bytes, normalized inside."""
    model, _ = build_torchvision("mobilenet_v2", size)
    pixels = torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8)
    return Pixels(model).eval(), (pixels,)


def int8_activations(size: int) -> Built:
    """ResNet-18, weights and activations quantized to int8 by PT2E."""
    model, image = build_torchvision("resnet18", size)
    _, graph = quantized(model, (image,), config())
    return graph, (image,)

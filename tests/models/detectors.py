"""Detectors: what a program can have of them, from the image to boxes, scores and labels.

Torchvision's own modules end with steps whose results have as many rows as there are detections:
they select by a mask and index by what is not zero. Here their networks, anchors and box coders
are followed by the same steps with a fixed number of rows, as a program on a device has them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from support.torchvision_models import set_statistics
from torch import Tensor, nn

from coreml_delegate.detection import nms
from coreml_delegate.scripts.inputs.vision import import_torchvision

_CANDIDATES = 200
_DETECTIONS = 50


def _detection() -> Any:
    """Return ``torchvision.models.detection``."""
    return import_torchvision().models.detection


def _image_list(image: Tensor) -> Any:
    size = (int(image.shape[-2]), int(image.shape[-1]))
    image_list = _detection().image_list
    return image_list.ImageList(image, [size])


def _inside(boxes: Tensor, image: Tensor) -> Tensor:
    """Return boxes [..., 4], clipped to the image."""
    height, width = image.shape[-2:]
    left, top, right, bottom = boxes.unbind(-1)
    corners = (
        left.clamp(0, width),
        top.clamp(0, height),
        right.clamp(0, width),
        bottom.clamp(0, height),
    )
    return torch.stack(corners, dim=-1)


class OneStage(nn.Module):
    """SSD or RetinaNet of torchvision: the best candidates of all classes, without duplicates.

    Args:
        detector: The module of torchvision.
        has_background: Whether class 0 is the background: softmax over classes, else sigmoids.
    """

    def __init__(self, detector: nn.Module, *, has_background: bool) -> None:
        super().__init__()
        self.detector = detector
        self.has_background = has_background

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes [detections, 4] in pixels, scores [detections] and labels [detections]."""
        detector: Any = self.detector
        features = list(detector.backbone(image).values())
        found = detector.head(features)
        (anchors,) = detector.anchor_generator(_image_list(image), features)
        (codes,), (logits,) = found["bbox_regression"], found["cls_logits"]
        boxes = _inside(detector.box_coder.decode_single(codes, anchors), image)
        scores = logits.softmax(-1)[:, 1:] if self.has_background else logits.sigmoid()
        classes = scores.shape[-1]
        best, places = scores.flatten().topk(_CANDIDATES)
        boxes, labels = boxes[torch.div(places, classes, rounding_mode="floor")], places % classes
        by_class = (labels[:, None] == torch.arange(classes)).to(best.dtype) * best[:, None]
        kept = nms(boxes, by_class, 0.5, _DETECTIONS, per_class=True)
        return boxes[kept], best[kept], labels[kept] + int(self.has_background)


class RoiAlign(nn.Module):
    """Bilinear samples of regions of feature maps, as products with two matrices for each region.

    Equal to ``torchvision.ops.roi_align`` with a fixed number of samples. Each region is taken
    from the map whose scale suits it: from all of them, and then by weights of which one is 1.

    Args:
        size: Rows and columns of a pooled region.
        samples: Samples along each dimension of one element.
    """

    def __init__(self, size: int, samples: int = 2) -> None:
        super().__init__()
        self.size = size
        places = (torch.arange(size * samples) + 0.5) / (size * samples)
        self.register_buffer("places", places)

    def _weights(self, start: Tensor, end: Tensor, count: int) -> Tensor:
        """Return [regions, size, count]: how much each of ``count`` pixels has of each element."""
        extent = (end - start).clamp(min=1.0)
        samples = (start[:, None] + self.places * extent[:, None]).clamp(0, count - 1)
        distance = (samples[:, :, None] - torch.arange(count, dtype=samples.dtype)).abs()
        weights = (1 - distance).clamp(min=0)
        return weights.unflatten(1, (self.size, -1)).mean(2)

    def _pool(self, features: Tensor, boxes: Tensor, stride: int) -> Tensor:
        """Return [regions, channels, size, size] of one feature map [channels, height, width]."""
        left, top, right, bottom = (boxes / stride).unbind(-1)
        rows = self._weights(top, bottom, features.shape[1])
        columns = self._weights(left, right, features.shape[2])
        lines = torch.matmul(rows[:, None], features)
        return torch.matmul(lines, columns[:, None].transpose(2, 3))

    def forward(self, maps: list[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
        """Return [regions, channels, size, size]; ``maps`` are [1, channels, height, width]."""
        strides = [2 ** round(math.log2(image.shape[-1] / m.shape[-1])) for m in maps]
        lowest, highest = (int(math.log2(strides[n])) for n in (0, -1))
        edge = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
        level = torch.floor(4 + torch.log2(edge / 224 + 1e-6)).clamp(lowest, highest)
        pooled = 0
        for features, stride in zip(maps, strides, strict=True):
            suits = (level == int(math.log2(stride))).to(boxes.dtype)
            pooled = pooled + self._pool(features[0], boxes, stride) * suits[:, None, None, None]
        return pooled


class TwoStage(nn.Module):
    """Faster R-CNN or Mask R-CNN of torchvision: the best proposals, classified, with masks."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector
        heads: Any = detector.roi_heads
        self.box_pool = RoiAlign(heads.box_roi_pool.output_size[0])
        has_masks = heads.mask_predictor is not None
        self.mask_pool = RoiAlign(heads.mask_roi_pool.output_size[0]) if has_masks else None

    def _proposals(self, image: Tensor, features: dict[str, Tensor]) -> Tensor:
        network: Any = getattr(self.detector, "rpn")  # noqa: B009 - modules have any attributes
        maps = list(features.values())
        objectness, codes = network.head(maps)
        (anchors,) = network.anchor_generator(_image_list(image), maps)
        rpn = _detection().rpn
        scores, deltas = rpn.concat_box_prediction_layers(objectness, codes)
        boxes = _inside(network.box_coder.decode_single(deltas, anchors), image)
        best, places = scores.flatten().topk(_CANDIDATES)
        boxes = boxes[places]
        return boxes[nms(boxes, best, 0.7, _DETECTIONS)]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return boxes [proposals, 4], scores and labels [proposals], and masks if it has any."""
        detector: Any = self.detector
        heads = detector.roi_heads
        features = detector.backbone(image)
        boxes = self._proposals(image, features)
        maps = [features[name] for name in heads.box_roi_pool.featmap_names if name in features]
        logits, codes = heads.box_predictor(heads.box_head(self.box_pool(maps, boxes, image)))
        scores, labels = logits.softmax(-1)[:, 1:].max(-1)
        labels = labels + 1
        decoded = heads.box_coder.decode_single(codes, boxes).unflatten(-1, (-1, 4))
        chosen = labels[:, None, None].expand(-1, 1, 4)
        boxes = _inside(decoded.gather(1, chosen)[:, 0], image)
        if self.mask_pool is None:
            return boxes, scores, labels
        masks = heads.mask_predictor(heads.mask_head(self.mask_pool(maps, boxes, image)))
        size = masks.shape[-2:]
        index = labels[:, None, None, None].expand(-1, 1, *size)
        return boxes, scores, labels, masks.gather(1, index)[:, 0].sigmoid()


class _Network(nn.Module):
    """The part of a detector that has batch normalizations."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> Any:
        detector: Any = self.detector
        features = detector.backbone(images)
        return detector.head(list(features.values())) if hasattr(detector, "head") else features


def _spread(detector: Any, image: Tensor) -> None:
    """Draw weights of heads with which scores differ as after training, by logits of about one.

    As they begin, those of all boxes are about equal, or all saturate.
    """
    head = detector.rpn.head if hasattr(detector, "rpn") else detector.head
    for layer in head.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    set_statistics(_Network(detector), torch.cat((image, torch.randn_like(image))))
    detector.eval()
    with torch.no_grad():
        found = head(list(detector.backbone(image).values()))
        logits = (
            torch.cat([part.flatten() for part in found[0]])
            if isinstance(found, tuple)
            else (found["cls_logits"])
        )
        for name, layer in head.named_modules():
            is_last = "cls_logits" in name or "classification_head.module_list" in name
            if is_last and isinstance(layer, nn.Conv2d) and layer.bias is not None:
                layer.weight /= logits.std()


def torchvision_detector(name: str, size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A detector with random weights and the statistics of a batch, and an image for it."""
    torch.manual_seed(0)
    build = getattr(_detection(), name)
    detector = build(weights=None, weights_backbone=None).eval()
    image = torch.randn(1, 3, size, size)
    _spread(detector, image)
    if name.startswith(("faster", "mask")):
        return TwoStage(detector).eval(), (image,)
    return OneStage(detector, has_background=name.startswith("ssd")).eval(), (image,)


class _ConvNormAct(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        )


class YoloHead(nn.Module):
    """The head of YOLOv8 and later: boxes from distributions of distances, at three strides.

    Args:
        channels: Of the feature maps at strides 8, 16 and 32.
        classes: Number of classes.
        bins: Distances that a side of a box is a distribution over, in units of the stride.
    """

    def __init__(
        self, channels: tuple[int, ...] = (64, 128, 256), classes: int = 80, bins: int = 16
    ) -> None:
        super().__init__()
        self.classes, self.bins = classes, bins
        box, label = max(16, channels[0] // 4, bins * 4), max(channels[0], min(classes, 100))
        self.boxes = nn.ModuleList(
            nn.Sequential(_ConvNormAct(c, box), _ConvNormAct(box, box), nn.Conv2d(box, 4 * bins, 1))
            for c in channels
        )
        self.labels = nn.ModuleList(
            nn.Sequential(
                _ConvNormAct(c, label), _ConvNormAct(label, label), nn.Conv2d(label, classes, 1)
            )
            for c in channels
        )
        self.register_buffer("distances", torch.arange(bins, dtype=torch.float32))

    def forward(self, *maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes [N, anchors, 4] in pixels, and scores [N, anchors, classes]."""
        found: list[Tensor] = []
        centers: list[Tensor] = []
        strides: list[Tensor] = []
        for n, features in enumerate(maps):
            outputs = torch.cat((self.boxes[n](features), self.labels[n](features)), 1)
            found.append(outputs.flatten(2))
            height, width = features.shape[-2:]
            rows, columns = torch.meshgrid(
                torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij"
            )
            centers.append(torch.stack((columns, rows), -1).view(-1, 2))
            strides.append(torch.full((height * width, 1), 8.0 * 2**n))
        sides, logits = torch.cat(found, 2).split((4 * self.bins, self.classes), 1)
        shares = sides.unflatten(1, (4, self.bins)).softmax(2)
        spans = (shares * self.distances.view(1, 1, -1, 1)).sum(2).transpose(1, 2)
        center, stride = torch.cat(centers), torch.cat(strides)
        near, far = spans.chunk(2, -1)
        boxes = torch.cat((center - near, center + far), -1) * stride
        return boxes, logits.sigmoid().transpose(1, 2)


def yolo_head(size: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The head at the width of YOLOv8 n, and the feature maps of an image of so many pixels."""
    torch.manual_seed(0)
    maps = (size // 8, size // 16, size // 32)
    channels = (64, 128, 256)
    features = tuple(torch.randn(1, c, s, s) for c, s in zip(channels, maps, strict=True))
    return YoloHead(channels).eval(), features

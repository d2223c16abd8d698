"""Non-maximum suppression with a fixed number of results, a single op of Core ML.

``torchvision.ops.nms`` returns as many indices as boxes remain. A program cannot allocate memory
for a data-dependent number, so this op returns a fixed number of indices, padded with -1.

Source of the semantics: coremltools' MIL op reference, ``non_maximum_suppression``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coreml_delegate.errors import OptionError

_LIBRARY = torch.library.Library("coreml_delegate", "FRAGMENT")
_ARGUMENTS = "Tensor boxes, Tensor scores, float iou_threshold, int max_boxes, bool per_class"
_LIBRARY.define(f"nms({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"nms.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")
_OWN: Any = torch.ops.coreml_delegate

NMS = "coreml_delegate.nms.default"
"""Name of the op in programs."""


def nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float = 0.5,
    max_boxes: int = 100,
    *,
    per_class: bool = False,
) -> Tensor:
    """Return the indices of the boxes after non-maximum suppression, best first.

    Repeatedly take the box with the best score, and remove boxes that overlap it too much.

    Args:
        boxes: [B, 4] or [N, B, 4], fp32: left, top, right, bottom, in any unit.
        scores: [B] or [N, B], or with classes [B, K] or [N, B, K], fp32. With classes the score of
            a box is the score of its best class.
        iou_threshold: Intersection over union above which the worse of two boxes is removed.
        max_boxes: Number of indices to return.
        per_class: Whether a box removes only boxes with the same best class.

    Returns:
        [max_boxes] or [N, max_boxes], int64, padded with -1.

    Raises:
        OptionError: The shapes do not fit, or a number is out of range.
    """
    is_batched = boxes.dim() == 3
    if boxes.dim() not in (2, 3) or boxes.shape[-1] != 4:
        raise OptionError(
            "nms takes no boxes of this shape",
            got=str(tuple(boxes.shape)),
            expected="[B, 4] or [N, B, 4]",
        )
    if scores.dim() == boxes.dim() - 1:
        scores = scores.unsqueeze(-1)
    if scores.shape[:-1] != boxes.shape[:-1]:
        raise OptionError(
            "nms takes a score or a row of scores for each box",
            got=f"scores {tuple(scores.shape)}, boxes {tuple(boxes.shape)}",
            expected="as many scores, or rows of scores, as boxes",
        )
    if max_boxes < 1 or not 0 <= iou_threshold <= 1:
        raise OptionError(
            "an argument of nms is out of range",
            got=f"max_boxes={max_boxes}, iou_threshold={iou_threshold}",
            expected="max_boxes of at least 1, iou_threshold of 0 to 1",
        )
    if not is_batched:
        boxes, scores = boxes.unsqueeze(0), scores.unsqueeze(0)
    indices = _OWN.nms.default(boxes, scores, iou_threshold, max_boxes, per_class)
    return indices if is_batched else indices[0]


def _nms_shape(
    boxes: Tensor, scores: Tensor, iou_threshold: float, max_boxes: int, per_class: bool
) -> Tensor:
    del scores, iou_threshold, per_class
    return boxes.new_empty((boxes.shape[0], max_boxes), dtype=torch.int64)


def _nms(
    boxes: Tensor, scores: Tensor, iou_threshold: float, max_boxes: int, per_class: bool
) -> Tensor:
    best, classes = scores.max(-1)
    order = best.argsort(dim=1, descending=True, stable=True)
    indices = boxes.new_full((boxes.shape[0], max_boxes), -1, dtype=torch.int64)
    for n, ranked in enumerate(order):
        remaining = ranked
        for rank in range(min(max_boxes, len(ranked))):
            if not len(remaining):
                break
            top, remaining = remaining[0], remaining[1:]
            indices[n, rank] = top
            stays = _overlaps(boxes[n, top], boxes[n, remaining]) <= iou_threshold
            if per_class:
                stays |= classes[n, remaining] != classes[n, top]
            remaining = remaining[stays]
    return indices


def _overlaps(box: Tensor, boxes: Tensor) -> Tensor:
    """Return the intersection over union [B] of a box [4] with each of ``boxes`` [B, 4]."""
    sides = torch.minimum(box[2:], boxes[:, 2:]) - torch.maximum(box[:2], boxes[:, :2])
    intersection = sides.clamp(min=0).prod(-1)
    union = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(-1) - intersection
    return torch.where(union > 0, intersection / union, 0)


def _nms_out(*arguments: Any, out: Tensor) -> Tensor:
    return out.copy_(_nms(*arguments))


_LIBRARY.impl("nms", _nms, "CompositeExplicitAutograd")
_LIBRARY.impl("nms", _nms_shape, "Meta")
_LIBRARY.impl("nms.out", _nms_out, "CompositeExplicitAutograd")

"""Non-maximum suppression.

Source: coremltools' MIL op reference, ``tensor_operation``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel
from coreml_delegate.targets import Opset


@kernel("non_maximum_suppression", widen=True)
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    score_threshold: float,
    max_boxes: int,
    per_class_suppression: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best boxes that overlap none better by more than ``iou_threshold``.

    Args:
        boxes: [N, B, 4]: centre x, centre y, width, height.
        scores: [N, B, K]; a box's score is its best class's.
        iou_threshold: Intersection over union above which the worse box goes.
        score_threshold: Scores not above it are out from the start, but the best box of all stays.
        max_boxes: Boxes to return; what is missing is 0, its index -1.
        per_class_suppression: Whether boxes suppress those of their own class alone.

    Returns:
        Boxes [N, max_boxes, 4], scores [N, max_boxes, K], indices [N, max_boxes], counts [N].
    """
    batches = [
        _survivors(b, s, iou_threshold, score_threshold, per_class_suppression)[:max_boxes]
        for b, s in zip(boxes, scores, strict=True)
    ]
    kept_boxes = boxes.new_zeros(len(batches), max_boxes, boxes.shape[2])
    kept_scores = scores.new_zeros(len(batches), max_boxes, scores.shape[2])
    kept = torch.full((len(batches), max_boxes), -1, dtype=torch.int64)
    for n, chosen in enumerate(batches):
        count = len(chosen)
        kept_boxes[n, :count] = boxes[n, chosen]
        kept_scores[n, :count] = scores[n, chosen]
        kept[n, :count] = chosen
    return kept_boxes, kept_scores, kept, torch.tensor([len(chosen) for chosen in batches])


@kernel("non_maximum_suppression", since=Opset.iOS17, widen=True)
def non_maximum_suppression_boxes_last(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    per_class_suppression: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As before, without threshold or counts, and with the boxes in the last dimension."""
    kept_boxes, kept_scores, kept, _ = non_maximum_suppression(
        boxes.mT, scores.mT, iou_threshold, -torch.inf, max_boxes, per_class_suppression
    )
    return kept_boxes.mT, kept_scores.mT, kept


def _survivors(
    boxes: Tensor, scores: Tensor, iou_threshold: float, score_threshold: float, per_class: bool
) -> Tensor:
    best, classes = scores.max(dim=-1)
    order = torch.argsort(best, descending=True, stable=True)
    candidates = order[best[order] > score_threshold]
    if not len(candidates):
        return order[:1]
    overlaps = _intersection_over_union(boxes[candidates]) > iou_threshold
    if per_class:
        overlaps &= classes[candidates][:, None] == classes[candidates]
    alive = torch.ones(len(candidates), dtype=torch.bool)
    for n in range(len(candidates)):
        if alive[n]:
            alive[n + 1 :] &= ~overlaps[n, n + 1 :]
    return candidates[alive]


def _intersection_over_union(boxes: Tensor) -> Tensor:
    centre, size = boxes[:, :2], boxes[:, 2:]
    low, high = centre - size / 2, centre + size / 2
    inner = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    intersection = inner.clamp(min=0).prod(dim=-1)
    area = size.prod(dim=-1)
    union = area[:, None] + area - intersection
    return torch.where(union > 0, intersection / union, torch.zeros_like(union))

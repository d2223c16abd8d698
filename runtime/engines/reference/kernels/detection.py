"""Non-maximum suppression.

Source: coremltools' MIL op reference, ``tensor_operation``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coreml_delegate.runtime.engines.reference.kernels import kernel
from coreml_delegate.targets import Opset


@kernel("non_maximum_suppression", widen=True)
def non_maximum_suppression_ios15(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    score_threshold: float,
    max_boxes: int,
    per_class_suppression: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep boxes in order of score, unless they overlap a better kept box.

    Args:
        boxes: [N, B, 4]: centre x, centre y, width, height.
        scores: [N, B, K]; the score of a box is its highest class score.
        iou_threshold: Intersection over union above which a better box suppresses a worse one.
        score_threshold: Boxes whose score is not above it are dropped, except the best box.
        max_boxes: Number of boxes to return; missing boxes are 0, their indices -1.
        per_class_suppression: Whether boxes suppress only boxes of the same best class.

    Returns:
        Boxes [N, max_boxes, 4], scores [N, max_boxes, K], indices [N, max_boxes], counts [N].
    """
    batches = [
        _survivors(b, s, iou_threshold, score_threshold, per_class_suppression)[:max_boxes]
        for b, s in zip(boxes, scores, strict=True)
    ]
    kept_boxes = boxes.new_zeros(len(batches), max_boxes, boxes.shape[2])
    kept_scores = scores.new_zeros(len(batches), max_boxes, scores.shape[2])
    indices = torch.full((len(batches), max_boxes), -1, dtype=torch.int64)
    for n, chosen in enumerate(batches):
        count = len(chosen)
        kept_boxes[n, :count] = boxes[n, chosen]
        kept_scores[n, :count] = scores[n, chosen]
        indices[n, :count] = chosen
    return kept_boxes, kept_scores, indices, torch.tensor([len(chosen) for chosen in batches])


@kernel("non_maximum_suppression", since=Opset.iOS17, widen=True)
def non_maximum_suppression_ios17(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    per_class_suppression: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As for iOS 15, without score threshold and counts; boxes [N, 4, B], scores [N, K, B]."""
    kept_boxes, kept_scores, indices, _ = non_maximum_suppression_ios15(
        boxes.mT, scores.mT, iou_threshold, -torch.inf, max_boxes, per_class_suppression
    )
    return kept_boxes.mT, kept_scores.mT, indices


def _survivors(
    boxes: Tensor, scores: Tensor, iou_threshold: float, score_threshold: float, per_class: bool
) -> Tensor:
    best, classes = scores.max(dim=-1)
    order = torch.argsort(best, descending=True, stable=True)
    candidates = order[best[order] > score_threshold]
    if not len(candidates):
        return order[:1]
    return pick_top(boxes, candidates, iou_threshold, classes if per_class else None)


def pick_top(
    boxes: Tensor, candidates: Tensor, iou_threshold: float, classes: Tensor | None
) -> Tensor:
    """Return the candidates that do not overlap an earlier returned candidate.

    Args:
        boxes: [B, 4]: centre x, centre y, width, height.
        candidates: Indices of boxes, the best first.
        iou_threshold: Intersection over union above which the later candidate is dropped.
        classes: [B], if boxes suppress only boxes of the same class; else None.
    """
    chosen: list[Tensor] = []
    while len(candidates):
        first, candidates = candidates[:1], candidates[1:]
        chosen.append(first)
        overlaps = _intersection_over_union(boxes[first], boxes[candidates]) > iou_threshold
        if classes is not None:
            overlaps &= classes[candidates] == classes[first]
        candidates = candidates[~overlaps]
    return torch.cat(chosen) if chosen else candidates


def _intersection_over_union(box: Tensor, boxes: Tensor) -> Tensor:
    """Return intersection over union of ``box`` [1, 4] and each of ``boxes`` [B, 4], [B]."""
    (low, high), (lows, highs) = (
        (corners[:, :2] - corners[:, 2:] / 2, corners[:, :2] + corners[:, 2:] / 2)
        for corners in (box, boxes)
    )
    inner = torch.minimum(high, highs) - torch.maximum(low, lows)
    intersection = inner.clamp(min=0).prod(dim=-1)
    union = box[:, 2:].prod(dim=-1) + boxes[:, 2:].prod(dim=-1) - intersection
    return torch.where(union > 0, intersection / union, torch.zeros_like(union))

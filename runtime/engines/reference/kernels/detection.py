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
    return pick_top(boxes, candidates, iou_threshold, classes if per_class else None)


def pick_top(
    boxes: Tensor, candidates: Tensor, iou_threshold: float, classes: Tensor | None
) -> Tensor:
    """Return the candidates that overlap none before them, of those returned, by more.

    Args:
        boxes: [B, 4]: centre x, centre y, width, height.
        candidates: Indices of boxes, the best first.
        iou_threshold: Intersection over union above which the later candidate goes.
        classes: [B], if boxes suppress those of their own class only; else None.
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


def _intersection_over_union(box: Tensor, others: Tensor) -> Tensor:
    """Return how much of their union a box [1, 4] and each of the others [B, 4] share, [B]."""
    (low, high), (lows, highs) = (
        (b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2) for b in (box, others)
    )
    inner = torch.minimum(high, highs) - torch.maximum(low, lows)
    intersection = inner.clamp(min=0).prod(dim=-1)
    union = box[:, 2:].prod(dim=-1) + others[:, 2:].prod(dim=-1) - intersection
    return torch.where(union > 0, intersection / union, torch.zeros_like(union))

"""Non-maximum suppression.

Source: coremltools' MIL op reference, ``tensor_operation``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from openvino import opset15 as ops

from coreml_delegate.runtime.engines.openvino.graph import (
    dim_of,
    dims,
    ints,
    reshape,
    scalar,
    shape_of,
    stable_topk,
)
from coreml_delegate.runtime.engines.openvino.translations import translation
from coreml_delegate.runtime.engines.openvino.values import Result, Tensor
from coreml_delegate.targets import Opset


@translation("non_maximum_suppression")
def non_maximum_suppression_ios15(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    score_threshold: float,
    max_boxes: int,
    per_class_suppression: bool = False,
) -> Result:
    """Keep boxes in order of score, unless they overlap a better kept box.

    The reference engine's kernel describes arguments and results.
    """
    best = ops.reduce_max(scores, ints(-1), False)
    is_candidate = _candidates(best, score_threshold)
    candidate_scores = ops.unsqueeze(_where(is_candidate, best, -math.inf), ints(1))
    if per_class_suppression:
        classes = ops.range(ints(0), dim_of(scores, 2), ints(1), "i32")
        of_class = ops.equal(ops.unsqueeze(_first(scores), ints(1)), reshape(classes, (-1, 1)))
        candidate_scores = _where(of_class, candidate_scores, -math.inf)
    is_kept = _unsuppressed(boxes, candidate_scores, iou_threshold, max_boxes)
    count = _count(boxes, max_boxes)
    _, ranking = stable_topk(_where(is_kept, best, -math.inf), count, 1, "max")
    is_box = ops.gather_elements(is_kept, ranking, 1)
    box_indices = ops.unsqueeze(ranking, ints(2))
    wide = ops.unsqueeze(is_box, ints(2))
    missing = ops.subtract(ints(max_boxes), count)
    return (
        _pad_boxes(_where(wide, ops.gather_nd(boxes, box_indices, 1), 0), missing, 0),
        _pad_boxes(_where(wide, ops.gather_nd(scores, box_indices, 1), 0), missing, 0),
        _pad_boxes(_where(is_box, ranking, -1), missing, -1),
        ops.reduce_sum(ops.convert(is_box, "i32"), ints(1), False),
    )


@translation("non_maximum_suppression", since=Opset.iOS17)
def non_maximum_suppression_ios17(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    per_class_suppression: bool = False,
) -> Result:
    """As for iOS 15, without score threshold and counts; boxes [N, 4, B], scores [N, K, B]."""
    swap = ints((0, 2, 1))
    kept_boxes, kept_scores, indices, _ = non_maximum_suppression_ios15(
        ops.transpose(boxes, swap),
        ops.transpose(scores, swap),
        iou_threshold,
        -math.inf,
        max_boxes,
        per_class_suppression,
    )
    return ops.transpose(kept_boxes, swap), ops.transpose(kept_scores, swap), indices


def _candidates(best: Any, score_threshold: float) -> Any:
    """Return a mask [N, B] of the boxes above the threshold, or else of the best box."""
    above = ops.greater(best, scalar(score_threshold, best))
    is_empty = ops.logical_not(ops.reduce_logical_or(above, ints(1), True))
    indices = ops.range(ints(0), dim_of(best, 1), ints(1), "i32")
    is_best = ops.equal(indices, ops.unsqueeze(_first(best), ints(1)))
    return ops.logical_or(above, ops.logical_and(is_empty, is_best))


def _first(values: Any) -> Any:
    """Return the index of the greatest element along the last axis."""
    return ops.squeeze(stable_topk(values, ints(1), -1, "max")[1], ints((-1,)))


def _unsuppressed(boxes: Any, candidate_scores: Any, iou_threshold: float, max_boxes: int) -> Any:
    """Return a mask [N, B] of unsuppressed boxes; ``candidate_scores`` are [N, classes, B]."""
    # OpenVINO also suppresses at the threshold, and treats denormal numbers as 0.
    beyond = np.nextafter(np.float32(iou_threshold), np.float32(np.inf))
    beyond = np.maximum(beyond, np.finfo(np.float32).tiny)
    selected = ops.non_max_suppression(
        boxes,
        candidate_scores,
        ints(max_boxes),
        ops.constant(beyond),
        ops.constant(np.float32(-np.inf)),
        box_encoding="center",
        sort_result_descending=False,
        output_type="i32",
    ).output(0)
    kept_indices = ops.gather(selected, ints((0, 2)), ints(1))
    set_marks = ops.broadcast(ops.constant(np.float32(1)), reshape(dim_of(kept_indices, 0), (1,)))
    shape = ops.gather(shape_of(boxes), ints((0, 1)), ints(0))
    unmarked = ops.broadcast(ops.constant(np.float32(0)), shape)
    marks = ops.scatter_nd_update(unmarked, kept_indices, set_marks)
    return ops.greater(marks, scalar(0, marks))


def _where(condition: Any, value: Any, otherwise: float) -> Any:
    return ops.select(condition, value, scalar(otherwise, value))


def _count(boxes: Any, max_boxes: int) -> Any:
    available = dims(boxes)[1]
    if available is not None:
        return ints(min(available, max_boxes))
    return ops.minimum(dim_of(boxes, 1), ints(max_boxes))


def _pad_boxes(value: Any, missing: Any, filler: float) -> Any:
    """Return ``value`` [N, boxes, ...] padded to ``missing`` more boxes."""
    end = [ints((0,)), reshape(missing, (1,)), ints([0] * (len(dims(value)) - 2))]
    axes = [0] * len(dims(value))
    return ops.pad(value, ints(axes), ops.concat(end, 0), "constant", scalar(filler, value))

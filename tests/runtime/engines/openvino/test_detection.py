"""Non-maximum suppression of the OpenVINO engine, against the textbook's loop."""

from __future__ import annotations

import numpy as np
import pytest
from support import mil
from support.engine_runs import assert_close, run
from support.mil import ct, mb, types

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.mil.reader import read_program
from coreml_delegate.targets import Opset


def _overlap(one, other):
    """Intersection over union of two boxes: centre x, centre y, width, height."""
    low = np.maximum(one[:2] - one[2:] / 2, other[:2] - other[2:] / 2)
    high = np.minimum(one[:2] + one[2:] / 2, other[:2] + other[2:] / 2)
    shared = np.prod(np.maximum(high - low, 0))
    total = np.prod(one[2:]) + np.prod(other[2:]) - shared
    return shared / total if total > 0 else 0.0


def _survivors(boxes, scores, iou_threshold, score_threshold, per_class):
    best, classes = scores.max(-1), scores.argmax(-1)
    order = np.argsort(-best, kind="stable")
    above = [n for n in order if best[n] > score_threshold] or [order[0]]
    kept: list[int] = []
    for n in above:
        rivals = [m for m in kept if not per_class or classes[m] == classes[n]]
        if all(_overlap(boxes[n], boxes[m]) <= iou_threshold for m in rivals):
            kept.append(n)
    return kept


def _expected(boxes, scores, max_boxes, **options):
    total = len(boxes)
    answer = (
        np.zeros((total, max_boxes, 4), np.float32),
        np.zeros((total, max_boxes, scores.shape[2]), np.float32),
        np.full((total, max_boxes), -1),
        np.zeros(total),
    )
    for n, (image, marks) in enumerate(zip(boxes, scores, strict=True)):
        kept = _survivors(image, marks, **options)[:max_boxes]
        answer[0][n, : len(kept)] = image[kept]
        answer[1][n, : len(kept)] = marks[kept]
        answer[2][n, : len(kept)] = kept
        answer[3][n] = len(kept)
    return answer


def _scene(batch, count, classes, seed):
    """Boxes that overlap in many ways; scores on a coarse grid, so that some are equal."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate(
        [rng.uniform(0, 6, (batch, count, 2)), rng.uniform(1, 4, (batch, count, 2))], -1
    )
    scores = rng.integers(0, 20, (batch, count, classes)) / 20
    return {"boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32)}


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize(
    ("batch", "count", "classes", "max_boxes", "iou_threshold", "score_threshold"),
    [
        (2, 25, 3, 10, 0.3, 0.4),
        (1, 30, 1, 4, 0.6, 0.0),
        (3, 6, 4, 9, 0.0, 0.5),  # more places than boxes; touching none at all
        (1, 8, 2, 8, 1.0, 0.2),  # nothing overlaps by more than everything
        (2, 7, 2, 3, 0.5, 2.0),  # no score is above the threshold: the best box stays
    ],
)
def test_boxes_equal_the_reference_engine(
    batch, count, classes, max_boxes, iou_threshold, score_threshold, per_class
):
    scene = _scene(batch, count, classes, seed=count)
    thresholds = {"iou_threshold": iou_threshold, "score_threshold": score_threshold}
    results = run(
        OPENVINO,
        lambda boxes, scores: mb.non_maximum_suppression(
            boxes=boxes,
            scores=scores,
            max_boxes=max_boxes,
            per_class_suppression=per_class,
            **{name: np.float32(value) for name, value in thresholds.items()},
        ),
        scene,
        Opset.iOS16,
    )
    answers = _expected(**scene, max_boxes=max_boxes, per_class=per_class, **thresholds)
    for result, answer in zip(results, answers, strict=True):
        assert_close(result, answer)


def test_boxes_in_the_last_dimension():
    scene = _scene(2, 25, 3, seed=1)
    results = run(
        OPENVINO,
        lambda boxes, scores: mb.non_maximum_suppression(
            boxes=boxes, scores=scores, iou_threshold=np.float32(0.3), max_boxes=12
        ),
        {name: np.swapaxes(array, 1, 2).copy() for name, array in scene.items()},
        Opset.iOS17,
    )
    boxes, scores, kept, _ = _expected(
        **scene, max_boxes=12, iou_threshold=0.3, score_threshold=-np.inf, per_class=False
    )
    answers = np.swapaxes(boxes, 1, 2), np.swapaxes(scores, 1, 2), kept
    for result, answer in zip(results, answers, strict=True):
        assert_close(result, answer)


def test_a_number_of_boxes_known_at_run_time():
    count = ct.RangeDim(1, 50).symbol

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, count, 4), dtype=types.fp32),
            mb.TensorSpec((1, count, 2), dtype=types.fp32),
        ],
        opset_version=ct.target.iOS16,
    )
    def program(boxes, scores):
        return mb.non_maximum_suppression(
            boxes=boxes,
            scores=scores,
            iou_threshold=np.float32(0.3),
            score_threshold=np.float32(0.1),
            max_boxes=6,
        )

    message = mil.load(program, weights_dir="", specification_version=7)
    compiled = OPENVINO.compile(
        mil.main(read_program(message.SerializeToString(), {})), EngineOptions()
    )
    for boxes in (3, 40):
        scene = _scene(1, boxes, 2, seed=boxes)
        answers = _expected(
            **scene, max_boxes=6, iou_threshold=0.3, score_threshold=0.1, per_class=False
        )
        for result, answer in zip(compiled(scene).values(), answers, strict=True):
            assert_close(result, answer)

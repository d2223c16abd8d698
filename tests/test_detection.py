"""Non-maximum suppression with a fixed number of results, in PyTorch and lowered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.lowering import fp32_specs, lower_unchecked, reasons
from torch import Tensor
from torch.export import Dim

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.detection import nms
from coreml_delegate.errors import OptionError
from coreml_delegate.ops import obstacle
from coreml_delegate.scripts.inputs.vision import import_torchvision


def _overlap(one, other):
    """Intersection over union of two boxes given by two corners."""
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    shared = np.prod(np.maximum(sides, 0))
    return shared / (np.prod(one[2:] - one[:2]) + np.prod(other[2:] - other[:2]) - shared)


def _kept(boxes, scores, threshold, count, *, per_class):
    """The textbook's loop, over all pairs."""
    best, classes = scores.max(-1), scores.argmax(-1)
    kept: list[int] = []
    for n in np.argsort(-best, kind="stable"):
        rivals = [m for m in kept if not per_class or classes[m] == classes[n]]
        if all(_overlap(boxes[n], boxes[m]) <= threshold for m in rivals):
            kept.append(int(n))
    kept = kept[:count]
    return kept + [-1] * (count - len(kept))


def _scene(images: int, count: int, classes: int) -> tuple[Tensor, Tensor]:
    near = torch.rand(images, count, 2) * 6
    return torch.cat((near, near + 1 + torch.rand(images, count, 2) * 3), -1), torch.rand(
        images, count, classes
    )


@pytest.mark.parametrize("per_class", [False, True])
def test_indices_are_those_of_the_textbook(per_class: bool) -> None:
    boxes, scores = _scene(2, 40, 3)
    found = nms(boxes, scores, 0.3, 30, per_class=per_class)
    expected = [
        _kept(b, s, 0.3, 30, per_class=per_class)
        for b, s in zip(boxes.numpy(), scores.numpy(), strict=True)
    ]
    assert found.tolist() == expected
    assert found.dtype is torch.int64


def test_one_image_and_one_class_need_no_dimension() -> None:
    boxes, scores = _scene(1, 20, 1)
    expected = nms(boxes, scores, max_boxes=5)
    assert torch.equal(nms(boxes, scores[..., 0], max_boxes=5), expected)
    assert torch.equal(nms(boxes[0], scores[0], max_boxes=5), expected[0])
    assert torch.equal(nms(boxes[0], scores[0, :, 0], max_boxes=5), expected[0])


@pytest.mark.parametrize(
    ("boxes", "scores", "options", "message"),
    [
        ((5, 3), (5,), {}, r"no boxes of this shape: got \(5, 3\)"),
        ((4,), (1,), {}, r"no boxes of this shape: got \(4,\)"),
        ((5, 4), (6,), {}, r"a score or a row of scores for each box: got scores \(6, 1\)"),
        ((2, 5, 4), (5, 2), {}, "a score or a row of scores for each box"),
        ((5, 4), (5,), {"max_boxes": 0}, "out of range: got max_boxes=0"),
        ((5, 4), (5,), {"iou_threshold": 1.5}, "iou_threshold=1.5, expected"),
    ],
)
def test_wrong_arguments_are_errors(boxes, scores, options, message) -> None:
    with pytest.raises(OptionError, match=message):
        nms(torch.rand(boxes), torch.rand(scores), **options)


class _Best(torch.nn.Module):
    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        kept = nms(boxes, scores, 0.3, 6, per_class=True)
        return boxes[kept], kept


def test_what_core_ml_does_not_take_runs_on_the_python_host() -> None:
    boxes, scores = (tensor[0] for tensor in _scene(1, 20, 3))
    skipped = ["coreml_delegate.nms.default"]
    lowered = lower_unchecked(_Best(), (boxes, scores), skip_ops_for_coreml_delegation=skipped)
    assert list(reasons(lowered.report)) == skipped
    assert [n.cpu_obstacle.code for n in lowered.report.without_kernel] == ["kernel"]
    program = runtime.load_program(lowered.pte, host="python")
    for actual, expected in zip(
        program.run("forward", [boxes, scores]), _Best()(boxes, scores), strict=True
    ):
        assert torch.equal(actual, expected)


def test_the_number_of_boxes_may_be_dynamic() -> None:
    boxes, scores = (tensor[0] for tensor in _scene(1, 20, 3))
    count = Dim("count", min=2, max=64)
    exported = torch.export.export(
        _Best(), (boxes, scores), dynamic_shapes=({0: count}, {0: count})
    )
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    assert partitioner.report.undelegated == ()
    program = runtime.load_program(edge.to_executorch().buffer)
    for few in (3, 20):
        given = [boxes[:few].contiguous(), scores[:few].contiguous()]
        actual = program.run("forward", given)
        for found, expected in zip(actual, _Best()(*given), strict=True):
            assert torch.equal(found, expected)


def test_torchvisions_own_is_refused_with_a_remedy() -> None:
    import_torchvision()
    graph = torch.fx.Graph()
    boxes, scores = graph.placeholder("boxes"), graph.placeholder("scores")
    reason = obstacle(
        graph.call_function(torch.ops.torchvision.nms.default, (boxes, scores, 0.5)), None
    )
    assert reason is not None
    assert "depends on values" in reason.text
    assert "coreml_delegate.detection.nms" in str(reason.remedy)

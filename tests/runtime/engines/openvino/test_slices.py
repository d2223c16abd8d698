"""Slices whose steps the OpenVINO plugin would lose."""

from __future__ import annotations

import numpy as np
import pytest
from support import mil
from support.mil import mb

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO


def _slice(x, begin: int, end: int, step: int, *, is_open: bool):
    masks = {"begin_mask": [is_open and begin == 0], "end_mask": [is_open]}
    return mb.slice_by_index(x=x, begin=[begin], end=[end], stride=[step], **masks)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("is_open", [False, True])
def test_slices_of_one_concatenation_keep_their_steps(sizes: tuple[int, int], is_open) -> None:
    total = sum(sizes)
    inputs = {
        "x": np.arange(sizes[0], dtype=np.int32),
        "y": np.arange(sizes[1], dtype=np.int32) + 10,
    }

    def function(x, y):
        joined = mb.concat(values=[x, y], axis=0)
        return [_slice(joined, first, total, 2, is_open=is_open) for first in (0, 1)]

    main = mil.main(mil.build(function, inputs))
    results = OPENVINO.compile(main, EngineOptions())(mil.features(main, inputs))
    joined = np.concatenate(list(inputs.values()))
    for name, wanted in zip(main.block.outputs, (joined[::2], joined[1::2]), strict=True):
        assert results[name].tolist() == wanted.tolist()

"""Calls of convolutions."""

from __future__ import annotations

from coreml_delegate.op_rules import ReasonCode
from ops.op_samples.sample import accept, reject, w, x

_CORE = "aten.convolution.default"

ACCEPTED = (
    accept("aten.conv1d.default", x(2, 4, 9), w(6, 4, 3), w(6), [2], [1], [1]),
    accept("aten.conv1d.default", x(2, 4, 9), w(4, 1, 3), None, [1], [2], [2], 4, note="depthwise"),
    accept("aten.conv1d.default", x(4, 9), w(6, 4, 3), w(6), note="unbatched"),
    accept("aten.conv2d.default", x(1, 4, 8, 9), w(6, 4, 3, 2), w(6), [2, 1], [1, 0]),
    accept("aten.conv2d.default", x(4, 8, 9), w(6, 4, 3, 2), w(6), note="unbatched"),
    accept("aten.conv2d.default", x(1, 4, 8, 9), w(6, 2, 3, 3), None, [1, 1], [2, 2], [2, 2], 2, note="groups"),
    accept("aten.conv3d.default", x(1, 2, 5, 6, 4), w(4, 2, 3, 2, 1), w(4), [1, 2, 1], [1, 0, 0]),
    accept("aten.conv2d.padding", x(1, 4, 8, 9), w(6, 4, 3, 3), w(6), [1, 1], "same", note="same"),
    accept("aten.conv2d.padding", x(1, 4, 8, 9), w(6, 4, 2, 4), w(6), [1, 1], "same", note="same-even"),
    accept("aten.conv2d.padding", x(1, 4, 8, 9), w(6, 4, 3, 3), None, [2, 1], "valid", note="valid"),
    accept("aten.conv2d.padding", x(1, 4, 8, 9), w(6, 4, 3, 3), None, [1, 1], "same",[2,2], note="same-dil"),
    accept("aten.conv1d.padding", x(1, 4, 9), w(6, 4, 3), None, [1], "same"),
    accept(_CORE, x(1, 4, 9), w(6, 4, 3), w(6), [1], [1], [1], False, [0], 1, note="1d"),
    accept(_CORE, x(1, 4, 8, 9), w(6, 4, 3, 3), w(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1, note="2d"),
    accept(_CORE, x(1, 4, 8, 9), w(4, 2, 3, 3), None, [2, 2], [0, 1], [1, 2], False, [0, 0], 2, note="2d-groups"),
    accept(_CORE, x(1, 2, 4, 5, 4), w(3, 2, 2, 2, 2), w(3), [1, 1, 1], [0, 1, 0], [1, 1, 1], False, [0, 0, 0], 1, note="3d"),
    accept(_CORE, x(1, 4, 5), w(4, 3, 3), w(3), [2], [1], [1], True, [0], 1, note="1d-transposed"),
    accept(_CORE, x(1, 4, 5), w(4, 3, 3), w(3), [2], [1], [1], True, [1], 1, note="1d-transposed-outpad"),
    accept(_CORE, x(1, 4, 5, 6), w(4, 3, 3, 3), w(3), [2, 2], [1, 1], [1, 1], True, [0, 0], 1, note="2d-transposed"),
    accept(_CORE, x(1, 4, 5, 6), w(4, 3, 3, 3), w(3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1, note="2d-transposed-outpad"),
    accept(_CORE, x(1, 4, 5, 6), w(4, 3, 3, 3), w(3), [2, 2], [0, 0], [1, 1], True, [1, 1], 1, note="2d-transposed-outpad0"),
    accept(_CORE, x(1, 4, 5, 6), w(4, 2, 3, 3), w(4), [2, 2], [1, 1], [1, 1], True, [0, 0], 2, note="2d-transposed-groups"),
    accept(_CORE, x(1, 4, 5, 6), w(4, 3, 3, 3), w(3), [1, 1], [1, 1], [2, 2], True, [0, 0], 1, note="2d-transposed-dil"),
    accept(_CORE, x(1, 2, 4, 5, 4), w(2, 3, 2, 2, 2), w(3), [2, 2, 2], [0, 1, 0], [1, 1, 1], True, [0, 0, 0], 1, note="3d-transposed"),
    accept("aten.conv_transpose1d.default", x(1, 4, 5), w(4, 3, 3), w(3), [2], [1]),
    accept("aten.conv_transpose1d.default", x(1, 4, 5), w(4, 3, 3), w(3), [2], [1], [1], note="outpad"),
    accept("aten.conv_transpose2d.input", x(1, 4, 5, 6), w(4, 3, 3, 3), w(3), [2, 2], [1, 1]),
    accept("aten.conv_transpose2d.input", x(1, 4, 5, 6), w(4, 3, 3, 3), w(3), [2, 2], [1, 1], [1, 1], note="outpad"),
    accept("aten.conv_transpose2d.input", x(1, 4, 5, 6), w(4, 3, 2, 2), w(3), [2, 2], note="k2"),
    accept("aten.conv_transpose2d.input", x(1, 4, 5, 6), w(4, 1, 3, 3), None, [2, 2], [0, 0], [0, 0], 4, [1, 1], note="depthwise"),
    accept("aten.conv_transpose2d.input", x(1, 4, 5, 6), w(4, 1, 3, 3), None, [1, 1], [0, 0], [0, 0], 1, [2, 2], note="dil"),
    accept("aten.conv_transpose3d.input", x(1, 4, 5, 6, 3), w(4, 3, 3, 3, 3), w(3), [2, 2, 2], [1, 1, 1]),
    accept(_CORE, x(1, 4, 8, 9), w(6, 4, 3, 3), w(6), [1], [1], [1], False, [0], 1, note="short"),
    accept(_CORE, x(1, 4, 8, 9), x(6, 4, 3, 3), w(6), [1,1], [1,1], [1,1], False, [0,0], 1, note="dynweight"),
    accept(_CORE, x(1, 4, 8, 9), x(6, 4, 3, 3), None, [1,1], [1,1], [1,1], False, [0,0], 1, note="dynweight-nobias"),
    accept(_CORE, x(1, 4, 8, 9), w(6, 4, 3, 3), x(6), [1,1], [1,1], [1,1], False, [0,0], 1, note="dynbias"),
)
REJECTED=()

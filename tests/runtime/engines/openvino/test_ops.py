"""Results of the OpenVINO engine, op by op, against torch or coremltools' value inference."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_runs import assert_close
from support.mil import features, main
from support.op_cases import CASES
from support.op_cases.case import OpCase

from coreml_delegate.errors import UnsupportedOpError
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.translations import TRANSLATIONS

_REFUSED = {
    # coremltools declares a wrong shape for the product of a vector and a batch of matrices.
    "matmul-vector-iOS18": r"result shape: got \[2, 3\], expected \[1, 3\]",
}
"""Cases of ops that have a translation, which this engine leaves to the reference engine."""

# A cast to fp16 does not round here.
_PRECISION = {"cast-float-fp16-iOS15": "fp16"}

_TRANSLATED = [case for case in CASES if TRANSLATIONS.find(case.op, case.opset) is not None]
# Precision changes what happens at the boundary of the graph, not in it: one fp16 case per op.
_FP16 = {case.op: case.id for case in reversed(_TRANSLATED) if "fp16" in case.precisions}.values()


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(case, precision, id=f"{case.id}-{precision}")
        for case in _TRANSLATED
        for precision in ("fp32", "fp16")
        if case.id not in _REFUSED and (precision == "fp32" or case.id in _FP16)
    ],
)
def test_results_equal_torch_or_coremltools(case: OpCase, precision: str):
    function = main(case.program(precision))
    assert OPENVINO.unsupported(function) == []
    results = OPENVINO.compile(function, EngineOptions())(
        features(function, case.arrays(precision))
    )
    answers = case.answers(precision)
    for result, answer, feature in zip(results.values(), answers, function.outputs, strict=True):
        assert result.dtype == feature.type.dtype.numpy
        assert result.flags.c_contiguous
        assert result.flags.owndata
        exact = not np.issubdtype(result.dtype, np.floating)
        assert_close(result, answer, "int32" if exact else _PRECISION.get(case.id, precision))


@pytest.mark.parametrize("case", [c for c in CASES if c.id in _REFUSED], ids=lambda c: c.id)
def test_refused_cases_are_unsupported(case: OpCase):
    function = main(case.program("fp32"))
    (reason,) = OPENVINO.unsupported(function)
    assert reason.startswith(f"{case.op} (output ")
    with pytest.raises(UnsupportedOpError, match=_REFUSED[case.id]):
        OPENVINO.compile(function, EngineOptions())

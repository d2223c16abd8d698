"""Results of the reference engine, op by op, against torch or coremltools' value inference."""

from __future__ import annotations

import numpy as np
import pytest
from support.mil import features, main
from support.op_cases import CASES
from support.tolerances import ATOL_RTOL

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("case", "precision"),
    [pytest.param(c, p, id=f"{c.id}-{p}") for c in CASES for p in c.precisions],
)
def test_results_equal_torch_or_coremltools(case, precision):
    function = main(case.program(precision))
    compiled = REFERENCE.compile(function, EngineOptions())
    results = compiled(features(function, case.arrays(precision)))
    answers = case.answers(precision)
    assert len(results) == len(answers)
    for result, answer, feature in zip(results.values(), answers, function.outputs, strict=True):
        assert result.dtype == feature.type.dtype.numpy
        assert result.shape == answer.shape
        exact = not np.issubdtype(result.dtype, np.floating)
        atol, rtol = ATOL_RTOL["int32" if exact else precision]
        np.testing.assert_allclose(
            result.astype(np.float64), answer.astype(np.float64), atol=atol, rtol=rtol
        )

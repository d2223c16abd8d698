"""Running one-op programs on an engine."""

from __future__ import annotations

import numpy as np

from coreml_delegate.runtime.engines.base import Engine, EngineOptions
from coreml_delegate.targets import Opset
from support import mil
from support.tolerances import ATOL_RTOL


def run(
    engine: Engine, function: mil.MilFunction, inputs: mil.Arrays, opset: Opset = Opset.iOS18
) -> list[np.ndarray]:
    """The outputs of ``function`` on ``inputs``, in the order the builder function returns them."""
    main = mil.main(mil.build(function, inputs, opset))
    compiled = engine.compile(main, EngineOptions())
    results = compiled(mil.features(main, inputs))
    return [results[name] for name in main.block.outputs]


def assert_close(actual: np.ndarray, expected: np.ndarray, precision: str = "fp32") -> None:
    """Equal shapes, and values within the tolerance of ``precision``."""
    assert actual.shape == np.shape(expected)
    atol, rtol = ATOL_RTOL[precision]
    np.testing.assert_allclose(
        actual.astype(np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=atol
    )

"""Constants that fp16 loses are stored in the model as they were, and show in a comparison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.lowering import lower
from support.partitioned import delegate_functions
from torch import nn

from coreml_delegate import CoreMLBackend
from coreml_delegate.errors import BlobFormatError
from coreml_delegate.formats.fp32_constants import METADATA_KEY, as_lost, read, write
from coreml_delegate.runtime.diagnosis import diagnose
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.runtime.mil.widening import widen_function

X = torch.linspace(0, 1, 32).half().float()


class Lossy(nn.Module):
    """A small divisor, a factor next to 1, and a vector of small factors.

    They follow a convolution, behind which no rule keeps them in fp32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.linspace(1e-9, 2e-9, 32))
        self.register_buffer("weights", torch.linspace(-1, 1, 32))
        self.register_buffer("identity", torch.ones(1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.conv1d(x[None, None], self.identity)[0, 0]
        ratio = x * self.factors / (x * 0 + 1e-12)
        return ratio * self.weights + torch.where(x < 0, x, 1 - 1e-7)


@pytest.fixture(scope="module")
def function() -> Function:
    """It in fp16."""
    specs = CoreMLBackend.generate_compile_specs()
    (function,) = delegate_functions(lower(Lossy(), (X,), compile_specs=specs).edge)
    return function


def test_the_model_has_the_constants_that_fp16_loses(function: Function) -> None:
    assert function.fp32_constants is not None
    lost = [value.ravel() for value in function.fp32_constants.values()]
    for constant in ([1e-12], [1 - 1e-7], Lossy().factors.numpy()):
        assert any(np.array_equal(value, np.float32(constant)) for value in lost)
    # A copy of an ordinary weight would take more room than the weight.
    assert max(float(np.abs(value).max()) for value in lost if value.size > 1) < 1e-8


def test_the_reference_run_takes_the_original_constants(function: Function) -> None:
    wide = widen_function(function)
    name = wide.inputs[0].name
    (actual,) = REFERENCE.compile(wide, EngineOptions()).run({name: X.numpy()}, None).values()
    # The ordinary weights are rounded, to eleven bits.
    torch.testing.assert_close(torch.from_numpy(actual), Lossy()(X), atol=2**-10, rtol=2**-10)


def test_what_constants_lose_is_a_fault(function: Function) -> None:
    inputs = {function.inputs[0].name: X.numpy()}
    diagnosis = diagnose(function, REFERENCE.compile(function, EngineOptions()), inputs)
    assert diagnosis.first_bad is not None
    assert not diagnosis.has_rounded_constants
    unknown = replace(function, fp32_constants=None)
    diagnosis = diagnose(unknown, REFERENCE.compile(unknown, EngineOptions()), inputs)
    assert diagnosis.has_rounded_constants


@pytest.mark.parametrize(
    ("constant", "lost"),
    [
        (np.float32(1e-12), True),
        (np.float32(0.1), True),
        (np.float32(0.5), False),
        (np.float32(-3.4e38), False),  # a mask: fp16 has infinity
        (np.linspace(1e-9, 2e-9, 4096, dtype=np.float32), True),
        (np.linspace(1e-9, 2e-9, 4097, dtype=np.float32), False),
        (np.linspace(0.1, 0.2, 16, dtype=np.float32), True),
        (np.linspace(0.1, 0.2, 17, dtype=np.float32), False),
        (np.full((9, 999), 1 - 1e-7, np.float32), True),
        (np.zeros(0, np.float32), False),
    ],
)
def test_constants_that_are_stored(constant: np.ndarray, lost: bool) -> None:
    stored = as_lost(constant)
    assert (stored is not None) is lost
    if stored is not None:
        np.testing.assert_array_equal(np.broadcast_to(stored, constant.shape), constant)


def test_metadata_round_trip() -> None:
    metadata: dict[str, str] = {}
    constants = {"a": np.float32([[1e-12], [0.1]]), "b": np.array(0.3, np.float32)}
    write(metadata, {"main": constants, "plain": None})
    stored = read(metadata, "main")
    assert stored is not None
    assert {name: value.tolist() for name, value in stored.items()} == {
        name: value.tolist() for name, value in constants.items()
    }
    assert read(metadata, "plain") is None
    write(metadata, {"main": None})
    assert metadata == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"main": 1}', '{"main": {"a": "b"}}'])
def test_malformed_metadata_is_refused(content: str) -> None:
    with pytest.raises(BlobFormatError, match="malformed metadata"):
        read({METADATA_KEY: content}, "main")

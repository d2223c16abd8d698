"""Conversions without coremltools' native modules, compared with conversions by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.lowering import lower
from torch import nn

from coreml_delegate import CoreMLBackend
from coreml_delegate.lowering.native_parts import BlobStorageReader, BlobStorageWriter
from coreml_delegate.patches.third_party import coremltools

_TYPES = {
    **{f"uint{bits}": (np.uint8, 0, 2**bits) for bits in (1, 2, 3, 4, 6, 8)},
    "int4": (np.int8, -8, 8),
    "int8": (np.int8, -128, 128),
    "int16": (np.int16, -(2**15), 2**15),
    "uint16": (np.uint16, 0, 2**16),
    "int32": (np.int32, -(2**31), 2**31),
    "uint32": (np.uint32, 0, 2**32),
    "fp16": (np.uint16, 0, 2**16),
    "float": (np.float32, -9, 9),
}


def test_weight_files_are_those_of_coremltools(tmp_path: Path) -> None:
    storage = pytest.importorskip("coremltools.libmilstoragepython")
    random = np.random.default_rng(0)
    cases = [
        (name, random.integers(low, high, count).astype(dtype))
        for name, (dtype, low, high) in _TYPES.items()
        for count in (1, 7, 8, 129)
    ]
    native, ours = tmp_path / "native.bin", tmp_path / "ours.bin"
    offsets = []
    for path, kind in (native, storage._BlobStorageWriter), (ours, BlobStorageWriter):
        writer = kind(str(path))
        offsets.append([getattr(writer, f"write_{name}_data")(values) for name, values in cases])
        del writer
    assert offsets[0] == offsets[1]
    assert native.read_bytes() == ours.read_bytes()
    reader = BlobStorageReader(str(native))
    for (name, values), offset in zip(cases, offsets[0], strict=True):
        read = getattr(reader, f"read_{name}_data")(offset)
        np.testing.assert_array_equal(read, values, strict=True)


@pytest.fixture
def without_native_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coremltools as it is where pip builds it."""
    coremltools()
    from coremltools.converters.mil.backend.mil import load as writing
    from coremltools.converters.mil.frontend.milproto import load as reading
    from coremltools.models import model, utils

    monkeypatch.setattr(writing, "BlobWriter", None)
    monkeypatch.setattr(reading, "BlobReader", None)
    monkeypatch.setattr(model, "_ModelPackage", None)
    monkeypatch.setattr(utils, "_ModelPackage", None)


_PALETTE = {"config_type": "OpPalettizerConfig", "global_config": {"nbits": 3}}
_PRUNING = {"config_type": "OpMagnitudePrunerConfig", "global_config": {"target_sparsity": 0.5}}
_INT4 = {"dtype": "int4", "granularity": "per_block", "block_size": 32}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(nn.Linear(64, 64), {}, id="weights"),
        pytest.param(nn.Softmax(-1), {}, id="no-weights"),
        pytest.param(nn.Linear(64, 64), {"weight_compression": _PALETTE}, id="palette"),
        pytest.param(nn.Linear(64, 64), {"weight_compression": _PRUNING}, id="pruned"),
        pytest.param(nn.Linear(64, 64), {"op_linear_quantizer_config": _INT4}, id="int4"),
    ],
)
def test_programs_are_those_of_coremltools(
    module: nn.Module, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    target = coremltools().target.iOS18
    inputs = (torch.randn(2, 64),)

    def program() -> bytes:
        specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=target, **options)
        lowered = lower(module, inputs, compile_specs=specs, lower_full_graph=True)
        return lowered.pte

    native = program()
    request.getfixturevalue("without_native_parts")
    assert program() == native

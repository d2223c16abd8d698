"""Whole models that coremltools converts, on the OpenVINO engine against eager torch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from support import torchvision_models
from support.mil import ct
from support.tolerances import SQNR_FP16, SQNR_FP32, sqnr_db

from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.mil.reader import read_mlpackage

_FLOOR = {"FLOAT32": SQNR_FP32, "FLOAT16": SQNR_FP16}


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("resnet18", "FLOAT32"),
        pytest.param("mobilenet_v3_small", "FLOAT16", marks=pytest.mark.slow),
        pytest.param("shufflenet_v2_x0_5", "FLOAT32", marks=pytest.mark.slow),
        pytest.param("swin_t", "FLOAT16", marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", "FLOAT16", marks=pytest.mark.slow),
    ],
)
def test_model(name, precision, tmp_path):
    module, x = torchvision_models.build(name, 64)
    with torch.no_grad():
        expected = module(x).numpy()
    exported = torch.export.export(module, (x,)).run_decompositions({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what coremltools says while it converts
        ct.convert(
            exported,
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision[precision],
            skip_model_load=True,
        ).save(str(tmp_path / "model.mlpackage"))
    function = read_mlpackage(tmp_path / "model.mlpackage").functions["main"]
    assert OPENVINO.unsupported(function) == []
    (feature,) = function.inputs
    image = x.numpy().astype(feature.type.dtype.numpy)
    (actual,) = OPENVINO.compile(function, EngineOptions())({feature.name: image}).values()
    assert sqnr_db(expected, actual.astype(np.float32)) >= _FLOOR[precision]

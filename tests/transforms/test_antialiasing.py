"""Resizing with antialiasing, beside PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.lowering import Function, fp32_specs, lower_unchecked, reasons
from support.tolerances import ATOL_RTOL
from torch.export import Dim
from torch.nn.functional import interpolate

from coreml_delegate import runtime

IMAGES = torch.linspace(-40.0, 40.0, 2 * 3 * 17 * 20).sin().reshape(2, 3, 17, 20)
FORMS: dict[str, dict[str, Any]] = {
    "smaller": {"size": (7, 9)},
    "larger": {"size": (30, 41)},
    "one axis": {"size": (17, 6)},
    "factor": {"scale_factor": 0.37},
    "two factors": {"scale_factor": (0.5, 1.7)},
    "recomputed factor": {"scale_factor": 0.37, "recompute_scale_factor": True},
    "corners": {"size": (5, 6), "align_corners": True},
    "single pixel": {"size": (1, 1), "align_corners": True},
}


def _resize(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        f"{mode}, {name}": interpolate(x, mode=mode, antialias=True, **form)
        for mode in ("bilinear", "bicubic")
        for name, form in FORMS.items()
    }


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_delegated(precision: str) -> None:
    specs = fp32_specs() if precision == "fp32" else []
    lowered = lower_unchecked(Function(_resize), (IMAGES,), compile_specs=specs)
    assert not lowered.report.undelegated
    atol, rtol = ATOL_RTOL[precision]
    for engine in ("reference", "openvino"):
        results = runtime.load_program(lowered.pte, engine=engine).run("forward", [IMAGES])
        for result, (name, expected) in zip(results, _resize(IMAGES).items(), strict=True):
            torch.testing.assert_close(result, expected, atol=atol, rtol=rtol, msg=name)


def test_many_columns() -> None:
    """The matrices are made in blocks."""
    image = torch.linspace(-40.0, 40.0, 3 * 3000).sin().reshape(1, 1, 3, 3000)

    def resize(x: torch.Tensor) -> torch.Tensor:
        return interpolate(x, (3, 70), mode="bilinear", antialias=True)

    lowered = lower_unchecked(Function(resize), (image,), compile_specs=fp32_specs())
    assert not lowered.report.undelegated
    (result,) = runtime.load_program(lowered.pte).run("forward", [image])
    atol, rtol = ATOL_RTOL["fp32"]
    torch.testing.assert_close(result, resize(image), atol=atol, rtol=rtol)


def test_any_number_of_images() -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return interpolate(x, (8, 8), mode="bicubic", antialias=True)

    shapes = (({0: Dim("images", min=1, max=8)},),)
    lowered = lower_unchecked(Function(resize), (IMAGES,), dynamic_shapes=shapes)
    assert not lowered.report.undelegated
    loaded = runtime.load_program(lowered.pte)
    atol, rtol = ATOL_RTOL["fp32"]
    for images in (IMAGES[:1], torch.cat((IMAGES, IMAGES.flip(0)))):
        (result,) = loaded.run("forward", [images])
        torch.testing.assert_close(result, resize(images), atol=atol, rtol=rtol)


def test_bytes_are_resized_on_the_cpu() -> None:
    """PyTorch rounds the weights of bytes to integers."""
    images = (IMAGES * 100 + 120).to(torch.uint8)

    def resize(x: torch.Tensor) -> torch.Tensor:
        return interpolate(x, (8, 9), mode="bilinear", antialias=True)

    lowered = lower_unchecked(Function(resize), (images,))
    assert set(reasons(lowered.report)) == {"aten._upsample_bilinear2d_aa.default"}
    (result,) = runtime.load_program(lowered.pte, host="python").run("forward", [images])
    assert torch.equal(result, resize(images))

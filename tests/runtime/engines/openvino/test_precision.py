"""The floating-point type that the OpenVINO engine computes in."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support import mil
from support.gates import needs_bf16
from support.mil import mb
from support.tolerances import SQNR_BF16, sqnr_db

from coreml_delegate.errors import EngineUnavailableError, OptionError, UnsupportedOpError
from coreml_delegate.options.engine_options import EngineOptions, Precision
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.openvino.engine import _core
from coreml_delegate.runtime.engines.openvino.session import compilation
from coreml_delegate.runtime.engines.reference import REFERENCE
from coreml_delegate.runtime.engines.selection import compile_function
from coreml_delegate.targets import Opset

_RNG = np.random.default_rng(0)
_SIZE = 4096


def _between_products(function):
    """``function`` between two matrix products, so that it is no first or last op of the graph."""
    first, last = (_RNG.standard_normal(s).astype(np.float32) for s in ((_SIZE, 64), (8, _SIZE)))

    def wrapped(x):
        return mb.linear(x=function(mb.linear(x=x, weight=first)), weight=last)

    x = _RNG.standard_normal((4, 64)).astype(np.float32)
    return mil.main(mil.build(wrapped, {"x": x}, Opset.iOS17)), {"x": x}


def _rms(x):
    mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=mean))


def _l2(x):
    total = mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=total))


_WIDE = {
    "softmax": lambda x: mb.softmax(x=x, axis=-1),
    "layer norm": lambda x: mb.layer_norm(x=x, axes=[-1]),
    "rms norm": _rms,
    "l2 norm": _l2,
}


@needs_bf16
@pytest.mark.parametrize("name", _WIDE)
def test_sums_over_thousands_of_elements_are_kept_in_fp32(name):
    # A sum kept in bf16 stops growing at 256 terms of equal size: it would be wrong by far.
    main, inputs = _between_products(_WIDE[name])
    (expected,) = REFERENCE.compile(main, EngineOptions())(inputs).values()
    compiled = OPENVINO.compile(main, EngineOptions(precision="bf16", cache=None))
    precisions = {
        str(node.get_rt_info()["runtimePrecision"].value)
        for node in compiled.compiled.get_runtime_model().get_ops()
    }
    assert "bf16" in precisions
    (actual,) = compiled(inputs).values()
    assert sqnr_db(expected, actual) >= SQNR_BF16


def test_f32_is_the_default_on_every_cpu():
    main, _ = _between_products(lambda x: x)
    compiled = OPENVINO.compile(main, EngineOptions(cache=None)).compiled
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    assert EngineOptions().precision is Precision.F32


def test_emulation_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "emulates_precision", lambda hint: True)
    compilation._log_emulated.cache_clear()
    mode = compilation._Mode("bf16", "no CPU has this")
    with caplog.at_level(logging.WARNING):
        compilation._require_precision(_core(), mode)
        compilation._require_precision(_core(), mode)
    (record,) = caplog.records
    assert "no instructions for bf16: it is emulated" in record.getMessage()


def test_a_precision_that_the_cpu_lacks_is_an_error(monkeypatch):
    monkeypatch.setattr(compilation, "emulates_precision", lambda hint: False)
    missing = compilation._Mode("bf16", "no CPU has this")
    monkeypatch.setattr(compilation, "_MODES", {Precision.BF16: missing})
    main, _ = _between_products(lambda x: x)
    with pytest.raises(EngineUnavailableError, match=r"does not compute in bf16: got .*FP32"):
        OPENVINO.compile(main, EngineOptions(precision="bf16"))
    with pytest.raises(UnsupportedOpError, match=r"openvino: .*FP32.*reference: the reference"):
        compile_function("auto", main, EngineOptions(precision="bf16"))


def test_the_reference_engine_refuses_another_precision():
    main, _ = _between_products(lambda x: x)
    with pytest.raises(OptionError, match="cannot change the numerics of a program: got precision"):
        REFERENCE.compile(main, EngineOptions(precision="bf16"))


def test_the_reference_engine_refuses_dynamic_quantization():
    main, _ = _between_products(lambda x: x)
    options = EngineOptions(dynamic_quantization=True)
    with pytest.raises(
        OptionError, match="cannot change the numerics of a program: got dynamic_qu"
    ):
        REFERENCE.compile(main, options)
    assert compile_function("auto", main, options).engine_name == "openvino"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "f16"}, r"unknown engine precision: got 'f16', expected f32 \| bf16"),
        ({"threads": 0}, "wrong number of threads: got 0, expected 1 or more, or None"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        EngineOptions(**options)

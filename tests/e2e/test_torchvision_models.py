"""Torchvision's architectures: exported, delegated whole, run on both engines and hosts."""

from __future__ import annotations

import functools

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.gates import needs_compiler
from support.tolerances import SQNR_FP16, SQNR_FP16_LOWER, SQNR_FP32, sqnr_db
from support.torchvision_models import build

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.compile_options import Precision

# Name -> input size: as small as the architecture allows without changing what it converts to.
MODELS = {
    "mobilenet_v2": 96,
    "resnet18": 96,
    "vit_b_16": 224,
    "efficientnet_b0": 96,
    "convnext_tiny": 96,
    "swin_t": 96,
    "squeezenet1_1": 96,
    "shufflenet_v2_x1_0": 96,
    "regnet_y_400mf": 96,
    "inception_v3": 128,
}
HOSTS = ["python", pytest.param("stock", marks=needs_compiler)]
ENGINES = ["openvino", "reference"]
# One process keeps a model and its programs: building them is most of the work.
CASES = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS]


@functools.cache
def _eager(name):
    model, example = build(name, MODELS[name])
    with torch.no_grad():
        return model(example).numpy()


@functools.lru_cache(maxsize=2)
def _lowered(name, precision):
    model, example = build(name, MODELS[name])
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(compute_precision=precision)
    )
    exported = torch.export.export(model, (example,))
    program = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
    return program.buffer, partitioner.report


def _run(name, precision, **where):
    _, example = build(name, MODELS[name])
    buffer, _ = _lowered(name, precision)
    (output,) = runtime.load_program(buffer, **where).run("forward", [example])
    return output


@pytest.mark.parametrize("name", CASES)
def test_the_whole_model_is_one_partition(name):
    _, report = _lowered(name, Precision.FLOAT32)
    assert report.undelegated == ()
    assert len(report.partitions) == 1


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_fp32_program_equals_eager(name, engine, host):
    output = _run(name, Precision.FLOAT32, engine=engine, host=host)
    assert sqnr_db(_eager(name), output.numpy()) >= SQNR_FP32


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_fp16_program_is_close_to_eager(name, engine, host):
    output = _run(name, Precision.FLOAT16, engine=engine, host=host)
    assert sqnr_db(_eager(name), output.numpy()) >= SQNR_FP16_LOWER.get(name, SQNR_FP16)


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_both_hosts_agree_to_the_bit(name):
    outputs = [
        _run(name, Precision.FLOAT32, engine="openvino", host=host) for host in ("python", "stock")
    ]
    assert torch.equal(*outputs)

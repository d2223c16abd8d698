"""Torchvision's architectures: exported, delegated whole, run on both engines and hosts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from support.gates import needs_compiler
from support.lowering import PRECISIONS
from support.tolerances import SQNR_FP16, SQNR_FP16_LOWER, SQNR_FP32, sqnr_db
from support.torchvision_models import build

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.partition import DelegationReport

# Name -> input size: as small as the architecture allows without changing what it converts to.
# Three have 224 pixels: on feature maps of 3x3 their random depthwise and grouped layers amplify
# rounding, so that eager half precision itself gives 31 dB at 96 pixels, and 36 dB at 224.
MODELS = {
    "mobilenet_v2": 224,
    "resnet18": 96,
    "vit_b_16": 224,
    "efficientnet_b0": 96,
    "convnext_tiny": 96,
    "swin_t": 96,
    "squeezenet1_1": 96,
    "shufflenet_v2_x1_0": 224,
    "regnet_y_400mf": 224,
    "inception_v3": 128,
}
HOSTS = ["python", pytest.param("stock", marks=needs_compiler)]
ENGINES = ["openvino", "reference"]
# The others take up to five times as long.
QUICK = {"resnet18"}


def _marks(name):
    # One process keeps a model and its programs: building them is most of the work.
    group = [pytest.mark.xdist_group(name)]
    return group if name in QUICK else [*group, pytest.mark.slow]


CASES = [pytest.param(name, marks=_marks(name)) for name in MODELS]


@dataclass(frozen=True)
class Lowered:
    """A model with its example, eager output and programs by precision."""

    name: str
    example: torch.Tensor
    eager: np.ndarray
    buffers: dict[Precision, bytes]
    report: DelegationReport

    def run(self, precision: Precision, **where: str) -> torch.Tensor:
        program = runtime.load_program(self.buffers[precision], **where)
        (output,) = program.run("forward", [self.example])
        return output


# The scope makes pytest finish with one model before it builds the next.
@pytest.fixture(scope="module", params=CASES)
def lowered(request) -> Lowered:
    model, example = build(request.param, MODELS[request.param])
    with torch.no_grad():
        eager = model(example).numpy()
    buffers = {}
    for precision in PRECISIONS:
        # Anew for each, as a user has it who lowers once.
        exported = torch.export.export(model, (example,))
        specs = CoreMLBackend.generate_compile_specs(compute_precision=precision)
        partitioner = CoreMLPartitioner(compile_specs=specs)
        manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
        buffers[precision] = manager.to_executorch().buffer
    return Lowered(request.param, example, eager, buffers, partitioner.report)


def test_the_whole_model_is_one_partition(lowered):
    assert lowered.report.undelegated == ()
    assert len(lowered.report.partitions) == 1


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_fp32_program_equals_eager(lowered, engine, host):
    output = lowered.run(Precision.FLOAT32, engine=engine, host=host)
    assert sqnr_db(lowered.eager, output.numpy()) >= SQNR_FP32


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_fp16_program_is_close_to_eager(lowered, engine, host):
    output = lowered.run(Precision.FLOAT16, engine=engine, host=host)
    bar = SQNR_FP16_LOWER.get(lowered.name, SQNR_FP16)
    assert sqnr_db(lowered.eager, output.numpy()) >= bar


@needs_compiler
def test_both_hosts_agree_to_the_bit(lowered):
    outputs = [
        lowered.run(Precision.FLOAT32, engine="openvino", host=host) for host in ("python", "stock")
    ]
    assert torch.equal(*outputs)

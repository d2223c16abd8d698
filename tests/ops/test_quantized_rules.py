"""The rules of ``quantize`` and ``dequantize``, which Core ML takes together or not at all."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from support.lowering import fp32_specs, reasons
from support.partitioned import delegate_functions
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the ops

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.ops import obstacle
from coreml_delegate.ops.call import target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.targets import Opset

Q = torch.ops.quantized_decomposed
ATOL, RTOL = ATOL_RTOL["fp32"]
X = (torch.linspace(-3, 3, 24).reshape(2, 3, 4),)
UINT8 = (0.02, 128, 0, 255, torch.uint8)
INT8 = (0.02, 0, -128, 127, torch.int8)
QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
CHANNELS = "quantized_decomposed.dequantize_per_channel.default"


class Grid(nn.Module):
    """Quantizes and dequantizes its input."""

    def __init__(self, made=UINT8, read=None, **options):
        super().__init__()
        self.made, self.read, self.options = made, read or made, options

    def forward(self, x):
        numbers = Q.quantize_per_tensor(x, *self.made)
        return torch.relu(Q.dequantize_per_tensor(numbers, *self.read, **self.options))


class Weight(nn.Module):
    """Multiplies by a weight that is held as integers; ``of`` makes floats of it."""

    def __init__(self, of, dtype=torch.int8, *, constant=True):
        super().__init__()
        limits = torch.iinfo(dtype)
        held = torch.linspace(limits.min, limits.max, 20).round().to(dtype).reshape(5, 4)
        self.register_buffer("held", held)
        self.register_buffer("scales", torch.linspace(0.01, 0.05, 5))
        self.register_buffer("zeros", torch.arange(5) * (dtype is torch.uint8))
        self.of = of

    def forward(self, x):
        return nn.functional.linear(x, self.of(self))


def per_channel(module, scales=None, zeros="held", **options):
    zeros = module.zeros if isinstance(zeros, str) else zeros
    scales = module.scales if scales is None else scales
    limits = torch.iinfo(module.held.dtype)
    arguments = (0, limits.min, limits.max, module.held.dtype)
    return Q.dequantize_per_channel(module.held, scales, zeros, *arguments, **options)


def per_tensor(module):
    limits = torch.iinfo(module.held.dtype)
    return Q.dequantize_per_tensor(module.held, 0.03, 3, limits.min, limits.max, module.held.dtype)


TAKEN = {
    "uint8": Grid(),
    "int8": Grid(INT8),
    "other scale": Grid(UINT8, (0.5, 3, 0, 255, torch.uint8)),
    "weight per channel": Weight(per_channel),
    "weight per tensor": Weight(per_tensor),
    "unsigned weight": Weight(per_channel, torch.uint8),
    "weight of a product": Weight(lambda m: per_tensor(m) * 2.0),
}


def _lowered(module, target=Opset.iOS17, **options):
    partitioner = CoreMLPartitioner(
        compile_specs=fp32_specs(minimum_deployment_target=target), **options
    )
    edge = to_edge_transform_and_lower(
        torch.export.export(module, X),
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return edge, partitioner.report


@pytest.mark.parametrize("name", TAKEN)
def test_quantized_ops_are_delegated(name):
    module = TAKEN[name]
    edge, report = _lowered(module)
    assert reasons(report) == {}
    pte = edge.to_executorch().buffer
    for engine in ("reference", "openvino"):
        (actual,) = runtime.load_program(pte, engine=engine).run("forward", list(X))
        torch.testing.assert_close(actual, module(*X), atol=ATOL, rtol=RTOL)


def test_weights_stay_integers():
    edge, _ = _lowered(Weight(per_channel))
    (function,) = delegate_functions(edge)
    assert "constexpr_affine_dequantize" in {op.type for op in function.block.ops}


class Returned(nn.Module):
    def forward(self, x):
        return Q.quantize_per_tensor(x, *UINT8)


class Given(nn.Module):
    def forward(self, x):
        return Q.dequantize_per_tensor((x * 10).to(torch.int8), *INT8)


class Scalar(nn.Module):
    def forward(self, x):
        return Q.dequantize_per_tensor(Q.quantize_per_tensor(x.sum(), *UINT8), *UINT8)


class Computed(nn.Module):
    def __init__(self, which):
        super().__init__()
        self.weight = Weight(lambda m: None)
        self.which = which

    def forward(self, x):
        scales = x.abs().amax((0, 2)).repeat(2)[:5]
        if self.which == "scales":
            return x @ per_channel(self.weight, scales=scales).t()
        return x @ per_channel(self.weight, zeros=scales.int()).t()


# name -> (module, op, reason)
REFUSED = {
    "range": (
        Grid((0.02, 64, 0, 127, torch.uint8)),
        QUANTIZE,
        "it clips to 0 .. 127, Core ML to 0 .. 255",
    ),
    "range of the source": (
        Grid((0.02, 64, 0, 127, torch.uint8)),
        DEQUANTIZE,
        "is not quantized by Core ML: it clips to 0 .. 127",
    ),
    "16 bits": (
        Grid((0.02, 0, -32768, 32767, torch.int16)),
        QUANTIZE,
        "the result is int16",
    ),
    "half": (Grid(out_dtype=torch.float16), DEQUANTIZE, "the result is float16"),
    "half of the user": (Grid(out_dtype=torch.float16), QUANTIZE, "takes its integers"),
    "result": (Returned(), QUANTIZE, "'output' takes its integers, which leave no delegate"),
    "input": (Given(), DEQUANTIZE, "is neither a constant nor quantized in the program"),
    "scalar": (Scalar(), QUANTIZE, "'input' has rank 0, Core ML takes 1 to 5 here"),
    "scales": (Computed("scales"), CHANNELS, "'scales' is computed"),
    "zero points": (Computed("zeros"), CHANNELS, "'zero_points' is computed"),
    "no zero points": (
        Weight(lambda m: per_channel(m, zeros=None)),
        CHANNELS,
        "zero_points=None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_quantized_ops_are_refused(name):
    module, op, text = REFUSED[name]
    program = torch.export.export(module, X)
    constants = stored_nodes(program)
    (call, *_) = (n for n in program.graph.nodes if target_name(n.target) == op)
    reason = obstacle(call, Opset.iOS17, constants)
    assert reason is not None
    assert text in reason.text


def test_refused_quantized_ops_run_on_the_cpu():
    module = Grid((0.02, 64, 0, 127, torch.uint8))
    edge, report = _lowered(module)
    assert set(reasons(report)) == {QUANTIZE, DEQUANTIZE}
    (actual,) = runtime.load_program(edge.to_executorch().buffer).run("forward", list(X))
    torch.testing.assert_close(actual, module(*X), atol=ATOL, rtol=RTOL)


class Around(nn.Module):
    """Dequantizes one value before an operator that Core ML has not (asinh) and after it."""

    def forward(self, x):
        numbers = Q.quantize_per_tensor(x * 2, *UINT8)
        before = torch.asinh(Q.dequantize_per_tensor(numbers, *UINT8)) * 3
        after = Q.dequantize_per_tensor(numbers, *UINT8)
        return before + after


def test_integers_stay_in_one_partition():
    module = Around()
    edge, report = _lowered(module)
    assert set(reasons(report)) == {"aten.asinh.default"}
    (actual,) = runtime.load_program(edge.to_executorch().buffer).run("forward", list(X))
    torch.testing.assert_close(actual, module(*X), atol=ATOL, rtol=RTOL)


def test_quantized_ops_need_ios17():
    edge, report = _lowered(Grid(), Opset.iOS16)
    assert "needs iOS17, the deployment target is iOS16" in reasons(report)[QUANTIZE]
    assert edge.to_executorch().buffer


def test_quantized_constants_outside_are_refused():
    _, report = _lowered(Weight(per_channel), take_over_constant_data=False)
    assert "is neither a constant nor quantized" in reasons(report)[CHANNELS]

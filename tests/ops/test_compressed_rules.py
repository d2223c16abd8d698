"""The rules of weights that ``quantize_`` compressed: every rank, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.compressed import stored_sizes
from support.lowering import lower
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate import runtime
from coreml_delegate.ops import obstacle
from coreml_delegate.ops.call import DECOMPRESS, target_name
from coreml_delegate.ops.constants import stored_nodes
from coreml_delegate.targets import Opset

ATOL, RTOL = ATOL_RTOL["fp32"]
ENGINES = ("reference", "openvino")
affine = torch.ops.torchao.dequantize_affine
codebook = torch.ops.quant.dequantize_codebook


class Affine(nn.Module):
    """Adds a weight of integers to its input."""

    def __init__(self, shape, block, limits=(-128, 127), *, zero=torch.int8, held=torch.int8):
        super().__init__()
        count = [whole // size for whole, size in zip(shape, block, strict=True)]
        self.block, self.limits, self.held_as = list(block), limits, held
        generator = torch.Generator().manual_seed(0)
        low, high = (-128, 127) if limits[0] is None else limits
        numbers = torch.randint(int(low), int(high) + 1, tuple(shape), generator=generator)
        self.register_buffer("held", numbers.to(held))
        self.register_buffer("scale", torch.rand(count, generator=generator) + 0.5)
        zeros = None if zero is None else torch.randint(0, 3, count, generator=generator).to(zero)
        self.register_buffer("zero", zeros)

    def weight(self):
        return affine(self.held, self.block, self.scale, self.zero, self.held_as, *self.limits)

    def forward(self, x):
        return x + self.weight()


class Codebook(nn.Module):
    """Adds a weight of indices to its input."""

    def __init__(self, shape, block, bits=2, width=1):
        super().__init__()
        sizes = [whole if size == -1 else size for whole, size in zip(shape, block, strict=True)]
        count = [whole // size for whole, size in zip(shape, sizes, strict=True)]
        self.block, self.bits = list(block), bits
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 2**bits, tuple(shape), generator=generator)
        self.register_buffer("codes", codes.to(torch.uint8))
        tables = torch.rand((*count, 2**bits, width), generator=generator)
        self.register_buffer("tables", tables.double())

    def weight(self):
        return codebook(self.codes.to(torch.int32), self.tables, self.bits, self.block)

    def forward(self, x):
        return x + self.weight()


TAKEN = {
    "a vector": (Affine((8,), (8,)), "iOS16"),
    "a vector in blocks": (Affine((8,), (2,)), "iOS18"),
    "rows in blocks": (Affine((4, 6), (2, 6)), "iOS18"),
    "one scale": (Affine((4, 6), (4, 6)), "iOS16"),
    "columns": (Affine((4, 6), (4, 1)), "iOS16"),
    "three dimensions": (Affine((2, 3, 8), (1, 3, 4)), "iOS18"),
    "channels of a filter": (Affine((4, 3, 2, 2), (1, 3, 2, 2)), "iOS16"),
    "five dimensions": (Affine((2, 3, 2, 2, 4), (1, 3, 1, 2, 4)), "iOS18"),
    "no zero points": (Affine((4, 6), (1, 6), zero=None), "iOS16"),
    "zero points that are floats": (Affine((4, 6), (1, 6), zero=torch.float32), "iOS18"),
    "zero points of 32 bits": (Affine((4, 6), (1, 6), zero=torch.int32), "iOS16"),
    "unsigned": (Affine((4, 6), (1, 6), (0, 255), held=torch.uint8), "iOS16"),
    "unsigned, 4 bits": (Affine((4, 6), (1, 3), (0, 15), held=torch.uint8), "iOS18"),
    "held in 32 bits": (Affine((4, 6), (1, 3), (-8, 7), held=torch.int32), "iOS18"),
    "limits of the type": (Affine((4, 6), (1, 6), (None, None)), "iOS16"),
    "tables of a filter": (Codebook((4, 3, 2, 2), (2, -1, -1, -1)), "iOS18"),
    "tables of three dimensions": (Codebook((2, 4, 6), (-1, -1, 3), bits=4), "iOS18"),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", TAKEN)
def test_compressed_weights_are_delegated(name):
    module, target = TAKEN[name]
    inputs = (torch.ones(module.weight().shape),)
    lowered = lower(module, inputs)
    assert lowered.operators == ()
    assert lowered.report.partitions[0].target == target
    for engine in ENGINES:
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", list(inputs))
        torch.testing.assert_close(actual, module(*inputs), atol=ATOL, rtol=RTOL)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.compressed = Affine((8, 16, 3, 3), (1, 8, 3, 3), (-8, 7))

    def forward(self, x):
        return nn.functional.conv2d(x, self.compressed.weight())


def test_a_convolution_with_a_scale_per_group_of_channels():
    module, inputs = Filter(), (torch.linspace(-1, 1, 16 * 25).reshape(1, 16, 5, 5),)
    lowered = lower(module, inputs)
    assert lowered.operators == ()
    assert stored_sizes(lowered.edge)[0] == 8 * 16 * 9 // 2
    for engine in ENGINES:
        (actual,) = runtime.load_program(lowered.pte, engine=engine).run("forward", list(inputs))
        torch.testing.assert_close(actual, module(*inputs), atol=ATOL * 100, rtol=RTOL)


class Given(nn.Module):
    """Takes its compressed weight as an input."""

    def forward(self, numbers, scale):
        return affine(numbers, [1, 4], scale, None, torch.int8, -128, 127)


class ScaleGiven(Affine):
    def forward(self, x):
        scale = self.scale + x.sum()
        return affine(self.held, self.block, scale, None, torch.int8, -128, 127)


REFUSED = {
    "range": (Affine((4, 6), (1, 6), (-300, 300), held=torch.int32), "its values are -300 .. 300"),
    "computed scales": (ScaleGiven((4, 6), (1, 6)), "'scale' is computed"),
    "six dimensions": (Affine((1, 1, 1, 1, 2, 2), (1, 1, 1, 1, 2, 2)), "rank 6"),
    "tables of vectors": (Codebook((4, 6), (4, 6), width=2), "holds vectors of 2"),
    "tables along two dimensions": (Codebook((4, 6), (2, 3)), "along several dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_compressed_weights_are_refused(name):
    module, text = REFUSED[name]
    shape = (1,) if "vectors" in name else (1, 1)
    assert text in _reason(module, (torch.ones(shape),))


def test_weights_that_are_inputs_are_refused():
    inputs = (torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1))
    assert "'input' is computed" in _reason(Given(), inputs)


def _reason(module, inputs):
    program = torch.export.export(module, inputs)
    call = next(n for n in program.graph.nodes if target_name(n.target) in DECOMPRESS)
    reason = obstacle(call, Opset.iOS26, stored_nodes(program))
    assert reason is not None
    return reason.text


def test_refused_compressed_weights_run_on_the_cpu():
    module, inputs = ScaleGiven((4, 6), (1, 3)), (torch.ones(1, 1),)
    lowered = lower(module, inputs)
    assert not set(lowered.operators) & DECOMPRESS
    (actual,) = runtime.load_program(lowered.pte).run("forward", list(inputs))
    torch.testing.assert_close(actual, module(*inputs), atol=ATOL, rtol=RTOL)

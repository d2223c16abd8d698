"""Models that compute with complex numbers inside: one partition, with PyTorch's results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from support.lowering import Lowered, fp32_specs, lower_unchecked
from support.partitioned import assert_equal_eager, delegate_functions
from support.tolerances import ATOL_RTOL, SQNR_FP16, SQNR_FP32, sqnr_db
from torch import nn
from torch.export import Dim

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.transforms import split_complex_numbers

ENGINES = ("openvino", "reference")


class RotaryAttention(nn.Module):
    """Causal attention whose queries and keys are rotated as complex numbers."""

    def __init__(self, width: int = 32, heads: int = 2, positions: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        size = width // heads
        speeds = 100.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(positions), speeds)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        points = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = points * self.turns[: x.shape[1]].unsqueeze(1)
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = self.rotate(parts[0]), self.rotate(parts[1]), parts[2]
        mixed = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FourierMixing(nn.Module):
    """A layer that mixes tokens by the real part of a transform in both dimensions."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + torch.fft.fft2(x, norm="ortho").real)
        return x + self.feed(x)


class LogMel(nn.Module):
    """The logarithm of a spectrogram's power in bands of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(400))
        centers = torch.linspace(2, 198, 20)[:, None]
        self.register_buffer("bands", (1 - (torch.arange(201) - centers).abs() / 12).clamp(min=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 400, 160, window=self.window, return_complex=True)
        return (self.bands @ spectrum.abs() ** 2).clamp(min=1e-4).log10()


class SpectralConvolution(nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies times complex weights."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        shape = (2, channels, channels, modes, modes)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.complex64) / channels)
        self.beside = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        kept = torch.zeros_like(spectrum)
        m = self.modes
        for rows, weight in zip((slice(0, m), slice(-m, None)), self.weight, strict=True):
            low = spectrum[:, :, rows, :m]
            kept[:, :, rows, :m] = torch.einsum("bixy,ioxy->boxy", low, weight)
        return nn.functional.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.beside(x))


class Volume(nn.Module):
    """A filter of volumes in three dimensions, centered on frequency zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.hann_window(7)[:, None, None].expand(7, 6, 5).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = (-3, -2, -1)
        spectrum = torch.fft.fftshift(torch.fft.fftn(x, dim=dims), dim=dims) * self.keep
        return torch.fft.ifftn(torch.fft.ifftshift(spectrum, dim=dims), dim=dims).abs()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES = {
    "rotary attention": Case(RotaryAttention, (2, 10, 32)),
    "Fourier mixing": Case(FourierMixing, (2, 10, 24)),
    "log mel": Case(LogMel, (1, 3200)),
    "spectral convolution": Case(SpectralConvolution, (2, 4, 9, 10)),
    "volume": Case(Volume, (2, 7, 6, 5)),
}


def inputs_of(case: Case) -> tuple[torch.Tensor]:
    return (torch.randn(case.shape, generator=torch.Generator().manual_seed(1)),)


def lowered(case: Case, precision: str) -> tuple[nn.Module, Lowered]:
    torch.manual_seed(0)
    module = case.make().eval()
    specs = fp32_specs() if precision == "fp32" else CoreMLBackend.generate_compile_specs()
    return module, lower_unchecked(module, inputs_of(case), compile_specs=specs)


@pytest.mark.share(6)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_complex_numbers_is_one_partition(name: str, precision: str) -> None:
    case = CASES[name]
    module, result = lowered(case, precision)
    assert result.report.undelegated == ()
    assert len(result.report.partitions) == 1
    assert result.operators == ()
    (x,) = inputs_of(case)
    expected = module(x).detach().numpy()
    for engine in ENGINES:
        (actual,) = runtime.load_program(result.pte, engine=engine).run("forward", [x])
        sqnr = sqnr_db(expected, actual.numpy())
        assert sqnr >= (SQNR_FP32 if precision == "fp32" else SQNR_FP16), engine


def test_rotations_are_products_of_parts() -> None:
    """Nothing is computed of the table, and no tensor has a dimension of parts but the ends."""
    _, result = lowered(CASES["rotary attention"], "fp32")
    (function,) = delegate_functions(result.edge)
    types = [op.type for op in function.block.ops]
    assert types.count("mul") == 2 * 4 + 1  # query and key are rotated, scores are scaled
    assert types.count("stack") == 2
    assert not {"cos", "sin"} & set(types)


@pytest.mark.slow
def test_the_batch_may_be_dynamic() -> None:
    torch.manual_seed(0)
    module = SpectralConvolution().eval()
    (x,) = inputs_of(CASES["spectral convolution"])
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    program = torch.export.export(module, (x,), dynamic_shapes=({0: Dim("b", min=2, max=8)},))
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    assert partitioner.report.undelegated == ()
    pte = edge.to_executorch().buffer
    atol, rtol = ATOL_RTOL["fp32"]
    for batch in (2, 5):
        x = torch.randn(batch, 4, 9, 10)
        for engine in ENGINES:
            (actual,) = runtime.load_program(pte, engine=engine).run("forward", [x])
            torch.testing.assert_close(actual, module(x), atol=atol, rtol=rtol)


class Oscillator(nn.Module):
    """A complex state that turns at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(self.turn).add_(x)
        return self.state.real.clone()


def test_a_complex_state_is_kept_between_runs() -> None:
    module, x = Oscillator(), torch.tensor([1.0, 2, 3, 4])
    program = runtime.load_program(lower_unchecked(module, (x,)).pte)
    module = Oscillator()  # the export has run the first
    atol, rtol = ATOL_RTOL["fp16"]  # as which Core ML stores states
    for _ in range(3):
        (actual,) = program.run("forward", [x])
        torch.testing.assert_close(actual, module(x), atol=atol, rtol=rtol)


def test_a_program_that_is_decomposed_first_is_rewritten_by_hand() -> None:
    """``to_edge`` shows the partitioner nothing before, and refuses complex operands."""
    module, x = FourierMixing().eval(), inputs_of(CASES["Fourier mixing"])
    partitioner = CoreMLPartitioner(compile_specs=fp32_specs())
    program = split_complex_numbers(torch.export.export(module, x))
    edge = to_edge(program).to_backend(partitioner)
    assert partitioner.report.undelegated == ()
    assert_equal_eager(edge.to_executorch().buffer, module, x)


class Loud(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x)
        return torch.stack([spectrum.abs(), (1e4 / spectrum).abs()])


def test_magnitudes_and_quotients_do_not_overflow_in_fp16() -> None:
    """The magnitudes are about 4000, whose squares fp16 does not have."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 500
    pte = lower_unchecked(Loud(), (x,), compile_specs=CoreMLBackend.generate_compile_specs()).pte
    (actual,) = runtime.load_program(pte, engine="reference").run("forward", [x])
    for expected, part in zip(Loud()(x), actual, strict=True):
        assert sqnr_db(expected.numpy(), part.numpy()) >= SQNR_FP16

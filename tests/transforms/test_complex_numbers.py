"""Programs with complex numbers, rewritten to pairs of reals and run by PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lowering import Function
from support.tolerances import ATOL_RTOL
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from coreml_delegate.errors import LoweringError, UnsupportedOperatorError
from coreml_delegate.transforms.complex_numbers import split_complex_numbers
from coreml_delegate.transforms.complex_operators import OPERATORS

pytestmark = [
    # What torch warns of in eager runs of stft and istft.
    pytest.mark.filterwarnings("ignore:stft with return_complex=False is deprecated"),
    pytest.mark.filterwarnings("ignore:A window was not provided"),
]

ATOL, RTOL = ATOL_RTOL["fp32"]
X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
POINTS = torch.polar(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3))


def exported(function: Any, *inputs: torch.Tensor, **options: Any) -> ExportedProgram:
    module = function if isinstance(function, nn.Module) else Function(function)
    return torch.export.export(module.eval(), inputs, **options)


def dtypes(program: ExportedProgram) -> set[torch.dtype]:
    values = (node.meta.get("val") for node in program.graph.nodes)
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}


def assert_equal_eager(program: ExportedProgram, function: Any, *inputs: torch.Tensor) -> None:
    assert not any(dtype.is_complex for dtype in dtypes(program))
    torch.testing.assert_close(
        program.module()(*inputs), function(*inputs), atol=ATOL, rtol=RTOL, equal_nan=True
    )


def z(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor with all kinds of angles."""
    return torch.complex(x, x.flip(-1) * 2 - 0.3)


def written(x: torch.Tensor) -> torch.Tensor:
    y = z(x)
    y *= 2
    y[..., 0] += 1j
    y[:, :2, :3] = POINTS[:2]
    y.mul_(y.conj() + 1)
    y.real.add_(1.0)
    return y


def spectrum_written(x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(2, 4, 4, dtype=torch.complex64)
    whole[:, :4, :3] = torch.fft.rfft2(x)[:, :4, :3] * POINTS
    return torch.fft.irfft2(whole, s=(4, 6))


# Functions with complex results, by what they use.
COMPLEX: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(2, 4, 3, 2)) * POINTS,
    "a stack viewed": lambda x: torch.view_as_complex(torch.stack([x, x + 1], -1)) * 2,
    "a view of bits": lambda x: x.view(torch.complex64) + 1,
    "polar": lambda x: torch.polar(x.abs(), x),
    "parts that are broadcast": lambda x: torch.complex(x[:, :1], x[..., :1]),
    "sums": lambda x: (z(x) + x - 2j * z(x) + 1) - (3 - z(x)) + torch.add(z(x), x, alpha=2),
    "sums that broadcast": lambda x: POINTS[:, None] + z(x)[0, 0, :1] * 1j + x[0, :, :3] + 0.5j,
    "integers": lambda x: (x > 0).int() * 1j + torch.arange(6),
    "products": lambda x: z(x) * z(x + 1) * x * 2 * (1 + 2j) * -1j,
    "quotients": lambda x: z(x) / z(x - 3) + z(x) / 2 + z(x) / (x * x + 1) + z(x) / (2 + 1j),
    "inverses": lambda x: 2j / z(x - 3) + 1 / z(x) + z(x).reciprocal(),
    "large divisors": lambda x: z(x) / (z(x + 5) * 1e30),
    "conjugates": lambda x: -z(x).conj() + z(x).conj().resolve_conj() * z(x).mH.mH,
    "exponentials": lambda x: torch.exp(1j * x) + torch.exp(z(x)) + (x + 0j).exp(),
    "powers": lambda x: z(x) ** 2 + z(x) ** 3 + z(x) ** 2.5 + z(x).sqrt() + z(x).square(),
    "logarithms": lambda x: z(x).log() + z(x).sgn() + (z(x) * 0).sgn(),
    "sines": lambda x: z(x).sin() + z(x).cos() + z(x).sinh() * z(x).cosh(),
    "written in place": written,
    "moved": lambda x: z(x).permute(2, 0, 1)[1:, :, ::2].flip(0).roll(1, 0).flatten(1).unsqueeze(0),
    "joined": lambda x: torch.cat([z(x), x, torch.stack([z(x)] * 2).sum(0)], 1),
    "split": lambda x: sum(z(x).chunk(2, 1)) + z(x).unbind(1)[0][:, None],
    "taken": lambda x: (x.sum() + POINTS[torch.tensor([0, 2])]).index_select(
        1, torch.tensor([1, 1, 0])
    ),
    "gathered": lambda x: z(x).gather(1, (x > 0).long()),
    "chosen": lambda x: torch.where(x > 0, z(x), 2j).masked_fill(x > 1, 1 + 2j),
    "padded": lambda x: nn.functional.pad(z(x), (1, 2, 0, 1)),
    "reduced": lambda x: z(x).sum(1) + z(x).mean((0, 1)) + z(x).cumsum(1)[:, 0],
    "filled": lambda x: z(x) * torch.full((6,), 1j) + torch.ones(6, dtype=torch.complex64) * x,
    "like others": lambda x: (
        torch.zeros_like(z(x)) + torch.ones_like(z(x)) + z(x).new_full((6,), 2)
    ),
    "a constant": lambda x: x * torch.tensor([1j, 2, 3, 4 + 2j, 5, 6]),
    "a cast": lambda x: x.to(torch.complex64) * z(x).to(torch.complex128).to(torch.complex64),
    "products of matrices": lambda x: z(x) @ z(x).mH + torch.bmm(z(x), z(x).mT),
    "a layer": lambda x: nn.functional.linear(z(x), POINTS.T.repeat(1, 2)[:, :6], POINTS[0, :3]),
    "added products": lambda x: torch.addmm(POINTS[:, :1], z(x[0]), z(x[1]).T, beta=2, alpha=3),
    "a product with a vector": lambda x: z(x[0]).mv(z(x[1, 0])) + torch.vdot(*z(x[:, 0])),
    "einsum": lambda x: torch.einsum("bij,ik->bjk", z(x), POINTS),
    "an outer product": lambda x: torch.outer(z(x[0, 0]), z(x[1, 0])),
    "shifted": lambda x: torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft(x)) * 1j),
    "a short-time transform of complex values": lambda x: torch.stft(
        z(x).flatten(1), 8, 3, return_complex=True, center=False
    ),
}

# Functions with real results.
REAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "real and imag": lambda x: z(x).real + (x * 1j).imag + (x * 1j).real + torch.real(x),
    "abs": lambda x: z(x).abs() + (z(x) * 0).abs() + (x * 1j).abs(),
    "abs of large numbers": lambda x: (z(x) * 1e30).abs(),
    "power": lambda x: z(x).abs() ** 2 + z(x).abs().square() + z(x).abs().pow(2).log(),
    "angle": lambda x: z(x).angle() + (x + 0j).angle(),
    "norm": lambda x: torch.linalg.vector_norm(z(x), dim=1) + torch.linalg.norm(z(x), dim=1),
    "equality": lambda x: (z(x) == z(x.round())) | (z(x) != z(x)) | (z(x) == 1j),
    "a view of bits": lambda x: z(x).view(torch.float32),
    "a real tensor like a complex one": lambda x: torch.zeros_like(z(x), dtype=torch.float32) + x,
    "frequencies": lambda x: torch.fft.rfft(x).abs() * torch.fft.rfftfreq(6, 0.5),
    "a spectrum that is written": spectrum_written,
    "hermitian": lambda x: torch.fft.hfft(torch.fft.ihfft(x)),
    "zero throughout": lambda x: torch.fft.irfft(x * 1j, n=2) + 1,
    "a short-time transform": lambda x: torch.stft(
        x.flatten(1), 8, 4, 6, torch.hann_window(6), return_complex=False, normalized=True
    ),
    "a short-time transform of one signal": lambda x: (
        torch.stft(x.flatten(), 8, 4, onesided=False, return_complex=True).imag
    ),
    "an inverse short-time transform": lambda x: torch.istft(
        torch.stft(x.flatten(1), 8, 2, window=torch.hann_window(8), return_complex=True) * 2,
        8,
        2,
        window=torch.hann_window(8),
    ),
    "an inverse short-time transform of one signal": lambda x: torch.istft(
        torch.stft(x.flatten(), 8, 2, return_complex=True, onesided=False, normalized=True),
        8,
        2,
        win_length=6,
        window=torch.hann_window(6) + 0.1,
        normalized=True,
        length=51,
    ),
    "no window": lambda x: torch.istft(torch.stft(x.flatten(1), 4, 4, return_complex=True), 4, 4),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_results_are_those_of_pytorch(name: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(COMPLEX[name](x).resolve_conj())

    assert_equal_eager(split_complex_numbers(exported(function, X)), function, X)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", REAL)
def test_real_results_are_those_of_pytorch(name: str) -> None:
    assert_equal_eager(split_complex_numbers(exported(REAL[name], X)), REAL[name], X)


def test_the_guide_lists_every_operator() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "complex.md").read_text()
    table = guide.partition("## Operators")[2].partition("## Refusals")[0]
    listed = set(re.findall(r"`(\w+)", table))
    taken = {name.split(".")[1] for name in OPERATORS} - {"getitem"}
    assert taken <= listed


# The program


def test_a_program_without_complex_numbers_is_returned_itself() -> None:
    program = exported(nn.Linear(6, 2), X)
    assert split_complex_numbers(program) is program


def test_the_given_program_does_not_change() -> None:
    program = exported(REAL["frequencies"], X)
    before = str(program)
    split_complex_numbers(program)
    assert str(program) == before
    torch.testing.assert_close(program.module()(X), REAL["frequencies"](X))


class Recurrent(nn.Module):
    """A complex state, rotated by complex parameters of which one has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.polar(torch.ones(6), torch.arange(6.0)))
        self.same = self.factor
        self.register_buffer("state", torch.zeros(6, dtype=torch.complex64))
        self.register_buffer("offset", torch.full((6,), 1 + 2j), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(self.factor * self.same).add_(x.sum((0, 1)) + self.offset)
        return self.state.real + x


def test_parameters_and_buffers_are_split_and_states_are_kept() -> None:
    module = Recurrent()
    program = split_complex_numbers(exported(module, X))
    assert not any(dtype.is_complex for dtype in dtypes(program))
    signature = program.graph_signature
    kinds = {spec.target: (spec.kind, spec.persistent) for spec in signature.input_specs}
    assert {name for name, (kind, _) in kinds.items() if kind is InputKind.BUFFER} == {
        "state_real",
        "state_imag",
        "offset_real",
        "offset_imag",
    }
    assert kinds["state_real"][1] is True
    assert kinds["offset_real"][1] is False
    assert "offset_real" not in program.state_dict
    written = [s.target for s in signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION]
    assert written == ["state_real", "state_imag"]
    assert isinstance(program.state_dict["factor_imag"], nn.Parameter)
    assert program.state_dict["factor_imag"] is program.state_dict["same_imag"]
    rewritten = program.module()
    for _ in range(3):
        torch.testing.assert_close(rewritten(X), module(X), atol=ATOL, rtol=RTOL)


def test_equal_matrices_are_stored_once() -> None:
    program = split_complex_numbers(
        exported(lambda x: torch.fft.fft(torch.fft.fft(x).real, dim=1, n=6).imag, X)
    )
    assert sorted(tuple(value.shape) for value in program.constants.values()) == [(6, 6)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_parts_have_the_precision_of_the_complex_dtype(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.rfft(x.to(torch.float64)) * POINTS[:, :1]).abs().to(dtype)

    program = split_complex_numbers(exported(function, X.to(dtype)))
    torch.testing.assert_close(program.module()(X.to(dtype)), function(X.to(dtype)))


def rotated(x: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * POINTS[: x.shape[1]]).flatten(-2)


def transformed(x: torch.Tensor) -> torch.Tensor:
    long = torch.fft.rfft(x.repeat(1, 1, 100))  # factored: it takes sizes apart
    return torch.fft.irfft2(torch.fft.rfft2(x) * 2j, s=(4, 6)) + long.abs().mean()


def frames(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x.flatten(1), 8, 4, return_complex=True).abs()


@pytest.mark.parametrize(
    ("function", "dims"),
    [(rotated, (0, 1)), (transformed, (0,)), (frames, (0, 2))],
    ids=["rotary", "transforms", "frames"],
)
def test_other_dimensions_may_be_dynamic(function: Any, dims: tuple[int, ...]) -> None:
    sizes = {dim: Dim(f"d{dim}", min=2, max=(9, 4, 20)[dim]) for dim in dims}
    given = exported(function, X, dynamic_shapes=({},) if not dims else ((sizes,),))
    program = split_complex_numbers(given)
    assert program.range_constraints == given.range_constraints
    shape = [
        3 * size // 2 if dim in dims and dim != 1 else size for dim, size in enumerate(X.shape)
    ]
    shape[1] = 3 if 1 in dims else shape[1]
    assert_equal_eager(program, function, torch.rand(shape))


# Refusals


def refusal(function: Any, *inputs: torch.Tensor, **options: Any) -> str:
    with pytest.raises(UnsupportedOperatorError) as raised:
        split_complex_numbers(exported(function, *inputs, **options))
    assert raised.value.expected == "the operators of docs/complex.md"
    return str(raised.value)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).tanh().abs()


def test_an_unknown_operator_is_named_with_its_place() -> None:
    message = refusal(nn.Sequential(nn.Identity(), Inner()), X)
    assert "got the operator aten.tanh.default at 1 (Inner), test_complex_numbers.py:" in message
    assert message.endswith("with real tensors: torch.view_as_real, x.real, x.imag")


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a large prime": (
        lambda x: torch.fft.fft(x, n=2053).abs(),
        "a transform of 2053 points, a prime number greater than 2048",
    ),
    "long frames": (
        lambda x: torch.stft(x.repeat(1, 1, 800).flatten(1), 4097, return_complex=True).abs(),
        "frames of 4097 points, more than 4096",
    ),
    "a computed window": (
        lambda x: torch.stft(x.flatten(1), 6, window=x[0, 0], return_complex=True).abs(),
        "a window that is computed from inputs",
    ),
    "gaps between windows": (
        lambda x: torch.istft(
            torch.fft.rfft(x).mT, 6, 6, window=torch.hann_window(6), center=False
        ),
        "istft with windows that leave samples out",
    ),
    "a branch": (
        lambda x: torch.cond(x.sum() > 0, lambda y: torch.fft.fft(y).abs(), torch.abs, (x,)),
        "a branch or loop of the graph",
    ),
    "a rounded power": (lambda x: (z(x) ** (1 + 1j)).abs(), "a complex exponent"),
    "three operands": (
        lambda x: torch.einsum("bij,bij,bij->bij", z(x), z(x), z(x)).abs(),
        "einsum of more than two operands",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forms_that_cannot_be_computed_are_refused(name: str) -> None:
    function, reason = REFUSED[name]
    assert f"got {reason}" in refusal(function, X)


def test_a_dynamic_number_of_points_is_refused() -> None:
    message = refusal(
        lambda x: torch.fft.fft(x).abs(), X, dynamic_shapes=(({2: Dim("n", min=2, max=9)},),)
    )
    assert "got a transform of a dynamic number of points, on which its matrix depends" in message
    assert message.endswith("other dimensions may be dynamic")


def test_complex_inputs_are_refused() -> None:
    with pytest.raises(LoweringError, match=r"takes a complex input.* inputs_0 of complex64") as e:
        split_complex_numbers(exported(torch.abs, z(X)))
    assert "torch.view_as_real(x)" in str(e.value.remedy)


def test_complex_outputs_are_refused() -> None:
    with pytest.raises(
        LoweringError, match=r"returns a complex tensor.* fft_fft of complex64"
    ) as e:
        split_complex_numbers(exported(torch.fft.fft, X))
    assert "torch.view_as_real(y)" in str(e.value.remedy)

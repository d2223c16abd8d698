"""Random models of a few ops in a row, the same for the same seed.

Graph passes of coremltools and OpenVINO replace a few ops in a row by another. If one replaces ops
that it should not, only the numbers show it.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import nn
from torch.nn import functional

from coreml_delegate import CoreMLBackend, CoreMLPartitioner, runtime
from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.options.compile_specs import Precision

ENGINES = ("reference", "openvino")
_SHAPES = ((3, 3), (2, 3, 4), (2, 4, 3), (1, 3, 4, 4))
_LARGEST = 1e4
_STEPS = (2, 6)
# As far as fp32 and fp64 may differ on the way: steps that lose more are not taken.
_CONDITIONED = 1e-5
_TOLERANCE = 2e-3
# In fp16: of the largest result, or of the error that PyTorch makes, which rounds elsewhere.
_TOLERANCE_HALF, _LOST = 1e-2, 10


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        text: The call, for a reader.
        function: Called with a value and the constants.
        constants: Tensors of the model.
    """

    text: str
    function: Callable[..., torch.Tensor]
    constants: tuple[torch.Tensor, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *(c.to(x.dtype) for c in self.constants))


class Chain(nn.Module):
    """Steps, each on the result of the previous step."""

    def __init__(self, x: torch.Tensor, steps: Sequence[Step]) -> None:
        super().__init__()
        self.x, self.steps = x, steps
        for i, step in enumerate(steps):
            for j, constant in enumerate(step.constants):
                self.register_buffer(f"c{i}_{j}", constant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, step in enumerate(self.steps):
            x = step.function(x, *(getattr(self, f"c{i}_{j}") for j in range(len(step.constants))))
        return x * 1.0

    def __str__(self) -> str:
        return f"{tuple(self.x.shape)}: " + ", ".join(step.text for step in self.steps)


class Together(nn.Module):
    """Several chains, lowered as one program."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        super().__init__()
        self.chains = nn.ModuleList(chains)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(chain(x) for chain, x in zip(self.chains, inputs, strict=True))


def draw_chain(source: random.Random) -> Chain:
    """Draw a chain whose numbers stay finite, and do not depend on roundings."""
    x = _uniform(source, source.choice(_SHAPES), -1.5, 1.5)
    steps: list[Step] = []
    value, exact = x, x.double()
    for _ in range(source.randint(*_STEPS)):
        step = source.choice(_KINDS)(source, value)
        if step is not None:
            after, exactly = step(value), step(exact)
            size = float(exactly.abs().max())
            error = float((after.double() - exactly).abs().max())
            if size < _LARGEST and error < _CONDITIONED * max(1.0, size):
                steps.append(step)
                value, exact = after, exactly
    return Chain(x, steps)


def wrong(chains: Sequence[Chain], precision: Precision = Precision.FLOAT32) -> list[str]:
    """Lower chains together; return the chains with results unlike eager PyTorch's, by engine.

    The constants of the chains are compared as well: lowering may not change them. If the chains
    cannot be lowered or run, the result is the chains that fail by themselves, with the error.
    """
    try:
        return _wrong(chains, precision)
    except (CoreMLDelegateError, RuntimeError, ValueError, TypeError) as error:
        if len(chains) == 1:
            return [f"{type(error).__name__}: {error}: {chains[0]}"]
        alone = [text for chain in chains for text in wrong([chain], precision)]
        return alone or [f"together, {type(error).__name__}: {error}: {[str(c) for c in chains]}"]


def _wrong(chains: Sequence[Chain], precision: Precision) -> list[str]:
    module, inputs = Together(chains).eval(), tuple(chain.x for chain in chains)
    expected = [result.clone() for result in module(*inputs)]
    tolerances = [_tolerance(*pair, precision) for pair in zip(chains, expected, strict=True)]
    specs = CoreMLBackend.generate_compile_specs(compute_precision=precision)
    edge = to_edge_transform_and_lower(
        torch.export.export(module, inputs),
        partitioner=[CoreMLPartitioner(compile_specs=specs)],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    results: dict[str, Sequence[Any]] = {"eager, afterwards": module(*inputs)}
    for engine in ENGINES:
        program = runtime.load_program(edge.to_executorch().buffer, engine=engine)
        results[engine] = program.run("forward", list(inputs))
    return [
        f"{engine}: {chain}"
        for engine, outcome in results.items()
        for chain, one, other, tolerance in zip(chains, outcome, expected, tolerances, strict=True)
        if not torch.allclose(one, other, rtol=0, atol=tolerance)
    ]


def _tolerance(chain: Chain, expected: torch.Tensor, precision: Precision) -> float:
    """Return the tolerance; in fp16 it includes the error of PyTorch's own fp16."""
    size = max(1.0, float(expected.abs().max()))
    if precision is Precision.FLOAT32:
        return _TOLERANCE * size
    half, x = copy.deepcopy(chain).half(), chain.x.half()
    rounded = (half(x), half.float()(x.float()))
    losses = [float((result.float() - expected).abs().max()) for result in rounded]
    return max(_TOLERANCE_HALF * size, *(_LOST * loss for loss in losses if math.isfinite(loss)))


# Kinds of steps


def _uniform(source: random.Random, shape: Sequence[int], low: float, high: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    return torch.rand(tuple(shape), generator=generator) * (high - low) + low


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("abs", "cos", "neg", "relu", "sigmoid", "square")},
    **{name: getattr(functional, name) for name in ("gelu", "silu", "softsign")},
    "clamp": lambda v: v.clamp(-1, 1.5),
    "exp": lambda v: torch.exp(torch.tanh(v)),
    "rsqrt": lambda v: torch.rsqrt(v.abs() + 0.5),
    "softmax": lambda v: functional.softmax(v, -1) if v.dim() else v,
    "sqrt": lambda v: torch.sqrt(v.abs() + 0.1),
}
_BINARY: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "x + c": lambda v, c: v + c,
    "x - c": lambda v, c: v - c,
    "c - x": lambda v, c: c - v,
    "x * c": lambda v, c: v * c,
    "x / c": lambda v, c: v / c,
    "c / x": lambda v, c: c / (v.abs() + 0.5),
    "x ** c": lambda v, c: torch.pow(v.abs() + 0.2, c),
    "c ** x": lambda v, c: torch.pow(c, torch.tanh(v)),
}
_SUMS = ("x + c", "x - c", "c - x")
_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "var": lambda v, dim, keepdim: torch.var(v, dim, correction=0, keepdim=keepdim),
}


def _elementwise(source: random.Random, _: torch.Tensor) -> Step:
    name = source.choice(sorted(_UNARY))
    return Step(name, _UNARY[name])


def _with_constant(source: random.Random, x: torch.Tensor) -> Step:
    """With a constant of fewer dimensions, some of size 1."""
    shape = [size if source.random() < 0.7 else 1 for size in x.shape]
    shape = shape[source.randint(0, len(shape)) :]
    name = source.choice(sorted(_BINARY))
    return Step(f"{name} {shape}", _BINARY[name], (_uniform(source, shape, 0.3, 1.5),))


def _with_number(source: random.Random, _: torch.Tensor) -> Step:
    name, number = source.choice(sorted(_BINARY)), source.choice((2.0, 0.5, 3.0, 1.0))
    return Step(f"{name}, c = {number}", lambda v: _BINARY[name](v, number))


def _permuted(source: random.Random, x: torch.Tensor) -> Step:
    order = list(range(x.dim()))
    source.shuffle(order)
    return Step(f"permute {order}", lambda v: v.permute(order))


def _reshaped(source: random.Random, x: torch.Tensor) -> Step | None:
    count = x.numel()
    shapes = [s for n in (1, 2, 3) if count % n == 0 for s in ([n, count // n], [count // n, 1, n])]
    shape = source.choice([[count], *shapes])
    return Step(f"reshape {shape}", lambda v: v.reshape(shape))


def _product(source: random.Random, x: torch.Tensor) -> Step | None:
    """With a constant matrix on either side, perhaps transposed, and perhaps an added vector."""
    if x.dim() < 2:
        return None
    is_left, is_transposed = source.random() < 0.5, source.random() < 0.3
    inner = x.shape[-2 if is_left else -1]
    outer = inner if is_transposed else source.choice((inner, 3, 4))
    shape = [outer, inner] if is_left else [inner, outer]
    constants = [_uniform(source, shape, -1, 1)]
    name = source.choice(_SUMS) if source.random() < 0.6 else ""
    if name:
        constants.append(_uniform(source, [x.shape[-1] if is_left else outer], -1, 1))

    def product(v: torch.Tensor, matrix: torch.Tensor, *vector: torch.Tensor) -> torch.Tensor:
        matrix = matrix.t() if is_transposed else matrix
        result = matrix @ v if is_left else v @ matrix
        return _BINARY[name](result, *vector) if name else result

    text = f"{'matrix @ x' if is_left else 'x @ matrix'} {shape}{' transposed' * is_transposed}"
    return Step(f"{text}{f', {name}' if name else ''}", product, tuple(constants))


def _reduced(source: random.Random, x: torch.Tensor) -> Step | None:
    if not x.dim():
        return None
    name, dim = source.choice(sorted(_REDUCTIONS)), source.randrange(x.dim())
    keepdim = source.random() < 0.5
    factor = source.choice((1.0, 1 / x.shape[dim], float(x.shape[dim])))
    function = _REDUCTIONS[name]
    text = f"{name}({dim}{', kept' if keepdim else ''}) * {factor:.3g}"
    return Step(text, lambda v: function(v, dim, keepdim=keepdim) * factor)


def _normed(source: random.Random, x: torch.Tensor) -> Step | None:
    if x.dim() < 2:
        return None
    width = [x.shape[-1]]
    constants = (_uniform(source, width, 0.5, 1.5),) if source.random() < 0.5 else ()

    def norm(v: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(v, width, *weight, eps=1e-3)

    return Step(f"layer_norm {len(constants)}", norm, constants)


_EPSILON = 1e-3
_MEANS = ("mean", "sum", "var")
_ROOTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "/ sqrt": lambda v, squares: v / squares.sqrt(),
    "* rsqrt": lambda v, squares: v * squares.rsqrt(),
    "* power": lambda v, squares: v * squares**-0.5,
    "root": lambda v, squares: squares.sqrt(),
}


def _written_norm(source: random.Random, x: torch.Tensor) -> Step | None:
    """A norm by its formula, over squares within fp16's range, or beyond."""
    dims = [dim for dim, size in enumerate(x.shape) if size > 1]
    if not dims:
        return None
    dim, gain = source.choice(dims), source.choice((1.0, 200.0))
    mean, root = source.choice(_MEANS), source.choice(sorted(_ROOTS))
    is_centred, correction = source.random() < 0.5, source.randrange(2)

    def norm(v: torch.Tensor) -> torch.Tensor:
        v = v * gain
        if is_centred:
            v = v - v.mean(dim, keepdim=True)
        if mean == "var":
            squares = v.var(dim, keepdim=True, correction=correction)
        else:
            squares = getattr(v.square(), mean)(dim, keepdim=True)
        return _ROOTS[root](v, squares + _EPSILON)

    centred = "centred " * is_centred
    return Step(f"{centred}norm {root} {mean}({dim}, {correction}) * {gain}", norm)


def _attention(source: random.Random, x: torch.Tensor) -> Step | None:
    """Attention by its formula: softmax of scaled products."""
    if x.dim() < 2:
        return None
    keys = _uniform(source, (x.shape[-1], source.randint(2, 5)), -1, 1)
    scale, divides = source.choice((0.5, -0.125, 2.0)), source.random() < 0.5

    def attend(v: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = v @ keys
        return ((scores / (1 / scale)) if divides else scores * scale).softmax(-1)

    return Step(f"softmax {'/' if divides else '*'} {scale}", attend, (keys,))


def _convolved(source: random.Random, x: torch.Tensor) -> Step | None:
    functions = {3: functional.conv1d, 4: functional.conv2d}
    if x.dim() not in functions:
        return None
    channels = source.choice((2, 3))
    shape = [channels, x.shape[1], *[1] * (x.dim() - 2)]
    constants = [_uniform(source, shape, -1, 1)]
    if source.random() < 0.5:
        constants.append(_uniform(source, [channels], -1, 1))
    return Step(f"conv {shape}", functions[x.dim()], tuple(constants))


def _joined(source: random.Random, x: torch.Tensor) -> Step | None:
    if not x.dim():
        return None
    dim, is_first = source.randrange(x.dim()), source.random() < 0.5
    constants = (_uniform(source, x.shape, -1, 1),)

    def join(v: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cat([other, v] if is_first else [v, other], dim)

    return Step(f"cat {dim}{' behind' * is_first}", join, constants)


def _sliced(source: random.Random, x: torch.Tensor) -> Step | None:
    dims = [dim for dim, size in enumerate(x.shape) if size > 1]
    if not dims:
        return None
    dim = source.choice(dims)
    return Step(f"slice {dim}", lambda v: v.narrow(dim, 1, v.shape[dim] - 1))


_KINDS = (
    *(_elementwise, _elementwise, _with_constant, _with_constant, _with_constant, _with_number),
    *(_permuted, _reshaped, _product, _product, _reduced, _reduced, _normed, _convolved),
    *(_joined, _sliced, _written_norm, _attention),
)

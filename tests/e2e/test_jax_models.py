"""Models of Flax and Equinox compute in Core ML what they compute in JAX. Random weights."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from jax import lax
from support.lowering import fp32_specs, lower
from support.partitioned import delegate_functions
from support.stablehlo_runs import ENGINES, run_on_each
from support.tolerances import SQNR_FP32, sqnr_db
from torch import nn

from coreml_delegate import jax as cj
from coreml_delegate.runtime.mil.program import Function
from coreml_delegate.targets import Opset

_RANDOM = np.random.default_rng(0)


def _input(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape, np.float32)


def _rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


class Block(nnx.Module):
    """A residual block with two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(inputs, outputs, (3, 3), stride, use_bias=False, rngs=rngs)
        self.first_norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.second = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.second_norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.shortcut = nnx.Conv(inputs, outputs, (1, 1), stride, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = nnx.relu(self.first_norm(self.first(x)))
        return nnx.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nnx.Module):
    """A residual network of a stem, blocks and a head."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, widths[0], (7, 7), 2, rngs=rngs)
        self.blocks = nnx.List(
            [Block(a, b, 1 + (a != b), rngs) for a, b in itertools.pairwise(widths)]
        )
        self.head = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Layer(nnx.Module):
    """A transformer's layer of attention and a perceptron."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm_after = nnx.LayerNorm(width, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.narrow(nnx.gelu(self.wide(self.norm_after(x))))


class Vit(nnx.Module):
    """A vision transformer with a class token."""

    def __init__(self, size: int, patch: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Conv(3, width, (patch, patch), patch, padding="VALID", rngs=rngs)
        count = (size // patch) ** 2 + 1
        self.token = nnx.Param(jax.random.normal(rngs.params(), (1, 1, width)))
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (1, count, width)))
        self.layers = nnx.List([Layer(width, 4, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.embed(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], 1) + self.positions[...]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class UnetBlock(nnx.Module):
    """Of a diffusion model: convolutions told the time, attention, half the size and back."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.GroupNorm(width, 4, rngs=rngs)
        self.conv = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.time = nnx.Linear(width, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.down = nnx.Conv(width, 2 * width, (3, 3), 2, rngs=rngs)
        self.up = nnx.ConvTranspose(2 * width, width, (4, 4), (2, 2), rngs=rngs)
        self.last = nnx.Conv(2 * width, width, (1, 1), rngs=rngs)

    def __call__(self, x: Any, time: Any) -> Any:
        width = x.shape[-1]
        angles = time[:, None] * jnp.exp(-jnp.arange(width // 2) * 0.3)
        told = self.time(nnx.silu(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)))
        y = self.conv(nnx.silu(self.norm(x))) + told[:, None, None]
        flat = y.reshape(y.shape[0], -1, width)
        y = y + self.attention(flat).reshape(y.shape)
        small = nnx.silu(self.down(y))
        larger = jax.image.resize(small, (*y.shape[:3], small.shape[-1]), "nearest")
        return self.last(jnp.concatenate([self.up(small), larger[..., :width]], -1)) + x


class Lstm(nnx.Module):
    """An LSTM over a sequence, by ``lax.scan``, and a head."""

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs) -> None:
        self.cell = nnx.OptimizedLSTMCell(inputs, width, rngs=rngs)
        self.width = width
        self.head = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        start = (jnp.zeros((x.shape[0], self.width)),) * 2
        _, found = lax.scan(self.cell, start, x.swapaxes(0, 1))
        return self.head(found.swapaxes(0, 1))


def _of_flax(model: Any) -> Callable[..., Any]:
    graph, state = nnx.split(model)
    return lambda *args: nnx.merge(graph, state)(*args)


def _perceptron() -> Callable[..., Any]:
    model = eqx.nn.MLP(8, 3, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    return jax.vmap(model)


def _small_cnn() -> Callable[..., Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
            eqx.nn.GroupNorm(2, 8),
            eqx.nn.Lambda(jax.nn.silu),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Conv2d(8, 8, 3, groups=8, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(8 * 6 * 6, 4, key=keys[2]),
            eqx.nn.Lambda(jax.nn.softmax),
        ]
    )
    return jax.vmap(layers)


MODELS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[np.ndarray, ...]]]] = {
    "resnet": lambda: (_of_flax(ResNet((8, 8, 16, 16), _rngs())), (_input(2, 32, 32, 3),)),
    "vit": lambda: (_of_flax(Vit(16, 4, 32, 2, _rngs())), (_input(2, 16, 16, 3),)),
    "unet block": lambda: (
        _of_flax(UnetBlock(16, _rngs())),
        (_input(2, 8, 8, 16), np.array([3, 70], np.float32)),
    ),
    "lstm": lambda: (_of_flax(Lstm(6, 12, _rngs())), (_input(2, 20, 6),)),
    "equinox perceptron": lambda: (_perceptron(), (_input(4, 8),)),
    "equinox network": lambda: (_small_cnn(), (_input(2, 3, 16, 16),)),
}


@pytest.mark.share(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_does_in_jax(name: str) -> None:
    function, arrays = MODELS[name]()
    program = cj.compile(function, *arrays, options={"engine": "reference"}).program
    expected = np.asarray(jax.jit(function)(*arrays))
    for (actual,) in run_on_each(program, *arrays):
        assert sqnr_db(expected, actual) > SQNR_FP32


class TorchLayer(nn.Module):
    """What ``Layer`` is, in torch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [
            part(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        ]
        found = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(found)
        return x + self.narrow(F.gelu(self.wide(self.norm_after(x)), approximate="tanh"))


def _computing_ops(function: Function) -> Counter[str]:
    moving = ("const", "identity", "reshape", "transpose")
    return Counter(op.type for op in function.block.walk() if op.type not in moving)


def test_a_transformers_layer_has_the_ops_that_torch_export_gives() -> None:
    x = _input(2, 6, 32)
    compiled = cj.compile(_of_flax(Layer(32, 4, _rngs())), x, options={"engine": "reference"})
    specs = fp32_specs(minimum_deployment_target=Opset.iOS18)
    lowered = lower(TorchLayer(32, 4), (torch.from_numpy(x),), compile_specs=specs)
    (function,) = delegate_functions(lowered.edge)
    ops = _computing_ops(compiled.program.executable.model.function)
    assert ops == _computing_ops(function)
    assert {"gelu", "layer_norm", "linear", "scaled_dot_product_attention"} <= set(ops)


class Decoder:
    """A decoder like GPT-2, one token a call, whose keys and values are states.

    Args:
        width: Of the model.
        heads: Of the attention.
        depth: Number of layers.
        length: Of the longest text.
        vocabulary: Number of tokens.
    """

    def __init__(self, width: int, heads: int, depth: int, length: int, vocabulary: int) -> None:
        self.heads, self.length = heads, length
        rngs = _rngs()
        shape = (depth, heads, length, width // heads)
        self.cache = (np.zeros(shape, np.float16), np.zeros(shape, np.float16))
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.norms = [[nnx.LayerNorm(width, rngs=rngs) for _ in range(2)] for _ in range(depth)]
        self.qkv = [nnx.Linear(width, 3 * width, rngs=rngs) for _ in range(depth)]
        self.out = [nnx.Linear(width, width, rngs=rngs) for _ in range(depth)]
        self.wide = [nnx.Linear(width, 4 * width, rngs=rngs) for _ in range(depth)]
        self.narrow = [nnx.Linear(4 * width, width, rngs=rngs) for _ in range(depth)]
        self.last = nnx.LayerNorm(width, rngs=rngs)

    def step(self, cache: Any, token: Any, at: Any) -> Any:
        """Return the logits after a token, and the cache with it."""
        x = self.embed(token) + self.positions(at)
        for n, (before, after) in enumerate(self.norms):
            parts = jnp.split(self.qkv[n](before(x)), 3)
            q, k, v = (part.reshape(self.heads, -1) for part in parts)
            cache = tuple(
                kept.at[n, :, at].set(new.astype(kept.dtype))
                for kept, new in zip(cache, (k, v), strict=True)
            )
            keys, values = (kept[n].astype(x.dtype) for kept in cache)
            scores = jnp.einsum("hd,htd->ht", q, keys) / np.sqrt(q.shape[-1]).astype(np.float32)
            scores = jnp.where(jnp.arange(self.length) <= at, scores, -1e9)
            found = jnp.einsum("ht,htd->hd", jax.nn.softmax(scores), values)
            x = x + self.out[n](found.reshape(-1))
            x = x + self.narrow[n](nnx.gelu(self.wide[n](after(x))))
        return self.embed.attend(self.last(x)), cache


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((32, 4, 2, 16, 50), id="small"),
        pytest.param((768, 12, 12, 128, 50257), id="gpt2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_decoder_keeps_its_cache_as_state(engine: str, sizes: tuple[int, ...]) -> None:
    decoder = Decoder(*sizes)
    example = (decoder.cache, np.int32(0), np.int32(0))
    compiled = cj.compile(decoder.step, *example, states={0: 1}, options={"engine": engine})
    session, cache = compiled.session(), decoder.cache
    step = jax.jit(decoder.step)
    token = np.int32(7)
    for at in range(6):
        expected, cache = step(cache, token, np.int32(at))
        (logits,) = session(token, np.int32(at))
        assert sqnr_db(np.asarray(expected), logits) > SQNR_FP32
        token = np.int32(np.argmax(expected))

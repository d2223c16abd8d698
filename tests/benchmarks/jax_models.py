"""The perceptron and the decoder written with JAX, on the weights of the torch modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

from benchmarks.contenders import Arrays, Bind, Call
from benchmarks.models import Decoder

_Weights = dict[str, jax.Array]


def load(module: nn.Module) -> Bind:
    """The module as a compiled function of its inputs and of the caches it keeps."""
    weights = {name: jnp.asarray(value.detach().numpy()) for name, value in _tensors(module)}
    caches = [jnp.asarray(cache.numpy()) for cache in getattr(module, "caches", ())]
    build = _decoder if isinstance(module, Decoder) else _perceptron
    # The weights are constants of the program, as they are for every other contender.
    function = jax.jit(build(module, weights), donate_argnums=0)
    held = [caches]

    def bind(inputs: Arrays) -> Call:
        arrays = [jnp.asarray(_narrowed(array)) for array in inputs]

        def call() -> Any:
            result, held[0] = function(held[0], *arrays)
            return result.block_until_ready()

        return call

    return bind


def _tensors(module: nn.Module) -> list[tuple[str, Any]]:
    held = [*module.named_parameters(), *module.named_buffers()]
    return [(name, value) for name, value in held if not name.startswith(("keys", "values"))]


def _narrowed(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.int64 else array


def _perceptron(module: nn.Module, weights: _Weights) -> Callable[..., Any]:
    places = [name for name, layer in module.named_children() if isinstance(layer, nn.Linear)]

    def forward(caches: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        for place in places:
            x = x @ weights[f"{place}.weight"].T + weights[f"{place}.bias"]
            x = x if place == places[-1] else jax.nn.relu(x)
        return x, caches

    return forward


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


def _decoder(module: Decoder, weights: _Weights) -> Callable[..., Any]:
    heads = module.layers[0].attention.heads

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(1, x.shape[1], heads, -1).swapaxes(1, 2)

    def attention(
        x: jax.Array, name: str, context: tuple[jax.Array, ...], caches: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        positions, cos, sin, mask = context
        query, key, value = (
            split(x @ weights[f"{name}.{part}.weight"].T) for part in ("query", "key", "value")
        )
        keys = caches[0].at[:, :, positions].set(_rotated(key, cos, sin))
        values = caches[1].at[:, :, positions].set(value)
        scores = _rotated(query, cos, sin) @ keys.swapaxes(2, 3) / keys.shape[3] ** 0.5
        attended = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1) @ values
        merged = attended.swapaxes(1, 2).reshape(x.shape)
        return merged @ weights[f"{name}.out.weight"].T, [keys, values]

    def forward(
        caches: list[jax.Array], tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        positions = position + jnp.arange(tokens.shape[1])
        mask = jnp.arange(caches[0].shape[2])[None, :] <= positions[:, None]
        context = positions, weights["cos"][positions], weights["sin"][positions], mask
        x = weights["embedding.weight"][tokens]
        after: list[jax.Array] = []
        for index in range(len(module.layers)):
            name = f"layers.{index}"
            normed = _norm(x, weights[f"{name}.attention_norm.weight"])
            attended, written = attention(
                normed, f"{name}.attention", context, caches[2 * index : 2 * index + 2]
            )
            after += written
            x = x + attended
            normed = _norm(x, weights[f"{name}.feed_norm.weight"])
            gate, up = (normed @ weights[f"{name}.{part}.weight"].T for part in ("gate", "up"))
            x = x + (jax.nn.silu(gate) * up) @ weights[f"{name}.down.weight"].T
        return _norm(x[:, -1], weights["norm.weight"]) @ weights["head.weight"].T, after

    return forward

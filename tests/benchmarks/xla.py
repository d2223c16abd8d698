"""Latency of JAX functions on this package's engine and on XLA, and the time to compile them.

    python -m tests.benchmarks.xla [FUNCTION ...] [--rounds 30] [--threads 2]

Both run the same function with the same weights in fp32, in one process on the same cores. Calls
are interleaved, and each number is a median. Random weights.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

warnings.filterwarnings("ignore")

import jax  # noqa: E402 - after the filter above
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from support.tolerances import sqnr_db  # noqa: E402

from benchmarks.timing import Turn, race  # noqa: E402

_SHORT, _MORE_ROUNDS = 5e-3, 10
_RANDOM = np.random.default_rng(0)
Function = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


def _weight(*shape: int) -> jax.Array:
    fan = int(np.prod(shape[:-1])) or 1
    return jnp.asarray(_RANDOM.standard_normal(shape, np.float32) / np.sqrt(fan))


def _input(*shape: int) -> np.ndarray:
    return _RANDOM.standard_normal(shape, np.float32)


def _dense(inputs: int, outputs: int) -> Callable[[Any], Any]:
    weight, bias = _weight(inputs, outputs), _weight(1, outputs)[0]
    return lambda x: x @ weight + bias


def _layer_norm(width: int) -> Callable[[Any], Any]:
    scale, offset = 1 + _weight(1, width)[0] / 10, _weight(1, width)[0] / 10

    def norm(x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + offset

    return norm


def _mlp(batch: int) -> Function:
    layers = [_dense(128, 256), _dense(256, 256), _dense(256, 10)]

    def function(x: Any) -> Any:
        for layer in layers[:-1]:
            x = jax.nn.relu(layer(x))
        return layers[-1](x)

    return function, (_input(batch, 128),)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> Any:
    kernel = _weight(size, size, inputs // groups, outputs)
    scale, offset = 1 + _weight(1, outputs)[0] / 10, _weight(1, outputs)[0] / 10

    def conv(x: Any) -> Any:
        y = lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return y * scale + offset

    return conv


def _resnet18() -> Function:
    stem = _conv(3, 64, 7, 2)
    blocks = []
    width = 64
    for outputs, stride in (
        (64, 1),
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        (512, 1),
    ):
        shortcut = None if width == outputs else _conv(width, outputs, 1, stride)
        blocks.append((_conv(width, outputs, 3, stride), _conv(outputs, outputs, 3), shortcut))
        width = outputs
    head = _dense(512, 1000)

    def function(x: Any) -> Any:
        x = jax.nn.relu(stem(x))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for first, second, shortcut in blocks:
            kept = x if shortcut is None else shortcut(x)
            x = jax.nn.relu(second(jax.nn.relu(first(x))) + kept)
        return head(x.mean((1, 2)))

    return function, (_input(1, 224, 224, 3),)


def _depthwise() -> Function:
    stem = _conv(3, 32, 3, 2)
    layers = []
    width = 32
    for outputs, stride in (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
    ):
        layers.append((_conv(width, width, 3, stride, width), _conv(width, outputs, 1)))
        width = outputs
    head = _dense(512, 1000)

    def function(x: Any) -> Any:
        x = jax.nn.relu(stem(x))
        for depthwise, pointwise in layers:
            x = jax.nn.relu(pointwise(jax.nn.relu(depthwise(x))))
        return head(x.mean((1, 2)))

    return function, (_input(1, 224, 224, 3),)


def _attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def _block(width: int, heads: int) -> Callable[..., Any]:
    first, second = _layer_norm(width), _layer_norm(width)
    qkv, out = _dense(width, 3 * width), _dense(width, width)
    up, down = _dense(width, 4 * width), _dense(4 * width, width)

    def block(x: Any, cache: Any = None, mask: Any = None, position: Any = None) -> Any:
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, heads, width // heads)
            for part in jnp.split(qkv(first(x)), 3, axis=-1)
        )
        if cache is not None:
            k = lax.dynamic_update_slice(cache[0], k, (0, position, 0, 0))
            v = lax.dynamic_update_slice(cache[1], v, (0, position, 0, 0))
        attended = _attend(q, k, v, mask)
        x = x + out(attended.reshape(batch, length, width))
        x = x + down(jax.nn.gelu(up(second(x)), approximate=True))
        return (x, k, v) if cache is not None else x

    return block


def _vit() -> Function:
    width, patches = 768, 196
    patch = _dense(16 * 16 * 3, width)
    token, positions = _weight(1, 1, width), _weight(1, patches + 1, width)
    blocks = [_block(width, 12) for _ in range(12)]
    norm, head = _layer_norm(width), _dense(width, 1000)

    def function(x: Any) -> Any:
        x = x.reshape(1, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(1, patches, -1)
        x = jnp.concatenate([token, patch(x)], axis=1) + positions
        for block in blocks:
            x = block(x)
        return head(norm(x)[:, 0])

    return function, (_input(1, 224, 224, 3),)


def _gpt2() -> tuple[Any, ...]:
    width, vocabulary, context = 768, 50257, 256
    return (
        _weight(vocabulary, width) * 100,
        _weight(context, width),
        [_block(width, 12) for _ in range(12)],
        _layer_norm(width),
    )


def _prefill() -> Function:
    embedding, positions, blocks, norm = _gpt2()
    mask = np.tril(np.ones((128, 128), bool))

    def function(tokens: Any) -> Any:
        x = embedding[tokens] + positions[:128]
        for block in blocks:
            x = block(x, mask=mask)
        return norm(x)[:, -1] @ embedding.T

    return function, (_RANDOM.integers(0, 50257, (1, 128)).astype(np.int32),)


def _decode() -> Function:
    embedding, positions, blocks, norm = _gpt2()

    def function(token: Any, position: Any, keys: Any, values: Any) -> Any:
        x = embedding[token] + lax.dynamic_slice_in_dim(positions, position, 1)
        mask = jnp.arange(256) <= position
        new_keys, new_values = [], []
        for n, block in enumerate(blocks):
            x, k, v = block(x, (keys[n], values[n]), mask, position)
            new_keys.append(k)
            new_values.append(v)
        return norm(x)[:, -1] @ embedding.T, jnp.stack(new_keys), jnp.stack(new_values)

    caches = (_input(12, 1, 256, 12, 64), _input(12, 1, 256, 12, 64))
    return function, (np.array([[7]], np.int32), np.int32(100), *caches)


def _lstm() -> Function:
    width = 128
    gates = _dense(2 * width, 4 * width)

    def function(x: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            hidden, cell = carry
            i, f, g, o = jnp.split(gates(jnp.concatenate([x, hidden], -1)), 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        start = (jnp.zeros((1, width)), jnp.zeros((1, width)))
        return lax.scan(step, start, x)[1]

    return function, (_input(128, 1, width),)


def _attention() -> Function:
    def function(q: Any, k: Any, v: Any) -> Any:
        return _attend(q, k, v)

    return function, tuple(_input(1, 256, 8, 64) for _ in range(3))


FUNCTIONS: dict[str, Callable[[], Function]] = {
    "mlp, batch 1": lambda: _mlp(1),
    "mlp, batch 64": lambda: _mlp(64),
    "resnet-18": _resnet18,
    "vit-b/16": _vit,
    "gpt-2 small, prefill 128": _prefill,
    "gpt-2 small, one step": _decode,
    "lstm, 128 steps": _lstm,
    "attention": _attention,
    "depthwise network": _depthwise,
}


def _measure(name: str, rounds: int) -> tuple[str, ...]:
    from coreml_delegate import jax as coreml_jax

    function, arguments = FUNCTIONS[name]()
    start = time.perf_counter()
    theirs = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(theirs(*arguments))
    their_compilation = time.perf_counter() - start
    start = time.perf_counter()
    ours = coreml_jax.compile(jax.jit(function), *arguments, options={"engine": "openvino"})
    results = ours(*arguments)
    our_compilation = time.perf_counter() - start
    expected = jax.tree.leaves(theirs(*arguments))
    error = min(
        sqnr_db(np.asarray(want), np.asarray(got))
        for want, got in zip(expected, jax.tree.leaves(results), strict=True)
    )
    turns = {
        "xla": Turn(lambda: jax.block_until_ready(theirs(*arguments))),
        "ours": Turn(lambda: ours(*arguments)),
    }
    # A disturbance of a machine that others use outlasts many rounds of short calls.
    is_short = race(turns, 1)["xla"] < _SHORT
    medians = race(turns, rounds * _MORE_ROUNDS if is_short else rounds)
    ratio = medians["ours"] / medians["xla"]
    return (
        name,
        f"{1e3 * medians['ours']:.3f}",
        f"{1e3 * medians['xla']:.3f}",
        f"{ratio:.2f}",
        f"{our_compilation:.1f}",
        f"{their_compilation:.1f}",
        f"{error:.0f}",
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.xla", description=__doc__)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help=", ".join(FUNCTIONS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    table = Table("function", "ms", "XLA, ms", "ratio", "compile, s", "XLA, s", "dB")
    ratios = []
    for name in arguments.functions or FUNCTIONS:
        row = _measure(name, arguments.rounds)
        ratios.append(float(row[3]))
        table.add_row(*row)
    Console(width=110).print(table)
    Console().print(f"geometric mean of the ratios: {np.exp(np.mean(np.log(ratios))):.2f}")


if __name__ == "__main__":
    main()

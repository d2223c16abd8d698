"""Recurrences over a call's tokens: Mamba 1, Mamba 2 and the gated delta rule.

The functions of ``transformers`` loop over the tokens, begin at zero, or treat padding as tokens.
Ours begin with the state before the call and end with the state of the last token: padding neither
decays a state nor adds to it. No decay is divided by another and no sums are subtracted, so that
fp16 suffices.

The modules stay those of ``transformers``: while their code runs, our functions replace theirs.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.caches import LayerCache
from coreml_delegate.llm.states import RECURRENCE, StateLayer
from coreml_delegate.patches import Patch, patched
from coreml_delegate.patches.transformers import recurrence

_STATE = (RECURRENCE, 0)


class MatrixOnly(nn.Module):
    """Weight and bias of a linear layer, for a module that multiplies by them in its own code.

    Not an ``nn.Linear``, so that it is not quantized.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias


def use_own_recurrences(model: nn.Module, layers: Sequence[LayerCache]) -> None:
    """Replace the recurrence functions of a model's modules by the functions of this module.

    Args:
        model: The model, which is changed.
        layers: Shapes of its layers' caches.

    Raises:
        LoweringError: A layer has another recurrence.
    """
    replaced: set[int] = set()
    for module in list(model.modules()):
        for code, name, function, rank in _recurrences(module):
            index: Any = module.layer_idx
            if _rank(layers[index]) == rank:
                replaced.add(index)
                module.forward = partial(_forward, module, code, name, function)
                for part, linear in _matrices(module):
                    setattr(module, part, MatrixOnly(linear))
    for index, layer in enumerate(layers):
        if _rank(layer) and index not in replaced:
            raise LoweringError(
                f"layer {index} of the model has a recurrence that is not supported",
                expected="Mamba 1, Mamba 2 or a gated delta rule",
            )


def _recurrences(
    module: nn.Module,
) -> Iterator[tuple[types.FunctionType, str, Callable[..., Any], int]]:
    """Yield a module's code, the name of the replaced function, ours, and its state's rank."""
    code = inspect.unwrap(type(module).forward)
    if isinstance(code, types.FunctionType):
        for name, (function, rank) in _FUNCTIONS.items():
            if name in code.__code__.co_names:
                yield code, name, function, rank


def _rank(layer: LayerCache) -> int:
    """Return the rank of a layer's recurrent state; 0 without a recurrence."""
    return next((len(state.shape) for state in layer.states if state.name[0] == RECURRENCE), 0)


def _matrices(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers whose weights a module multiplies by in its own code."""
    for name, layer in list(module.named_children()):
        if name == "dt_proj" and isinstance(layer, nn.Linear):
            yield name, layer


def _forward(
    module: Any,
    code: types.FunctionType,
    name: str,
    function: Callable[..., Any],
    *args: Any,
    cache: Any = None,
    **options: Any,
) -> Any:
    """Run a module's own code; with a cache, ``name`` in it is our function."""
    patches: list[Patch] = []
    if cache is not None:
        own = partial(function, cache.layers[module.layer_idx])
        patches = [recurrence(code, name, own)]
    with patched(*patches):
        return code(module, *args, cache=cache, **options)


def selective_scan(
    layer: StateLayer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *,
    delta_softplus: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba's selective scan (arXiv:2312.00752, algorithm 2), with a decay per state element.

    h_t = exp(dt_t A) * h_(t-1) + dt_t x_t B_t^T; y_t = (h_t C_t + D * x_t) * silu(z_t).

    Args:
        layer: Has the state [1, K, N] before the call.
        hidden_states: [1, K, L].
        dt: Time steps [1, K, L].
        A: Logarithms of the decays per unit of time, [K, N].
        B: Input weights of the state, [1, N, L].
        C: Output weights of the state, [1, N, L].
        D: Skip connection, [K].
        z: Gate, [1, K, L].
        delta_bias: Added to the time steps, [K].
        delta_softplus: Whether softplus is then applied to the time steps.
        options: Arguments that choose an implementation, ignored.

    Returns:
        [1, K, L], and the state after the last token.
    """
    del options
    steps = dt if delta_bias is None else dt + delta_bias[:, None]
    steps = functional.softplus(steps) if delta_softplus else steps
    steps = _without_padding(layer, steps)
    times = steps[0].t()[:, :, None]  # [L, K, 1]
    decays = torch.exp(times * A)
    inputs = times * hidden_states[0].t()[:, :, None] * B[0].t()[:, None, :]
    states = _blocked_scan(decays, inputs, layer.past(_STATE))
    result = (states @ C[0].t()[:, :, None])[:, :, 0].t()[None]
    if D is not None:
        result = result + hidden_states * D[:, None]
    if z is not None:
        result = result * functional.silu(z)
    return result, states[states.shape[0] - 1 :]


def _without_padding(layer: StateLayer, values: torch.Tensor) -> torch.Tensor:
    """Return values of tokens [..., L] with zeros for padding."""
    real = layer.span.real
    return values if real is None else values * real


def _blocked_scan(decays: torch.Tensor, inputs: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """Return all states [L, K, N] of h_t = decays_t * h_(t-1) + inputs_t.

    A blocked scan: the tokens are cut into about sqrt(L) blocks of sqrt(L) tokens. All blocks
    advance together from zero; then the initial states are passed from block to block. That is
    2 sqrt(L) steps, and little more arithmetic than L steps.

    Args:
        decays: [L, K, N].
        inputs: [L, K, N].
        past: State before the first token, [1, K, N].
    """
    length, *sizes = inputs.shape
    size = math.isqrt(length - 1) + 1
    blocks = -(-length // size)
    padding = (0, 0, 0, 0, 0, blocks * size - length)
    if blocks * size > length:
        decays, inputs = functional.pad(decays, padding), functional.pad(inputs, padding)
    products = [step[:, 0] for step in decays.reshape(blocks, size, *sizes).split(1, dim=1)]
    sums = [step[:, 0] for step in inputs.reshape(blocks, size, *sizes).split(1, dim=1)]
    for step in range(1, size):
        sums[step] = sums[step] + products[step] * sums[step - 1]
        products[step] = products[step] * products[step - 1]
    initial = [past]
    for block in range(blocks - 1):
        initial.append(sums[-1][block : block + 1] + products[-1][block : block + 1] * initial[-1])
    initials = torch.cat(initial)[:, None]
    states = torch.stack(sums, dim=1) + torch.stack(products, dim=1) * initials
    return states.reshape(blocks * size, *sizes)[:length]


def chunk_scan(
    layer: StateLayer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba 2's recurrence (SSD, arXiv:2405.21060) as matrix products; each head has a decay.

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T; y_t = h_t C_t + D x_t. As attention without softmax:
    y_t = sum_(s<=t) (C_t . B_s) d(s, t) dt_s x_s + d(0, t) h_0 C_t + D x_t, where d(s, t) is the
    product of the decays of the tokens s + 1 to t.

    Args:
        layer: Has the state [1, H, P, N] before the call.
        hidden_states: [1, L, H, P].
        dt: Time steps [1, L, H].
        A: Logarithms of the decays per unit of time, [H].
        B: Input weights of the state for each group of heads, [1, L, G, N].
        C: Output weights of the state, [1, L, G, N].
        chunk_size: Ignored: the call is one chunk.
        D: Skip connection, [H].
        dt_bias: Added to the time steps, [H].
        dt_softplus: Whether softplus is then applied to the time steps.
        dt_limit: Bounds of the time steps.
        options: Arguments that choose an implementation, ignored.

    Returns:
        [1, L, H, P], and the state after the last token.
    """
    del chunk_size, options
    steps = dt if dt_bias is None else dt + dt_bias
    steps = functional.softplus(steps) if dt_softplus else steps
    steps = _clamp(steps, dt_limit).transpose(1, 2)[0]
    steps = _without_padding(layer, steps)  # [H, L]
    _, length, heads, width = hidden_states.shape
    groups, numbers = B.shape[2:]
    per_group = heads // groups
    into, out = B[0].transpose(0, 1), C[0].transpose(0, 1)  # [G, L, N]
    inputs = hidden_states[0].transpose(0, 1) * steps[:, :, None]  # [H, L, P]
    between, since = _decays(steps * A[:, None])
    past = layer.past(_STATE).reshape(groups, per_group * width, numbers)

    # [G, 1, L, L] of each group times [G, H / G, L, L] of its heads.
    decays = between.reshape(groups, per_group, length, length)
    shares = (out @ into.transpose(1, 2))[:, None] * decays
    own = shares.reshape(heads, length, length) @ inputs
    earlier = (out @ past.transpose(1, 2)).reshape(groups, length, per_group, width)
    earlier = earlier.transpose(1, 2)
    result = own + earlier.reshape(heads, length, width) * since
    if D is not None:
        result = result + hidden_states[0].transpose(0, 1) * D[:, None, None]

    to_last = between[:, length - 1, :, None]  # decay from each token to the last, [H, L, 1]
    added = (inputs * to_last).transpose(1, 2).reshape(groups, per_group * width, length) @ into
    state = past.reshape(heads, width * numbers) * since[:, length - 1]
    state = state.reshape(1, heads, width, numbers) + added.reshape(1, heads, width, numbers)
    return result.transpose(0, 1)[None].contiguous(), state


def _clamp(steps: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
    least, most = limits
    steps = steps.clamp(min=least) if least > 0 else steps
    return steps.clamp(max=most) if math.isfinite(most) else steps


def gated_delta_rule(
    layer: StateLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule: S_t = exp(g_t) S_(t-1) + k_t u_t^T; o_t = S_t^T q_t / sqrt(K).

    The added value is u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t) (arXiv:2412.06464). For all
    tokens this is a triangular system: (I + beta tril(D * K K^T, -1)) U = beta (V - G K S_0), where
    D has the decays between two tokens, and G the decays from the start.

    Args:
        layer: Has the state [1, H, K, V] before the call.
        query: Queries of each group of heads, [1, L, G, K].
        key: [1, L, G, K].
        value: [1, L, H, V].
        g: Logarithms of decays, [1, L, H].
        beta: Step size of the update, [1, L, H].
        use_qk_l2norm_in_kernel: Whether queries and keys are normalized to unit length.
        options: Arguments that choose an implementation, ignored.

    Returns:
        [1, L, H, V], and the state after the last token.
    """
    del options
    length, heads = value.shape[1:3]
    queries, keys = (
        _repeat_for_heads(x, heads, unit=use_qk_l2norm_in_kernel) for x in (query, key)
    )
    queries = queries * queries.shape[2] ** -0.5
    values = value[0].transpose(0, 1)  # [H, L, V]
    rates = _without_padding(layer, beta[0].t())[:, :, None]
    between, since = _decays(_without_padding(layer, g[0].t()))
    past = layer.past(_STATE)[0]

    similarity = keys @ keys.transpose(1, 2) * between
    inverse = _inverse(rates * similarity)
    added = inverse @ (rates * values) - (inverse @ (rates * since * keys)) @ past
    shares = queries @ keys.transpose(1, 2) * between
    result = (since * queries) @ past + shares @ added
    decayed_keys = keys * between[:, length - 1, :, None]
    state = past * since[:, length - 1 :] + decayed_keys.transpose(1, 2) @ added
    return result.transpose(0, 1)[None].contiguous(), state[None]


def _repeat_for_heads(vectors: torch.Tensor, heads: int, *, unit: bool) -> torch.Tensor:
    """Repeat vectors [1, L, G, K] of groups for their heads: [H, L, K]."""
    if unit:
        vectors = vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
    _, length, groups, width = vectors.shape
    per_group = heads // groups
    repeated = vectors[0].transpose(0, 1).repeat_interleave(per_group, dim=0)
    return repeated.reshape(heads, length, width)


def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    """Return (I + tril(M, -1))^-1 of a matrix M [H, L, L].

    Diagonal blocks are inverted, and neighbours merged, with doubling sizes: for A and D inverted,
    [[A, 0], [C, D]]^-1 = [[A', 0], [-D' C A', D']]. The Neumann series would be shorter, but its
    terms grow far beyond the result when keys are similar.
    """
    length = matrix.shape[1]
    inverse = torch.eye(length).expand(matrix.shape)
    indices = torch.arange(length)
    size = 1
    while size < length:
        block = indices // size
        pair = (block[:, None] == block[None] + 1) & (block[None] % 2 == 0)
        inverse = inverse - inverse @ (matrix * pair.to(matrix.dtype)) @ inverse
        size *= 2
    return inverse


def _decays(logarithms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of decays between two tokens, and from the start to each token.

    Args:
        logarithms: Logarithm of each token's decay, [H, L].

    Returns:
        [H, L, L], from the column's token to the row's, zero for later columns; and [H, L, 1].
    """
    length = logarithms.shape[1]
    causal = torch.ones(length, length).tril()
    # Sums over the tokens in between: differences of running sums would lose digits.
    summed = causal @ (logarithms[:, :, None] * causal.tril(-1))
    return torch.exp(summed) * causal, torch.exp(causal @ logarithms[:, :, None])


_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "mamba_selective_scan": (selective_scan, 3),
    "mamba2_chunk_scan": (chunk_scan, 4),
    "torch_chunk_gated_delta_rule": (gated_delta_rule, 4),
}
"""Our functions by the name of the replaced function, with the rank of the state."""

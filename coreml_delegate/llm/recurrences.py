"""Recurrences over a call's tokens, in place of those of ``transformers``.

Theirs loop over the tokens, begin at zero, or take padding for tokens. Ours begin with the state
before the call and end with that of the last token: padding neither decays a state nor adds to it.
No decay is divided by another and no sums are subtracted, so that fp16 suffices.

The modules stay those of ``transformers``: their code runs with our functions under the names that
it calls.
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

_STATE = (RECURRENCE, 0)


class MatrixOnly(nn.Module):
    """Weight and bias of a linear layer that a module multiplies by itself.

    As it is no ``nn.Linear``, it is not quantized.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias


def use_own_recurrences(model: nn.Module, layers: Sequence[LayerCache]) -> None:
    """Let the modules of a model that have a recurrence compute it with the functions of here.

    Args:
        model: Changed.
        layers: What its layers keep.

    Raises:
        LoweringError: A layer has another recurrence.
    """
    known: set[int] = set()
    for module in list(model.modules()):
        for code, name, function, rank in _recurrences(module):
            index: Any = module.layer_idx
            if _rank(layers[index]) == rank:
                known.add(index)
                module.forward = partial(_forward, module, code, name, function)
                for part, linear in _multiplied(module):
                    setattr(module, part, MatrixOnly(linear))
    for index, layer in enumerate(layers):
        if _rank(layer) and index not in known:
            raise LoweringError(
                f"layer {index} of the model has a recurrence that is not supported",
                expected="that of Mamba 1, Mamba 2 or a gated delta rule",
            )


def _recurrences(
    module: nn.Module,
) -> Iterator[tuple[types.FunctionType, str, Callable[..., Any], int]]:
    """Yield a module's code, the name in it that is ours, our function, and its state's rank."""
    code = inspect.unwrap(type(module).forward)
    if isinstance(code, types.FunctionType):
        for name, (function, rank) in _FUNCTIONS.items():
            if name in code.__code__.co_names:
                yield code, name, function, rank


def _rank(layer: LayerCache) -> int:
    """Return the rank of the state of a layer's recurrence; 0 if it has none."""
    return next((len(state.shape) for state in layer.states if state.name[0] == RECURRENCE), 0)


def _multiplied(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a module whose weights it multiplies by itself."""
    for name, layer in list(module.named_children()):
        if name == "dt_proj" and isinstance(layer, nn.Linear):
            yield name, layer


def _forward(
    module: nn.Module,
    code: types.FunctionType,
    name: str,
    function: Callable[..., Any],
    *args: Any,
    cache: Any = None,
    **options: Any,
) -> Any:
    """Run a module's own code; with a cache, it calls our function under a name."""
    names = code.__globals__
    if cache is not None:
        layer: Any = cache.layers[module.layer_idx]
        names = {**names, name: partial(function, layer)}
    own = types.FunctionType(code.__code__, names, name, code.__defaults__, code.__closure__)
    own.__kwdefaults__ = code.__kwdefaults__
    return own(module, *args, cache=cache, **options)


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
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba 1's recurrence: a decay for each channel and each of its N numbers.

    Args:
        layer: Has the state [1, K, N] before the call.
        hidden_states: [1, K, L].
        dt: Time steps [1, K, L].
        A: Logarithms of decays in a time step of 1, [K, N].
        B: Into the state, [1, N, L].
        C: Out of the state, [1, N, L].
        D: Past the state, [K].
        z: Gate, [1, K, L].
        delta_bias: Added to the time steps, [K].
        delta_softplus: Whether time steps are then made positive.
        others: Arguments that choose an implementation.

    Returns:
        [1, K, L], and the state behind the last token.
    """
    del others
    steps = dt if delta_bias is None else dt + delta_bias[:, None]
    steps = functional.softplus(steps) if delta_softplus else steps
    steps = _without_padding(layer, steps)
    times = steps[0].t()[:, :, None]  # [L, K, 1]
    decays = torch.exp(times * A)
    inputs = times * hidden_states[0].t()[:, :, None] * B[0].t()[:, None, :]
    states = _scan(decays, inputs, layer.past(_STATE))
    made = (states @ C[0].t()[:, :, None])[:, :, 0].t()[None]
    if D is not None:
        made = made + hidden_states * D[:, None]
    if z is not None:
        made = made * functional.silu(z)
    return made, states[states.shape[0] - 1 :]


def _without_padding(layer: StateLayer, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of tokens [..., L] with zeros for padding."""
    real = layer.span.real
    return numbers if real is None else numbers * real


def _scan(decays: torch.Tensor, inputs: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    """Return all states of a recurrence: each is the one before times a decay, plus an input.

    The tokens are cut into blocks, as many as a block has tokens. All blocks advance together, as
    if each began at zero; then what each begins with goes from block to block. That is twice the
    root of L steps, and little more arithmetic than L steps would be.

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
    kept = [step[:, 0] for step in decays.reshape(blocks, size, *sizes).split(1, dim=1)]
    made = [step[:, 0] for step in inputs.reshape(blocks, size, *sizes).split(1, dim=1)]
    for step in range(1, size):
        made[step] = made[step] + kept[step] * made[step - 1]
        kept[step] = kept[step] * kept[step - 1]
    begins = [past]
    for block in range(blocks - 1):
        begins.append(made[-1][block : block + 1] + kept[-1][block : block + 1] * begins[-1])
    begin = torch.cat(begins)[:, None]
    states = torch.stack(made, dim=1) + torch.stack(kept, dim=1) * begin
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
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba 2's recurrence, which has one decay for each head, by products of matrices.

    A token takes from another what attention without softmax would, times the decays between them.

    Args:
        layer: Has the state [1, H, P, N] before the call.
        hidden_states: [1, L, H, P].
        dt: Time steps [1, L, H].
        A: Logarithms of decays in a time step of 1, [H].
        B: Into the state, [1, L, G, N], for each group of heads.
        C: Out of the state, [1, L, G, N].
        chunk_size: Ignored: the call is one chunk.
        D: Past the state, [H].
        dt_bias: Added to the time steps, [H].
        dt_softplus: Whether time steps are then made positive.
        dt_limit: Bounds of the time steps.
        others: Arguments that choose an implementation.

    Returns:
        [1, L, H, P], and the state behind the last token.
    """
    del chunk_size, others
    steps = dt if dt_bias is None else dt + dt_bias
    steps = functional.softplus(steps) if dt_softplus else steps
    steps = _limited(steps, dt_limit).transpose(1, 2)[0]
    steps = _without_padding(layer, steps)  # [H, L]
    _, length, heads, width = hidden_states.shape
    groups, numbers = B.shape[2:]
    each = heads // groups
    into, out = B[0].transpose(0, 1), C[0].transpose(0, 1)  # [G, L, N]
    inputs = hidden_states[0].transpose(0, 1) * steps[:, :, None]  # [H, L, P]
    between, since = _decays(steps * A[:, None])
    past = layer.past(_STATE).reshape(groups, each * width, numbers)

    # [G, L, L] of each group times [G, H / G, L, L] of its heads.
    shares = (out @ into.transpose(1, 2))[:, None] * between.reshape(groups, each, length, length)
    own = shares.reshape(heads, length, length) @ inputs
    earlier = (out @ past.transpose(1, 2)).reshape(groups, length, each, width).transpose(1, 2)
    made = own + earlier.reshape(heads, length, width) * since
    if D is not None:
        made = made + hidden_states[0].transpose(0, 1) * D[:, None, None]

    kept = between[:, length - 1, :, None]  # of each token's input at the last token, [H, L, 1]
    added = (inputs * kept).transpose(1, 2).reshape(groups, each * width, length) @ into
    state = past.reshape(heads, width * numbers) * since[:, length - 1]
    state = state.reshape(1, heads, width, numbers) + added.reshape(1, heads, width, numbers)
    return made.transpose(0, 1)[None].contiguous(), state


def _limited(steps: torch.Tensor, limits: tuple[float, float]) -> torch.Tensor:
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
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a recurrence that takes from the state what it has for a key before it adds to it.

    What each token adds depends on what earlier ones added: a triangular system of the tokens.

    Args:
        layer: Has the state [1, H, K, V] before the call.
        query: [1, L, G, K], for each group of heads.
        key: [1, L, G, K].
        value: [1, L, H, V].
        g: Logarithms of decays, [1, L, H].
        beta: Shares of the value that are taken, [1, L, H].
        use_qk_l2norm_in_kernel: Whether queries and keys become unit vectors.
        others: Arguments that choose an implementation.

    Returns:
        [1, L, H, V], and the state behind the last token.
    """
    del others
    length, heads = value.shape[1:3]
    queries, keys = (_of_heads(each, heads, unit=use_qk_l2norm_in_kernel) for each in (query, key))
    queries = queries * queries.shape[2] ** -0.5
    values = value[0].transpose(0, 1)  # [H, L, V]
    taken = _without_padding(layer, beta[0].t())[:, :, None]
    between, since = _decays(_without_padding(layer, g[0].t()))
    past = layer.past(_STATE)[0]

    alike = keys @ keys.transpose(1, 2) * between
    solved = _inverse(taken * alike)
    added = solved @ (taken * values) - (solved @ (taken * since * keys)) @ past
    shares = queries @ keys.transpose(1, 2) * between
    made = (since * queries) @ past + shares @ added
    kept = keys * between[:, length - 1, :, None]
    state = past * since[:, length - 1 :] + kept.transpose(1, 2) @ added
    return made.transpose(0, 1)[None].contiguous(), state[None]


def _of_heads(vectors: torch.Tensor, heads: int, *, unit: bool) -> torch.Tensor:
    """Return vectors [1, L, G, K] of groups as vectors [H, L, K] of their heads."""
    if unit:
        vectors = vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
    _, length, groups, width = vectors.shape
    each = heads // groups
    return vectors[0].transpose(0, 1).repeat_interleave(each, dim=0).reshape(heads, length, width)


def _inverse(below: torch.Tensor) -> torch.Tensor:
    """Return the inverse of one plus what a matrix [H, L, L] has below its diagonal.

    Blocks on the diagonal are inverted, then pairs of neighbours joined, until there is one. The
    sum of powers would be shorter, but its terms grow far beyond the result when keys are alike.
    """
    length = below.shape[1]
    inverse = torch.eye(length).expand(below.shape)
    places = torch.arange(length)
    size = 1
    while size < length:
        block = places // size
        pair = (block[:, None] == block[None] + 1) & (block[None] % 2 == 0)
        inverse = inverse - inverse @ (below * pair.to(below.dtype)) @ inverse
        size *= 2
    return inverse


def _decays(logarithms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is kept between two tokens, and since before the first one.

    Args:
        logarithms: Of each token's decay, [H, L].

    Returns:
        [H, L, L], from the column's token to the row's, zero for later columns; and [H, L, 1].
    """
    length = logarithms.shape[1]
    known = torch.ones(length, length).tril()
    # Sums of only what lies between: differences of sums would lose digits.
    summed = known @ (logarithms[:, :, None] * known.tril(-1))
    return torch.exp(summed) * known, torch.exp(known @ logarithms[:, :, None])


_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "mamba_selective_scan": (selective_scan, 3),
    "mamba2_chunk_scan": (chunk_scan, 4),
    "torch_chunk_gated_delta_rule": (gated_delta_rule, 4),
}
"""Functions by the name that modules of ``transformers`` call, and the rank of the states."""

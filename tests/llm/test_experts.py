"""Mixtures of experts: all compute, few count; and attention with sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import save, tiny_model
from support.llm_families import FAMILIES
from support.quantization import few_bits
from support.tolerances import ATOL_RTOL_LOGITS
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.attention import Call, active_call, attend
from coreml_delegate.llm.checkpoint import load_decoder, read_config
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.experts import Experts, LastLayers, routers
from coreml_delegate.llm.export import quantize_weights
from coreml_delegate.llm.stored_weights import StoredWeight, read_weights

COUNT, WIDTH, INNER = 5, 16, 32
_TOKENS = torch.arange(1, 41)[None]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gate(x: torch.Tensor) -> torch.Tensor:
    return x[..., :INNER] * x[..., INNER:]


def experts(first: torch.Tensor | None = None) -> Experts:
    weights = random(COUNT, 2 * INNER, WIDTH) if first is None else first
    last, biases = random(COUNT, WIDTH, INNER, seed=1), random(COUNT, 2 * INNER + WIDTH, seed=2)
    return Experts(weights, last, biases[:, : 2 * INNER], biases[:, 2 * INNER :])


def test_the_chosen_experts_are_added_by_their_weights():
    module, x = experts(), random(7, WIDTH, seed=3)
    weights, indices = torch.topk(random(7, COUNT, seed=4).softmax(-1), 2)
    first = module.first.weight.view(COUNT, 2 * INNER, WIDTH)
    last = module.last.weight.view(WIDTH, COUNT, INNER)
    first_bias = module.first.bias.view(COUNT, 2 * INNER)
    assert module.last_bias is not None
    expected = torch.stack(
        [
            sum(
                weight * (last[:, e] @ gate(first[e] @ token + first_bias[e]) + module.last_bias[e])
                for weight, e in zip(weights[t], indices[t], strict=True)
            )
            for t, token in enumerate(x)
        ]
    )
    torch.testing.assert_close(module(x, indices, weights, gate), expected, atol=1e-4, rtol=1e-4)


def test_an_expert_that_overflows_for_other_tokens_does_no_harm():
    first = random(COUNT, 2 * INNER, WIDTH)
    first[3] *= 1e30  # its product is infinite
    module, x = experts(first), random(2, WIDTH, seed=3)
    chosen = torch.tensor([[0, 1], [2, 4]])
    made = module(x, chosen, torch.full((2, 2), 0.5), gate)
    assert made.isfinite().all()
    assert torch.equal(made, experts()(x, chosen, torch.full((2, 2), 0.5), gate))
    assert not module(x, torch.tensor([[3, 1]] * 2), torch.full((2, 2), 0.5), gate).isfinite().all()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_checkpoint_of_experts_is_read_matrix_by_matrix(name, tmp_path):
    """Mixtral stores the matrices of each expert, which transformers stacks while it loads."""
    model = save(tmp_path, name, **FAMILIES[name].changes)
    decoder = load_decoder(tmp_path, read_config(tmp_path / "config.json"), context=64)
    matrices = {key: p for key, p in decoder.named_parameters() if p.dim() > 1}
    in_memory = {key for key, p in matrices.items() if not isinstance(p, StoredWeight)}
    assert not in_memory
    atol, rtol = ATOL_RTOL_LOGITS
    expected = model(_TOKENS, use_cache=False).logits
    torch.testing.assert_close(decoder(_TOKENS), expected, atol=atol, rtol=rtol)
    read_weights(decoder)
    assert not any(isinstance(p, StoredWeight) for p in decoder.parameters())
    torch.testing.assert_close(decoder(_TOKENS), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("linear", ["int8", "int4"])
def test_experts_are_quantized_and_their_routers_are_not(linear):
    name = "phimoe"  # whose router is a linear layer
    decoder = Decoder(tiny_model(name, **FAMILIES[name].changes), context=64)
    modules = [m for m in decoder.modules() if isinstance(m, Experts)]
    before = [m.last.weight for m in modules]
    quantize_weights(decoder, **few_bits(linear))
    kept: Any = routers(decoder)
    assert len(kept) == len(modules) == 2
    assert all(type(router.weight) is nn.Parameter for router in kept)
    for module, last in zip(modules, before, strict=True):
        found: Any = module.last.weight
        inputs = module.last.inputs if linear == "int8" else 16
        assert found.scale.shape == (last.shape[0], last.shape[1] // inputs)
        assert float((found.dequantize() - last).abs().max()) <= float(found.scale.max())
        assert type(module.first.weight) is type(found)


def test_inputs_of_an_expert_have_scales_of_their_own():
    """A scale for all experts would leave nothing of one whose weights are small."""
    module = LastLayers(torch.cat((torch.ones(4, 8), torch.full((4, 8), 1e-4)), 1), inputs=8)
    holder: Any = nn.Module()
    holder.layer, holder.language_modules = module, holder.named_modules
    holder.embedding = holder.head = nn.Embedding(2, 2)
    quantize_weights(holder, **few_bits("int8"))
    found: Any = module.weight
    torch.testing.assert_close(
        found.dequantize()[:, 8:], torch.full((4, 8), 1e-4), rtol=0.01, atol=0
    )


@pytest.mark.parametrize("name", ["jetmoe", "llama4_text"])
def test_experts_of_another_form_are_named(name):
    with pytest.raises(LoweringError, match=r"form of a mixture of experts .* got \w+Experts at "):
        Decoder(tiny_model(name), context=64)


def test_sinks_take_a_share_of_the_attention():
    heads, groups, length, rows, width = 6, 2, 3, 5, 8
    query, key, value = (
        random(2, heads, length, width),
        random(2, 3, rows, width),
        random(2, 3, rows, 4),
    )
    mask = torch.where(random(1, 1, length, rows, seed=5) > 0.5, -3e4, 0.0)
    sinks = 3 * random(heads, seed=6)
    with active_call(Call(), nn.Module()):
        found, _ = attend(nn.Module(), query, key, value, mask, s_aux=sinks)
    keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = query @ keys.transpose(2, 3) * width**-0.5 + mask
    total = scores.logsumexp(-1, keepdim=True)
    # Softmax with one more score is softmax times the share of the others.
    shares = scores.softmax(-1) * torch.sigmoid(total - sinks.view(1, -1, 1, 1))
    torch.testing.assert_close(found, (shares @ values).transpose(1, 2), atol=1e-5, rtol=1e-4)

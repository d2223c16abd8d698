"""Norms in fp16: the safe forms are exact, and take the place of those of transformers."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import tiny_model
from support.tolerances import ATOL_RTOL, ATOL_RTOL_LOGITS
from torch import nn

from coreml_delegate.errors import LoweringError
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.norms import LayerNorm, RMSNorm, make_norms_safe


@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1e-3, 1.0, 300.0, 3e4])
def test_safe_norms_are_exact_in_fp16(magnitude):
    """The plain form overflows from 256 on, and underflows for small activations."""
    torch.manual_seed(0)
    x = (torch.rand(8, 64) - 0.5) * 2 * magnitude
    safe = RMSNorm(torch.ones(64), 1e-6)
    exact = nn.functional.rms_norm(x.double(), (64,), eps=1e-6)
    torch.testing.assert_close(safe(x).double(), exact, atol=1e-6, rtol=1e-5)
    atol, rtol = ATOL_RTOL["fp16"]
    halved = nn.functional.rms_norm(x.half().double(), (64,), eps=1e-6)
    torch.testing.assert_close(safe.half()(x.half()).double(), halved, atol=atol, rtol=rtol)
    if magnitude > 256:
        plain = nn.functional.rms_norm(x.half(), (64,), torch.ones(64).half(), eps=1e-6)
        squares = x.half().square()
        assert squares.isinf().any()
        assert plain.isfinite().all()  # torch's own computes in fp32


@pytest.mark.parametrize(
    ("model_type", "changes", "kinds"),
    [
        ("llama", {}, {RMSNorm}),
        ("gemma", {"head_dim": 16}, {RMSNorm}),  # whose weights are one less
        ("nanochat", {}, {RMSNorm}),  # which has no weights
        ("diffllama", {}, {RMSNorm}),
        ("cohere", {"use_qk_norm": True}, {LayerNorm}),
        ("phi", {"num_key_value_heads": 4}, set()),
    ],
)
def test_norms_of_transformers_are_recognised(model_type, changes, kinds):
    tokens = torch.arange(12)[None]
    model = tiny_model(model_type, **changes)
    expected = model(tokens, use_cache=False).logits
    decoder = Decoder(model, context=64, safe_norms=True)
    assert {type(m) for m in decoder.modules() if isinstance(m, RMSNorm | LayerNorm)} == kinds
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(decoder(tokens), expected, atol=atol, rtol=rtol)


def test_an_unknown_norm_is_refused():
    class CubicNorm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.abs().pow(3).mean(-1, keepdim=True).pow(1 / 3)

    with pytest.raises(LoweringError, match="CubicNorm is a norm whose form for float16 is not"):
        make_norms_safe(nn.Sequential(CubicNorm()))

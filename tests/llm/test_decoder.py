"""The decoder alone: safe norms, masks and rotation."""

from __future__ import annotations

import pytest
import torch
from support.tolerances import ATOL_RTOL
from torch import nn

from coreml_delegate.llm.checkpoint import random_decoder
from coreml_delegate.llm.decoder import DecoderSettings, RMSNorm, Rotary, rotary_tables, rotate

SETTINGS = DecoderSettings(
    vocabulary=31,
    dim=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    hidden=24,
    max_context=32,
    norm_eps=1e-6,
    rotary=Rotary(100.0, 4),
)


@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1e-3, 1.0, 300.0, 3e4])
def test_safe_norms_are_exact_in_fp16(magnitude):
    """The plain form overflows from 256 on, and underflows for small activations."""
    torch.manual_seed(0)
    x = (torch.rand(8, 64) - 0.5) * 2 * magnitude
    safe = RMSNorm(64, 1e-6, safe=True)
    exact = nn.functional.rms_norm(x.double(), (64,), eps=1e-6)
    torch.testing.assert_close(safe(x).double(), exact, atol=1e-6, rtol=1e-5)
    atol, rtol = ATOL_RTOL["fp16"]
    halved = nn.functional.rms_norm(x.half().double(), (64,), eps=1e-6)
    torch.testing.assert_close(safe.half()(x.half()).double(), halved, atol=atol, rtol=rtol)
    if magnitude > 256:
        plain = RMSNorm(64, 1e-6, safe=False).half()(x.half())
        assert not torch.allclose(plain.double(), halved, atol=0.1)


def test_tokens_do_not_attend_to_later_tokens():
    decoder = random_decoder(SETTINGS, 0, positions=32)
    tokens = torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] += 1
    before, after = decoder(tokens), decoder(changed % 31)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_rotation_depends_only_on_distance():
    cos, sin = rotary_tables(Rotary(100.0, 8), 64)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at: int, other: int) -> torch.Tensor:
        turned = [
            rotate(x, (cos[[p]].unsqueeze(1), sin[[p]].unsqueeze(1)))
            for x, p in ((query, at), (key, other))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(5, 2), score(60, 57))
    torch.testing.assert_close(score(9, 9), (query * key).sum())
    assert not torch.isclose(score(5, 2), score(5, 3))

"""Encoders of samples: padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from support.encoder_decoder_families import FAMILIES, tiny_model
from torch import nn

from coreml_delegate.errors import InputError, LoweringError
from coreml_delegate.llm.attention import MASKED, Call, active_call
from coreml_delegate.llm.audio import padded_samples
from coreml_delegate.llm.encoder_decoder import source_kind
from coreml_delegate.llm.samples import NormWithoutPadding, Reach, over_samples, prepare_samples
from coreml_delegate.llm.source import Source, SourceKind


def moonshine():
    return tiny_model("moonshine", FAMILIES["moonshine"].config)


@torch.no_grad()
def test_the_number_of_positions_is_that_of_the_convolutions():
    encoder = moonshine().get_encoder()
    layers = [encoder.conv1, encoder.conv2, encoder.conv3]
    reach = prepare_samples(encoder)
    assert (reach.kernel, reach.stride) == (895, 384)
    for length in (895, 1278, 1279, 1280, 4000, 4351):
        results = torch.zeros(1, 1, length)
        for layer in layers:
            results = layer(results)
        assert int(reach.count(torch.tensor([length]))) == results.shape[2]
    assert int(reach.count(torch.tensor([3]))) == 1  # what is missing is silence


@torch.no_grad()
def test_a_norm_leaves_out_the_results_of_padding():
    random = torch.Generator().manual_seed(0)
    norm = nn.GroupNorm(1, 6)
    norm.weight.copy_(torch.randn(6, generator=random))
    norm.bias.copy_(torch.randn(6, generator=random))
    convolution = nn.Conv1d(1, 6, kernel_size=5, stride=3)
    ours, call = NormWithoutPadding(norm, Reach().of(convolution)), Call()
    samples = torch.randn(1, 1, 200, generator=random)
    for length in (200, 97, 8):
        expected = norm(convolution(samples[..., :length]))
        call.source_length = torch.tensor([length])
        padded = torch.cat((samples[..., :length], torch.zeros(1, 1, 200 - length)), dim=2)
        with active_call(call, nn.Module()):
            actual = ours(convolution(padded))
        torch.testing.assert_close(actual[..., : expected.shape[2]], expected)


def test_an_encoder_takes_the_mask_of_its_positions():
    mask = torch.tensor([0.0, 0.0, MASKED])[None, None, None]
    wide = over_samples(mask, Reach(895, 384))
    count = (wide.shape[-1] - 895) // 384 + 1  # as the encoder computes it
    torch.testing.assert_close(wide[..., ::384][..., :count], mask)


def test_encoders_of_another_form_are_refused():
    with pytest.raises(LoweringError, match="a form that is not supported: got Linear"):
        prepare_samples(nn.Linear(2, 2))
    with pytest.raises(LoweringError, match="takes a source that is not supported: got pixels"):
        source_kind("pixels")


def test_samples_are_padded_and_checked():
    samples, count = padded_samples(torch.ones(3), (1, 5))
    assert (samples.tolist(), count.tolist()) == ([[1, 1, 1, 0, 0]], [3])
    for wrong in (torch.ones(6), torch.ones(0), torch.ones(1, 3), [1, 2], torch.ones(3).long()):
        with pytest.raises(InputError, match="expected 1 to 5 samples"):
            padded_samples(wrong, (1, 5))


def test_only_texts_are_no_recordings():
    kinds = {kind: Source(kind, 8, (1,)).is_recording for kind in SourceKind}
    assert kinds == {SourceKind.TOKENS: False, SourceKind.AUDIO: True, SourceKind.SAMPLES: True}

"""Weights that stay in their files give the numbers of those in memory."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import save, tiny_model
from support.llm_families import FAMILIES
from support.quantization import few_bits
from support.tolerances import ATOL_RTOL_LOGITS
from torch import nn

from coreml_delegate.llm import export
from coreml_delegate.llm.checkpoint import load_decoder, read_config
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import quantize_weights
from coreml_delegate.llm.stored_weights import StoredWeight, in_memory, read_weights
from coreml_delegate.patches.third_party import quiet_import


def load(folder, model_type="llama", dtype=torch.bfloat16, **changes):
    model = save(folder, model_type, dtype=dtype, **changes)
    return load_decoder(folder, read_config(folder / "config.json"), context=64), model


def test_matrices_are_in_the_file_until_they_are_read(tmp_path):
    decoder, model = load(tmp_path, tie_word_embeddings=True)
    stored = {name for name, p in decoder.named_parameters() if isinstance(p, StoredWeight)}
    assert stored == {f"model.{name}" for name, p in model.named_parameters() if p.dim() == 2}
    read_weights(decoder)
    assert decoder.head.weight is decoder.embedding.weight
    expected = dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, expected[name.removeprefix("model.")])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_with_stored_weights(name, tmp_path):
    decoder, model = load(tmp_path, name, torch.float32, **FAMILIES[name].changes)
    tokens = torch.arange(1, 41)[None]
    atol, rtol = ATOL_RTOL_LOGITS
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(decoder(tokens), expected, atol=atol, rtol=rtol)


def test_a_stored_weight_cannot_be_written():
    weight = StoredWeight(lambda: torch.ones(2, 3), torch.Size((2, 3)))
    assert repr(weight) == "StoredWeight([2, 3])"
    assert (weight.dtype, weight.shape) == (torch.float32, (2, 3))
    assert torch.equal(weight @ torch.ones(3), torch.full((2,), 3.0))
    assert type(weight.detach()) is StoredWeight
    with pytest.raises(TypeError, match="would write to a weight that is in a file"):
        weight.add_(1)


@pytest.mark.parametrize(("linear", "group"), [("int4", 16), ("int8", 16)], ids=["int4", "int8"])
def test_weights_are_quantized_as_torchao_does(linear, group, tmp_path, monkeypatch):
    """Some rows at a time, read from a file, with the head and the embedding as one."""
    with quiet_import():
        import torchao.quantization as torchao
        from torchao.quantization.granularity import PerAxis, PerGroup

    monkeypatch.setattr(export, "_CHUNK", 7 * 32)
    decoder, model = load(tmp_path, tie_word_embeddings=True)
    quantize_weights(decoder, **few_bits(linear, "int8", group=group))

    def expected(dtype, granularity, chosen):
        config = torchao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
        torchao.quantize_(model, config, lambda module, _: chosen(module))

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    linears = PerGroup(group) if linear == "int4" else PerAxis(0)
    expected(getattr(torch, linear), linears, lambda m: isinstance(m, nn.Linear) and m is not head)
    expected(torch.int8, PerAxis(0), lambda m: m in (embedding, head))
    whole = dict(model.named_modules())
    matrices = 0
    for name, module in decoder.model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() < 2:
            continue
        wanted = whole[name].weight
        matrices += 1
        assert (weight.block_size, weight.target_dtype) == (wanted.block_size, wanted.target_dtype)
        for part in ("qdata", "scale", "zero_point"):
            assert torch.equal(getattr(weight, part), getattr(wanted, part))
    assert matrices == 2 + 2 * 7
    codes = decoder.embedding.weight.qdata, decoder.head.weight.qdata
    assert codes[0].data_ptr() == codes[1].data_ptr()


def test_weights_in_memory_are_taken_as_they_are():
    decoder = Decoder(tiny_model("llama"), context=64)
    before = dict(decoder.named_parameters())
    read_weights(decoder)
    assert all(before[name] is parameter for name, parameter in decoder.named_parameters())
    weight = decoder.embedding.weight
    assert in_memory(weight) is weight

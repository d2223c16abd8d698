"""GGUF files: the numbers of transformers, in the integers of the file."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import tiny_model
from support.gguf_files import TOKENS, write_gguf
from support.tolerances import ATOL_RTOL_DEQUANTIZED
from tokenizers import Tokenizer

from coreml_delegate.errors import OptionError
from coreml_delegate.llm.checkpoint import config_file, end_tokens, load_model, read_config
from coreml_delegate.llm.gguf import gguf_tokenizer
from coreml_delegate.llm.quantized_checkpoint import kept_quantization
from coreml_delegate.llm.stored_weights import in_memory
from coreml_delegate.patches.third_party import transformers

pytestmark = pytest.mark.xdist_group("GGUF files")

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}


def written(folder, kind: str):
    path = folder / "model.gguf"
    write_gguf(path, tiny_model("llama", vocab_size=TOKENS, **SIZES), kind)
    return path


@torch.no_grad()
@pytest.mark.parametrize("kind", [*BITS, "Q2_K", "F16"])
def test_weights_are_those_of_transformers(kind, tmp_path, caplog):
    path = written(tmp_path, kind)
    expected = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    model = load_model(path, read_config(config_file(path)))
    weights = dict(model.named_parameters())
    atol, rtol = ATOL_RTOL_DEQUANTIZED
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(in_memory(weights[name]), weight, atol=atol, rtol=rtol)
        integers = kept_quantization(weights[name])
        if kind not in BITS or weight.dim() < 2:
            assert integers is None
        else:
            assert integers.bits == BITS[kind]
            assert integers.scale.shape == (len(weight), 256 // (16 if kind == "Q6_K" else 32))
    count = "9 of 9 quantized weights"  # seven of a block, the embedding and the head
    assert (count in caplog.text) == (kind == "Q2_K")


def test_the_tokenizer_and_the_end_of_text_are_the_files(tmp_path):
    path = written(tmp_path, "Q8_0")
    tokenizer = Tokenizer.from_str(gguf_tokenizer(path).decode())
    tokens = tokenizer.encode("He sees a fish.", add_special_tokens=False).ids
    assert (tokens[0], len(tokens)) == (TOKENS - 1, len("He sees a fish.") - 1)
    assert tokenizer.decode(tokens) == "He sees a fish."
    assert tokenizer.get_vocab_size() == TOKENS  # without a token that only transformers has
    assert end_tokens(read_config(path), path) == (2,)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, r"no such GGUF file: got .*model.gguf"), (b"GGML", "transformers cannot read .*gguf")],
)
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read_config(path)

"""Models that read images, without their images: the logits and the text of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from support.lowering import fp32_specs
from support.text_only_models import CONFIGURATIONS, CONTEXT, tiny_text_only_model
from support.text_tokenizer import save_tokenizer, text_of
from support.tolerances import ATOL_RTOL_LOGITS, logits_bounds
from torch import nn

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import OptionError
from coreml_delegate.llm import vision
from coreml_delegate.llm.checkpoint import load_decoder, read_config
from coreml_delegate.llm.decoder import Decoder
from coreml_delegate.llm.export import export_methods, lower
from coreml_delegate.llm.generator import Generator
from coreml_delegate.llm.layout import CacheKind, Layout
from coreml_delegate.targets import Opset

pytestmark = pytest.mark.xdist_group("checkpoints")

CHUNK, STEPS = 8, 32
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37]


def test_every_family_with_unsupported_images_is_tested():
    assert set(vision.REFUSED) - set(vision.TEXT_REFUSED) <= set(CONFIGURATIONS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_checkpoint_of_the_whole_model_is_read_without_its_tower(name, tmp_path):
    model = tiny_text_only_model(name)
    model.save_pretrained(tmp_path)
    options = {} if name in vision.REFUSED else {"text_only": True}
    config = read_config(tmp_path / "config.json", **options)
    decoder = load_decoder(tmp_path, config, **options, context=CONTEXT)
    assert type(decoder) is Decoder
    language = (*model.get_decoder().parameters(), *model.get_output_embeddings().parameters())
    assert len(list(decoder.parameters())) == len(set(language)) < len(list(model.parameters()))
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        actual = decoder(tokens)
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


@torch.no_grad()
def greedy(model: nn.Module) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers, computed on whole texts, and the logits before each."""
    tokens = list(PROMPT)
    for _ in range(STEPS):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(PROMPT) :], logits[len(PROMPT) - 1 :]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "qwen2_5_vl" else pytest.mark.slow)
        for name in CONFIGURATIONS
    ],
)
def test_the_program_and_executorchs_runner_write_the_text_of_transformers(name, tmp_path):
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    model = tiny_text_only_model(name)
    tokens, logits = greedy(model)
    vision.leave_out_images(model)
    decoder = Decoder(model, context=CONTEXT)
    layout = Layout(decoder.vocabulary, CONTEXT, CHUNK, CacheKind.BUFFER, standard=True)
    specs = fp32_specs(minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=False)
    path = tmp_path / "model.pte"
    path.write_bytes(lower(export_methods(decoder, layout), layout, partitioner).buffer)
    assert [len(report.partitions) for report in partitioner.reports] == [1]
    generator = Generator.load(path, engine="openvino")
    steps = [generator.feed(PROMPT), *(generator.feed([token]) for token in tokens[:-1])]
    atol, rtol = logits_bounds(logits)
    torch.testing.assert_close(torch.stack(steps), logits, atol=atol, rtol=rtol)
    runtime.register(engine="openvino")
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", decoder.vocabulary)
    pieces: list[str] = []
    TextLLMRunner(str(path), str(tokenizer)).generate(
        text_of(PROMPT),
        GenerationConfig(echo=False, temperature=0.0, max_new_tokens=STEPS),
        pieces.append,
        None,
    )
    assert "".join(pieces) == text_of(tokens)


def test_an_unknown_model_that_reads_images_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "idefics2"}))
    with pytest.raises(OptionError, match="Leave images out with --text-only"):
        read_config(path)
    assert read_config(path, text_only=True).model_type == "idefics2"


@pytest.mark.parametrize("name", vision.TEXT_REFUSED)
def test_models_whose_texts_are_not_causal_are_refused(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name}))
    with pytest.raises(OptionError, match=f"got model_type '{name}', which has .*, expected") as e:
        read_config(path, text_only=True)
    assert "--text-only" not in str(e.value)


def test_a_model_of_text_has_no_images_to_leave_out(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(OptionError, match="the model reads no images: got --text-only"):
        read_config(path, text_only=True)

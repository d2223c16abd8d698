"""Vectors and scores of texts, beside the hidden states of transformers without padding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.lowering import fp32_specs
from support.text_tokenizer import save_tokenizer, text_of
from support.tolerances import ATOL_RTOL_LOGITS, SQNR_FP16, sqnr_db
from torch import nn
from torch.nn import functional

from coreml_delegate import CoreMLPartitioner, runtime
from coreml_delegate.errors import InputError, LoweringError, OptionError, ProgramError
from coreml_delegate.llm.embedding import (
    Embedder,
    Head,
    Pooling,
    TextEncoder,
    constants,
    export_encoder,
    load_encoder,
)
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.partition.export import lower_methods
from coreml_delegate.patches.third_party import transformers
from coreml_delegate.targets import Opset

VOCABULARY, WIDTH = 97, 32
TEXT = [5, 7, 11, 13, 17, 19, 23, 29, 31]
_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
# Scores of smaller random weights hardly depend on the text.
_SCORES = {"num_labels": 2, "initializer_range": 0.3}
_MODERN = {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 8}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture, keys of its tiny configuration, and a pooling."""

    kind: str
    pooling: Pooling
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def make(self, **changes: Any) -> Any:
        torch.manual_seed(0)
        library = transformers()
        config = library.AutoConfig.for_model(self.kind, **{**_SIZES, **self.changes, **changes})
        return library.AutoModel.from_config(config).eval().requires_grad_(False)


BERT = Model("bert", Pooling.MEAN)
MODELS = (
    BERT,
    Model("qwen3", Pooling.LAST, _GROUPED),
    Model("xlm-roberta", Pooling.MEAN),
    Model("roberta", Pooling.CLS),
    Model("mpnet", Pooling.MEAN),
    Model("distilbert", Pooling.MAX, {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    Model("modernbert", Pooling.CLS, _MODERN),
    Model(
        "gemma3_text",
        Pooling.MEAN,
        {**_GROUPED, "sliding_window": 8, "use_bidirectional_attention": True},
    ),
    Model("electra", Pooling.CLS, {"embedding_size": 16}),
)
QUICK = ("bert", "qwen3")

_POOLED: Mapping[Pooling, Callable[[torch.Tensor], torch.Tensor]] = {
    Pooling.MEAN: lambda states: states.mean(0),
    Pooling.CLS: lambda states: states[0],
    Pooling.LAST: lambda states: states[-1],
    Pooling.MAX: lambda states: states.amax(0),
}


@torch.no_grad()
def expected(module: Any, pooling: Pooling, tokens: list[int]) -> torch.Tensor:
    """The vector from the hidden states of the text by itself."""
    states = module(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return functional.normalize(_POOLED[pooling](states), dim=0)


def lowered(
    encoder: TextEncoder, precision: Precision = Precision.FLOAT32, engine: str = "openvino"
) -> Embedder:
    specs = fp32_specs(compute_precision=precision, minimum_deployment_target=Opset.iOS18)
    partitioner = CoreMLPartitioner(compile_specs=specs, lower_full_graph=True)
    program = lower_methods(export_encoder(encoder), partitioner, constants(encoder))
    assert [len(report.partitions) for report in partitioner.reports] == [1] * len(encoder.lengths)
    return Embedder(runtime.load_program(program.buffer, engine=engine))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.kind, marks=() if model.kind in QUICK else pytest.mark.slow)
        for model in MODELS
    ],
)
def test_vectors_are_those_of_the_text_without_padding(model):
    module = model.make()
    embed = lowered(TextEncoder(module, Head(model.pooling), (8, 16)))
    atol, rtol = ATOL_RTOL_LOGITS
    for count in (1, 8, len(TEXT)):
        vector = expected(module, model.pooling, TEXT[:count])
        torch.testing.assert_close(embed(TEXT[:count]), vector, atol=atol, rtol=rtol)


def test_fp16_stays_close():
    module = BERT.make()
    embed = lowered(TextEncoder(module, Head(BERT.pooling), (16,)), Precision.FLOAT16, "reference")
    vector = expected(module, BERT.pooling, TEXT)
    assert sqnr_db(vector.numpy(), embed(TEXT).numpy()) > SQNR_FP16


def scoring(folder: Path, kind: str, **changes: Any) -> Any:
    """Save a cross-encoder, and return it."""
    torch.manual_seed(0)
    library = transformers()
    config = library.AutoConfig.for_model(kind, **{**_SIZES, **_SCORES, **changes})
    model = library.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json", VOCABULARY)
    return model.eval()


@torch.no_grad()
def test_scores_of_pairs_are_those_of_transformers(tmp_path):
    model = scoring(tmp_path, "bert")
    encoder = load_encoder(tmp_path, tmp_path / "config.json", lengths=(16,))
    embed = lowered(encoder)
    embed = Embedder(embed._program, _tokenizer(tmp_path))
    first, second = TEXT[:4], TEXT[4:]
    inputs = {
        "input_ids": torch.tensor([first + second]),
        "token_type_ids": torch.tensor([[0] * len(first) + [1] * len(second)]),
    }
    atol, rtol = ATOL_RTOL_LOGITS
    scores = embed(text_of(first), text_of(second))
    torch.testing.assert_close(scores, model(**inputs).logits[0], atol=atol, rtol=rtol)
    assert not torch.allclose(scores, embed(first + second), atol=atol)


@torch.no_grad()
@pytest.mark.slow
def test_scores_of_a_decoder_are_those_of_its_last_token(tmp_path):
    model = scoring(tmp_path, "qwen3", **_GROUPED)
    embed = lowered(load_encoder(tmp_path, tmp_path / "config.json", lengths=(16,)))
    scores = model(input_ids=torch.tensor([TEXT])).logits[0]
    atol, rtol = ATOL_RTOL_LOGITS
    torch.testing.assert_close(embed(TEXT), scores, atol=atol, rtol=rtol)


def answering(folder: Path, kind: str = "qwen3", **changes: Any) -> Any:
    torch.manual_seed(0)
    library = transformers()
    keys = {**_SIZES, **_GROUPED, **changes, "initializer_range": 0.3}
    model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(kind, **keys))
    model.save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json", VOCABULARY)
    return model.eval()


@torch.no_grad()
def test_scores_of_answers_are_differences_of_logits(tmp_path):
    model = answering(tmp_path)
    yes, no = 40, 41
    answers = text_of([yes]), str(no)
    encoder = load_encoder(tmp_path, tmp_path / "config.json", lengths=(16,), answers=answers)
    assert encoder.describe_head() == f"logit of {answers[0]} minus logit of 41"
    logits = model(input_ids=torch.tensor([TEXT])).logits[0, -1]
    atol, rtol = ATOL_RTOL_LOGITS
    expected = (logits[yes] - logits[no])[None]
    torch.testing.assert_close(lowered(encoder)(TEXT), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        (("97", "1"), {}, "not in the vocabulary: got 97, expected < 97"),
        ((text_of([40, 41]), "1"), {}, r"not one token: got .*: \[40, 41\]"),
        (("1", "2"), {"pooling": Pooling.LAST}, "computes scores, and has no pooling"),
    ],
)
def test_wrong_answers_are_refused(answers, options, message, tmp_path):
    answering(tmp_path)
    with pytest.raises(OptionError, match=message):
        load_encoder(tmp_path, tmp_path / "config.json", answers=answers, **options)


def test_answers_of_capped_logits_are_refused(tmp_path):
    answering(tmp_path, "gemma2", final_logit_softcapping=1.0)
    with pytest.raises(LoweringError, match="computes its logits by more than a product"):
        load_encoder(tmp_path, tmp_path / "config.json", answers=("1", "2"))


def test_a_decoder_that_does_not_know_its_padding_is_refused(tmp_path):
    scoring(tmp_path, "qwen3", **_GROUPED)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    with pytest.raises(LoweringError, match=r"something else with padding: .*pad_token_id"):
        load_encoder(tmp_path, tmp_path / "config.json", lengths=(16,))


def _tokenizer(folder: Path) -> Any:
    from coreml_delegate.llm.tokenizer import FileTokenizer

    return FileTokenizer(folder)


def checkpoint(folder: Path, *, pooling: Mapping[str, Any], dense: str = "Tanh") -> nn.Linear:
    """Save BERT as sentence-transformers do, with a dense layer, which is returned."""
    BERT.make().save_pretrained(folder)
    parts = ("Transformer", "Pooling", "Dense", "Normalize")
    paths = ("", *(f"{number}_{part}" for number, part in enumerate(parts[1:], 1)))
    modules = [
        {"idx": n, "path": path, "type": f"sentence_transformers.models.{part}"}
        for n, (path, part) in enumerate(zip(paths, parts, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir()
    (folder / paths[1] / "config.json").write_text(json.dumps(pooling))
    activation = f"torch.nn.modules.activation.{dense}"
    sizes = {"in_features": WIDTH, "out_features": 12, "bias": True}
    settings = {**sizes, "activation_function": activation}
    (folder / paths[2] / "config.json").write_text(json.dumps(settings))
    layer = nn.Linear(WIDTH, 12)
    weights = {f"linear.{name}": weight for name, weight in layer.state_dict().items()}
    save_file(weights, folder / paths[2] / "model.safetensors")
    return layer


MEAN_KEYS = {
    "word_embedding_dimension": WIDTH,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
}


@pytest.mark.parametrize("pooling", [MEAN_KEYS, {"pooling_mode": "mean"}], ids=["keys", "mode"])
@torch.no_grad()
def test_checkpoints_of_sentence_transformers_have_their_own_head(pooling, tmp_path):
    layer = checkpoint(tmp_path, pooling=pooling)
    encoder = load_encoder(tmp_path, tmp_path / "config.json", lengths=(16,))
    assert encoder.describe_head() == "pooling mean, Linear, Tanh, normalized"
    states = BERT.make()(input_ids=torch.tensor([TEXT])).last_hidden_state[0].mean(0)
    vector = functional.normalize(torch.tanh(layer(states)), dim=0)
    mask = torch.ones(1, len(TEXT), dtype=torch.long)
    actual = encoder(torch.tensor([TEXT]), mask)[0]
    torch.testing.assert_close(actual, vector)
    plain = load_encoder(tmp_path, tmp_path / "config.json", pooling=Pooling.CLS, normalizes=False)
    assert plain.describe_head() == "pooling cls, Linear, Tanh"
    assert plain.lengths == (66,)


@pytest.mark.parametrize(
    ("pooling", "dense", "message"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, "Tanh", "got weightedmean_tokens, expected"),
        ({**MEAN_KEYS, "pooling_mode_cls_token": True}, "Tanh", "got cls_token, mean_tokens"),
        (MEAN_KEYS, "Hardswish", "has an activation that is not supported: got Hardswish"),
    ],
)
def test_unsupported_heads_are_refused(pooling, dense, message, tmp_path):
    checkpoint(tmp_path, pooling=pooling, dense=dense)
    with pytest.raises(OptionError, match=message):
        load_encoder(tmp_path, tmp_path / "config.json", lengths=(16,))


def test_checkpoints_of_masked_language_models_lose_their_head(tmp_path):
    torch.manual_seed(0)
    config = transformers().AutoConfig.for_model("bert", **_SIZES)
    model = transformers().AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    encoder = load_encoder(tmp_path, path, lengths=(16,), pooling=Pooling.MEAN)
    mask = torch.ones(1, len(TEXT), dtype=torch.long)
    with torch.no_grad():
        vector = expected(model.eval().bert, Pooling.MEAN, TEXT)
        torch.testing.assert_close(encoder(torch.tensor([TEXT]), mask)[0], vector)


def test_checkpoints_without_a_weight_of_a_layer_are_refused(tmp_path):
    BERT.make().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = "encoder.layer.1.output.dense.weight"
    kept = {name: w for name, w in weights.items() if name != lost and "pooler" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    with pytest.raises(OptionError, match=f"lacks a weight: expected {lost}"):
        load_encoder(tmp_path, path, lengths=(16,), pooling=Pooling.MEAN)
    save_file({**kept, lost: weights[lost]}, tmp_path / "model.safetensors", {"format": "pt"})
    load_encoder(tmp_path, path, lengths=(16,), pooling=Pooling.MEAN)


def test_wrong_texts_are_refused():
    embed = lowered(TextEncoder(BERT.make(), Head(Pooling.MEAN), (8,)))
    for text, message in (
        ([], "the text has no token"),
        (TEXT, "the text is too long: got 9 tokens, expected 1 to 8"),
        ([VOCABULARY], "not in the model's vocabulary: got 97"),
        ("text", "there is no tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            embed(text)


def test_other_programs_are_refused(tmp_path):
    from support.command import tiny_pte

    (tmp_path / "tiny.pte").write_bytes(tiny_pte())
    with pytest.raises(ProgramError, match="computes no vectors of texts: got the methods forward"):
        Embedder.load(tmp_path / "tiny.pte")

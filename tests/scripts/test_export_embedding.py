"""``coreml-delegate export-embedding``: files, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llm.test_embedding import TEXT, VOCABULARY, scoring
from support.command import leftovers
from support.text_tokenizer import text_of

from coreml_delegate.llm.embedding import Embedder, Pooling
from coreml_delegate.scripts.cli import main
from coreml_delegate.scripts.commands.export_embedding import POOLINGS

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    return path


def test_the_command_has_the_poolings():
    assert {pooling.value for pooling in Pooling} == set(POOLINGS)


def test_a_method_for_each_length(config, tmp_path, capsys):
    output = tmp_path / "model.pte"
    command = ["export-embedding", "--random", str(config), "-o", str(output), "--pooling", "cls"]
    assert main([*command, "--length", "16,8", "--quantize", "int8", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document = json.loads(captured.out)
    assert (document["lengths"], document["outputs"]) == ([8, 16], 32)
    assert document["head"] == "pooling cls, normalized"
    assert set(document["methods"]) == {"forward_8", "forward_16"}
    assert all(method["on_the_cpu"] == [] for method in document["methods"].values())
    assert document["bytes"] == output.stat().st_size
    embed = Embedder.load(output)
    assert float(embed(TEXT).norm()) == pytest.approx(1, rel=1e-2)


@torch.no_grad()
def test_a_cross_encoder_keeps_its_tokenizer(tmp_path, capsys):
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "model.pte"
    model = scoring(checkpoint, "bert", num_hidden_layers=1)
    command = ["export-embedding", str(checkpoint), "-o", str(output), "--precision", "float32"]
    assert main([*command, "--length", "16"]) == 0
    assert "2 numbers: logits of labels" in capsys.readouterr().out
    embed = Embedder.load(output, tmp_path / "model.tokenizer.json")
    expected = model(input_ids=torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(embed(text_of(TEXT)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, [], "Pass --pooling mean|cls|last|max"),
        ({}, ["--pooling", "cls", "--length", "33"], "got 33, expected at most 32"),
        ({}, ["--pooling", "cls", "--quantize", "gptq-4"], "unknown quantization mode"),
        ({"model_type": "none"}, ["--pooling", "cls"], "has an architecture that is not supported"),
        ({"model_type": "t5"}, ["--pooling", "cls"], "the model has a decoder"),
        (
            {"architectures": ["BertForSequenceClassification"]},
            ["--pooling", "cls"],
            "the model computes scores, and has no pooling",
        ),
    ],
)
def test_bad_input_is_one_line(config, changes, options, message, tmp_path, capsys):
    config.write_text(json.dumps({**BERT, **changes}))
    output = tmp_path / "model.pte"
    assert main(["export-embedding", "--random", str(config), "-o", str(output), *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert leftovers(tmp_path) == {"config.json"}


def test_a_folder_that_does_not_exist(tmp_path, capsys):
    assert main(["export-embedding", "nowhere", "-o", str(tmp_path / "model.pte")]) == 1
    assert "no such checkpoint: got nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["export-embedding", "-o", str(tmp_path / "model.pte")])
    assert "exactly one is required" in capsys.readouterr().err


@pytest.mark.parametrize("answers", ["yes", "yes,", ",no"])
def test_answers_are_two_tokens(answers, config, capsys):
    with pytest.raises(SystemExit):
        main(["export-embedding", "--random", str(config), "-o", "m.pte", "--answers", answers])
    assert "two tokens with a comma between them" in capsys.readouterr().err

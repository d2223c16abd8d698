"""``coreml-delegate generate --chat``, and programs of ``export-llm --sample-in-model``."""

from __future__ import annotations

import io
import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import chat_tokenizers
from support.chat_tokenizers import REFUSING, bpe
from support.checkpoints import CONFIG, tiny_model
from support.command import leftovers, start

from coreml_delegate.llm.chat import ChatTokenizer, Message
from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("checkpoints")

CONTEXT = 96


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A model that says two words and ends its turn, with its tokenizer."""
    folder = tmp_path_factory.mktemp("chats") / "checkpoint"
    tokenizer = bpe()
    model = tiny_model(
        "phi",
        num_hidden_layers=1,
        max_position_embeddings=CONTEXT,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_id=None,
    )
    _say(model, tokenizer.encode("\n the words<|end|>").ids)
    model.save_pretrained(folder)
    return chat_tokenizers.save(folder)


@torch.no_grad()
def _say(model: Any, words: list[int]) -> None:
    """Let the token after each of these be the next; the first stands for the question's last."""
    model.model.embed_tokens.weight.zero_()
    model.lm_head.weight.zero_()
    model.lm_head.bias.zero_()
    for place, (token, following) in enumerate(itertools.pairwise(words)):
        model.model.embed_tokens.weight[token, place] = 100.0
        model.lm_head.weight[following, place] = 100.0
    for layer in model.model.layers:
        layer.self_attn.dense.weight.zero_()
        layer.self_attn.dense.bias.zero_()
        layer.mlp.fc2.weight.zero_()
        layer.mlp.fc2.bias.zero_()
    model.model.final_layernorm.weight.fill_(1.0)
    model.model.final_layernorm.bias.zero_()


@pytest.fixture(scope="module")
def program(checkpoint) -> Path:
    return exported(checkpoint)


def exported(checkpoint: Path, *options: str) -> Path:
    path = checkpoint.parent / f"{'_'.join(options).replace(':', '')}.pte"
    sizes = ["--prefill-chunk", "16", "--context", str(CONTEXT)]
    command = ["export-llm", str(checkpoint), "-o", str(path), *sizes, *options]
    if not path.exists():
        assert main(command) == 0
    return path


def chat(program: Path, checkpoint: Path, *options: str) -> int:
    return main(["generate", str(program), "--chat", "--tokenizer", str(checkpoint), *options])


@pytest.mark.slow
@pytest.mark.parametrize("selection", [(), ("argmax",), ("top-k:3",)])
@pytest.mark.parametrize("cache", ["io", "state"])
def test_one_turn_is_answered(checkpoint, selection, cache, capsys):
    options = ["--cache", cache, *(("--sample-in-model", *selection) if selection else ())]
    program = exported(checkpoint, *options)
    capsys.readouterr()
    assert chat(program, checkpoint, "--prompt", "the world") == 0
    captured = capsys.readouterr()
    assert captured.out == " the words\n"
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == ["prefill", "decode"]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["io", "state"])
def test_lines_of_standard_input_are_turns(checkpoint, cache, monkeypatch, capsys):
    program = exported(checkpoint, "--cache", cache)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("the world\n\n  \nnaïve\r\nuser"))
    assert chat(program, checkpoint, "--system", "words", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    roles = ["system", *["user", "assistant"] * 3]
    assert [turn["role"] for turn in document["turns"]] == roles
    assert [turn["content"] for turn in document["turns"][1::2]] == ["the world", "naïve", "user"]
    tokenizer, messages, seen = ChatTokenizer(checkpoint), [], 0
    for turn in document["turns"]:
        if turn["role"] == "assistant":
            assert turn["content"] == " the words"
            assert turn["tokens"] == bpe().encode(" the words").ids
            assert turn["ending"] == "stop"
            assert (turn["kept"], turn["kept"] + turn["fed"]) == (
                seen,
                len(tokenizer.render(messages)),
            )
            seen = turn["kept"] + turn["fed"] + len(turn["tokens"])
        messages.append(Message(turn["role"], turn["content"]))
    assert document["prefill"]["tokens"] == sum(t["fed"] for t in document["turns"][2::2])


@pytest.mark.slow
def test_a_full_context_is_told(program, checkpoint, monkeypatch, capsys):
    """Turns are answered until one does not fit."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("words of the world\n" * 20))
    assert chat(program, checkpoint) == 1
    captured = capsys.readouterr()
    assert captured.out == " the words\n" * captured.out.count("\n")
    assert captured.out.count("\n") > 1
    assert captured.err.count("\n") == 1
    assert f"the context of {CONTEXT} tokens is too short: got" in captured.err
    assert "tokens in it" in captured.err


@pytest.mark.slow
def test_an_error_leaves_the_answers_before_it(program, checkpoint, monkeypatch, capsys):
    for text, said in (("words of the world\n" * 20, True), ("w" * CONTEXT, False)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert chat(program, checkpoint, "--json") == 1
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert bool(captured.out) == said
        if said:
            answers = json.loads(captured.out)["turns"][1::2]
            assert len(answers) > 1
            assert {turn["content"] for turn in answers} == {" the words"}


@pytest.mark.slow
def test_an_answer_that_fills_the_context_is_a_warning(checkpoint, tmp_path, monkeypatch, capsys):
    program = exported(checkpoint)
    text = "w" * (CONTEXT - len(ChatTokenizer(checkpoint).render([Message("user", "")])) - 1)
    assert chat(program, checkpoint, "--prompt", text, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == f"coreml-delegate: warning: the context of {CONTEXT} tokens is full\n"
    assert json.loads(captured.out)["turns"][1]["ending"] == "context"


@pytest.mark.slow
def test_no_input_is_no_turn(program, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert chat(program, checkpoint, "--json") == 0
    assert json.loads(capsys.readouterr().out)["turns"] == []


@pytest.mark.slow
def test_bytes_that_are_no_text_are_one_error(program, checkpoint, monkeypatch, capsys):
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    assert chat(program, checkpoint) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("coreml-delegate: error: standard input is not UTF-8: got ")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_ends_a_chat(program, checkpoint):
    command = ["generate", program, "--chat", "--tokenizer", checkpoint]
    process = start(*command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for turn in ("the world", "words"):
        process.stdin.write(f"{turn}\n")
        process.stdin.flush()
        assert process.stdout.readline() == " the words\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "a chat needs the tokenizer and the chat template of the model. Pass --tokenizer"),
        (["--tokenizer", "nowhere"], "no such tokenizer: got nowhere"),
        (["--tokenizer", "FOLDER", "--chat-template", "rag"], "got rag, expected default"),
        (["--tokenizer", "FOLDER", "--system", "a"], "got TemplateError: no system message"),
    ],
)
def test_invalid_chats_are_refused_before_the_program_is_read(options, message, tmp_path, capsys):
    folder = str(chat_tokenizers.save(tmp_path / "checkpoint", REFUSING))
    given = [folder if option == "FOLDER" else option for option in options]
    assert main(["generate", "nothing.pte", "--chat", "--prompt", "b", *given]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--prompt or --audio is required, except with --chat"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--prompt", "a", "--chat-template", "b"], "--chat-template needs --chat"),
    ],
)
def test_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "nothing.pte", *options])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_tokenizer_is_named_by_its_file_or_folder(program, checkpoint, capsys):
    texts = []
    for path in (checkpoint, checkpoint / "tokenizer.json"):
        options = ["--prompt", "a\n", "--max-new-tokens", "3", "--tokenizer", str(path)]
        assert main(["generate", str(program), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "options", "message"),
    [
        ("argmax", ["--temperature", "0.5"], "nothing to sample: got temperature 0.5"),
        ("argmax", ["--top-k", "3"], "got top_k 3"),
        ("argmax", ["--top-p", "0.5"], "got top_p 0.5"),
        ("top-k:3", ["--temperature", "1", "--top-k", "4"], "got top_k 4, expected at most 3"),
        ("top-k:3", ["--temperature", "1"], None),
        ("top-k:3", ["--temperature", "1", "--top-k", "2", "--top-p", "0.9"], None),
        ("top-k:3", [], None),
    ],
)
def test_options_of_draws_need_tokens_to_draw_from(checkpoint, selection, options, message, capsys):
    program = exported(checkpoint, "--sample-in-model", selection)
    capsys.readouterr()
    given = [*options, "--tokenizer", str(checkpoint), "--max-new-tokens", "2"]
    assert main(["generate", str(program), "--prompt", "a\n", *given]) == (message is not None)
    captured = capsys.readouterr()
    assert message is None or message in captured.err


@pytest.mark.slow
def test_the_report_names_the_selection(checkpoint, tmp_path, capsys):
    output = tmp_path / "model.pte"
    options = ["--sample-in-model", "top-k:3", "-o", str(output)]
    assert main(["export-llm", str(checkpoint), *options]) == 0
    assert "selection   top-k:3\n" in capsys.readouterr().out
    assert main(["export-llm", str(checkpoint), *options, "--json", "--force"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"]["get_selection"] == "top-k:3"
    assert document["layout"]["get_llm_layout_version"] == 3
    for counts in document["methods"].values():
        assert counts["delegated"] == counts["operations"]
        assert counts["partitions"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("greedy", "got greedy, expected argmax or top-k:K"),
        ("top-k:0", "got top-k:0, expected argmax or top-k:K, where K is at least 1"),
        ("top-k:98", "got top-k:98, expected at most top-k:97"),
    ],
)
def test_invalid_selections_are_refused(text, message, tmp_path, capsys):
    config, output = tmp_path / "config.json", tmp_path / "model.pte"
    config.write_text(json.dumps({**CONFIG, "model_type": "llama"}))
    options = ["--sample-in-model", text, "-o", str(output)]
    assert main(["export-llm", "--random", str(config), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert leftovers(tmp_path) == {"config.json"}


def test_a_chat_takes_its_prompt_from_a_file(program, checkpoint, tmp_path, capsys):
    options = ["--prompt", "Hi", "--json", "--prompt-cache", str(tmp_path / "chat.cache")]
    documents: list[Any] = []
    for _ in range(2):
        assert chat(program, checkpoint, *options) == 0
        documents.append(json.loads(capsys.readouterr().out))
    turns = [document["turns"] for document in documents]
    (first, second) = (turn[-1] for turn in turns)
    assert first["content"] == second["content"]
    assert (first["kept"], second["fed"]) == (0, 1)
    assert second["kept"] == documents[1]["prompt_cache"]["tokens"] == first["fed"] - 1 > 0


def test_answers_have_a_form(program, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nWhy?\n"))
    assert chat(program, checkpoint, "--regex", "(the world|of) the[.!]", "--json") == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    assert len(answers) == 2
    for answer in answers:
        assert re.fullmatch("(the world|of) the[.!]", answer["content"])
        assert answer["ending"] == "stop"

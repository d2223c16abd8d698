"""``coreml-delegate evaluate``: perplexities, finished windows, and errors."""

from __future__ import annotations

import json
import math
import signal
import sys
import time

import pytest
import torch
from support.checkpoints import CONFIG, save
from support.command import leftovers, start
from support.text_tokenizer import save_tokenizer, text_of
from support.tolerances import PERPLEXITY_FP32

from coreml_delegate.scripts.cli import main

pytestmark = pytest.mark.xdist_group("checkpoints")
CONTEXT, STRIDE, LENGTH = 24, 16, 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, the program that the command exports, and a text."""
    folder = tmp_path_factory.mktemp("evaluate")
    save(folder / "checkpoint", "llama", num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    save_tokenizer(folder / "checkpoint" / "tokenizer.json", CONFIG["vocab_size"])
    (folder / "text.txt").write_text(text_of(tokens()))
    options = ["--precision", "float32", "--context", "32"]
    program = str(folder / "model.pte")
    assert main(["export-llm", str(folder / "checkpoint"), "-o", program, *options]) == 0
    return folder


def tokens() -> list[int]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(3, CONFIG["vocab_size"], (LENGTH,), generator=random).tolist()


def command(folder, *options: object) -> list[str]:
    sizes = ["--context", CONTEXT, "--stride", STRIDE]
    arguments = ["evaluate", folder / "model.pte", "--text", folder / "text.txt", *sizes, *options]
    return [str(argument) for argument in arguments]


def evaluate(folder, capsys, *options: object) -> dict:
    capsys.readouterr()
    assert main(command(folder, *options, "--json")) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


@torch.no_grad()
def eager(folder) -> float:
    """The perplexity of the checkpoint as transformers loads it, each token after its window's."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", local_files_only=True)
    text, total = tokens(), 0.0
    for index in range(1, LENGTH):
        # The first window that has the token.
        window = max(0, math.ceil((index + 1 - CONTEXT) / STRIDE)) * STRIDE
        logits = module(torch.tensor([text[window:index]]), use_cache=False).logits[0, -1]
        total -= float(logits.double().log_softmax(0)[text[index]])
    return math.exp(total / (LENGTH - 1))


def test_perplexity_of_program_and_checkpoint(folder, capsys):
    document = evaluate(folder, capsys, "--checkpoint", folder / "checkpoint")
    expected = eager(folder)
    assert document["checkpoint"]["perplexity"] == pytest.approx(expected, rel=PERPLEXITY_FP32)
    assert document["program"]["perplexity"] == pytest.approx(expected, rel=PERPLEXITY_FP32)
    assert document["program"]["loss"] == pytest.approx(math.log(expected), rel=PERPLEXITY_FP32)
    assert (document["tokens"], document["predicted"]) == (LENGTH, LENGTH - 1)
    assert document["engines"] == {"openvino": ["fp32"]}


def test_the_summary_and_the_first_windows(folder, capsys):
    capsys.readouterr()
    options = ["--checkpoint", folder / "checkpoint", "--max-windows", 2, "--engine", "reference"]
    assert main(command(folder, *options)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "perplexity of the program",
        "perplexity of the checkpoint",
        "difference",
        "predicted tokens",
        "windows",
        "engine",
    ]
    assert lines[-3].endswith(f"{CONTEXT + STRIDE - 1} of {LENGTH}")
    assert lines[-2].endswith(f"2 of {CONTEXT} tokens, every {STRIDE}")
    assert lines[-1].endswith("reference in fp32")


def test_finished_windows_are_not_computed_again(folder, tmp_path, capsys):
    path = tmp_path / "windows.json"
    options = ["--resume", path, "--checkpoint", folder / "checkpoint"]
    first = evaluate(folder, capsys, *options, "--max-windows", 2)
    stored = json.loads(path.read_bytes())
    assert [len(losses) for losses in stored["losses"].values()] == [2, 2]
    whole = evaluate(folder, capsys, *options)
    assert whole == evaluate(folder, capsys, "--checkpoint", folder / "checkpoint")
    assert evaluate(folder, capsys, *options, "--max-windows", 2) == first
    # A value that no window has shows that the file is read.
    key = next(key for key in stored["losses"] if key.startswith("program"))
    stored["losses"][key][0] += LENGTH - 1
    path.write_text(json.dumps(stored))
    changed = evaluate(folder, capsys, *options)
    assert changed["program"]["loss"] == pytest.approx(whole["program"]["loss"] + 1)
    assert changed["checkpoint"] == whole["checkpoint"]
    # Another engine computes anew.
    other = evaluate(folder, capsys, *options, "--engine", "reference")
    assert other["program"]["loss"] == pytest.approx(whole["program"]["loss"], rel=PERPLEXITY_FP32)
    assert leftovers(tmp_path) == {"windows.json"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_loses_no_finished_window(folder, tmp_path, capsys):
    path, text = tmp_path / "windows.json", tmp_path / "long.txt"
    text.write_text(text_of(tokens() * 200))  # so that the command is certainly not done
    process = start(*command(folder, "--text", text, "--resume", path))
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "coreml-delegate: error: interrupted\n")
    (losses,) = json.loads(path.read_bytes())["losses"].values()
    assert losses
    options = ["--text", text, "--max-windows", len(losses)]
    resumed = evaluate(folder, capsys, *options, "--resume", path)
    assert resumed == evaluate(folder, capsys, *options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--context": 20}, "has windows of another evaluation: got context 24, expected 20"),
        ({"--stride": 20}, "got stride 16, expected 20"),
        ({"--text": "other.txt"}, "got tokens "),
    ],
)
def test_windows_of_another_evaluation_are_refused(folder, tmp_path, capsys, changes, message):
    (folder / "other.txt").write_text(text_of([5, 6, 7]))
    path = tmp_path / "windows.json"
    evaluate(folder, capsys, "--resume", path, "--max-windows", 1)
    options = [item for n, v in changes.items() for item in (n, folder / v if n == "--text" else v)]
    assert main(command(folder, "--resume", path, *options)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"schema_version": 1}', "{}"])
def test_other_files_are_refused(folder, tmp_path, capsys, content):
    path = tmp_path / "windows.json"
    path.write_text(content)
    assert main(command(folder, "--resume", path)) == 1
    assert f"{path} is not a file of --resume" in capsys.readouterr().err
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", 33], "got --context 33, expected at most 32"),
        (["--stride", 25], "the stride is out of range: got 25, expected 1 to 24"),
        (["--text", "none.txt"], "No such file or directory: none.txt"),
        (["--checkpoint", "none"], "no such checkpoint: got none"),
        (["--tokenizer", "none"], "no such tokenizer: got none"),
        (["--adapter", "none"], "the program has no such adapter: got none"),
    ],
)
def test_invalid_options_are_one_line(folder, capsys, options, message):
    capsys.readouterr()
    assert main(command(folder, *options)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("coreml-delegate: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_texts_and_checkpoints_that_do_not_fit_are_refused(folder, tmp_path, capsys):
    text = tmp_path / "latin.txt"
    text.write_bytes("\u00e9".encode("latin-1"))
    assert main(command(folder, "--text", text)) == 1
    assert f"{text} is not a text in UTF-8" in capsys.readouterr().err
    text.write_text("")
    assert main(command(folder, "--text", text)) == 1
    assert "the text is too short: got 0 tokens" in capsys.readouterr().err
    save(tmp_path / "other", "llama", vocab_size=50)
    assert main(command(folder, "--checkpoint", tmp_path / "other")) == 1
    expected = "got 50 tokens, expected a language model with a vocabulary of 97 tokens"
    assert expected in capsys.readouterr().err
